"""What we ask of a host, as small Protocols. Nothing here raises: a failure is an Unreadable or an Outcome.

Reading is under the deadline the adapter was made with; what can hang in the kernel runs in a child that is abandoned.
Acting returns soon (a stop is a request, its end is observed) and re-checks the identity it was decided on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hsdaemon.core import model as m


class Clock(Protocol):
    """Time, and the only way to wait."""

    def now(self) -> m.Now: ...

    def wait(self, seconds: float) -> None:
        """Sleep until then or until an event (signal, D-Bus, file) says that something may have changed."""


class Gpus(Protocol):
    """NVML, read in a child that is replaced after a failure."""

    def read(self) -> tuple[m.Gpu, ...] | m.Unreadable:
        """Every device, ascending by index, with NVML's own process lists as claims."""

    def xids(self) -> tuple[m.Xid, ...]:
        """Error lines of the kernel log of this boot, oldest first; () where it cannot be read."""


class Procs(Protocol):
    """/proc."""

    def holders(self, gpus: Sequence[m.Gpu]) -> tuple[m.Holder, ...] | m.Unreadable:
        """Claims attributed to processes, units and containers, one Holder a process; descriptors of /dev/nvidia*
        find those that NVML's pids do not."""

    def signal(self, pid: int, start_ticks: int, exe: str, signal: Literal["TERM", "KILL"]) -> m.Outcome:
        """Through a pidfd; moved-on when start time or executable differ."""


class Units(Protocol):
    """systemd, or the foreground stand-in."""

    def read(self, names: Sequence[str], patterns: Sequence[str] = ()) -> tuple[m.Unit, ...] | m.Unreadable:
        """The named units (load "not-found" where there is none) and all loaded or installed ones that match."""

    def start(self, name: str, after: str) -> m.Outcome:
        """Queue a start; moved-on unless `after` is still its last invocation and it does not run."""

    def stop(self, name: str, invocation: str) -> m.Outcome:
        """Queue a stop; moved-on when another invocation runs."""

    def kill(self, name: str, invocation: str, pids: Sequence[int]) -> m.Outcome:
        """SIGKILL those of `pids` that are still in the unit's cgroup; moved-on when another invocation runs."""

    def lease(self, name: str, file_state: str, was_up: bool) -> m.Outcome:
        """Write the drop-in and the undo record, synced, and reload; done when both are there already."""

    def disable(self, name: str) -> m.Outcome:
        """Disable and sync."""

    def release(self, name: str) -> m.Outcome:
        """Undo a lease from its record; done when there is none."""


class EngineProbe(Protocol):
    """Everything about the engine but its unit."""

    def read(self, unit: m.Unit) -> m.Engine | m.Unreadable:
        """At most one HTTP probe in flight; none while the unit is down."""

    def apply_patch(self, release: str) -> m.Outcome: ...

    def prepare(self, port: int, fingerprint: str) -> m.Outcome:
        """Leave the port for the next start where `hs-extract serve` finds it."""

    def sweep(self, paths: Sequence[str]) -> m.Outcome:
        """Remove build locks and shared memory of dead owners."""


class ProofPort(Protocol):
    """The verdict file of the proof."""

    def read(self) -> m.Proof | m.Unreadable | None: ...

    def prepare(self, invocation: str) -> m.Outcome:
        """Leave the invocation to prove where the proof's unit finds it."""


class WorkerPort(Protocol):
    """The worker's last words."""

    def read(self, unit: m.Unit) -> m.Worker | m.Unreadable: ...


class VolumePort(Protocol):
    def read(self) -> m.Volume | m.Unreadable:
        """Identity marker, mount, write probe and free space, in a child under a deadline."""


class ManifestPort(Protocol):
    def read(self) -> m.Progress | m.Unadopted | m.Unreadable | None:
        """Counts; None when there is neither a manifest nor a sample. Never creates one."""


class SpoolPort(Protocol):
    def read(self) -> m.Spool | m.Unreadable: ...

    def sweep(self) -> m.Outcome:
        """Remove files of dead epochs; foreign names stay."""


class WishPort(Protocol):
    """What people ask for through the socket or a verb."""

    def read(self) -> m.Wishes: ...


class Notifier(Protocol):
    """sd_notify, or nothing."""

    def ready(self) -> None: ...

    def status(self, sentence: str) -> None: ...

    def watchdog(self) -> None: ...

    def stopping(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Ports:
    """All of them: made by the root, handed to the loop."""

    clock: Clock
    gpus: Gpus
    procs: Procs
    units: Units
    engine: EngineProbe
    proof: ProofPort
    worker: WorkerPort
    volume: VolumePort
    manifest: ManifestPort
    spool: SpoolPort
    wishes: WishPort
    notifier: Notifier
