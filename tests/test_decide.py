"""Tables: what is seen, and what is planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scenes import (
    PROOF,
    VLLM_UP,
    WORKER,
    acted,
    busy,
    died,
    engine,
    gpus,
    holder,
    kinds,
    loading,
    past_of,
    plan_of,
    rest,
)
from world import CONFIG, tuned

from hsdaemon.core import budget, safety
from hsdaemon.core import model as m
from hsdaemon.core.decide import LADDER, decide
from hsdaemon.core.facts import plan

DOWN = m.Unreadable("x", "cause", "")
STOPPED = m.Worker(m.Unit(m.WORKER_UNIT, invocation="w1", since_s=4100))
SCANNING = m.Unit(m.SCAN_UNIT, active="activating", invocation="s1", pids=(9,), since_s=4090)
FINISHED = m.Progress(100, 97, 2, 1, True)

TABLE: list[tuple[str, m.Observation, str, list[str]]] = [
    ("free", rest(), "engine-start", ["StartEngine"]),
    ("no manifest yet", rest(progress=None), "engine-start", ["StartEngine"]),
    ("loads", loading(), "engine-loading", []),
    ("up, not proved", busy(proof=None, worker=STOPPED), "proving", ["RunProof"]),
    ("proved", busy(worker=STOPPED), "worker-start", ["StartWorker"]),
    ("works", busy(), "extracting", []),
    ("proof runs", busy(proof=None, worker=STOPPED, proof_unit=replace(PROOF, active="active")), "proof-late",
     ["StopProof"]),
    ("proof unreadable", busy(proof=DOWN, worker=STOPPED), "proof-unreadable", []),
    ("orphans in the spool", busy(worker=STOPPED, spool=m.Spool(orphans=3)), "worker-start",
     ["SweepSpool", "StartWorker"]),
    ("tree without a manifest", rest(progress=m.Unadopted()), "scanning", ["StartScan"]),
    ("tree is adopted while the engine starts", rest(progress=m.Unadopted(), scan_unit=SCANNING), "engine-start",
     ["StartEngine"]),
    ("no proof beside a scan", busy(proof=None, worker=STOPPED, progress=m.Unadopted(), scan_unit=SCANNING),
     "scan-running", []),
    ("no worker beside a scan", busy(proof=None, worker=STOPPED, scan_unit=SCANNING), "scan-running", []),
    ("scan unit missing", rest(progress=m.Unadopted(), scan_unit=m.Unit(m.SCAN_UNIT, load="not-found")),
     "scan-blocked", []),
    ("volume absent", rest(volume=m.Volume("not-mounted")), "volume-absent", []),
    ("volume without marker", rest(volume=m.Volume("no-marker")), "volume-unmarked", []),
    ("other volume", rest(volume=m.Volume("foreign")), "volume-foreign", []),
    ("volume gone in a run", busy(volume=m.Volume("not-mounted")), "volume-absent", ["StopWorker"]),
    ("volume hangs in a run", busy(volume=m.Unreadable("volume", "D", "hang")), "volume-hung", []),
    ("manifest busy, at rest", rest(progress=DOWN), "manifest-unreadable", []),
    ("manifest busy, in a run", busy(progress=DOWN), "extracting", []),
    ("manifest damaged", rest(progress=m.Unreadable("manifest", "x", "damaged")), "engine-start", ["StartEngine"]),
    ("units unreadable", rest(units=DOWN, engine=DOWN, worker=DOWN), "engine-unreadable", []),
    ("engine unit masked", rest(engine=m.Engine(m.Unit(m.ENGINE_UNIT, load="masked"))), "engine-blocked", []),
    ("worker unit missing", busy(worker=m.Worker(m.Unit(m.WORKER_UNIT, load="not-found"))), "worker-blocked", []),
    ("worker refuses", busy(worker=m.Worker(m.Unit(m.WORKER_UNIT, active="failed", result="exit-code", status=78))),
     "worker-refused", []),
    ("all ports taken", rest(engine=m.Engine(m.Unit(m.ENGINE_UNIT), busy_ports=tuple((p, "x") for p in range(30000,
     30020)))), "ports-busy", []),
    ("finished, worker up", busy(progress=FINISHED), "finishing", ["StopWorker"]),
    ("finished, engine up", busy(progress=FINISHED, worker=STOPPED), "finishing", ["StopEngine"]),
    ("finished, at rest", rest(progress=FINISHED), "done", []),
    ("finished, others on the GPUs", rest(progress=FINISHED, gpus=gpus(80_000)), "done", []),
    ("finished, volume away", rest(progress=FINISHED, volume=m.Volume("not-mounted")), "done", []),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "reason", "actions"), [t[1:] for t in TABLE], ids=[t[0] for t in TABLE])
def test_plan(seen: m.Observation, reason: str, actions: list[str]) -> None:
    plan = plan_of(seen)
    assert (plan.reason, kinds(plan)) == (reason, actions)
    assert plan.sentence


def test_the_ladder_reads_as_the_manual_says() -> None:
    names = [rung.__name__ for rung in LADDER]
    assert names == [
        "volume_ready", "tree_adopted", "gpus_visible", "gpus_ours", "engine_patched", "engine_up", "engine_proved",
        "work_running",
    ]  # fmt: skip


def test_an_engine_on_the_cpu_asks_nothing_about_gpus() -> None:
    config = tuned(CONFIG, engine={"device": "cpu"})
    assert plan_of(rest(gpus=(), holders=()), config=config).reason == "engine-start"


def test_an_adoption_shows_how_far_it_is_while_the_engine_loads_and_after() -> None:
    adopting = m.Unadopted(1234, 5000)
    plan = plan_of(loading(progress=adopting, scan_unit=SCANNING))
    assert plan.reason == "engine-loading"
    assert any("1234" in note for note in plan.notes)
    waits = plan_of(busy(proof=None, worker=STOPPED, progress=adopting, scan_unit=SCANNING))
    assert (waits.reason, "1234" in waits.sentence) == ("scan-running", True)


def test_scans_that_reboots_cut_are_not_held_against_the_next_one() -> None:
    seen = rest(progress=m.Unadopted(), scan_unit=m.Unit(m.SCAN_UNIT, active="failed", result="oom-kill"))
    cut = [acted(m.StartScan(""), 10, f"old-{n}") for n in range(3)]
    assert plan_of(seen, events=[*cut, acted(m.StartScan(""), 20)]).reason == "scan-wait"
    here = [acted(m.StartScan(""), 900 - n) for n in range(3)]
    assert plan_of(seen, events=here).reason == "scan-failed"


def test_named_gpus_are_cleared_for_an_engine_on_the_cpu_too() -> None:
    config = tuned(CONFIG, engine={"device": "cpu"}, gpus={"uuids": ("GPU-0", "GPU-1")})
    held = rest(gpus=gpus(75_800), holders=(holder(),), units=(VLLM_UP,))
    assert kinds(plan_of(held, config=config)) == ["LeaseUnit", "DisableUnit", "StopUnit"]
    assert plan_of(rest(), config=config).reason == "engine-start"
    assert plan_of(rest(gpus=gpus(count=1)), config=config).reason == "gpu-missing"
    start = decide(config, rest(), past_of(rest()))
    vetoed = safety.veto(start, config, rest(gpus=gpus(75_800)), past_of(rest()))
    assert (vetoed.reason, start.reason) == ("vetoed", "engine-start"), "and safety has a mind of its own"


def test_a_changed_argument_line_waits_for_the_next_stop_unless_asked() -> None:
    changed = engine(wanted="new")
    assert plan_of(busy(engine=changed)).reason == "extracting"
    assert any("argument line changed" in note for note in plan_of(busy(engine=changed)).notes)
    asked: dict[str, Any] = {"engine": changed, "wishes": m.Wishes(reload_now=True)}
    assert kinds(plan_of(busy(**asked))) == ["StopWorker"]
    drains = m.Worker(replace(WORKER, active="deactivating"))
    waits = plan_of(busy(worker=drains, **asked))
    assert (waits.reason, waits.actions) == ("worker-stopping", ()), "what is in flight needs the engine"
    assert kinds(plan_of(busy(worker=STOPPED, **asked))) == ["StopEngine"]
    assert plan_of(busy(wishes=m.Wishes(reload_now=True))).reason == "extracting", "nothing changed: nothing stops"


def test_evicted_units_are_given_back_at_the_end_or_kept() -> None:
    lease = acted(m.LeaseUnit("vllm-a.service", "enabled", True))
    finished = rest(progress=FINISHED)
    plan = plan_of(finished, events=[lease])
    assert plan.actions == (m.ReleaseUnits(("vllm-a.service",)),)
    kept = tuned(CONFIG, supervisor={"on_done": "keep"})
    assert plan_of(finished, events=[lease], config=kept).reason == "done"
    asked = replace(finished, wishes=m.Wishes(release=("vllm-a.service",)))
    assert kinds(plan_of(asked, events=[lease], config=kept)) == ["ReleaseUnits"]


def test_equal_input_gives_an_equal_plan() -> None:
    for _, seen, _, _ in TABLE:
        past = past_of(seen)
        assert decide(CONFIG, seen, past) == decide(CONFIG, seen, past)


def test_the_worker_is_not_restarted_at_once_after_a_crash() -> None:
    down = m.Worker(replace(WORKER, active="failed", result="signal", status=9, pids=(), since_s=4999))
    events: list[budget.Event] = [acted(m.StartWorker("e1", "w0"), 50), died("signal 9", 1.0, unit=m.WORKER_UNIT)]
    assert plan_of(busy(worker=down), events=events).reason == "worker-backoff"
    later = busy(worker=down, now=replace(busy().now, mono_s=5100.0))
    assert plan_of(later, events=events).reason == "worker-start"


def test_a_worker_that_finds_its_volume_bad_is_tried_again_ever_more_seldom() -> None:
    down = m.Worker(
        replace(WORKER, active="failed", result="exit-code", status=73, pids=(), since_s=4999), "", "", "EIO"
    )
    events: list[budget.Event] = []
    for i in range(3):
        events += [acted(m.StartWorker("e1", f"w{i}"), 100 - i), died("exit-code 73", 90 - i, unit=m.WORKER_UNIT)]
    soon = busy(worker=down, now=replace(busy().now, mono_s=4915.0))
    plan = plan_of(soon, events=events)
    assert plan.reason == "worker-refused"
    assert "EIO" in plan.sentence
    assert plan_of(busy(worker=down), events=events).reason == "worker-start"


def test_leases_are_given_back_also_when_the_history_is_lost() -> None:
    unit = m.Unit("vllm-a.service", leased=True, file_state="disabled")
    assert plan_of(rest(progress=FINISHED, units=(unit,))).actions == (m.ReleaseUnits(("vllm-a.service",)),)


def test_a_damaged_verdict_is_asked_for_again() -> None:
    torn = busy(proof=m.Unreadable("proof", "torn", "damaged"), worker=STOPPED)
    assert kinds(plan_of(torn)) == ["RunProof"]


def test_a_sentence_needs_all_its_facts() -> None:
    with pytest.raises(KeyError):
        plan("engine_up", "engine-start")
