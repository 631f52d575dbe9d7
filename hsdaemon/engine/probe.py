"""The port EngineProbe: what an engine says and leaves behind, asked in a child, since any of its files may hang."""

from __future__ import annotations

import contextlib
import glob
import http.client
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec import Struct

from hsdaemon import wire
from hsdaemon.config import Config
from hsdaemon.core import model as m
from hsdaemon.engine import endpoint, environment, leftovers, patch, ports, releases
from hsdaemon.engine.diff import State
from hsdaemon.engine.inplace import check
from hsdaemon.errors import EngineError, HsError
from hsdaemon.machine import disk
from hsdaemon.machine.checkpoint import read_model
from hsdaemon.machine.child import Child, NoAnswer
from hsdaemon.machine.identity import boot_id

START_FILE = "start.json"  # in paths.run: the port that the supervisor chose for the next start
HEALTH_S = 2.0  # the engine's probe is passive: it answers at once or not at all
TAIL_BYTES, TAIL_LINES = 8192, 8
MEND_S = 60.0  # patching syncs files

# What the capture's state in the sources means to a supervisor.
STATES = {
    State.OURS: "ours", State.OURS_EDITED: "ours", State.PRISTINE: "absent", State.EDITED: "absent",
    State.PARTIAL: "older", State.OLDER: "older", State.NEWER: "foreign", State.MODIFIED: "foreign",
    State.CONFLICT: "foreign", State.MISSING: "missing",
}  # fmt: skip


class StartOrder(Struct, frozen=True):
    """What the supervisor wants of the next start."""

    port: int


class EngineProbe:
    """Reads with today's configuration, so that a reload is seen at the next look."""

    def __init__(self, config: Callable[[], Config], deadline_s: float) -> None:
        self._config, self._deadline_s = config, deadline_s
        self._child = Child("engine", Look().serve)

    def read(self, unit: m.Unit) -> m.Engine | m.Unreadable:
        answer = self._child.ask((self._config(), unit), self._deadline_s)
        if isinstance(answer, NoAnswer):
            return m.Unreadable("engine", answer.detail, "hang")
        assert isinstance(answer, m.Engine | m.Unreadable)
        return answer

    def apply_patch(self, release: str) -> m.Outcome:
        return self._act(("patch", release))

    def prepare(self, port: int, fingerprint: str) -> m.Outcome:  # noqa: ARG002  # the order is the port's alone
        """A crash leaves the order for a start that comes later: it is looked at again then."""
        try:
            run = Path(self._config().paths.run)
            disk.make_folder(run)
            disk.replace(run / START_FILE, msgspec.json.encode(StartOrder(port)), 0o644)
        except (OSError, HsError) as error:
            return m.Outcome("failed", str(error))
        return m.Outcome("done")

    def sweep(self, paths: Sequence[str]) -> m.Outcome:
        return self._act(("sweep", self._config(), tuple(paths)))

    def _act(self, question: tuple[object, ...]) -> m.Outcome:
        answer = self._child.ask(question, MEND_S)
        return answer if isinstance(answer, m.Outcome) else m.Outcome("failed", str(getattr(answer, "detail", answer)))

    def close(self) -> None:
        self._child.close()


def ordered_port(run: str) -> int | None:
    """The port that the supervisor chose for this start, taken: the next start asks again."""
    path = Path(run) / START_FILE
    try:
        order = msgspec.json.decode(disk.read_own(path), type=StartOrder)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    with contextlib.suppress(PermissionError):  # the supervisor's own in a sticky folder: it writes a new one each time
        path.unlink(missing_ok=True)
    return order.port


class Look:
    """Runs in the child. Remembers which start has answered: after that only progress counts as life."""

    def __init__(self) -> None:
        self._answered = ""

    def serve(self, question: tuple[object, ...]) -> m.Engine | m.Unreadable | m.Outcome:
        match question:
            case (Config() as config, m.Unit() as unit):
                return self._read(config, unit)
            case ("patch", _):
                return _patched()
            case ("sweep", Config() as config, tuple() as paths):
                return _swept(config, paths)
        raise AssertionError(question)

    def _read(self, config: Config, unit: m.Unit) -> m.Engine | m.Unreadable:
        end = endpoint.read(config.paths.run)
        if end is not None and end.boot_id != boot_id():
            end = None
        try:
            return self._engine(config, unit, end)
        except (HsError, OSError) as error:
            return m.Unreadable("engine", str(error))

    def _engine(self, config: Config, unit: m.Unit, end: endpoint.Endpoint | None) -> m.Engine:
        capture = _capture(config)
        down = unit.gone
        return m.Engine(
            unit=unit,
            endpoint=_noun(end),
            capture=capture,
            wanted="" if capture.state in ("unsupported", "missing") else _wanted(config, capture.release),
            attest=_attested(config, end),
            health="refused" if end is None or not unit.up else self._health(end),
            log_bytes=_size(end.log) if end else 0,
            cpu_s=_cpu_s(unit.pids),
            last_lines=_last_words(config.paths.log) if down else (),
            busy_ports=_busy(config) if down else (),
            stale=tuple(leftovers.find(_caches(config))) if down else (),
        )

    def _health(self, end: endpoint.Endpoint) -> str:
        """At most one probe in flight, and none once this start has answered: under load probes fail for no reason."""
        if self._answered == end.launch:
            return "ok"
        found = ask_health(end.host, end.port)
        if found == "ok":
            self._answered = end.launch
        return found


def ask_health(host: str, port: int) -> str:
    """refused, loading, ok or silent."""
    line = http.client.HTTPConnection(host, port, timeout=HEALTH_S)
    try:
        line.request("GET", "/health")
        status = line.getresponse().status
    except ConnectionRefusedError:
        return "refused"
    except (OSError, http.client.HTTPException):
        return "silent"
    finally:
        line.close()
    return "ok" if status == 200 else "loading"


def _noun(end: endpoint.Endpoint | None) -> m.Endpoint | None:
    if end is None:
        return None
    return m.Endpoint(end.launch, end.pid, end.start_ticks, end.port, end.fingerprint, end.release)


def _capture(config: Config) -> m.Capture:
    """By content, of what the next start would load."""
    try:
        version = releases.installed()
    except EngineError as error:
        return m.Capture("missing", detail=str(error))
    try:
        known = releases.release(version)
        releases.check(config, known, "the configuration")
        if releases.way_of(config, known) == "plugin":
            check("plugin")
            return m.Capture("plugin", version)
        return _in_sources(version)
    except EngineError as error:
        return m.Capture("unsupported", version, str(error))


def _in_sources(version: str) -> m.Capture:
    tree = patch.find()
    seen = patch.status(tree)
    state = "older" if seen.interrupted else STATES[seen.state]
    if state in ("absent", "older") and not os.access(tree.folder, os.W_OK):
        state = "read-only"
    return m.Capture(state, version, "; ".join(seen.reasons))


def _wanted(config: Config, version: str) -> str:
    """The fingerprint that `hs-extract serve` would write today."""
    cores = sorted(os.sched_getaffinity(0))
    kind = _kind(config.model.path)
    return environment.fingerprint(config, releases.release(version), cores, kind)


@lru_cache(maxsize=4)
def _kind(path: str) -> str:
    return read_model(path).kind


def _attested(config: Config, end: endpoint.Endpoint | None) -> str:
    """The worst stage that a rank of this launch attests: broken, then armed, then seen."""
    stages = set()
    for path in Path(config.paths.run, "attest").glob(f"attest-{glob.escape(end.launch)}-*.json") if end else ():
        with contextlib.suppress(OSError, ValueError):
            stages.add(wire.attest(disk.read_own(path).decode(errors="replace")).stage)
    return next((stage for stage in ("broken", "armed", "seen") if stage in stages), "none")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _last_words(folder: str) -> tuple[str, ...]:
    """Of the newest log: the last start's, also where it ended before there was an engine."""
    logs = sorted(Path(folder).glob("engine-hs-*.log"), key=lambda path: path.stat().st_mtime_ns)
    return _tail(str(logs[-1])) if logs else ()


def _tail(path: str) -> tuple[str, ...]:
    try:
        with disk.open_own(Path(path)) as file:
            file.seek(max(0, _size(path) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(line.strip() for line in lines if line.strip())[-TAIL_LINES:]


def _cpu_s(pids: tuple[int, ...]) -> float:
    """CPU seconds of these processes so far."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _busy(config: Config) -> tuple[tuple[int, str], ...]:
    """Ports of the span that the next start cannot have, with their owners."""
    found = []
    for port in range(config.engine.port, min(config.engine.port + config.engine.port_span, 65536)):
        taken = next((p for p in ports.plan(config, port) if not ports.free(config.engine.host, p)), None)
        if taken is not None:
            found.append((port, ports.owner(taken)))
    return tuple(found)


def _patched() -> m.Outcome:
    try:
        seen = patch.apply(patch.find())
    except HsError as error:
        return m.Outcome("failed", str(error))
    return m.Outcome("done") if seen.ready else m.Outcome("failed", "; ".join(seen.reasons) or seen.state.value)


def _caches(config: Config) -> tuple[Path, ...]:
    return leftovers.caches({**os.environ, **config.engine.environment})


def _swept(config: Config, paths: tuple[str, ...]) -> m.Outcome:
    left = leftovers.sweep(paths, _caches(config))
    return m.Outcome("failed", f"cannot remove {', '.join(left)}") if left else m.Outcome("done")
