"""A simulated host: GPUs, units, processes, disk, engine and worker under a seeded clock, and an oracle of the truth.

The product sees the host through tests/fakes.py only. `violations` lists every act that was wrong in truth, whatever
the product could see; `fault` breaks something, `mend` ends all faults.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from hsdaemon.config import Config, Data, Engine, Evict, EvictProcess, EvictUnit, Gpus, Model, Output, Supervisor
from hsdaemon.core import model as m

GPUS = 2
IDLE_MIB, ENGINE_MIB, FOREIGN_MIB = 5, 70_000, 75_800
TOTAL_MIB = 96_000
VLLM, STRANGER = "vllm-kimi.service", "jupyter.service"
ROGUE = "/opt/rogue/bin/rogue"  # named by the policy, belongs to no unit
VISITOR = "/usr/bin/visitor"  # named by nobody
SAMPLE = 64 << 20  # bytes: a worker waits until one more fits above the floor
CONFIG = Config(
    data=Data(path="/data/set.jsonl"),
    model=Model(path="/models/m"),
    output=Output(path="/data/out"),
    engine=Engine(tp=GPUS, start_patience_s=100.0),
    gpus=Gpus(clear_patience_s=60.0),
    supervisor=Supervisor(tick_s=5.0, stall_s=60.0, start_budget=3, backoff_s=5.0, backoff_max_s=60.0),
    evict=Evict(
        units=(EvictUnit("vllm*.service", "disable"), EvictUnit("batch*.service", "report")),
        processes=(EvictProcess("/opt/rogue/*", "stop"),),
        term_grace_s=10.0,
        budget=3,
    ),
)


class Cut(Exception):  # not an error: the supervisor dies here
    """The supervisor dies at this very point."""


@dataclass
class Proc:
    pid: int
    ticks: int
    exe: str
    unit: str
    mib: int  # on each of `gpus`
    gpus: tuple[int, ...]
    born_s: float
    frozen: bool = False  # hangs in the kernel: no signal ends it
    deaf: bool = False  # ignores TERM
    container: str = ""
    kills: int = 0
    shy: bool = False  # its pending SIGKILL is not seen


@dataclass
class Service:
    """A unit in truth. `file_state` and `leased` survive reboots, the rest does not."""

    name: str
    file_state: str = "static"
    leased: bool = False
    active: str = "inactive"
    invocation: str = ""
    since_s: float = 0.0
    result: str = "success"
    status: int = 0
    pids: set[int] = field(default_factory=set)
    stopping_s: float = 0.0  # until when it is deactivating
    revive_s: float = 0.0  # somebody starts it again this often; 0 = nobody
    stubborn: bool = False  # whoever revives it removes the lease, too
    leftover: bool = False  # a grandchild outlives its stop


@dataclass
class World:
    """The truth. `fates` are what the next starts of the engine come to: die, hang, silent, false, mute, crash."""

    seed: int = 0
    total: int = 50
    config: Config = CONFIG
    mono_s: float = 1000.0
    wall_s: float = 1.7e9
    boots: int = 0
    violations: list[str] = field(default_factory=list)
    fates: list[str] = field(default_factory=list)
    settled: dict[int, int] = field(default_factory=dict)  # row and how often it was stored
    cut_in: int = -1  # the supervisor dies at this many steps from now

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.procs: dict[int, Proc] = {}
        self.residue: list[tuple[int, int, float]] = []  # GPU, MiB, until
        self.next_pid = 100
        self.services = {n: Service(n) for n in (m.ENGINE_UNIT, m.WORKER_UNIT, m.PROOF_UNIT, m.SCAN_UNIT)}
        self.unadopted = 0  # samples of a tree without a manifest
        self.scan_fails = False
        self.services[VLLM] = Service(VLLM, "disabled")
        self.services[STRANGER] = Service(STRANGER, "disabled")
        self.before: dict[str, tuple[str, bool]] = {}
        self.stops: dict[str, set[str]] = {}
        self.crashes = 0  # of the engine since the last new sample or a human
        self.resets = 0
        self.capture = "ours"
        self.patches_fail = False
        self.nvml = ""
        self.blind_units = self.blind_manifest = ""
        self.volume, self.free = "ok", 500 << 30
        self.lost: set[int] = set()
        self.stuck_mib = 0
        self.lie = ""
        self.fabric_until = self.nvml_until = self.volume_until = self.units_until = 0.0
        self.stale: tuple[str, ...] = ()
        self.busy_ports: tuple[int, ...] = ()
        self.xids: list[m.Xid] = []
        self.worker_haunted = self.worker_refuses = self.filling = False
        self.gated = ""  # a unit that a condition keeps down: orders to start it come to nothing
        self.orders: list[float] = []  # when it was told to, since one of ours began to run
        self.worker_stall_s = self.rng.choice([40.0, 1e9])  # a worker may give up before the supervisor does
        self._fresh()

    # --- boots --------------------------------------------------------------------------------------------------

    def _fresh(self) -> None:
        """What a boot makes new."""
        self.boots += 1
        self.procs.clear()
        self.residue.clear()
        self.orders.clear()
        self.proof: m.Proof | None = None
        self.endpoint: m.Endpoint | None = None
        self.fate, self.healthy_s, self.done_in_run = "", 0.0, 0
        self.worker_turn_s = self.moved_s = self.mono_s
        self.lost.clear()
        self.xids.clear()
        self.stuck_mib = 0
        if self.nvml in ("mismatch", "stuck"):
            self.nvml = ""
        for unit in self.services.values():
            unit.active, unit.invocation, unit.result, unit.status = "inactive", "", "success", 0
            unit.pids, unit.since_s = set(), self.mono_s
        for unit in self.services.values():
            if unit.file_state == "enabled" and not unit.leased:
                self.start_service(unit)

    def reboot(self) -> None:
        """A reboot or a power cut: everything that was acknowledged as durable is there afterwards."""
        self.mono_s = 10.0 + self.rng.random() * 20
        self._fresh()
        if self.rng.random() < 0.5:
            self.volume, self.volume_until = "not-mounted", self.mono_s + self.rng.random() * 60
        if self.rng.random() < 0.5:
            self.nvml, self.nvml_until = "no-driver", self.mono_s + self.rng.random() * 40
        self.mono_until_clear()

    def mono_until_clear(self) -> None:
        self.fabric_until = self.units_until = 0.0

    @property
    def boot(self) -> str:
        return f"boot-{self.boots}"

    def now(self) -> m.Now:
        return m.Now(self.mono_s, self.wall_s, self.boot)

    # --- processes and memory -----------------------------------------------------------------------------------

    def spawn(self, exe: str, unit: str, mib: int, gpus: tuple[int, ...], **kw: object) -> Proc:
        self.next_pid += 1
        proc = Proc(self.next_pid, self.next_pid * 7, exe, unit, mib, gpus, self.mono_s)
        for key, value in kw.items():
            setattr(proc, key, value)
        self.procs[proc.pid] = proc
        if unit in self.services:
            self.services[unit].pids.add(proc.pid)
        return proc

    def end(self, pid: int) -> None:
        """A process ends; the driver frees its memory some seconds later."""
        proc = self.procs.get(pid)
        if proc is None or proc.frozen:
            return
        del self.procs[pid]
        if proc.unit in self.services:
            self.services[proc.unit].pids.discard(pid)
        lag = self.mono_s + self.rng.random() * 8
        self.residue.extend((g, proc.mib, lag) for g in proc.gpus if proc.mib)

    def used(self, gpu: int) -> int:
        lingering = sum(mib for g, mib, until in self.residue if g == gpu and until > self.mono_s)
        return IDLE_MIB + self.stuck_mib + lingering + sum(p.mib for p in self.procs.values() if gpu in p.gpus)

    def foreign(self, gpu: int) -> int:
        """MiB of others on a GPU, in truth."""
        own = sum(p.mib for p in self.procs.values() if gpu in p.gpus and p.unit == m.ENGINE_UNIT)
        return self.used(gpu) - own - IDLE_MIB

    # --- units --------------------------------------------------------------------------------------------------

    def start_service(self, unit: Service) -> None:
        if unit.leased or unit.active in ("active", "activating", "deactivating"):
            return
        if unit.name == self.gated:
            return
        if unit.name in (m.ENGINE_UNIT, m.WORKER_UNIT):
            self.orders.clear()
        unit.active, unit.since_s = "active", self.mono_s
        unit.invocation = f"{unit.name[:4]}{self.rng.getrandbits(48):012x}"
        unit.result, unit.status = "success", 0
        if unit.name == m.ENGINE_UNIT:
            self._begin_engine(unit)
        elif unit.name == m.WORKER_UNIT:
            self.worker_turn_s = self.mono_s
            self.spawn("/usr/bin/worker", unit.name, 0, ())
        elif unit.name == m.SCAN_UNIT:
            self.spawn("/usr/bin/scan", unit.name, 0, ())
        elif unit.name == m.PROOF_UNIT:
            if self.services[m.SCAN_UNIT].active == "active":
                self.wrong("a proof beside a scan")
            self.spawn("/usr/bin/proof", unit.name, 0, ())
        else:
            self.spawn(f"/opt/{unit.name}", unit.name, FOREIGN_MIB, tuple(range(GPUS)))

    def stop_service(self, unit: Service, seconds: float) -> None:
        if unit.active in ("active", "activating"):
            unit.active, unit.since_s, unit.stopping_s = "deactivating", self.mono_s, self.mono_s + seconds

    def die(self, unit: Service, result: str, status: int, orphans: bool = False) -> None:
        """A unit ends; what is frozen, and its orphans, stay in its cgroup."""
        for i, pid in enumerate(sorted(unit.pids)):
            if not (orphans and i == 0):
                self.end(pid)
        unit.active = "inactive" if result == "success" else "failed"
        unit.result, unit.status, unit.since_s = result, status, self.mono_s
        if unit.name == m.ENGINE_UNIT:
            self.moved_s = self.mono_s
            self.crashes += result != "success"

    def _begin_engine(self, unit: Service) -> None:
        self.fate = self.fates.pop(0) if self.fates else ""
        self.load_s = 30 + self.rng.random() * 30 + (140 if self.fate == "slow" else 0)
        self.healthy_s, self.done_in_run = 0.0, 0
        proc = self.spawn("/usr/bin/sglang", unit.name, 20_000, tuple(range(GPUS)))
        self.spawn("/usr/bin/sglang-rank", unit.name, 0, ())
        self.endpoint = m.Endpoint(f"launch-{unit.invocation}", proc.pid, proc.ticks, self.port, "wanted")

    port = 30000

    # --- time ---------------------------------------------------------------------------------------------------

    def step(self, seconds: float) -> None:
        self.mono_s += seconds
        self.wall_s += seconds
        self.residue = [r for r in self.residue if r[2] > self.mono_s]
        if self.volume == "not-mounted" and 0 < self.volume_until <= self.mono_s:
            self.volume, self.volume_until = "ok", 0.0
        if self.nvml and 0 < self.nvml_until <= self.mono_s:
            self.nvml, self.nvml_until = "", 0.0
        for unit in list(self.services.values()):
            self._turn(unit)
            if unit.name in m.OUR_UNITS and unit.active == "inactive" and not unit.pids:
                unit.invocation = ""  # nothing refers to it: systemd unloads what ended well
        self._engine(self.services[m.ENGINE_UNIT])
        self._proof(self.services[m.PROOF_UNIT])
        self._scan(self.services[m.SCAN_UNIT])
        self._worker(self.services[m.WORKER_UNIT])

    def _turn(self, unit: Service) -> None:
        if unit.active == "deactivating" and unit.stopping_s <= self.mono_s:
            self.die(unit, "success", 0, orphans=unit.leftover)
        if unit.revive_s and unit.active in ("inactive", "failed") and self.mono_s - unit.since_s > unit.revive_s:
            if unit.stubborn:
                unit.leased = False
            self.start_service(unit)

    def _engine(self, unit: Service) -> None:
        if unit.active != "active":
            return
        age = self.mono_s - unit.since_s
        if any(self.foreign(g) + ENGINE_MIB > TOTAL_MIB for g in range(GPUS)) and age > 10 and not self.healthy_s:
            self.die(unit, "exit-code", 1)
        elif self.fate == "die" and age > 8:
            self.die(unit, "signal", 11)
        elif self.fate == "orphan" and age > 8:
            self.die(unit, "signal", 9, orphans=True)
        elif self.fate == "oom" and age > 8:
            self.die(unit, "oom-kill", 9)
        elif self.fate == "crash" and self.done_in_run >= 2:
            self.die(unit, "signal", 6)
        elif self.fate not in ("silent", "hang-load") and age > self.load_s and not self.healthy_s:
            self.healthy_s = self.mono_s
            for proc in self.procs.values():
                if proc.unit == unit.name and proc.mib:
                    proc.mib = ENGINE_MIB

    def _proof(self, unit: Service) -> None:
        engine = self.services[m.ENGINE_UNIT]
        if unit.active != "active" or self.mono_s - unit.since_s < 5:
            return
        if engine.active != "active" or not self.healthy_s or self.fate == "mute":
            if self.mono_s - unit.since_s > 20:
                self.proof = m.Proof(self.to_prove, False, "timeout", "no answer")
                self.die(unit, "exit-code", 1)
            return
        good = self.fate != "false"
        self.proof = m.Proof(self.to_prove, good, "" if good else "continuity", "" if good else "cosine 0.31")
        self.die(unit, "success" if good else "exit-code", 0 if good else 1)

    def _scan(self, unit: Service) -> None:
        """Half a minute; a reboot in the middle begins it again."""
        if unit.active != "active" or self.volume != "ok":
            return
        if self.scan_fails and self.mono_s - unit.since_s > 5:
            self.die(unit, "exit-code", 73)
        elif self.mono_s - unit.since_s > 30:
            self.settled.update(dict.fromkeys(range(self.unadopted), 1))
            self.unadopted = 0
            self.crashes = 0  # adopted samples are new ones to whoever counts
            self.die(unit, "success", 0)

    to_prove = ""

    @property
    def paused(self) -> bool:
        """The worker waits for room: one sample more would go below the floor."""
        short = self.free < (self.config.output.reserve_mib << 20) + SAMPLE
        return self.services[m.WORKER_UNIT].active in ("active", "deactivating") and short

    def _worker(self, unit: Service) -> None:
        """One sample in three seconds while the engine answers and the volume takes it."""
        engine = self.services[m.ENGINE_UNIT]
        if unit.active != "active":
            return
        if self.worker_refuses:
            self.die(unit, "exit-code", 70)
            return
        if len(self.settled) >= self.total:
            self.die(unit, "success", 0)
            return
        if self.filling and self.volume == "ok":
            self.free = (self.config.output.reserve_mib << 20) + (1 << 20)
        if self.paused:
            self.worker_turn_s = self.mono_s
            return
        works = engine.active == "active" and self.healthy_s and self.fate not in ("mute", "hang-run")
        if self.worker_haunted or not works or self.volume != "ok" or self.free < self.config.output.reserve_mib << 20:
            self.worker_turn_s = self.mono_s
            if self.mono_s - max(unit.since_s, self.moved_s) > self.worker_stall_s:
                self.die(unit, "exit-code", 75)
            return
        if self.fate == "false":
            self.wrong("a sample was taken from an engine that is false")
        while self.mono_s - self.worker_turn_s >= 3 and len(self.settled) < self.total:
            self.worker_turn_s += 3
            row = next(r for r in range(self.total) if r not in self.settled)
            self.settled[row] = self.settled.get(row, 0) + 1
            self.done_in_run += 1
            self.crashes = 0
            self.moved_s = self.worker_turn_s

    # --- the supervisor's own death --------------------------------------------------------------------------------

    def risk(self) -> None:
        """A point at which the supervisor may die."""
        if self.cut_in >= 0:
            self.cut_in -= 1
            if self.cut_in < 0:
                raise Cut

    # --- truth about acts -----------------------------------------------------------------------------------------

    def wrong(self, text: str) -> None:
        self.violations.append(f"{self.boot} {self.mono_s:.1f}: {text}")

    def judge_eviction(self, name: str) -> None:
        """Called when somebody else's unit is stopped."""
        unit = self.services[name]
        if name != VLLM:
            self.wrong(f"{name} was touched, no policy names it")
        if self.mono_s - unit.since_s < 1.0:
            self.wrong(f"{name} was stopped at first sight")
        if not unit.leased:
            self.wrong(f"{name} was stopped without a lease")
        if self.nvml or self.units_until > self.mono_s:
            self.wrong(f"{name} was stopped blindly")
        known = self.stops.setdefault(name, set())
        known.add(unit.invocation)
        if len(known) > self.config.evict.budget:
            self.wrong(f"{name} was stopped {len(known)} times without a human")

    def judge_engine_start(self) -> None:
        held = [g for g in range(GPUS) if self.foreign(g) > self.config.gpus.baseline_mib]
        if held:
            self.wrong(f"engine started while others hold GPU {held}")
        if self.lost or self.nvml or self.fabric_until > self.mono_s:
            self.wrong("engine started on GPUs that are not sound")
        if self.capture != "ours":
            self.wrong("engine started without the capture")
        if self.volume != "ok":
            self.wrong("engine started without the volume")
        if self.services[m.ENGINE_UNIT].pids:
            self.wrong("engine started beside what is left of the last one")
        if self.crashes >= self.config.supervisor.start_budget + 2:  # two may fall between a look and a reboot
            self.wrong(f"engine started after {self.crashes} crashes without one new sample")

    def judge_worker_start(self) -> None:
        engine = self.services[m.ENGINE_UNIT]
        proved = self.proof is not None and self.proof.ok and self.proof.invocation == engine.invocation
        if not proved or engine.active != "active":
            self.wrong("worker started on an engine that is not proved")
        if self.volume != "ok" or self.free < self.config.output.reserve_mib << 20:
            self.wrong("worker started on a volume that is not ready")
        if self.unadopted or self.services[m.SCAN_UNIT].active == "active":
            self.wrong("worker started before the tree was adopted")

    def judge_order(self, name: str) -> None:
        """Called when a unit is told to start."""
        if name != self.gated:
            return
        self.orders.append(self.mono_s)
        if len(self.orders) > 2 and self.orders[-1] - self.orders[-2] < self.config.supervisor.backoff_s:
            self.wrong(f"{self.gated} was told to start again and again")

    def judge_stop(self, action: m.StopEngine | m.StopWorker) -> None:
        """Called after one of ours was told to stop."""
        if action.code == "finishing" and len(self.settled) < self.total:
            self.wrong("stopped as finished with work left")
        fresh = self.mono_s - self.moved_s < self.config.supervisor.stall_s
        if action.code in ("worker-stalled", "engine-stalled") and (fresh or self.paused):
            self.wrong("restarted for want of progress while samples arrive or wait for the disk")

    # --- faults ---------------------------------------------------------------------------------------------------

    def fault(self, kind: str) -> None:
        getattr(self, f"_fault_{kind.replace('-', '_')}")()

    def _fault_reboot(self) -> None:
        self.reboot()

    def _fault_supervisor(self) -> None:
        self.cut_in = self.rng.randrange(6)

    def _fault_vllm(self) -> None:
        unit = self.services[VLLM]
        unit.file_state = "enabled"
        unit.leftover = self.rng.random() < 0.3
        self.start_service(unit)

    def _fault_reviver(self) -> None:
        self.services[VLLM].revive_s = 5.0 + self.rng.random() * 20
        self.services[VLLM].stubborn = self.rng.random() < 0.5
        self._fault_vllm()

    def _fault_stranger(self) -> None:
        self.start_service(self.services[STRANGER])

    def _fault_rogue(self) -> None:
        self.spawn(ROGUE, "", 9_000, (self.rng.randrange(GPUS),), deaf=self.rng.random() < 0.5)

    def _fault_visitor(self) -> None:
        self.visitor = self.spawn(self.rng.choice([VISITOR, ROGUE]), "", 0, (0,)).pid

    visitor = 0

    def _fault_container(self) -> None:
        self.spawn(ROGUE, "docker-ab12.scope", 8_000, (1,), container="ab12")

    def _fault_frozen(self) -> None:
        self.spawn(ROGUE, "", 8_000, (0,), frozen=True, shy=self.rng.random() < 0.5)

    def _fault_volume(self) -> None:
        self.volume = self.rng.choice(["not-mounted", "read-only", "io-error", "no-marker", "hang", "foreign"])

    def _fault_disk(self) -> None:
        self.free = 1 << 30

    def _fault_tight(self) -> None:
        """The worker fills the disk, up to less than a sample above the floor."""
        self.filling = True

    def _fault_gated(self) -> None:
        self.gated = self.rng.choice([m.ENGINE_UNIT, m.WORKER_UNIT])
        self.orders.clear()

    def _fault_nvml(self) -> None:
        self.nvml = self.rng.choice(["no-library", "mismatch", "hang", "no-permission", "stuck", ""])

    def _fault_lie(self) -> None:
        self.lie = self.rng.choice(["no-claims", "no-memory"])

    def _fault_lost(self) -> None:
        self.lost.add(self.rng.randrange(GPUS))

    def _fault_fabric(self) -> None:
        self.fabric_until = self.mono_s + 50

    def _fault_stuck(self) -> None:
        self.stuck_mib = 5_000

    def _fault_units(self) -> None:
        self.units_until = self.mono_s + 30

    def _fault_manifest(self) -> None:
        self.blind_manifest = "busy"

    def _fault_patch(self) -> None:
        """Somebody reinstalls or edits SGLang, perhaps under a running engine, and the engine ends soon."""
        self.capture = self.rng.choice(["absent", "older", "foreign"])
        self._fault_engine_now()

    def _fault_engine(self) -> None:
        kinds = ["die", "orphan", "oom", "crash", "silent", "hang-load", "slow", "false", "mute", "hang-run"]
        self.fates.extend([self.rng.choice(kinds)] * self.rng.choice([1, 1, 2, 8]))

    def _fault_crash_loop(self) -> None:
        self.fates = ["die"] * 8
        unit = self.services[m.ENGINE_UNIT]
        if unit.active == "active":
            self.die(unit, "signal", 6)

    def _fault_engine_now(self) -> None:
        unit = self.services[m.ENGINE_UNIT]
        if unit.active == "active":
            if self.rng.random() < 0.4:
                self.fate = self.rng.choice(["hang-run", "mute"])
            else:
                self.die(unit, "signal", 9, orphans=self.rng.random() < 0.5)

    def _fault_meddler(self) -> None:
        """Somebody restarts the engine by hand."""
        unit = self.services[m.ENGINE_UNIT]
        if unit.active == "active":
            self.die(unit, "success", 0)
            if all(p.unit == unit.name or not p.mib for p in self.procs.values()):
                self.start_service(unit)

    def _fault_worker(self) -> None:
        unit = self.services[m.WORKER_UNIT]
        if unit.active == "active":
            self.die(unit, "signal", 9)

    def _fault_haunted(self) -> None:
        self.worker_haunted = True

    def _fault_tree(self) -> None:
        """A tree without a manifest: only before anything was done."""
        if not self.settled and self.services[m.WORKER_UNIT].active == "inactive":
            self.unadopted = 7
            self.scan_fails = self.rng.random() < 0.3

    def _fault_refuses(self) -> None:
        self.worker_refuses = True

    def _fault_stale(self) -> None:
        self.stale = ("/dev/shm/sgl_shm_1",)

    def _fault_ports(self) -> None:
        self.busy_ports = tuple(range(30000, 30000 + self.rng.choice([1, 20])))

    def _fault_xid(self) -> None:
        uuid = f"GPU-{self.rng.randrange(GPUS)}"
        self.xids.append(m.Xid(uuid, self.rng.choice([13, 31, 43, 94]), self.mono_s))

    def mend(self) -> None:
        """Every fault ends; what only a person can end, a person ended."""
        self.nvml = self.lie = self.blind_manifest = ""
        self.volume, self.free = "ok", 500 << 30
        self.volume_until = self.nvml_until = self.fabric_until = self.units_until = 0.0
        self.lost.clear()
        self.stuck_mib = 0
        self.fates.clear()
        self.busy_ports = ()
        self.worker_haunted = self.worker_refuses = self.scan_fails = self.filling = False
        self.gated = ""
        self.cut_in = -1
        if self.capture == "foreign":
            self.capture = "absent"
        for unit in self.services.values():
            unit.revive_s, unit.stubborn = 0.0, False
        for proc in list(self.procs.values()):
            proc.frozen = False
            if proc.unit in (STRANGER, "docker-ab12.scope") or proc.exe == VISITOR or proc.kills:
                self.end(proc.pid)
        if self.services[STRANGER].active == "active":
            self.die(self.services[STRANGER], "success", 0)

    def human(self) -> None:
        """What `hs-extract reset` and a look at a failed engine come to."""
        self.resets += 1
        self.stops.clear()
        self.orders.clear()
        self.crashes = 0
        if self.fate in ("false", "mute", "hang-run", "hang-load", "silent"):
            self.fate = ""


FAULTS = sorted(name.removeprefix("_fault_").replace("_", "-") for name in vars(World) if name.startswith("_fault_"))


def tuned(config: Config, **parts: dict[str, object]) -> Config:
    """The config with some values of some tables changed."""
    for table, values in parts.items():
        config = msgspec.structs.replace(config, **{table: msgspec.structs.replace(getattr(config, table), **values)})
    return config
