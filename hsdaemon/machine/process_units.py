"""The port Units without systemd: engine, proof and worker as processes of their own sessions.

They outlive the supervisor, as units do: what was started is written down under `run`, and a supervisor that starts
again finds it there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from hsdaemon.core.model import Outcome, Unit, Unreadable
from hsdaemon.errors import HsError
from hsdaemon.machine import disk
from hsdaemon.machine.child import Child, NoAnswer
from hsdaemon.machine.identity import start_ticks

SCAN_S = 10.0
KILL_S = 5.0  # a killed process goes at once, or hangs in the kernel
MARK = "INVOCATION_ID"  # the name that systemd uses for the same thing
NO_SYSTEMD = Outcome("failed", "there is no systemd here that could do it")


class Started(Struct, frozen=True):
    """One start. `status`: as subprocess counts it, None while it runs or when its end was seen by nobody."""

    invocation: str
    pid: int
    start_ticks: int
    since_s: float
    stopping: bool = False
    status: int | None = None


class Processes:
    """The port Units over child processes. `commands`: unit name -> argument line; `grace_s`: from TERM to KILL."""

    def __init__(self, commands: Mapping[str, Sequence[str]], run: Path, grace_s: float = 90.0) -> None:
        self._commands = commands
        self._folder = run / "units"
        self._grace_s = grace_s
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._unwritten: dict[str, Started] = {}  # what became of a start, where the disk did not take it
        self._scan = Child("process", members)  # reading an environment waits for a process that hangs in the kernel

    def read(
        self,
        names: Sequence[str],
        patterns: Sequence[str] = (),  # noqa: ARG002  # nothing of others is known here
    ) -> tuple[Unit, ...] | Unreadable:
        try:
            return tuple(self._unit(name) for name in names)
        except (OSError, HsError) as error:
            return Unreadable("units", f"cannot look at processes: {error}")

    def start(self, name: str, after: str) -> Outcome:
        if name not in self._commands:
            return NO_SYSTEMD
        try:
            unit = self._unit(name)
        except (OSError, HsError) as error:
            return Outcome("failed", f"cannot look at processes: {error}")
        if unit.up or unit.invocation != after:
            return Outcome("moved-on", f"{name} is {unit.active}, invocation {unit.invocation or 'none'}")
        if unit.pids:
            return Outcome("failed", f"{name} has left-over processes {unit.pids}: a start would add a second copy")
        invocation = secrets.token_hex(16)
        try:
            child = self._spawn(self._commands[name], invocation)
        except OSError as error:
            return Outcome("failed", f"cannot start {name}: {error}")
        try:
            self._write(name, Started(invocation, child.pid, start_ticks(child.pid) or 0, time.monotonic()))
        except (OSError, HsError) as error:
            _take_back(child)
            return Outcome("failed", f"cannot start {name}: {error}")
        self._unwritten.pop(name, None)
        self._children[name] = child
        return Outcome("done")

    def stop(self, name: str, invocation: str) -> Outcome:
        """TERM to the main process alone; after the grace, KILL to all that is left."""
        started = self._started(name)
        if started is None:
            return NO_SYSTEMD if name not in self._commands else Outcome("moved-on", f"{name} never ran")
        if started.invocation != invocation:
            return Outcome("moved-on", f"another start of {name} runs")
        self._note(name, msgspec.structs.replace(started, stopping=True))
        _signal(started.pid, started.start_ticks, signal.SIGTERM)
        timer = threading.Timer(self._grace_s, lambda: _kill_members(started))
        timer.daemon = True
        timer.start()
        return Outcome("done")

    def kill(self, name: str, invocation: str, pids: Sequence[int]) -> Outcome:
        started = self._started(name)
        if started is None or started.invocation != invocation:
            return Outcome("moved-on", f"another start of {name} runs")
        hit = _kill_members(started, pids)
        return Outcome("done") if hit else Outcome("moved-on", f"none of {tuple(pids)} is in {name} any more")

    def lease(self, name: str, file_state: str, was_up: bool) -> Outcome:  # noqa: ARG002  # the port's signature
        return NO_SYSTEMD

    def disable(self, name: str) -> Outcome:  # noqa: ARG002
        return NO_SYSTEMD

    def release(self, name: str) -> Outcome:  # noqa: ARG002
        return Outcome("done")  # nothing can be leased here

    def _spawn(self, command: Sequence[str], invocation: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, MARK: invocation}
        environ.pop("NOTIFY_SOCKET", None)
        return subprocess.Popen(
            list(command), env=environ, stdin=subprocess.DEVNULL, start_new_session=True, close_fds=True
        )

    def _unit(self, name: str) -> Unit:
        if name not in self._commands:
            return Unit(name, load="not-found")
        started = self._reaped(name)
        if started is None:
            return Unit(name)
        pids = self._scan.ask(started, SCAN_S)
        if isinstance(pids, NoAnswer):
            raise OSError(pids.detail)
        alive = started.pid in pids and start_ticks(started.pid) == started.start_ticks
        if not alive:
            started = self._reaped(name) or started  # it may have ended since it was asked for its status
        active, result, status = _state(started, alive)
        return Unit(
            name,
            active=active,
            sub="running" if alive else "dead",
            invocation=started.invocation,
            main_pid=started.pid if alive else 0,
            pids=pids,
            since_s=started.since_s,
            result=result,
            status=status,
        )

    def _reaped(self, name: str) -> Started | None:
        """What was started last, with its exit status as soon as that is known."""
        if name in self._unwritten:
            self._note(name, self._unwritten[name])
        started, child = self._started(name), self._children.get(name)
        if started is None or child is None or child.pid != started.pid or child.poll() is None:
            return started
        del self._children[name]
        ended = msgspec.structs.replace(started, status=child.returncode, since_s=time.monotonic())
        self._note(name, ended)
        return ended

    def _started(self, name: str) -> Started | None:
        """None when it never ran in this boot: `run` is gone after a reboot."""
        if name in self._unwritten:
            return self._unwritten[name]
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            data = disk.read(self._folder / f"{name}.json")
            return None if data is None else msgspec.json.decode(data, type=Started)
        return None

    def _note(self, name: str, started: Started) -> None:
        """Write down what became of a start. What a full disk does not take is kept, and tried again at each look."""
        try:
            self._write(name, started)
            self._unwritten.pop(name, None)
        except (OSError, HsError):
            self._unwritten[name] = started

    def _write(self, name: str, started: Started) -> None:
        disk.make_folder(self._folder.parent)
        disk.make_folder(self._folder)
        disk.replace(self._folder / f"{name}.json", msgspec.json.encode(started), 0o644)


def _state(started: Started, alive: bool) -> tuple[str, str, int]:
    """ActiveState, Result and status, as systemd would say them."""
    if alive:
        return ("deactivating" if started.stopping else "active"), "success", 0
    status = started.status or 0
    if status == 0 or (started.stopping and status == -signal.SIGTERM):
        return "inactive", "success", 0
    return "failed", ("signal" if status < 0 else "exit-code"), abs(status)


def _take_back(child: subprocess.Popen[bytes]) -> None:
    """End a process just started, which nobody could find again and would be started a second time."""
    os.killpg(child.pid, signal.SIGKILL)  # a session of its own, not reaped: the number cannot be another's
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(KILL_S)


def members(started: Started) -> tuple[int, ...]:
    """Every living process of this start: of its session, or with its INVOCATION_ID. Neither is enough: some leave the
    session, others overwrite their environment with a title."""
    wanted = f"{MARK}={started.invocation}".encode()
    leader = start_ticks(started.pid)
    ours = leader in (None, started.start_ticks)  # a session's number is not given out again while a member lives
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            same = ours and os.getsid(int(entry)) == started.pid
            if same or wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return tuple(sorted(pid for pid in found if start_ticks(pid)))


def _signal(pid: int, ticks: int | None, number: int) -> bool:
    """Through a pidfd, after the start time was read again."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            if ticks is not None and start_ticks(pid) == ticks:
                signal.pidfd_send_signal(fd, number)
                return True
        finally:
            os.close(fd)
    return False


def _kill_members(started: Started, only: Sequence[int] | None = None) -> bool:
    """KILL the members (of `only`). True when one was there."""
    hit = [_signal(pid, start_ticks(pid), signal.SIGKILL) for pid in members(started) if only is None or pid in only]
    return any(hit)
