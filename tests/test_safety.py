"""Plans that must be vetoed, whoever made them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scenes import PROVED, VLLM_UP, acted, busy, crashes, engine, gpus, holder, past_of, rest
from world import CONFIG, STRANGER, VLLM

from hsdaemon.core import budget, safety
from hsdaemon.core import model as m

START = m.StartEngine("", 30000, "wanted")
STOP_VLLM = m.StopUnit(VLLM, "v1")
held = rest(gpus=gpus(75_805), holders=(holder(),), units=(VLLM_UP,))
rogue = holder(77, "", exe="/opt/rogue/x")
KILL = m.KillProcess(77, 770, "/opt/rogue/x", "KILL")
SCANNING = m.Unit(m.SCAN_UNIT, active="activating", invocation="s1", pids=(9,))
DOWN = m.Worker(m.Unit(m.WORKER_UNIT))
EVICTED: list[budget.Event] = [acted(m.StopUnit(VLLM, f"old{i}")) for i in range(3)]
LEFT = replace(VLLM_UP, active="inactive")

TABLE: list[tuple[str, m.Observation, tuple[m.Action, ...], list[budget.Event]]] = [
    ("two disruptive acts", held, (STOP_VLLM, KILL), []),
    ("a unit that no policy names", replace(held, units=(replace(VLLM_UP, name=STRANGER),)),
     (m.StopUnit(STRANGER, "v1"),), []),
    ("our own unit as if foreign", busy(), (m.StopUnit(m.ENGINE_UNIT, "e1"),), []),
    ("disable only", held, (m.DisableUnit(VLLM),), []),
    ("GPUs unreadable", replace(held, gpus=m.Unreadable("nvml", "hang", "hang")), (STOP_VLLM,), []),
    ("holders unreadable", replace(held, holders=m.Unreadable("procs", "x")), (STOP_VLLM,), []),
    ("breaker", held, (STOP_VLLM,), EVICTED),
    ("kill of a running unit", held, (m.KillUnit(VLLM, "v1", (9,)),), []),
    ("kill of strangers in a unit", replace(held, units=(LEFT,)), (m.KillUnit(VLLM, "v1", (9, 4711)),), []),
    ("third kill of a unit", replace(held, units=(LEFT,)), (m.KillUnit(VLLM, "v1", (9,)),),
     [acted(m.KillUnit(VLLM, "v1", (9,))), acted(m.KillUnit(VLLM, "v1", (9,)))]),
    ("third kill of a process", replace(held, holders=(rogue,)), (KILL,), [acted(KILL), acted(KILL)]),
    ("process that is no holder", held, (KILL,), []),
    ("reused pid", replace(held, holders=(replace(rogue, start_ticks=771),)), (KILL,), []),
    ("process in a container", replace(held, holders=(replace(rogue, container="ab"),)), (KILL,), []),
    ("process that no policy names", replace(held, holders=(replace(rogue, exe="/usr/bin/x"),)),
     (m.KillProcess(77, 770, "/usr/bin/x", "TERM"),), []),
    ("process of a unit", replace(held, holders=(replace(rogue, unit=VLLM),)), (KILL,), []),
    ("pid 1", replace(held, holders=(replace(rogue, pid=1, start_ticks=1),)),
     (m.KillProcess(1, 1, "/opt/rogue/x", "KILL"),), []),
    ("start on held GPUs", held, (START,), []),
    ("start on foreign memory", rest(gpus=gpus(9000)), (START,), []),
    ("start on unknown memory", rest(gpus=gpus(None)), (START,), []),
    ("start on too few", rest(gpus=gpus(count=1)), (START,), []),
    ("start on a lost GPU", rest(gpus=gpus(lost=True)), (START,), []),
    ("start with a reset owed", rest(gpus=gpus(recovery="reset")), (START,), []),
    ("start without the volume", rest(volume=m.Volume("not-mounted")), (START,), []),
    ("start without the capture", rest(engine=engine(m.Unit(m.ENGINE_UNIT), capture=m.Capture("absent"))),
     (START,), []),
    ("start on a taken port", rest(engine=m.Engine(m.Unit(m.ENGINE_UNIT), busy_ports=((30000, "x"),))), (START,), []),
    ("start beside the old one", busy(), (m.StartEngine("e1", 30000, "wanted"),), []),
    ("start after another", rest(), (m.StartEngine("other", 30000, "wanted"),), []),
    ("start over the crash budget", rest(), (START,), crashes(3)),
    ("worker without proof", busy(proof=None, worker=DOWN), (m.StartWorker("e1", ""),), []),
    ("worker on another engine", busy(worker=DOWN), (m.StartWorker("e0", ""),), []),
    ("worker on a failed proof", busy(worker=DOWN, proof=replace(PROVED, ok=False)), (m.StartWorker("e1", ""),), []),
    ("worker on a full volume", busy(worker=DOWN, volume=m.Volume("ok", "", 1 << 20)), (m.StartWorker("e1", ""),), []),
    ("second worker", busy(), (m.StartWorker("e1", "w1"),), []),
    ("proof beside the worker", busy(), (m.RunProof("e1", ""),), []),
    ("proof of another engine", busy(worker=DOWN), (m.RunProof("e0", ""),), []),
    ("stop of another engine", busy(), (m.StopEngine("e0", "finishing"),), []),
    ("stop of another worker", busy(), (m.StopWorker("w0", "finishing"),), []),
    ("stalled while rows land", busy(), (m.StopEngine("e1", "engine-stalled"),), []),
    ("patch under a running engine", busy(engine=engine(capture=m.Capture("absent"))), (m.ApplyPatch("1"),), []),
    ("patch over foreign edits", rest(engine=engine(m.Unit(m.ENGINE_UNIT), capture=m.Capture("foreign"))),
     (m.ApplyPatch("1"),), []),
    ("sweep beside an engine", busy(), (m.SweepStale(("/x",)),), []),
    ("worker beside a scan", busy(worker=DOWN, scan_unit=SCANNING), (m.StartWorker("e1", ""),), []),
    ("proof beside a scan", busy(worker=DOWN, scan_unit=SCANNING), (m.RunProof("e1", ""),), []),
    ("worker before the tree is adopted", busy(worker=DOWN, progress=m.Unadopted()), (m.StartWorker("e1", ""),), []),
    ("scan for want of nothing", rest(), (m.StartScan(""),), []),
    ("scan beside a worker", busy(progress=m.Unadopted()), (m.StartScan(""),), []),
    ("spool swept beside the worker", busy(), (m.SweepSpool(1),), []),
    ("release of what was never evicted", rest(progress=m.Progress(1, 1, 0, 0, True)), (m.ReleaseUnits((VLLM,)),), []),
    ("release with work left", rest(), (m.ReleaseUnits((VLLM,)),), [acted(m.LeaseUnit(VLLM, "enabled", True))]),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "actions", "events"), [t[1:] for t in TABLE], ids=[t[0] for t in TABLE])
def test_vetoed(seen: m.Observation, actions: tuple[m.Action, ...], events: list[budget.Event]) -> None:
    plan = m.Plan("test", "engine-start", "said", actions)
    vetoed = safety.veto(plan, CONFIG, seen, past_of(seen, events=events))
    assert vetoed.reason == "vetoed"
    assert vetoed.actions == ()


GOOD: list[tuple[str, m.Observation, tuple[m.Action, ...]]] = [
    ("start", rest(), (START,)),
    ("evict", held, (m.LeaseUnit(VLLM, "enabled", True), m.DisableUnit(VLLM), STOP_VLLM)),
    ("kill a named process", replace(held, holders=(rogue,)), (KILL,)),
    ("worker", busy(worker=DOWN), (m.StartWorker("e1", ""),)),
    ("stop the worker", busy(), (m.StopWorker("w1", "volume-full"),)),
]


@pytest.mark.parametrize(("seen", "actions"), [t[1:] for t in GOOD], ids=[t[0] for t in GOOD])
def test_not_vetoed(seen: m.Observation, actions: tuple[m.Action, ...]) -> None:
    plan = m.Plan("test", "engine-start", "said", actions)
    assert safety.veto(plan, CONFIG, seen, past_of(seen)) == plan


@pytest.mark.parametrize("actions", [(STOP_VLLM,), (KILL,)], ids=["unit", "process"])
def test_nobody_is_touched_at_first_sight(actions: tuple[m.Action, ...]) -> None:
    seen = replace(held, holders=(holder(), rogue))
    once = budget.look(budget.Past(), seen, CONFIG)
    assert safety.veto(m.Plan("t", "evicting", "s", actions), CONFIG, seen, once).reason == "vetoed"


@pytest.mark.parametrize("name", safety.names())
def test_every_rule_is_needed_by_some_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, at least one plan that must be refused passes."""
    others = tuple(r for r in safety.RULES if getattr(r, "__name__", "") != name)
    monkeypatch.setattr(safety, "RULES", others)
    first: list[tuple[str, m.Observation, tuple[m.Action, ...], list[budget.Event]]]
    first = [("first sight", replace(held, holders=(holder(), rogue)), (KILL,), [])]
    passed = [
        row
        for row, seen, actions, events in (*TABLE, *first)
        if safety.veto(
            m.Plan("t", "evicting", "s", actions),
            CONFIG,
            seen,
            past_of(seen, 0.1 if row == "first sight" else 8, events),
        ).actions
    ]
    assert passed
