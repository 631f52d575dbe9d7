"""Observation to Plan: a ladder of small rungs. The first one that is not met says what happens next.

Pure: the same config, observation and past give the same plan. The phase is the rung reached; it is never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hsdaemon.config import Config
from hsdaemon.core import budget, facts
from hsdaemon.core import model as m
from hsdaemon.core.budget import Past
from hsdaemon.core.engine import engine_patched, engine_proved, engine_up, leftover
from hsdaemon.core.facts import plan
from hsdaemon.core.gpus import foreign, gpus_ours, gpus_visible

Rung = Callable[[Config, m.Observation, Past], m.Plan | None]
MIB = 1 << 20
SCANS, SCAN_AGAIN_S = 3, 30.0  # of one boot, before a person must look
# Exit codes of the worker (errors.py) that another try does not change: usage, data set, fatal, config ...
REFUSALS = frozenset({2, 65, 70, 78})
MOODS = frozenset({69, 73})  # ... and those of engine and volume, which may recover: tried again, ever more seldom
TRIES = 3  # of those, before it is called a refusal
SOON_S = 0.2  # after an act that nothing has to settle after: the next rung need not wait
GAVE_UP = 2  # workers that ended by themselves without one new sample: then it is the engine's turn

_VOLUME = {
    "not-mounted": "volume-absent",
    "no-marker": "volume-unmarked",
    "foreign": "volume-foreign",
    "read-only": "volume-read-only",
}


def decide(config: Config, seen: m.Observation, past: Past) -> m.Plan:
    """What to do now, and why. When nothing is left to extract, nobody is evicted and nothing is started."""
    if isinstance(seen.progress, m.Progress) and seen.progress.finished:
        return done(config, seen, past)
    for rung in LADDER:
        if (found := rung(config, seen, past)) is not None:
            return replace(found, notes=notes(config, seen, past))
    return replace(_extracting(seen), notes=notes(config, seen, past))


def volume_ready(config: Config, seen: m.Observation, _past: Past) -> m.Plan | None:
    """Our volume is there, takes a write and has room; else no worker runs."""
    volume, path = seen.volume, config.output.volume or config.output.path
    if isinstance(volume, m.Unreadable):
        return plan("volume_ready", "volume-hung", path=path, cause=volume.cause)
    cause = volume.detail or volume.verdict
    if volume.verdict != "ok":
        return _pause(seen, _VOLUME.get(volume.verdict, "volume-error"), path=path, cause=cause)
    if volume.free_bytes < floor_bytes(config, seen):
        return _pause(seen, "volume-full", path=path, free=f"{volume.free_bytes / 2**30:.1f}")
    progress = seen.progress
    if isinstance(progress, m.Unreadable) and progress.code != "damaged" and not facts.engine_up(seen):
        return plan("volume_ready", "manifest-unreadable", cause=progress.cause)  # there may be nothing left to do
    return None


def floor_bytes(config: Config, seen: m.Observation) -> int:
    """Free space below which the work pauses; a paused worker needs an eighth more to begin again."""
    floor = config.output.reserve_mib * MIB
    worker = facts.known(seen.worker)
    return floor if worker and worker.unit.up else floor + floor // 8


def _pause(seen: m.Observation, code: str, **said: object) -> m.Plan:
    worker = facts.known(seen.worker)
    if worker and worker.unit.up:
        return plan("volume_ready", code, m.StopWorker(worker.unit.invocation, code), look_s=1.0, **said)
    return plan("volume_ready", code, look_s=1.0, **said)


def tree_adopted(_config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    """Samples without a manifest are being looked at: begun before the engine, since both take long."""
    if not isinstance(seen.progress, m.Unadopted):
        return None
    if isinstance(seen.scan_unit, m.Unreadable):
        return plan("tree_adopted", "units-unreadable", cause=seen.scan_unit.cause)
    unit = seen.scan_unit
    if unit.up or unit.pids:
        return None
    if unit.load != "loaded":
        return plan("tree_adopted", "scan-blocked", cause=unit.load)
    if budget.count_of(past, budget.SCAN_KEY, seen.now.boot) >= SCANS:
        return plan("tree_adopted", "scan-failed", cause=budget.cause_of(unit))
    if budget.retry_s(past, budget.SCAN_KEY, seen.now, SCAN_AGAIN_S) > 0:
        return plan("tree_adopted", "scan-wait", cause=budget.cause_of(unit), look_s=1.0)
    return plan("tree_adopted", "scanning", m.StartScan(unit.invocation), look_s=SOON_S)


def work_running(config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    """The worker runs and the manifest advances."""
    if isinstance(seen.worker, m.Unreadable):
        return plan("work_running", "worker-unreadable", cause=seen.worker.cause)
    unit = seen.worker.unit
    if unit.up:
        return _stalled(config, seen, seen.worker, past)
    if not unit.gone:
        return plan("work_running", "worker-stopping", look_s=1.0)
    if unit.load != "loaded":
        return plan("work_running", "worker-blocked", cause=unit.load)
    if isinstance(seen.progress, m.Unreadable) and seen.progress.code != "damaged":
        return plan("work_running", "manifest-unreadable", cause=seen.progress.cause)
    return _start_worker(config, seen, seen.worker, past)


def _stalled(config: Config, seen: m.Observation, worker: m.Worker, past: Past) -> m.Plan | None:
    """No progress: first another worker, then another engine, then a person. A pause for the disk is no stall: the
    worker itself fills a disk up to less than a sample above the floor at which the first rung would see it."""
    if worker.paused:
        return plan("work_running", "worker-paused", cause=worker.paused)
    moved, paused = past.mark("settled"), past.mark("paused")
    since = max(worker.unit.since_s, moved.since_s if moved else seen.now.mono_s, paused.since_s if paused else 0.0)
    age = seen.now.mono_s - since
    if age <= config.supervisor.stall_s or isinstance(seen.progress, m.Unreadable):
        return None
    if budget.stalls(past, m.WORKER_UNIT) == 0:
        stop = m.StopWorker(worker.unit.invocation, "worker-stalled")
        return plan("work_running", "worker-stalled", stop, age=int(age), look_s=1.0)
    return _engine_stalled(seen, past, age) or plan("work_running", "stalled", age=int(age))


def _engine_stalled(seen: m.Observation, past: Past, age: float) -> m.Plan | None:
    """Another worker did not help: another engine, once."""
    engine = facts.known(seen.engine)
    if engine is None or not engine.unit.up or budget.stalls(past, m.ENGINE_UNIT) > 0:
        return None
    stop = m.StopEngine(engine.unit.invocation, "engine-stalled")
    return plan("work_running", "engine-stalled", stop, age=int(age), look_s=1.0)


def _gave_up(config: Config, seen: m.Observation, past: Past) -> float | None:
    """Seconds without a sample, when workers of this start of the engine end by themselves, sooner than the supervisor
    would have stopped them; None when that is no stall yet."""
    engine, moved = facts.known(seen.engine), past.mark("settled")
    if engine is None or moved is None:
        return None
    tries = [
        s
        for s in past.starts
        if s.unit == m.WORKER_UNIT and s.boot == seen.now.boot and budget.fruitless(s) and s.at_s > engine.unit.since_s
    ]
    if len(tries) < GAVE_UP:
        return None
    age = seen.now.mono_s - max(moved.since_s, tries[0].at_s)
    return age if age > config.supervisor.stall_s else None


def _start_worker(config: Config, seen: m.Observation, worker: m.Worker, past: Past) -> m.Plan:
    unit, engine = worker.unit, facts.known(seen.engine)
    cause = worker.detail or worker.code or budget.cause_of(unit)
    reset_since = past.reset_boot == seen.now.boot and past.reset_s > unit.since_s
    if unit.result == "exit-code" and unit.status in REFUSALS and not reset_since:
        return plan("work_running", "worker-refused", cause=cause)
    stalled_s = _gave_up(config, seen, past)
    if stalled_s is not None and (other := _engine_stalled(seen, past, stalled_s)) is not None:
        return other
    sup = config.supervisor
    wait = budget.wait_s(past, m.WORKER_UNIT, seen.now, sup.backoff_s, sup.backoff_max_s)
    if wait > 0 and stalled_s is not None:
        return plan("work_running", "stalled", age=int(stalled_s))
    moody = unit.result == "exit-code" and unit.status in MOODS
    if wait > 0 and moody and budget.failures(past, m.WORKER_UNIT, seen.now.boot) >= TRIES:
        return plan("work_running", "worker-refused", cause=cause)
    if wait > 0:
        return plan("work_running", "worker-backoff", cause=cause, wait=int(wait) + 1, look_s=min(wait, 5.0))
    left = seen.progress.total - seen.progress.settled if isinstance(seen.progress, m.Progress) else "all"
    sweep = [m.SweepSpool(seen.spool.orphans)] if isinstance(seen.spool, m.Spool) and seen.spool.orphans else []
    start = m.StartWorker(engine.unit.invocation if engine else "", unit.invocation)
    if cause := budget.unheard(past, start, seen.now, sup.backoff_s):
        return plan("work_running", "worker-blocked", cause=cause)
    return plan("work_running", "worker-start", *sweep, start, left=left, look_s=2.0)


def done(config: Config, seen: m.Observation, past: Past) -> m.Plan:
    """Everything is settled: stop both, give the GPUs and evicted units back."""
    for part in (seen.worker, seen.engine):
        if isinstance(part, m.Unreadable):
            return plan("done", "units-unreadable", cause=part.cause)
    worker, engine = facts.known(seen.worker), facts.known(seen.engine)
    if worker and worker.unit.up:
        return plan(
            "done", "finishing", m.StopWorker(worker.unit.invocation, "finishing"), who="the worker", look_s=1.0
        )
    if engine and engine.unit.up:
        return plan(
            "done", "finishing", m.StopEngine(engine.unit.invocation, "finishing"), who="the engine", look_s=1.0
        )
    if (left := leftover(seen, past)) is not None:
        return left
    if worker and not worker.unit.gone:
        return plan("done", "worker-stopping", look_s=1.0)
    return _give_back(config, seen, past) or _done(seen)


def _give_back(config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    units = facts.known(seen.units) or ()
    names = tuple(dict.fromkeys([*(lease.name for lease in past.leases), *(u.name for u in units if u.leased)]))
    if config.supervisor.on_done != "release":
        names = tuple(n for n in names if n in seen.wishes.release)
    if not names:
        return None
    release = m.ReleaseUnits(names)
    if budget.retry_s(past, budget.key_of(release), seen.now, 10.0) > 0:
        return plan("done", "release-wait", who=", ".join(names), cause="the last try failed")
    return plan("done", "releasing", release, who=", ".join(names))


def _done(seen: m.Observation) -> m.Plan:
    p = seen.progress
    assert isinstance(p, m.Progress)
    return plan("done", "done", done=p.done, failed=p.failed, skipped=p.skipped, look_s=30.0)


def _extracting(seen: m.Observation) -> m.Plan:
    p = seen.progress if isinstance(seen.progress, m.Progress) else None
    return plan("work_running", "extracting", settled=p.settled if p else 0, total=p.total if p else "?")


def notes(config: Config, seen: m.Observation, past: Past) -> tuple[str, ...]:
    """What an operator should know although it stops nothing."""
    found = []
    if facts.engine_up(seen):
        if isinstance(seen.gpus, m.Unreadable):
            found.append(f"GPUs cannot be read ({seen.gpus.cause}); the running engine is left alone")
        found.extend(f"{facts.who(h)} shares our GPUs" for h in foreign(config, seen, past))
        engine = facts.known(seen.engine)
        end = facts.known(engine.endpoint) if engine else None
        if engine and end and engine.wanted and end.fingerprint != engine.wanted:
            found.append("the argument line changed: it is applied at the next start, or by `hs-extract reload --now`")
    if isinstance(seen.progress, m.Unadopted) and seen.progress.done:
        found.append(f"stored samples are being adopted beside it: {seen.progress.done} so far")
    if isinstance(seen.progress, m.Unreadable):
        found.append(f"the manifest cannot be read ({seen.progress.cause})")
    return tuple(found)


LADDER: tuple[Rung, ...] = (
    volume_ready,
    tree_adopted,
    gpus_visible,
    gpus_ours,
    engine_patched,
    engine_up,
    engine_proved,
    work_running,
)
