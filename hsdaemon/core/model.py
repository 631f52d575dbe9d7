"""The nouns: what is seen of a host (Observation), what may be done to it (Action), and what shall be done (Plan).

Everything is frozen. Times called `*_s` are seconds of the monotonic clock of this boot, unless their name says more.
Each fact of an Observation is there, or an Unreadable that says which port failed and why: unknown is never good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SUPERVISOR_UNIT = "hs-extract.service"
ENGINE_UNIT = "hs-sglang.service"
WORKER_UNIT = "hs-worker.service"
PROOF_UNIT = "hs-proof.service"  # oneshot; writes its verdict to <paths.run>/proof.json
SCAN_UNIT = "hs-scan.service"  # oneshot; makes the manifest of a tree that has none
OUR_UNITS = (SUPERVISOR_UNIT, ENGINE_UNIT, WORKER_UNIT, PROOF_UNIT, SCAN_UNIT)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A fact that could not be had. `code` tells the cases that are decided on apart, "" is any other."""

    port: str  # "nvml", "units", "procs", "volume", "manifest", "engine", "worker", ...
    cause: str
    code: str = ""  # nvml: no-library no-driver mismatch no-permission sandbox hang stuck lost; others: hang damaged


@dataclass(frozen=True, slots=True)
class Now:
    """The moment of a tick. `wall_s`: seconds since 1970, for people and across boots only."""

    mono_s: float
    wall_s: float
    boot: str  # boot id


# --- GPUs ---------------------------------------------------------------------------------------------------------

HolderKind = Literal["compute", "graphics", "mps", "fd", "invisible", "container"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A process as NVML lists it on one GPU. `used_mib` None: not told (NVML NA)."""

    pid: int
    kind: HolderKind
    used_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. `used_mib` None: the device does not answer for its memory."""

    uuid: str
    index: int
    name: str = ""
    total_mib: int = 0
    used_mib: int | None = None
    lost: bool = False  # NVML answers GPU_IS_LOST or UNKNOWN for it
    recovery: str = ""  # what the driver asks for: none reset reboot drain; "" = the driver cannot tell
    fabric: str = "none"  # none (no fabric) complete in-progress failed
    claims: tuple[Claim, ...] = ()
    minor: int | None = None  # N of its /dev/nvidiaN


@dataclass(frozen=True, slots=True)
class Xid:
    """One error line of the kernel log of this boot."""

    uuid: str  # "" when the PCI address could not be matched
    code: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Holder:
    """A process on one or more GPUs, attributed. An invisible one has a pid that this namespace does not show."""

    kind: HolderKind
    pid: int
    start_ticks: int = 0  # field 22 of /proc/pid/stat; 0 when invisible
    gpus: tuple[str, ...] = ()  # uuids, ascending
    used_mib: int | None = None  # sum over GPUs, None when NVML does not tell
    unit: str = ""  # innermost .service or .scope of its cgroup
    cgroup: str = ""
    exe: str = ""
    container: str = ""  # id, when its cgroup or pid namespace is a container's
    state: str = ""  # letter of /proc/pid/stat
    kill_pending: bool = False  # SIGKILL was sent and is not yet delivered


# --- units ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit as systemd (or the foreground stand-in) shows it, and the processes that are really in its cgroup."""

    name: str
    load: str = "loaded"  # loaded not-found masked error
    active: str = "inactive"  # active activating deactivating inactive failed
    sub: str = "dead"
    invocation: str = ""  # InvocationID, "" when it never ran in this boot
    main_pid: int = 0
    file_state: str = ""  # enabled disabled static masked generated transient ""
    pids: tuple[int, ...] = ()  # of the whole cgroup, recursively: the truth about "stopped"
    cgroup: str = ""
    since_s: float = 0.0  # when ActiveState last changed
    result: str = "success"  # exit-code signal oom-kill timeout watchdog core-dump
    status: int = 0  # exit code of the main process, or the signal that ended it
    leased: bool = False  # our drop-in keeps it down
    triggers: tuple[str, ...] = ()  # sockets, timers, paths that would start it

    @property
    def up(self) -> bool:
        """Running or about to."""
        return self.active in ("active", "activating", "reloading")

    @property
    def gone(self) -> bool:
        """Not running, and nothing of it is left."""
        return self.active in ("inactive", "failed") and not self.pids


# --- engine, proof, worker ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What `<paths.run>/engine.json` says of the engine that was started last."""

    launch: str
    pid: int
    start_ticks: int
    port: int
    fingerprint: str  # of argument line and environment
    release: str = ""


@dataclass(frozen=True, slots=True)
class Capture:
    """The capture in the engine's installation, by content. `state`:
    plugin (loads itself), ours, absent, older, foreign (edited by somebody), read-only, unsupported, missing."""

    state: str
    release: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine. Only its unit is always there; the rest is what it says or leaves behind."""

    unit: Unit
    endpoint: Endpoint | Unreadable | None = None
    capture: Capture | Unreadable = Capture("ours")
    wanted: str = ""  # fingerprint of what we would start today
    attest: str = "none"  # none armed seen broken, of this launch
    health: str = "refused"  # refused (no listener) loading (503) ok silent (no answer in time) skipped (not probed)
    log_bytes: int = 0
    cpu_s: float = 0.0  # CPU seconds of its cgroup
    last_lines: tuple[str, ...] = ()  # of its log, for the reason when it dies
    busy_ports: tuple[tuple[int, str], ...] = ()  # of the port span, by others: port and owner
    stale: tuple[str, ...] = ()  # build locks and shared memory whose owners are dead


@dataclass(frozen=True, slots=True)
class Proof:
    """The last verdict of a proof, and the start of the engine that it is about."""

    invocation: str
    ok: bool
    code: str = ""  # inert spool layers norm content chunk continuity timeout unreachable blocked
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Worker:
    """The worker; `code` and `detail` are its last words when it stopped, `paused` is why it waits for room."""

    unit: Unit
    said: str = ""
    code: str = ""
    detail: str = ""
    paused: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of the manifest: the only liveness that counts."""

    total: int
    done: int
    failed: int
    skipped: int
    ingest_complete: bool
    bytes: int = 0
    tokens: int = 0

    @property
    def settled(self) -> int:
        return self.done + self.failed + self.skipped

    @property
    def finished(self) -> bool:
        return self.ingest_complete and self.settled >= self.total


@dataclass(frozen=True, slots=True)
class Unadopted:
    """Samples that no manifest vouches for yet: a tree that never had one, or a scan that runs or was cut short.
    `done`: rows adopted so far; `total`: rows of the data set read so far."""

    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Volume:
    """The volume under the output folder, judged by writing to it. `verdict`:
    ok, not-mounted, no-marker, foreign, read-only, io-error."""

    verdict: str
    detail: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Spool:
    """The spool. `orphans`: files of dead epochs."""

    used_bytes: int = 0
    files: int = 0
    orphans: int = 0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What people asked for since the supervisor last did it."""

    reload_now: bool = False  # apply a changed argument line at once
    release: tuple[str, ...] = ()  # evicted units to give back


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that was seen in one tick. `units`: those the policy names and those of holders, none of ours."""

    now: Now
    volume: Volume | Unreadable
    gpus: tuple[Gpu, ...] | Unreadable
    holders: tuple[Holder, ...] | Unreadable
    units: tuple[Unit, ...] | Unreadable
    engine: Engine | Unreadable
    proof_unit: Unit | Unreadable
    proof: Proof | Unreadable | None
    worker: Worker | Unreadable
    progress: Progress | Unadopted | Unreadable | None  # None: neither manifest nor samples
    spool: Spool | Unreadable = Spool()
    xids: tuple[Xid, ...] = ()
    wishes: Wishes = Wishes()
    scan_unit: Unit | Unreadable = Unit(SCAN_UNIT)


# --- actions: frozen, with the identity they were decided on; whoever runs one has nothing left to choose ------------


@dataclass(frozen=True, slots=True)
class LeaseUnit:
    """Drop-in with a false condition, so that nothing starts the unit again: durable, and the record of how to undo."""

    name: str
    file_state: str  # before us: what release restores
    was_up: bool


@dataclass(frozen=True, slots=True)
class DisableUnit:
    """Take it out of the boot (synced: a disable is lost at a power cut otherwise)."""

    name: str


@dataclass(frozen=True, slots=True)
class StopUnit:
    """Stop somebody else's unit. Does nothing when another invocation runs by now."""

    name: str
    invocation: str


@dataclass(frozen=True, slots=True)
class KillUnit:
    """SIGKILL for what is left in a unit's cgroup. `pids`: only these, if they are still in it."""

    name: str
    invocation: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Signal one process that belongs to no unit, through a pidfd, after its identity was read again."""

    pid: int
    start_ticks: int
    exe: str
    signal: Literal["TERM", "KILL"]


@dataclass(frozen=True, slots=True)
class ReleaseUnits:
    """Give evicted units back: drop-in away, enabled again if it was, started again if it was up."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ApplyPatch:
    """Put the capture into the engine's installation (all or nothing)."""

    release: str


@dataclass(frozen=True, slots=True)
class SweepStale:
    """Remove build locks and shared memory of dead owners, each proved dead once more."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SweepSpool:
    """Remove files of dead epochs."""

    files: int


@dataclass(frozen=True, slots=True)
class StartScan:
    """Start SCAN_UNIT. `after`: its last invocation."""

    after: str


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start ENGINE_UNIT, unless `after` (its last invocation) is no longer its last one. `port`: of the span."""

    after: str
    port: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Stop ENGINE_UNIT if this invocation still runs. `code`: the reason, from the catalogue."""

    invocation: str
    code: str


@dataclass(frozen=True, slots=True)
class RunProof:
    """Start PROOF_UNIT for this very start of the engine. `after`: last invocation of the proof's unit."""

    invocation: str
    after: str


@dataclass(frozen=True, slots=True)
class StopProof:
    """Stop a proof that is overdue or about another start of the engine."""

    invocation: str  # of PROOF_UNIT


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start WORKER_UNIT against this proved engine. `after`: last invocation of the worker's unit."""

    engine: str  # invocation of the engine
    after: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Stop WORKER_UNIT if this invocation still runs (it drains). `code`: the reason, from the catalogue."""

    invocation: str
    code: str


Action = (
    LeaseUnit
    | DisableUnit
    | StopUnit
    | KillUnit
    | KillProcess
    | ReleaseUnits
    | ApplyPatch
    | SweepStale
    | SweepSpool
    | StartScan
    | StartEngine
    | StopEngine
    | RunProof
    | StopProof
    | StartWorker
    | StopWorker
)
# What interrupts or starts something: at most one of these a tick.
DISRUPTIVE = (
    StopUnit, KillUnit, KillProcess, ReleaseUnits, ApplyPatch,
    StartScan, StartEngine, StopEngine, RunProof, StopProof, StartWorker, StopWorker,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an act went. moved-on: the identity no longer matched, nothing was done. failed: Transient, said once.
    cause: also of what was done as far as it goes."""

    result: Literal["done", "moved-on", "failed"]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one tick decided. `reason`: code of the catalogue, "" while all is well; `notes`: warnings beside it."""

    rung: str
    reason: str
    sentence: str
    actions: tuple[Action, ...] = ()
    look_again_s: float = 5.0
    notes: tuple[str, ...] = ()
