"""Folds of history into numbers: attempts, backoff, progress since a start, sightings, baselines.

`Past` is all that decisions know of earlier ticks. Its first part is folded from durable events and survives reboots;
its second part is folded from looking, and is empty after a restart of the supervisor: all is looked at again then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hsdaemon.config import Config
from hsdaemon.core import model as m
from hsdaemon.core.reasons import CATALOGUE

SCAN_KEY = "scan"
KEPT = 256  # tries and evictions that are remembered, the newest
_CUTS_PER_FAILURE = 4  # a start that a reboot cut short says little about the engine, but not nothing
_NO_FAILURE = ("engine-reload", "finishing")  # stops of the engine that are not its fault
_STALLED = ("worker-stalled", "engine-stalled")


@dataclass(frozen=True, slots=True)
class Acted:
    """An intent, written before the act. `settled`: samples settled at that moment, None when unknown."""

    now: m.Now
    action: m.Action
    settled: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How the act went. A missing one means that we died in between: the next tick looks at the world."""

    now: m.Now
    action: m.Action
    outcome: m.Outcome


@dataclass(frozen=True, slots=True)
class Died:
    """A unit of ours ended by itself."""

    now: m.Now
    unit: str
    invocation: str
    cause: str
    settled: int | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """A human cleared budgets and breakers."""

    now: m.Now


Event = Acted | Ended | Died | Reset


@dataclass(frozen=True, slots=True)
class Start:
    """A start of engine or worker. `ended`: "" runs, or was cut by a reboot; else why it ended."""

    unit: str
    after: str
    boot: str
    at_s: float
    settled: int | None
    ended: str = ""
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tries:
    """How often the same thing was tried on the same identity, in one boot."""

    key: str
    count: int
    first_s: float
    last_s: float
    boot: str


@dataclass(frozen=True, slots=True)
class Lease:
    """A unit we keep down, and what it was before."""

    name: str
    file_state: str
    was_up: bool


@dataclass(frozen=True, slots=True)
class Spell:
    """A condition that has been true in every look since `first_s`; looks less than a second apart count once."""

    key: str
    first_s: float
    last_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A value and when it last changed."""

    key: str
    value: float
    since_s: float


@dataclass(frozen=True, slots=True)
class Past:
    """See above. Tuples, not dicts, so that it can be stored and compared."""

    starts: tuple[Start, ...] = ()  # since the last progress
    stalls: tuple[tuple[str, int | None], ...] = ()  # unit and settled, since the last progress
    evictions: tuple[tuple[str, str], ...] = ()  # unit and invocation, since a human's reset
    leases: tuple[Lease, ...] = ()
    tries: tuple[Tries, ...] = ()
    reset_boot: str = ""  # boot and moment of the last human reset
    reset_s: float = 0.0
    boot: str = ""
    spells: tuple[Spell, ...] = ()
    marks: tuple[Mark, ...] = ()
    baselines: tuple[tuple[str, int], ...] = ()  # GPU and MiB that it holds when idle

    def spell(self, key: str) -> Spell | None:
        return next((s for s in self.spells if s.key == key), None)

    def mark(self, key: str) -> Mark | None:
        return next((v for v in self.marks if v.key == key), None)

    def tried(self, key: str) -> Tries | None:
        return next((t for t in self.tries if t.key == key), None)

    def last_start(self, unit: str) -> Start | None:
        return next((s for s in reversed(self.starts) if s.unit == unit), None)


# --- what an action counts under ------------------------------------------------------------------------------------


def key_of(action: m.Action) -> str:
    """The identity that tries are counted by; "" for actions that are counted otherwise."""
    match action:
        case m.StopUnit(name, invocation):
            return f"stop:{name}:{invocation}"
        case m.KillUnit(name, invocation):
            return f"kill:{name}:{invocation}"
        case m.KillProcess(pid, ticks, _, signal):
            return f"{signal}:{pid}:{ticks}"
        case m.StopEngine(invocation) | m.StopWorker(invocation) | m.StopProof(invocation):
            return f"stop:ours:{invocation}"
        case m.RunProof(invocation):
            return f"proof:{invocation}"
        case m.ApplyPatch(release):
            return f"patch:{release}"
        case m.ReleaseUnits(names):
            return f"release:{','.join(names)}"
        case m.SweepStale(paths):
            return f"sweep:{','.join(paths)}"
        case m.SweepSpool():
            return "sweep-spool"
        case m.StartScan():
            return SCAN_KEY
        case m.StartEngine(after):
            return f"start:{m.ENGINE_UNIT}:{after}"
        case m.StartWorker(_, after):
            return f"start:{m.WORKER_UNIT}:{after}"
        case _:
            return ""


# --- durable events --------------------------------------------------------------------------------------------------


def durable(past: Past) -> Past:
    """What outlives the supervisor: all but what was learned by looking."""
    return replace(past, boot="", spells=(), marks=(), baselines=())


def fold(past: Past, event: Event) -> Past:
    """The past after one durable event, in this boot or an earlier one."""
    match event:
        case Acted():
            return _acted(_progress(past, event.settled, event.now.boot), event)
        case Ended():
            return _ended(past, event)
        case Died():
            return _died(_progress(past, event.settled, event.now.boot), event)
        case Reset(now):
            return replace(past, starts=(), stalls=(), evictions=(), tries=(), reset_boot=now.boot, reset_s=now.mono_s)


def _progress(past: Past, settled: int | None, boot: str) -> Past:
    """New samples wipe what was held against engine and worker, but for the starts that still run."""
    if settled is None:
        return past
    starts = tuple(
        replace(s, settled=settled)
        for s in past.starts
        if s.settled in (None, settled) or (not s.ended and s.boot == boot)
    )
    return replace(past, starts=starts, stalls=tuple(s for s in past.stalls if s[1] in (None, settled)))


def _acted(past: Past, event: Acted) -> Past:
    now, action = event.now, event.action
    past = _count(past, key_of(action), now)
    match action:
        case m.StartEngine(after):
            return _begin(past, Start(m.ENGINE_UNIT, after, now.boot, now.mono_s, event.settled))
        case m.StartWorker(_, after):
            return _begin(past, Start(m.WORKER_UNIT, after, now.boot, now.mono_s, event.settled))
        case m.StopEngine(_, code):
            past = replace(past, stalls=_stall(past, m.ENGINE_UNIT, code, event.settled))
            return _end(past, m.ENGINE_UNIT, code, now)
        case m.StopWorker(_, code):
            past = replace(past, stalls=_stall(past, m.WORKER_UNIT, code, event.settled))
            return _end(past, m.WORKER_UNIT, code, now)
        case m.StopUnit(name, invocation):
            known = past.evictions[-KEPT:]
            return past if (name, invocation) in known else replace(past, evictions=(*known, (name, invocation)))
        case m.LeaseUnit(name, file_state, was_up):
            if any(lease.name == name for lease in past.leases):
                return past
            return replace(past, leases=(*past.leases, Lease(name, file_state, was_up)))
        case _:
            return past


def _begin(past: Past, start: Start) -> Past:
    return replace(past, starts=(*past.starts, start)[-KEPT:])


def _count(past: Past, key: str, now: m.Now) -> Past:
    if not key:
        return past
    old = past.tried(key)
    first = old.first_s if old and old.boot == now.boot else now.mono_s
    count = old.count if old and old.boot == now.boot else 0
    new = Tries(key, count + 1, first, now.mono_s, now.boot)
    return replace(past, tries=(*(t for t in past.tries if t.key != key), new)[-KEPT:])


def _stall(past: Past, unit: str, code: str, settled: int | None) -> tuple[tuple[str, int | None], ...]:
    return (*past.stalls, (unit, settled)) if code in _STALLED else past.stalls


def _end(past: Past, unit: str, cause: str, now: m.Now) -> Past:
    """The running start of a unit has ended, or was refused: no order to start it was in vain."""
    last = past.last_start(unit)
    if last is None or last.ended:
        return past
    starts = tuple(replace(s, ended=cause, ended_s=now.mono_s) if s is last else s for s in past.starts)
    return replace(past, starts=starts, tries=tuple(t for t in past.tries if not t.key.startswith(f"start:{unit}:")))


def _ended(past: Past, event: Ended) -> Past:
    action, outcome = event.action, event.outcome
    if isinstance(action, m.ReleaseUnits) and outcome.result == "done":
        return replace(
            past,
            leases=tuple(lease for lease in past.leases if lease.name not in action.names),
            evictions=tuple(e for e in past.evictions if e[0] not in action.names),
        )
    if isinstance(action, m.StartEngine | m.StartWorker) and outcome.result != "done":
        unit = m.ENGINE_UNIT if isinstance(action, m.StartEngine) else m.WORKER_UNIT
        return _end(past, unit, f"not started: {outcome.cause or outcome.result}", event.now)
    return past


def _died(past: Past, event: Died) -> Past:
    return _end(past, event.unit, event.cause, event.now)


def news(past: Past, seen: m.Observation) -> tuple[Died, ...]:
    """Deaths that this look shows for the first time."""
    found = []
    for part in (seen.engine, seen.worker):
        if isinstance(part, m.Unreadable):
            continue
        unit, last = part.unit, past.last_start(part.unit.name)
        running = last is not None and not last.ended and last.boot == seen.now.boot and last.after != unit.invocation
        if running and unit.active in ("inactive", "failed"):
            found.append(Died(seen.now, unit.name, unit.invocation, cause_of(unit), settled_of(seen)))
    return tuple(found)


def cause_of(unit: m.Unit) -> str:
    """Why a unit ended, in systemd's words: "oom-kill", "signal 11", "exit-code 70", "success"."""
    return f"{unit.result} {unit.status}" if unit.status else unit.result


# --- looking ---------------------------------------------------------------------------------------------------------


def look(past: Past, seen: m.Observation, config: Config) -> Past:
    """The past after one observation: spells, marks and baselines, all of this boot only."""
    now = seen.now
    if past.boot != now.boot:
        past = replace(past, boot=now.boot, spells=(), marks=(), baselines=())
    past = _progress(past, settled_of(seen), now.boot)
    past = replace(past, baselines=_baselines(past, seen, config))
    spells = tuple(_spell(past.spell(key), key, now.mono_s) for key in dict.fromkeys(_conditions(past, seen, config)))
    return replace(past, spells=spells, marks=_marks(past, seen))


def _spell(old: Spell | None, key: str, now_s: float) -> Spell:
    if old is None:
        return Spell(key, now_s, now_s, 1)
    return replace(old, last_s=now_s, count=old.count + 1) if now_s - old.last_s >= 1.0 else old


def _conditions(past: Past, seen: m.Observation, config: Config) -> Iterator[str]:
    """Keys of everything whose duration matters."""
    if not isinstance(seen.holders, m.Unreadable):
        yield from (f"holder:{h.pid}:{h.start_ticks}" for h in seen.holders)
    if not isinstance(seen.units, m.Unreadable):
        yield from (f"unit:{u.name}:{u.invocation}" for u in seen.units if u.up or u.pids)
        yield from (f"left:{u.name}:{u.invocation}" for u in seen.units if not u.up and u.pids)
        yield from (f"up:{u.name}" for u in seen.units if u.up)
    if not isinstance(seen.engine, m.Unreadable) and not seen.engine.unit.up and seen.engine.unit.pids:
        yield "left:engine"
    if not isinstance(seen.gpus, m.Unreadable):
        held = held_gpus(seen)
        for gpu in seen.gpus:
            if gpu.fabric == "in-progress":
                yield f"fabric:{gpu.uuid}"
            if gpu.used_mib is not None and held is not None and gpu.uuid not in held:
                yield f"{'clear' if gpu.used_mib <= idle_mib(past, gpu, config) else 'stuck'}:{gpu.uuid}"


def held_gpus(seen: m.Observation) -> frozenset[str] | None:
    """GPUs on which some process works, or None when that cannot be told."""
    if isinstance(seen.holders, m.Unreadable):
        return None
    return frozenset(uuid for h in seen.holders if h.kind not in ("fd", "graphics") for uuid in h.gpus)


def _baselines(past: Past, seen: m.Observation, config: Config) -> tuple[tuple[str, int], ...]:
    held = held_gpus(seen)
    if isinstance(seen.gpus, m.Unreadable) or held is None:
        return past.baselines
    known = dict(past.baselines)
    for gpu in seen.gpus:
        if gpu.uuid not in held and gpu.used_mib is not None and gpu.used_mib <= config.gpus.baseline_mib:
            known[gpu.uuid] = min(gpu.used_mib, known.get(gpu.uuid, gpu.used_mib))
    return tuple(sorted(known.items()))


def idle_mib(past: Past, gpu: m.Gpu, config: Config) -> int:
    """Memory up to which a GPU counts as idle: what was learned of it and some slack, never above the configured."""
    learned = dict(past.baselines).get(gpu.uuid)
    return config.gpus.baseline_mib if learned is None else min(config.gpus.baseline_mib, learned + 256)


def _marks(past: Past, seen: m.Observation) -> tuple[Mark, ...]:
    now_s = seen.now.mono_s
    values: dict[str, float] = {}
    settled = settled_of(seen)
    if settled is not None:
        values["settled"] = settled
    if not isinstance(seen.engine, m.Unreadable):
        values["log"] = seen.engine.log_bytes
        values["cpu"] = seen.engine.cpu_s
    if not isinstance(seen.gpus, m.Unreadable):
        values["memory"] = sum(g.used_mib or 0 for g in seen.gpus)
    if not isinstance(seen.worker, m.Unreadable):
        values["paused"] = float(bool(seen.worker.paused))
    kept = {mark.key: mark for mark in past.marks}
    for key, value in values.items():
        old = kept.get(key)
        if old is None or _changed(old, value, now_s):
            kept[key] = Mark(key, value, now_s)
    return tuple(kept.values())


def _changed(old: Mark, value: float, now_s: float) -> bool:
    """Idle processes use a little CPU: less than one core-second in twenty is nothing."""
    if old.key == "cpu":
        return value < old.value or value - old.value > 1.0 + 0.05 * (now_s - old.since_s)
    return value != old.value


def settled_of(seen: m.Observation) -> int | None:
    """Samples settled, or None when that is not known. Neither manifest nor samples is zero, on a volume that is there:
    below an empty mount point it says nothing, and must not look like progress."""
    if isinstance(seen.progress, m.Progress):
        return seen.progress.settled
    there = isinstance(seen.volume, m.Volume) and seen.volume.verdict == "ok"
    return 0 if seen.progress is None and there else None


# --- numbers for decisions --------------------------------------------------------------------------------------------


def failures(past: Past, unit: str, boot: str) -> int:
    """Starts of a unit that failed without one new sample; starts cut by a reboot weigh a quarter."""
    starts = [s for s in past.starts if s.unit == unit]
    failed = sum(bool(s.ended) and s.ended not in _NO_FAILURE and not s.ended.startswith("not started") for s in starts)
    return failed + sum(not s.ended and s.boot != boot for s in starts) // _CUTS_PER_FAILURE


def fruitless(start: Start) -> bool:
    """Whether a worker ended by itself, or was stopped for want of progress. One that was stopped for another reason,
    such as a disk that went away, or that was never started says nothing about the engine."""
    told = start.ended in CATALOGUE and start.ended not in _STALLED
    return bool(start.ended) and not told and not start.ended.startswith("not started")


def wait_s(past: Past, unit: str, now: m.Now, first_s: float, most_s: float) -> float:
    """Seconds until a unit may be started again: doubled with each failure; a reboot was wait enough."""
    last = past.last_start(unit)
    if last is None or not last.ended or last.boot != now.boot or last.ended in _NO_FAILURE:
        return 0.0
    count = sum(1 for s in past.starts if s.unit == unit and s.ended and s.boot == now.boot)
    return max(0.0, last.ended_s + backoff_s(count, first_s, most_s) - now.mono_s)


def backoff_s(count: int, first_s: float, most_s: float) -> float:
    """first, 2 first, 4 first, ... up to most."""
    return min(most_s, first_s * 2.0 ** min(max(0, count - 1), 30))


def retry_s(past: Past, key: str, now: m.Now, first_s: float) -> float:
    """Seconds until the same act may be tried on the same identity again."""
    tried = past.tried(key)
    if tried is None or tried.boot != now.boot:
        return 0.0
    return max(0.0, tried.last_s + backoff_s(tried.count, first_s, 300.0) - now.mono_s)


def unheard(past: Past, start: m.StartEngine | m.StartWorker, now: m.Now, first_s: float) -> str:
    """What a unit is that systemd took orders to start of, and of which no run is known; "" when it may be told now.
    One more order is free: the first may have been cut by our own death."""
    key = key_of(start)
    count = count_of(past, key, now.boot)
    if count < 2 or retry_s(past, key, now, first_s) == 0:
        return ""
    return (
        f"still down after {count} orders to start: a condition, another unit that it needs, or an end without an error"
    )


def count_of(past: Past, key: str, boot: str) -> int:
    """How often the same act was tried on the same identity in this boot."""
    tried = past.tried(key)
    return tried.count if tried and tried.boot == boot else 0


def returns(past: Past, unit: str) -> int:
    """How often a unit was evicted since a human reset the breaker."""
    return sum(1 for name, _ in past.evictions if name == unit)


def stalls(past: Past, unit: str) -> int:
    """Restarts of a unit for want of progress, since the last progress."""
    return sum(1 for name, _ in past.stalls if name == unit)
