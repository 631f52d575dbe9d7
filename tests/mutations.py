"""Planted bugs: one a rung, one a safety rule, two waits. The simulation must catch each, or it proves nothing.

A rung's bug leaves it out. A safety rule's bug breaks the ladder so that the rule is needed, and takes the rule away:
then the oracle of the simulated host must see the damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from hsdaemon.config import Config
from hsdaemon.core import budget, decide, engine, facts, gpus, safety
from hsdaemon.core import model as m
from hsdaemon.core.budget import Past, Spell

Rung = Callable[[Config, m.Observation, Past], m.Plan | None]


@dataclass(frozen=True)
class Mutation:
    """`patches`: object, attribute, value. `without`: safety rules that are taken away."""

    name: str
    patches: tuple[tuple[object, str, Any], ...]
    without: tuple[str, ...] = ()

    @contextmanager
    def planted(self) -> Iterator[None]:
        rules = tuple(r for r in safety.RULES if getattr(r, "__name__", "") not in self.without)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(safety, "RULES", rules))
            for target, attribute, value in self.patches:
                stack.enter_context(mock.patch.object(target, attribute, value))
            yield


def _ladder(changed: Rung, new: Rung) -> tuple[object, str, Any]:
    return (decide, "LADDER", tuple(new if r is changed else r for r in decide.LADDER))


def _nothing(config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    return None


def _at_once(old: Spell | None, key: str, now_s: float) -> Spell:
    return Spell(key, now_s - 1000, now_s, 9)


def _kill_instead(*args: Any) -> m.Plan:
    plan = _STOP(*args)
    kill = tuple(m.KillUnit(a.name, a.invocation, args[3].pids) for a in plan.actions if isinstance(a, m.StopUnit))
    return replace(plan, actions=kill)


def _always_moved(self: Past, key: str) -> budget.Mark | None:
    return budget.Mark(key, 0, 0) if key == "settled" else next((v for v in self.marks if v.key == key), None)


def _nameless(config: Config, seen: m.Observation, past: Past) -> m.Plan:
    plan = _DONE(config, seen, past)
    stop = [replace(a, invocation="?") if isinstance(a, m.StopEngine) else a for a in plan.actions]
    return replace(plan, actions=tuple(stop))


def _patch_all(config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    part = seen.engine
    if isinstance(part, m.Engine) and isinstance(part.capture, m.Capture) and part.capture.state == "foreign":
        return m.Plan("engine_patched", "patching", "patching", (m.ApplyPatch("0.5.23"),))
    return engine.engine_patched(config, seen, past)


def _sweep_always(config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    if isinstance(seen.worker, m.Worker) and seen.worker.unit.up:
        return m.Plan("work_running", "extracting", "sweeping", (m.SweepSpool(1),))
    return decide.work_running(config, seen, past)


def _release_early(config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    if past.leases and isinstance(seen.worker, m.Worker) and seen.worker.unit.up:
        names = tuple(lease.name for lease in past.leases)
        return m.Plan("work_running", "releasing", "releasing", (m.ReleaseUnits(names),))
    return decide.work_running(config, seen, past)


def _nothing_yet(_seen: m.Observation) -> m.Plan | None:
    return None


def _stalled_while_paused(config: Config, seen: m.Observation, worker: m.Worker, past: Past) -> m.Plan | None:
    return _STALLED(config, seen, replace(worker, paused=""), past)


_STOP, _DONE, _STALLED = gpus._stop, decide.done, decide._stalled
RUNGS = (
    *(Mutation(f"rung {r.__name__} left out", (_ladder(r, _nothing),)) for r in decide.LADDER),
    Mutation("rung done gives nothing back", ((decide, "_give_back", _nothing),)),
)
RULES = (
    Mutation("any unit is evicted", ((facts, "how_unit", lambda c, name: "stop"),), ("only_named_units",)),
    Mutation("any process is signalled", ((facts, "how_process", lambda c, h: "stop"),), ("only_named_processes",)),
    Mutation("evicted at first sight", ((budget, "_spell", _at_once),), ("seen_twice",)),
    Mutation(
        "started blindly",
        (_ladder(gpus.gpus_visible, _nothing),),
        ("nothing_blind", "start_only_on_free_gpus"),
    ),
    Mutation("killed without end", ((facts, "KILLS", 99),), ("kill_budget",)),
    Mutation("evicted without end", ((budget, "returns", lambda past, unit: 0),), ("breaker",)),
    Mutation("killed while it runs", ((gpus, "_stop", _kill_instead),), ("kept_down_first",)),
    Mutation("started beside others", (_ladder(gpus.gpus_ours, _nothing),), ("start_only_on_free_gpus",)),
    Mutation("started without the capture", (_ladder(engine.engine_patched, _nothing),), ("start_only_when_gone",)),
    Mutation(
        "restarted without end",
        ((budget, "failures", lambda *a: 0), (budget, "wait_s", lambda *a: 0.0)),
        ("crash_budget",),
    ),
    Mutation("worker on an unproved engine", (_ladder(engine.engine_proved, _nothing),), ("worker_only_on_proof",)),
    Mutation(
        "proof beside the worker", ((engine, "unproved_worker", lambda seen, unit: None),), ("proof_only_on_engine",)
    ),
    Mutation("proof beside a scan", ((engine, "scan_first", _nothing_yet),), ("nothing_beside_a_scan",)),
    Mutation("restarted while rows land", ((Past, "mark", _always_moved),), ("not_while_rows_land",)),
    Mutation("engine stopped by no name", ((decide, "done", _nameless),), ("stop_only_what_was_seen",)),
    Mutation("foreign edits overwritten", (_ladder(engine.engine_patched, _patch_all),), ("patch_only_at_rest",)),
    Mutation("spool swept in use", (_ladder(decide.work_running, _sweep_always),), ("spool_only_at_rest",)),
    Mutation("given back too early", (_ladder(decide.work_running, _release_early),), ("release_only_at_the_end",)),
)
WAITS = (
    Mutation("a pause is a stall", ((decide, "_stalled", _stalled_while_paused),)),
    Mutation("told to start without end", ((budget, "unheard", lambda *a: ""),)),
)
MUTATIONS = RUNGS + RULES + WAITS
