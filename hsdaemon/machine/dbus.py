"""systemd over D-Bus: the port Units.

Everything here runs in a child. A systemd or a dbus-daemon that hangs costs a deadline and a new child, a restart of
dbus costs nothing at all, and neither GLib nor its threads are ever in the supervisor.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hsdaemon.core.model import Outcome, Unit, Unreadable
from hsdaemon.errors import HsError
from hsdaemon.machine import cgroup
from hsdaemon.machine.child import Child, NoAnswer
from hsdaemon.machine.lease import DROP_IN, Leases

SYSTEM_BUS = "unix:path=/run/dbus/system_bus_socket"
UNITS = Path("/etc/systemd/system")
NAME = "org.freedesktop.systemd1"
MANAGER = f"{NAME}.Manager"
UP = ("active", "activating", "reloading")
ACT_S = 60.0  # an act syncs files and may reload the manager; longer than a look, shorter than the watchdog
FRESH_S = 30.0  # reading all properties takes milliseconds: at once after a change of state, else this seldom
KINDS = {".service": f"{NAME}.Service", ".scope": f"{NAME}.Scope"}


class Systemd:
    """The port Units over pydbus."""

    def __init__(
        self,
        deadline_s: float,
        state: Path,
        address: str = SYSTEM_BUS,
        units: Path = UNITS,
        cgroups: Path | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        session = Session(address, Leases(units, state), deadline_s, cgroups)
        self._child = Child("systemd", session.serve)

    def read(self, names: Sequence[str], patterns: Sequence[str] = ()) -> tuple[Unit, ...] | Unreadable:
        answer = self._child.ask(("read", tuple(names), tuple(patterns)), self._deadline_s)
        if isinstance(answer, NoAnswer):
            return Unreadable("units", answer.detail, "hang" if answer.kind in ("hung", "stuck") else "")
        if isinstance(answer, str):
            return Unreadable("units", answer)
        return tuple(answer)

    def start(self, name: str, after: str) -> Outcome:
        return self._act("start", name, after)

    def stop(self, name: str, invocation: str) -> Outcome:
        return self._act("stop", name, invocation)

    def kill(self, name: str, invocation: str, pids: Sequence[int]) -> Outcome:
        return self._act("kill", name, invocation, tuple(pids))

    def lease(self, name: str, file_state: str, was_up: bool) -> Outcome:
        return self._act("lease", name, file_state, was_up)

    def disable(self, name: str) -> Outcome:
        return self._act("disable", name)

    def release(self, name: str) -> Outcome:
        return self._act("release", name)

    def close(self) -> None:
        self._child.close()

    def _act(self, *question: object) -> Outcome:
        answer = self._child.ask(question, ACT_S)
        if isinstance(answer, NoAnswer):
            return Outcome("failed", answer.detail)
        return answer if isinstance(answer, Outcome) else Outcome("failed", str(answer))


@dataclass(frozen=True)
class Known:
    """What was read of a unit, as of its `since_s`."""

    path: str
    at: float
    unit: Unit


def _known_to_systemd(of: Callable[[str, Any], Any]) -> bool:
    """Whether systemd has read the drop-in of a lease. of: a look-up in the unit's properties."""
    return any(Path(drop_in).name == DROP_IN for drop_in in of("DropInPaths", ()))


class Session:
    """The child's side: one private connection, rebuilt when it is closed."""

    def __init__(self, address: str, leases: Leases, deadline_s: float, cgroups: Path | None) -> None:
        self._cgroups = cgroups
        self._address = address
        self._leases = leases
        self._timeout_ms = int(deadline_s * 1000)
        self._con: Any = None
        self._known: dict[str, Known] = {}
        self._matches: tuple[str, ...] = ()
        self._patterns: Sequence[str] = ()
        self._listed_at = -FRESH_S

    def serve(self, question: tuple[Any, ...]) -> tuple[Unit, ...] | Outcome | str:
        """An answer, or the failure as a sentence."""
        try:
            import pydbus  # noqa: F401  # needed by `_bus`: what lacks is said here
            from gi.repository import GLib
        except ImportError as error:
            return f"cannot reach systemd: {error}; install pydbus and PyGObject, or run with --foreground"
        verb: Callable[..., tuple[Unit, ...] | Outcome] = getattr(self, f"_{question[0]}")
        if question[0] != "read":
            self._forget()
        try:
            return verb(*question[1:])
        except GLib.Error as error:
            return f"systemd: {question[0]} {' '.join(map(str, question[1:2]))}: {error.message}"
        except (OSError, HsError) as error:
            return f"{question[0]} {' '.join(map(str, question[1:2]))}: {error}"

    # --- reading ----------------------------------------------------------------------------------------------------

    def _read(self, names: Sequence[str], patterns: Sequence[str]) -> tuple[Unit, ...]:
        if time.monotonic() - self._listed_at > FRESH_S or patterns != self._patterns:
            self._matches = tuple(self._matching(patterns))
            self._patterns, self._listed_at = patterns, time.monotonic()
        return tuple(self._remembered(name) for name in dict.fromkeys([*names, *self._matches]))

    def _remembered(self, name: str) -> Unit:
        """What was read of a unit holds as long as its state has not changed, but for its processes and its lease."""
        known = self._known.get(name)
        if known and time.monotonic() - known.at < FRESH_S and self._changed(known.path) == known.unit.since_s:
            pids = cgroup.pids(known.unit.cgroup, self._cgroups)
            return replace(known.unit, pids=pids, leased=known.unit.leased and self._leases.held(name))
        unit = self._unit(name)
        path = self._path(name)
        if path and unit.load == "loaded" and unit.active in ("active", "inactive", "failed"):
            self._known[name] = Known(path, time.monotonic(), unit)
        else:
            self._known.pop(name, None)
        return unit

    def _changed(self, path: str) -> float:
        """When its state last changed, as `since_s` counts."""
        args = (f"{NAME}.Unit", "StateChangeTimestampMonotonic")
        return float(self._call(path, "org.freedesktop.DBus.Properties", "Get", "(ss)", args).unpack()[0]) / 1e6

    def _forget(self) -> None:
        self._known.clear()
        self._listed_at = -FRESH_S

    def _matching(self, patterns: Sequence[str]) -> Iterator[str]:
        """Loaded and installed units; a template is no unit by itself."""
        if not patterns:
            return
        (loaded,) = self._manager("ListUnitsByPatterns", "(asas)", ([], list(patterns)))
        (files,) = self._manager("ListUnitFilesByPatterns", "(asas)", ([], list(patterns)))
        found = {unit[0] for unit in loaded} | {Path(path).name for path, _ in files}
        yield from sorted(name for name in found if "@." not in name)

    def _unit(self, name: str) -> Unit:
        path = self._path(name)
        if path is None:
            return Unit(name, load="not-found")
        of = self._properties(path, f"{NAME}.Unit")
        kind = KINDS.get(Path(name).suffix)
        its = self._properties(path, kind) if kind else lambda _name, default: default
        group = its("ControlGroup", "")
        return Unit(
            name=name,
            load=of("LoadState", ""),
            active=of("ActiveState", ""),
            sub=of("SubState", ""),
            invocation=bytes(of("InvocationID", b"")).hex(),
            main_pid=its("MainPID", 0),
            file_state=self._file_state(name),
            pids=cgroup.pids(group, self._cgroups),
            cgroup=group,
            since_s=of("StateChangeTimestampMonotonic", 0) / 1e6,
            result=its("Result", "success"),
            status=its("ExecMainStatus", 0),
            leased=self._leases.held(name) and _known_to_systemd(of),
            triggers=tuple(of("TriggeredBy", ())),
        )

    def _path(self, name: str) -> str | None:
        """The unit's object, loaded if need be; None for a name that can be no unit's."""
        try:
            return str(self._manager("LoadUnit", "(s)", (name,))[0])
        except self._error() as error:
            if "Invalid" in str(error) or "not valid" in str(error):
                return None
            raise

    def _file_state(self, name: str) -> str:
        """As it is on disk now: the property of the same name is a memory of the last reload."""
        try:
            return str(self._manager("GetUnitFileState", "(s)", (name,))[0])
        except self._error():
            return ""  # no unit file: transient, or not there at all

    def _properties(self, path: str, interface: str) -> Callable[[str, Any], Any]:
        """A look-up in all properties; only what is asked for is unpacked."""
        reply = self._call(path, "org.freedesktop.DBus.Properties", "GetAll", "(s)", (interface,))
        table = reply.get_child_value(0)

        def look(name: str, default: Any) -> Any:
            value = table.lookup_value(name, None)
            return default if value is None else value.unpack()

        return look

    # --- acting -----------------------------------------------------------------------------------------------------

    def _start(self, name: str, after: str) -> Outcome:
        unit = self._unit(name)
        if unit.active in UP or unit.invocation != after:
            return Outcome("moved-on", f"{name} is {unit.active}, invocation {unit.invocation or 'none'}")
        if unit.pids:
            return Outcome("failed", f"{name} has left-over processes {unit.pids}: a start would add a second copy")
        if unit.active == "failed":
            self._manager("ResetFailedUnit", "(s)", (name,))
        self._manager("StartUnit", "(ss)", (name, "replace"))
        return Outcome("done")

    def _stop(self, name: str, invocation: str) -> Outcome:
        unit = self._unit(name)
        if unit.invocation != invocation:
            return Outcome("moved-on", f"another start of {name} runs")
        self._manager("StopUnit", "(ss)", (name, "replace"))
        return Outcome("done")

    def _kill(self, name: str, invocation: str, pids: tuple[int, ...]) -> Outcome:
        unit = self._unit(name)
        if unit.invocation != invocation:
            return Outcome("moved-on", f"another start of {name} runs")
        hit = cgroup.signal_members(unit.cgroup, pids, signal.SIGKILL, self._cgroups)
        return Outcome("done") if hit else Outcome("moved-on", f"none of {pids} is in {name} any more")

    def _lease(self, name: str, file_state: str, was_up: bool) -> Outcome:
        self._leases.write(name, file_state, was_up)
        if not self._loaded(name):
            self._manager("Reload", None, ())  # once an eviction: a reload can cut running containers off their GPUs
        return Outcome("done")

    def _loaded(self, name: str) -> bool:
        path = self._path(name)
        return path is not None and _known_to_systemd(self._properties(path, f"{NAME}.Unit"))

    def _disable(self, name: str) -> Outcome:
        """Not by DisableUnitFiles: that takes along what the unit's Also= names, which nobody let us touch."""
        self._leases.remove_links(name)
        return Outcome("done")

    def _release(self, name: str) -> Outcome:
        """Links first, then the drop-in, then the start, the record last: after any crash it can be said again. A unit
        that was uninstalled or masked meanwhile is not started: nobody can."""
        record = self._leases.record(name)
        if record is None and not self._leases.held(name):
            return Outcome("done")
        load = self._unit(name).load
        if record is not None and load != "not-found":
            self._leases.restore_links(record)
        self._leases.lift(name)
        self._manager("Reload", None, ())
        if record is None:
            return Outcome("done")
        if record.was_up and load == "loaded":
            self._manager("StartUnit", "(ss)", (name, "replace"))
        self._leases.forget(name)
        return Outcome("done", "" if load == "loaded" else f"it is {load} by now and cannot be started")

    # --- the bus ----------------------------------------------------------------------------------------------------

    def _manager(self, method: str, signature: str | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
        reply = self._call("/org/freedesktop/systemd1", MANAGER, method, signature, args)
        return tuple(reply.unpack())

    def _call(self, path: str, interface: str, method: str, signature: str | None, args: tuple[Any, ...]) -> Any:
        from gi.repository import Gio, GLib

        body = GLib.Variant(signature, args) if signature else None
        flags = Gio.DBusCallFlags.NONE
        return self._bus().call_sync(NAME, path, interface, method, body, None, flags, self._timeout_ms, None)

    def _bus(self) -> Any:
        """A connection of our own: the shared one ends the process when dbus restarts, and is never rebuilt."""
        if self._con is None or self._con.is_closed():
            import pydbus

            self._con = pydbus.connect(self._address).con
            self._con.set_exit_on_close(False)
        return self._con

    @staticmethod
    def _error() -> type[Exception]:
        from gi.repository import GLib

        return GLib.Error  # type: ignore[no-any-return]
