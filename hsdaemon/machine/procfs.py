"""/proc: who holds the GPUs, and signals that hit only whom they are meant for.

NVML's pids are of the driver's namespace; in a container they are somebody else's numbers, or nobody's. What is open
under /proc/*/fd cannot be mistaken, so where the two disagree the descriptors are believed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hsdaemon.core.model import Claim, Gpu, Holder, HolderKind, Outcome, Unreadable
from hsdaemon.machine import cgroup

SCAN_S = 30.0  # reading every descriptor of a big host takes tens of milliseconds: at once after a change, else seldom
SIGKILL_BIT = 1 << (signal.SIGKILL - 1)
_NODE = re.compile(r"/dev/nvidia(\d+)$")


@dataclass(frozen=True)
class Process:
    """One process as /proc shows it."""

    pid: int
    start_ticks: int
    parent: int
    state: str
    exe: str
    cgroup: str
    kill_pending: bool
    namespace: str  # pid namespace, "" when it may not be read


def read_process(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """None when it is gone. Never reads what a process in D state can block: cmdline, environ, maps."""
    folder = proc / str(pid)
    try:
        state, *rest = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        status = (folder / "status").read_text(errors="replace")
        group = cgroup.path_of(pid, proc)
    except (OSError, ValueError):
        return None
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return Process(
        pid=pid,
        start_ticks=int(rest[18]),
        parent=int(rest[0]),
        state=state,
        exe=_link(folder / "exe").removesuffix(" (deleted)"),
        cgroup=group,
        kill_pending=any(mask & SIGKILL_BIT for mask in pending),
        namespace=_link(folder / "ns/pid"),
    )


def _link(path: Path) -> str:
    """Where it leads, as a text that can be said: names of files are any bytes."""
    try:
        return os.fsencode(path.readlink()).decode(errors="replace")
    except OSError:
        return ""


class Procfs:
    """The port Procs."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._root = cgroup.own_root(proc)
        self._open: dict[int, frozenset[int]] = {}  # pid -> minors of the devices that it has open
        self._scanned_at = -SCAN_S
        self._scanned_for: object = None

    def holders(self, gpus: Sequence[Gpu]) -> tuple[Holder, ...] | Unreadable:
        try:
            self._scan(gpus)
            return tuple(sorted(self._attributed(gpus), key=lambda h: h.pid))
        except OSError as error:
            return Unreadable("procs", f"cannot read {self._proc}: {error}")

    def signal(self, pid: int, start_ticks: int, exe: str, signal: Literal["TERM", "KILL"]) -> Outcome:
        """The pidfd is opened first: whatever is read of the number afterwards is about the process it points to."""
        try:
            fd = os.pidfd_open(pid)
        except OSError as error:
            return Outcome("moved-on", f"pid {pid}: {error.strerror}")
        try:
            now = read_process(pid, self._proc)
            if now is None or (now.start_ticks, now.exe) != (start_ticks, exe):
                return Outcome("moved-on", f"pid {pid} is another process by now")
            return _send(fd, pid, signal)
        finally:
            os.close(fd)

    # --- who has which device open ----------------------------------------------------------------------------------

    def _scan(self, gpus: Sequence[Gpu]) -> None:
        """Look anew when what NVML says has changed, else now and then."""
        shape = [(g.uuid, g.claims, (g.used_mib or 0) // 64) for g in gpus]
        if shape == self._scanned_for and time.monotonic() - self._scanned_at < SCAN_S:
            self._open = {pid: minors for pid, minors in self._open.items() if self._minors(pid) == minors}
            return
        pids = [int(name) for name in os.listdir(self._proc) if name.isdigit()]
        self._open = {pid: minors for pid in pids if (minors := self._minors(pid)) and not self._mine(pid)}
        self._scanned_at, self._scanned_for = time.monotonic(), shape

    def _mine(self, pid: int) -> bool:
        """This process and its probes, which have the devices open to look at them."""
        process = read_process(pid, self._proc)
        return process is None or os.getpid() in (pid, process.parent)

    def _minors(self, pid: int) -> frozenset[int]:
        """Devices that a process has open; none when it is gone or may not be looked at."""
        found = set()
        with contextlib.suppress(OSError), os.scandir(self._proc / str(pid) / "fd") as descriptors:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    if node := _NODE.search(os.readlink(descriptor.path)):
                        found.add(int(node[1]))
        return frozenset(found)

    # --- attribution ------------------------------------------------------------------------------------------------

    def _attributed(self, gpus: Sequence[Gpu]) -> Iterator[Holder]:
        claimed: dict[int, list[tuple[Gpu, Claim]]] = {}
        for gpu in gpus:
            for claim in gpu.claims:
                claimed.setdefault(claim.pid, []).append((gpu, claim))
        by_number = {pid: p for pid in claimed if (p := read_process(pid, self._proc)) and self._fits(pid)}
        for pid, process in by_number.items():
            yield self._holder(process, _kind(claimed[pid]), *_sums(claimed[pid]))
        opened = list(self._by_descriptor(gpus, by_number))
        yield from opened
        found = {uuid for holder in opened for uuid in holder.gpus}
        for pid, claims in claimed.items():
            left = [(gpu, claim) for gpu, claim in claims if gpu.uuid not in found]
            if pid not in by_number and left:
                uuids, used = _sums(left)
                yield Holder("invisible", pid, gpus=uuids, used_mib=used)

    def _fits(self, pid: int) -> bool:
        """Whether the process of this number can be the one NVML means: it has a device open, or nobody we see has."""
        return pid in self._open or not self._open or not os.access(self._proc / str(pid) / "fd", os.R_OK)

    def _by_descriptor(self, gpus: Sequence[Gpu], known: Mapping[int, Process]) -> Iterator[Holder]:
        """Processes with a device open that NVML does not name."""
        uuids = {gpu.index if gpu.minor is None else gpu.minor: gpu.uuid for gpu in gpus}
        for pid, minors in self._open.items():
            process = None if pid in known else read_process(pid, self._proc)
            if process is None:
                continue
            on = tuple(sorted(uuids[n] for n in minors if n in uuids))
            if on:
                yield self._holder(process, "fd", on, None)

    def _holder(self, process: Process, kind: HolderKind, gpus: tuple[str, ...], used_mib: int | None) -> Holder:
        path = cgroup.below(self._root, process.cgroup)
        container = cgroup.container_of(path) or self._other_namespace(process)
        return Holder(
            kind="container" if container and kind == "fd" else kind,
            pid=process.pid,
            start_ticks=process.start_ticks,
            gpus=gpus,
            used_mib=used_mib,
            unit=cgroup.unit_of(path),
            cgroup=process.cgroup,
            exe=process.exe,
            container=container,
            state=process.state,
            kill_pending=process.kill_pending,
        )

    def _other_namespace(self, process: Process) -> str:
        """The pid namespace's name when it is not ours, "" else."""
        ours = _link(self._proc / "self/ns/pid")
        return process.namespace if process.namespace and ours and process.namespace != ours else ""


def _send(fd: int, pid: int, name: str) -> Outcome:
    try:
        signal.pidfd_send_signal(fd, signal.Signals[f"SIG{name}"])
    except ProcessLookupError:
        return Outcome("moved-on", f"pid {pid} is gone")
    except OSError as error:
        return Outcome("failed", f"cannot signal pid {pid}: {error.strerror}")
    return Outcome("done")


def _kind(claims: Sequence[tuple[Gpu, Claim]]) -> HolderKind:
    kinds = [claim.kind for _, claim in claims]
    return next((kind for kind in ("mps", "compute") if kind in kinds), kinds[0])


def _sums(claims: Sequence[tuple[Gpu, Claim]]) -> tuple[tuple[str, ...], int | None]:
    """UUIDs, ascending, and the memory over all of them, None when one is not told."""
    told = [claim.used_mib for _, claim in claims]
    used = None if None in told else sum(mib for mib in told if mib is not None)
    return tuple(sorted({gpu.uuid for gpu, _ in claims})), used
