"""What no plan may ever do: a second opinion on every plan. It shares no code with the ladder, on purpose.

A rule gives the cause of its objection, or None. One objection turns the plan into a hold; nothing of it is done.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hsdaemon.config import Config
from hsdaemon.core import model as m
from hsdaemon.core.budget import Past
from hsdaemon.core.reasons import CATALOGUE


@dataclass(frozen=True, slots=True)
class Scene:
    """What a rule may look at."""

    config: Config
    seen: m.Observation
    past: Past


Rule = Callable[[m.Action, Scene], str | None]
NEVER = (
    "systemd-*",
    "dbus*",
    "ssh*",
    "init.scope",
    "getty*",
    "serial-getty*",
    "nvidia-*",
    "user@*",
    "hs-*",
    "network*",
)


def veto(plan: m.Plan, config: Config, seen: m.Observation, past: Past) -> m.Plan:
    """The plan itself, or a hold that says which rule it breaks."""
    cause = next(objections(plan, config, seen, past), None)
    if cause is None:
        return plan
    sentence = CATALOGUE["vetoed"].template.format(cause=f"{cause} ({plan.rung}: {plan.sentence})")
    return m.Plan(plan.rung, "vetoed", sentence, (), plan.look_again_s, plan.notes)


def objections(plan: m.Plan, config: Config, seen: m.Observation, past: Past) -> Iterator[str]:
    """Every rule that the plan breaks."""
    if sum(isinstance(a, m.DISRUPTIVE) for a in plan.actions) > 1:
        yield "more than one disruptive action in a tick"
    at = Scene(config, seen, past)
    stops = [a.name for a in plan.actions if isinstance(a, m.StopUnit)]
    for action in plan.actions:
        for rule in RULES:
            if (cause := rule(action, at)) is not None:
                yield cause
        if isinstance(action, m.LeaseUnit | m.DisableUnit) and action.name not in stops:
            yield f"{action.name} would be kept down without being stopped"


# --- others' units and processes -------------------------------------------------------------------------------------


def only_named_units(action: m.Action, at: Scene) -> str | None:
    """Others' units: only those whose policy says so, never the host's own or ours."""
    if not isinstance(action, m.LeaseUnit | m.DisableUnit | m.StopUnit | m.KillUnit):
        return None
    if isinstance(action, m.KillUnit) and action.name == m.ENGINE_UNIT:
        return None
    how = ""
    for entry in at.config.evict.units:
        if fnmatch.fnmatchcase(action.name, entry.pattern):
            how = entry.how
            break
    allowed = ("disable",) if isinstance(action, m.DisableUnit) else ("stop", "disable")
    protected = any(fnmatch.fnmatchcase(action.name, p) for p in NEVER) or not action.name.endswith(".service")
    return f"{action.name} is not ours to touch" if how not in allowed or protected else None


def only_named_processes(action: m.Action, at: Scene) -> str | None:
    """Others' processes: only a seen holder of this identity, outside units and containers, that a policy names."""
    if not isinstance(action, m.KillProcess):
        return None
    holders = () if isinstance(at.seen.holders, m.Unreadable) else at.seen.holders
    found = [h for h in holders if h.pid == action.pid and h.start_ticks == action.start_ticks and h.exe == action.exe]
    if not found or action.pid <= 1 or not action.start_ticks:
        return f"pid {action.pid} is not the holder that was seen"
    holder = found[0]
    if holder.container or holder.kind in ("container", "invisible"):
        return f"pid {action.pid} is in a container or another namespace"
    how = next((e.how for e in at.config.evict.processes if fnmatch.fnmatchcase(holder.exe, e.executable)), "report")
    if how != "stop" or holder.unit.startswith("hs-"):
        return f"no policy names {holder.exe or 'the process'}"
    units = () if isinstance(at.seen.units, m.Unreadable) else at.seen.units
    real = any(u.name == holder.unit and u.load != "not-found" and u.name.endswith(".service") for u in units)
    return f"pid {action.pid} belongs to {holder.unit}" if real else None


def seen_twice(action: m.Action, at: Scene) -> str | None:
    """Nobody is touched at first sight."""
    looping = ""
    match action:
        case m.StopUnit(name, invocation) | m.KillUnit(name, invocation, _) if name != m.ENGINE_UNIT:
            key, looping = f"unit:{name}:{invocation}", f"up:{name}" if isinstance(action, m.StopUnit) else ""
        case m.KillProcess(pid, ticks):
            key = f"holder:{pid}:{ticks}"
        case _:
            return None
    for spell in at.past.spells:
        age = at.seen.now.mono_s - spell.first_s
        if spell.count >= 2 and ((spell.key == key and age >= 1.0) or (spell.key == looping and age >= 20.0)):
            return None
    return f"{key} was seen once only"


def nothing_blind(action: m.Action, at: Scene) -> str | None:
    """Unknown is not free and not guilty: nothing is evicted or started while the GPUs cannot be read."""
    touching = (m.LeaseUnit, m.DisableUnit, m.StopUnit, m.KillProcess, m.StartEngine)
    if not isinstance(action, touching) and not (isinstance(action, m.KillUnit) and action.name != m.ENGINE_UNIT):
        return None
    if not at.config.gpu_count and isinstance(action, m.StartEngine):
        return None
    for part in (at.seen.gpus, at.seen.holders, at.seen.units):
        if isinstance(part, m.Unreadable):
            return f"{part.port} cannot be read"
    return None if at.config.gpu_count else "nobody is evicted for an engine that takes no GPU"


def kill_budget(action: m.Action, at: Scene) -> str | None:
    """A process that ignores two SIGKILLs hangs in the kernel; more of them help nobody."""
    match action:
        case m.KillUnit(name, invocation):
            key = f"kill:{name}:{invocation}"
        case m.KillProcess(pid, ticks, _, signal):
            key = f"{signal}:{pid}:{ticks}"
        case _:
            return None
    spent = sum(t.count for t in at.past.tries if t.key == key and t.boot == at.seen.now.boot)
    return "kill budget spent" if spent >= 2 else None


def breaker(action: m.Action, at: Scene) -> str | None:
    """A unit that comes back again and again is left to a human."""
    if not isinstance(action, m.StopUnit):
        return None
    earlier = {pair for pair in at.past.evictions if pair[0] == action.name} - {(action.name, action.invocation)}
    return f"{action.name} was evicted {len(earlier)} times" if len(earlier) >= at.config.evict.budget else None


def kept_down_first(action: m.Action, at: Scene) -> str | None:
    """What was killed or stopped must be recorded and stay down: KillUnit only on what is not up."""
    if not isinstance(action, m.KillUnit) or isinstance(at.seen.units, m.Unreadable):
        return None
    own = () if isinstance(at.seen.engine, m.Unreadable) else (at.seen.engine.unit,)
    for unit in (*at.seen.units, *own):
        if unit.name == action.name and unit.invocation == action.invocation:
            strangers = set(action.pids) - set(unit.pids)
            return f"{unit.name} still runs: stop it first" if unit.up or strangers else None
    return f"{action.name} is not the unit that was seen"


# --- our own ----------------------------------------------------------------------------------------------------------


def start_only_on_free_gpus(action: m.Action, at: Scene) -> str | None:
    """Never a start on GPUs that are fewer than wanted, lost, owed a reset, or hold somebody's memory."""
    if not isinstance(action, m.StartEngine) or not at.config.gpu_count:
        return None
    if isinstance(at.seen.gpus, m.Unreadable) or isinstance(at.seen.holders, m.Unreadable):
        return "GPUs are unknown"
    names = (
        at.config.gpus.uuids
        or tuple(g.uuid for g in sorted(at.seen.gpus, key=lambda g: g.index))[: at.config.gpu_count]
    )
    mine = [g for g in at.seen.gpus if g.uuid in names]
    if len(mine) < at.config.gpu_count:
        return "GPUs are missing"
    for gpu in mine:
        if gpu.lost or gpu.recovery not in ("", "none") or gpu.fabric not in ("none", "complete"):
            return f"GPU {gpu.index} is not sound"
        if gpu.used_mib is None or gpu.used_mib > at.config.gpus.baseline_mib:
            return f"GPU {gpu.index} holds memory"
    computing = ("compute", "mps", "invisible", "container")
    taken = [h for h in at.seen.holders if h.kind in computing and set(h.gpus) & set(names)]
    return f"pid {taken[0].pid} works on our GPUs" if taken else None


def start_only_when_gone(action: m.Action, at: Scene) -> str | None:
    """One engine at a time, on a port that is free, for a volume that is there, carrying the capture."""
    if not isinstance(action, m.StartEngine):
        return None
    if isinstance(at.seen.engine, m.Unreadable) or not at.seen.engine.unit.gone:
        return "the last engine is not gone"
    if at.seen.engine.unit.invocation != action.after:
        return "another engine ran since"
    if action.port in [port for port, _ in at.seen.engine.busy_ports]:
        return f"port {action.port} is taken"
    capture = at.seen.engine.capture
    if isinstance(capture, m.Unreadable) or capture.state not in ("ours", "plugin"):
        return "the engine does not carry the capture"
    if isinstance(at.seen.volume, m.Unreadable) or at.seen.volume.verdict != "ok":
        return "the volume is not there"
    return None


def crash_budget(action: m.Action, at: Scene) -> str | None:
    """No endless restarts without one new sample, across reboots."""
    if not isinstance(action, m.StartEngine):
        return None
    ends = [s.ended for s in at.past.starts if s.unit == m.ENGINE_UNIT]
    bad = [e for e in ends if e and not e.startswith("not started") and e not in ("engine-reload", "finishing")]
    return "crash budget spent" if len(bad) >= at.config.supervisor.start_budget else None


def worker_only_on_proof(action: m.Action, at: Scene) -> str | None:
    """The worker meets only an engine whose very start was proved, and a volume with room."""
    if not isinstance(action, m.StartWorker):
        return None
    if isinstance(at.seen.engine, m.Unreadable) or at.seen.engine.unit.active != "active":
        return "the engine does not run"
    if action.engine != at.seen.engine.unit.invocation:
        return "the engine is another one"
    if not isinstance(at.seen.proof, m.Proof) or not at.seen.proof.ok or at.seen.proof.invocation != action.engine:
        return "this start of the engine is not proved"
    if isinstance(at.seen.worker, m.Unreadable) or not at.seen.worker.unit.gone:
        return "the last worker is not gone"
    if isinstance(at.seen.volume, m.Unreadable) or at.seen.volume.verdict != "ok":
        return "the volume is not there"
    return "the volume is full" if at.seen.volume.free_bytes < at.config.output.reserve_mib * 1024 * 1024 else None


def nothing_beside_a_scan(action: m.Action, at: Scene) -> str | None:
    """While a tree is adopted nobody else works on the output; and it is adopted only for want of a manifest."""
    if isinstance(action, m.StartScan):
        if not isinstance(at.seen.progress, m.Unadopted):
            return "no samples without a manifest were seen"
        busy = isinstance(at.seen.worker, m.Unreadable) or not at.seen.worker.unit.gone
        return "a worker has the output" if busy else None
    if not isinstance(action, m.StartWorker | m.RunProof):
        return None
    if isinstance(at.seen.progress, m.Unadopted):
        return "samples without a manifest are not adopted yet"
    scan = at.seen.scan_unit
    return "a scan has the output" if isinstance(scan, m.Unreadable) or not scan.gone else None


def proof_only_on_engine(action: m.Action, at: Scene) -> str | None:
    """A proof is about the engine that runs now, and never beside a worker."""
    if not isinstance(action, m.RunProof):
        return None
    if isinstance(at.seen.engine, m.Unreadable) or at.seen.engine.unit.invocation != action.invocation:
        return "the engine to prove is another one"
    if not action.invocation or at.seen.engine.unit.active != "active":
        return "the engine does not run"
    beside = isinstance(at.seen.worker, m.Unreadable) or at.seen.worker.unit.up
    return "a worker runs beside the proof" if beside else None


def not_while_rows_land(action: m.Action, at: Scene) -> str | None:
    """An engine or worker that makes progress is not restarted for want of it."""
    if not isinstance(action, m.StopEngine | m.StopWorker):
        return None
    if action.code not in ("worker-stalled", "engine-stalled"):
        return None
    moved = [v.since_s for v in at.past.marks if v.key == "settled"]
    fresh = not moved or at.seen.now.mono_s - moved[0] < at.config.supervisor.stall_s
    return "samples arrived within the stall time" if fresh else None


def stop_only_what_was_seen(action: m.Action, at: Scene) -> str | None:
    """Our own units are stopped by the identity that was at.seen."""
    if not isinstance(action, m.StopEngine | m.StopWorker):
        return None
    part = at.seen.engine if isinstance(action, m.StopEngine) else at.seen.worker
    same = not isinstance(part, m.Unreadable) and part.unit.invocation == action.invocation and bool(action.invocation)
    return None if same else "the unit to stop is another one"


def patch_only_at_rest(action: m.Action, at: Scene) -> str | None:
    """Nobody changes files under a running engine, or files that somebody else edited."""
    if isinstance(action, m.SweepStale | m.ApplyPatch) and (
        isinstance(at.seen.engine, m.Unreadable) or not at.seen.engine.unit.gone
    ):
        return "an engine may be running"
    if not isinstance(action, m.ApplyPatch) or isinstance(at.seen.engine, m.Unreadable):
        return None
    capture = at.seen.engine.capture
    known = not isinstance(capture, m.Unreadable) and capture.state in ("absent", "older")
    return None if known else "the engine's files are not ours to change"


def spool_only_at_rest(action: m.Action, at: Scene) -> str | None:
    if not isinstance(action, m.SweepSpool):
        return None
    return "a worker may use the spool" if isinstance(at.seen.worker, m.Unreadable) or at.seen.worker.unit.up else None


def release_only_at_the_end(action: m.Action, at: Scene) -> str | None:
    """Evicted units come back only when our engine is gone and nothing is left to do, and only ours to give."""
    if not isinstance(action, m.ReleaseUnits):
        return None
    units = () if isinstance(at.seen.units, m.Unreadable) else at.seen.units
    leased = {lease.name for lease in at.past.leases} | {u.name for u in units if u.leased}
    if set(action.names) - leased:
        return "a unit that was never evicted"
    if isinstance(at.seen.engine, m.Unreadable) or not at.seen.engine.unit.gone:
        return "the engine still holds the GPUs"
    p = at.seen.progress
    over = isinstance(p, m.Progress) and p.ingest_complete and p.done + p.failed + p.skipped >= p.total
    return None if over else "work is left"


RULES: tuple[Rule, ...] = (
    only_named_units,
    only_named_processes,
    seen_twice,
    nothing_blind,
    kill_budget,
    breaker,
    kept_down_first,
    start_only_on_free_gpus,
    start_only_when_gone,
    crash_budget,
    worker_only_on_proof,
    nothing_beside_a_scan,
    proof_only_on_engine,
    not_while_rows_land,
    stop_only_what_was_seen,
    patch_only_at_rest,
    spool_only_at_rest,
    release_only_at_the_end,
)


def names(rules: Iterable[Rule] = RULES) -> tuple[str, ...]:
    """The rules, for the manual and the campaign."""
    return tuple(getattr(rule, "__name__", "") for rule in rules)
