"""Every fake: the ports of the product over a simulated host, and a history without a disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from world import GPUS, TOTAL_MIB, VLLM, Service, World

from hsdaemon.config import Config
from hsdaemon.core import budget
from hsdaemon.core import model as m
from hsdaemon.machine.ports import Ports

DONE = m.Outcome("done")
MOVED = m.Outcome("moved-on")


@dataclass
class FakeClock:
    world: World

    def now(self) -> m.Now:
        return self.world.now()

    def wait(self, seconds: float) -> None:
        self.world.step(seconds)


@dataclass
class FakeGpus:
    world: World

    def read(self) -> tuple[m.Gpu, ...] | m.Unreadable:
        w = self.world
        if w.nvml:
            return m.Unreadable("nvml", f"fault {w.nvml}", w.nvml)
        return tuple(self._gpu(i) for i in range(GPUS))

    def _gpu(self, i: int) -> m.Gpu:
        w = self.world
        used = None if w.lie == "no-memory" else w.used(i)
        fabric = "in-progress" if w.fabric_until > w.mono_s else "complete"
        return m.Gpu(f"GPU-{i}", i, "fake", TOTAL_MIB, used, i in w.lost, "none", fabric)

    def xids(self) -> tuple[m.Xid, ...]:
        return tuple(self.world.xids)


@dataclass
class FakeProcs:
    world: World

    def holders(self, gpus: Sequence[m.Gpu]) -> tuple[m.Holder, ...] | m.Unreadable:
        w = self.world
        return tuple(
            m.Holder(
                "container" if p.container else "compute",
                p.pid,
                p.ticks,
                tuple(f"GPU-{g}" for g in p.gpus),
                p.mib,
                p.unit,
                f"/system.slice/{p.unit}" if p.unit else "/",
                p.exe,
                p.container,
                "D" if p.frozen else "S",
                p.frozen and p.kills > 0 and not p.shy,
            )
            for p in w.procs.values()
            if p.gpus and w.lie != "no-claims"
        )

    def signal(self, pid: int, start_ticks: int, exe: str, signal: Literal["TERM", "KILL"]) -> m.Outcome:
        w = self.world
        w.risk()
        proc = w.procs.get(pid)
        if proc is None or proc.ticks != start_ticks or proc.exe != exe:
            return MOVED
        if proc.container or not exe.startswith("/opt/rogue/") or proc.unit in w.services:
            w.wrong(f"{exe} in {proc.unit or 'no unit'} was signalled, no policy lets us")
        if w.mono_s - proc.born_s < 1.0:
            w.wrong(f"{exe} was signalled at first sight")
        if signal == "KILL":
            proc.kills += 1
            if proc.kills > 2:
                w.wrong(f"{exe} was killed {proc.kills} times")
        if signal == "KILL" or not proc.deaf:
            w.end(pid)
        w.risk()
        return DONE


@dataclass
class FakeUnits:
    world: World

    def read(self, names: Sequence[str], patterns: Sequence[str] = ()) -> tuple[m.Unit, ...] | m.Unreadable:
        w = self.world
        if w.units_until > w.mono_s:
            return m.Unreadable("units", "dbus is down")
        wanted = [n for n in w.services if n in names or (patterns and n == VLLM)]
        missing = [m.Unit(n, load="not-found") for n in names if n not in w.services]
        return (*(self._unit(w.services[n]) for n in wanted), *missing)

    def _unit(self, u: Service) -> m.Unit:
        return m.Unit(
            u.name,
            active=u.active,
            invocation=u.invocation,
            main_pid=min(u.pids, default=0) if u.active == "active" else 0,
            file_state=u.file_state,
            pids=tuple(sorted(u.pids)),
            since_s=u.since_s,
            result=u.result,
            status=u.status,
            leased=u.leased,
        )

    def start(self, name: str, after: str) -> m.Outcome:
        w, unit = self.world, self.world.services[name]
        w.risk()
        if w.units_until > w.mono_s:
            return m.Outcome("failed", "dbus is down")
        if unit.invocation != after or unit.active in ("active", "activating"):
            return MOVED
        if name == m.ENGINE_UNIT:
            w.judge_engine_start()
        if name == m.WORKER_UNIT:
            w.judge_worker_start()
        w.judge_order(name)
        w.start_service(unit)
        w.risk()
        return DONE

    def stop(self, name: str, invocation: str) -> m.Outcome:
        w, unit = self.world, self.world.services[name]
        w.risk()
        if unit.invocation != invocation:
            return MOVED
        if name not in m.OUR_UNITS:
            w.judge_eviction(name)
        w.stop_service(unit, w.rng.random() * 6)
        w.risk()
        return DONE

    def kill(self, name: str, invocation: str, pids: Sequence[int]) -> m.Outcome:
        w, unit = self.world, self.world.services[name]
        w.risk()
        if unit.invocation != invocation:
            return MOVED
        if unit.active == "active":
            w.wrong(f"{name} was killed while it runs")
        if name not in (VLLM, m.ENGINE_UNIT):
            w.wrong(f"{name} was killed, no policy names it")
        hit = set(pids) & unit.pids
        for pid in hit:
            w.procs[pid].kills += 1
            if w.procs[pid].kills > 2:
                w.wrong(f"pid {pid} was killed {w.procs[pid].kills} times")
            w.end(pid)
        if hit and not unit.pids and unit.active == "active":
            w.die(unit, "signal", 9)
        w.risk()
        return DONE if hit else MOVED

    def lease(self, name: str, file_state: str, was_up: bool) -> m.Outcome:
        w = self.world
        w.risk()
        w.before.setdefault(name, (file_state, was_up))
        w.services[name].leased = True
        w.risk()
        return DONE

    def disable(self, name: str) -> m.Outcome:
        w = self.world
        w.risk()
        w.services[name].file_state = "disabled"
        w.risk()
        return DONE

    def release(self, name: str) -> m.Outcome:
        w = self.world
        w.risk()
        if len(w.settled) < w.total:
            w.wrong(f"{name} was given back before the end")
        if name in w.before:
            unit = w.services[name]
            unit.leased = False
            unit.file_state, was_up = w.before.pop(name)
            if was_up:
                w.start_service(unit)
        w.risk()
        return DONE


@dataclass
class FakeEngine:
    world: World

    def read(self, unit: m.Unit) -> m.Engine | m.Unreadable:
        w = self.world
        busy = tuple((p, "squatter") for p in w.busy_ports)
        alive = unit.up and w.fate != "silent"
        age = w.mono_s - unit.since_s
        return m.Engine(
            unit,
            w.endpoint,
            m.Capture(w.capture, "0.5.23"),
            "wanted",
            "seen" if w.healthy_s else "none",
            "ok" if w.healthy_s and unit.up else "refused",
            int(age * 100) if alive and w.fate != "hang-load" else 0,
            age * 0.9 if alive and w.fate != "hang-load" else 0.0,
            ("last line",),
            busy,
            w.stale,
        )

    def apply_patch(self, release: str) -> m.Outcome:
        w = self.world
        w.risk()
        if w.services[m.ENGINE_UNIT].active == "active" or w.capture == "foreign":
            w.wrong("files of the engine were changed that must not be")
        w.capture = "ours"
        return DONE

    def prepare(self, port: int, fingerprint: str) -> m.Outcome:
        self.world.port = port
        if port in self.world.busy_ports:
            self.world.wrong("engine started on a taken port")
        return DONE

    def sweep(self, paths: Sequence[str]) -> m.Outcome:
        self.world.risk()
        self.world.stale = ()
        return DONE


@dataclass
class FakeProof:
    world: World

    def read(self) -> m.Proof | m.Unreadable | None:
        return self.world.proof

    def prepare(self, invocation: str) -> m.Outcome:
        w = self.world
        if w.services[m.WORKER_UNIT].active == "active":
            w.wrong("a proof beside a worker")
        if invocation != w.services[m.ENGINE_UNIT].invocation:
            w.wrong("a proof of another engine")
        w.to_prove = invocation
        return DONE


@dataclass
class FakeWorker:
    world: World

    def read(self, unit: m.Unit) -> m.Worker | m.Unreadable:
        return m.Worker(unit, paused="1 MiB above the floor" if unit.up and self.world.paused else "")


@dataclass
class FakeVolume:
    world: World

    def read(self) -> m.Volume | m.Unreadable:
        w = self.world
        if w.volume == "hang":
            return m.Unreadable("volume", "no answer in 10 s", "hang")
        return m.Volume(w.volume, "", w.free, 1 << 44, "uuid")


@dataclass
class FakeManifest:
    world: World

    def read(self) -> m.Progress | m.Unadopted | m.Unreadable | None:
        w = self.world
        if w.blind_manifest:
            return m.Unreadable("manifest", "busy", w.blind_manifest)
        if w.volume in ("not-mounted", "no-marker"):
            return None  # an empty folder
        if w.volume != "ok":
            return m.Unreadable("manifest", "no volume", "hang")
        if w.unadopted:
            return m.Unadopted()
        return m.Progress(w.total, len(w.settled), 0, 0, True) if w.settled else None


@dataclass
class FakeSpool:
    world: World

    def read(self) -> m.Spool | m.Unreadable:
        return m.Spool(orphans=self.world.rng.randrange(2))

    def sweep(self) -> m.Outcome:
        if self.world.services[m.WORKER_UNIT].active == "active":
            self.world.wrong("the spool was swept beside a worker")
        return DONE


@dataclass
class FakeWishes:
    wishes: m.Wishes = field(default_factory=m.Wishes)

    def read(self) -> m.Wishes:
        return self.wishes


@dataclass
class FakeNotifier:
    said: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def ready(self) -> None:
        self.calls.append("ready")

    def status(self, sentence: str) -> None:
        self.said = [*self.said[-50:], sentence]

    def watchdog(self) -> None:
        self.calls.append("watchdog")

    def stopping(self) -> None:
        self.calls.append("stopping")


def ports(world: World) -> Ports:
    return Ports(
        FakeClock(world),
        FakeGpus(world),
        FakeProcs(world),
        FakeUnits(world),
        FakeEngine(world),
        FakeProof(world),
        FakeWorker(world),
        FakeVolume(world),
        FakeManifest(world),
        FakeSpool(world),
        FakeWishes(),
        FakeNotifier(),
    )


@dataclass
class FakeHistory:
    """Events in a list that survives the supervisor; the past is folded anew after each death."""

    world: World
    events: list[budget.Event] = field(default_factory=list)
    past: budget.Past = field(default_factory=budget.Past)

    def reborn(self) -> FakeHistory:
        new = FakeHistory(self.world, self.events)
        for event in self.events:
            new.past = budget.fold(new.past, event)
        return new

    def append(self, event: budget.Event) -> None:
        self.world.risk()
        self.events.append(event)
        self.past = budget.fold(self.past, event)
        self.world.risk()

    def look(self, seen: m.Observation, config: Config) -> None:
        self.past = budget.look(self.past, seen, config)
        for death in budget.news(self.past, seen):
            self.append(death)

    def intend(self, seen: m.Observation, action: m.Action) -> None:
        self.append(budget.Acted(seen.now, action, budget.settled_of(seen)))

    def ended(self, seen: m.Observation, action: m.Action, outcome: m.Outcome) -> None:
        self.append(budget.Ended(seen.now, action, outcome))

    def tick(self, tick: object) -> None: ...
