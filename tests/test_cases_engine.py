"""Cases of the engine's life cycle that are decisions: what is seen, and what is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scenes import (
    ENDPOINT,
    ENGINE,
    NOW,
    WORKER,
    acted,
    busy,
    crashes,
    died,
    engine,
    gpus,
    holder,
    kinds,
    loading,
    past_of,
    plan_of,
    rest,
    young,
)
from world import CONFIG

from hsdaemon.core import budget
from hsdaemon.core import model as m
from hsdaemon.core.decide import decide

DOWN = m.Unit(m.ENGINE_UNIT, active="failed", invocation="e1", since_s=4000, result="signal", status=9)
STOPPED = m.Worker(m.Unit(m.WORKER_UNIT, invocation="w1", since_s=4100))


def stalled(**more: object) -> m.Observation:
    return replace(busy(), **more)  # type: ignore[arg-type]


def test_en_01_ranks_that_outlive_the_engine_are_killed_before_a_new_start() -> None:
    """The port is free and the unit is dead: the cgroup and the memory are what counts."""
    ranks = (holder(51, m.ENGINE_UNIT, exe="/usr/bin/python3"),)
    left = rest(engine=young(replace(DOWN, pids=(51,))), gpus=gpus(70_000), holders=ranks)
    assert plan_of(left, looked_s=5).reason == "engine-stopping"
    assert plan_of(left, looked_s=20).actions == (m.KillUnit(m.ENGINE_UNIT, "e1", (51,)),)
    killed = acted(m.KillUnit(m.ENGINE_UNIT, "e1", (51,)), 100)
    assert plan_of(left, looked_s=200, events=[killed, killed]).reason == "engine-stuck"
    memory = rest(engine=young(DOWN), gpus=gpus(70_000))
    assert plan_of(memory).reason == "gpus-settling", "nobody is left, but the memory is not free yet"


def test_en_02_an_unclean_end_takes_the_next_port() -> None:
    start = plan_of(rest(engine=young(DOWN))).actions[-1]
    assert isinstance(start, m.StartEngine)
    assert start.port == ENDPOINT.port + 1
    clean = replace(DOWN, active="inactive", result="success", status=0)
    start = plan_of(rest(engine=young(clean))).actions[-1]
    assert isinstance(start, m.StartEngine)
    assert start.port == ENDPOINT.port


def test_en_03_en_04_taken_ports_are_known_before_the_load() -> None:
    free = m.Engine(
        m.Unit(m.ENGINE_UNIT), busy_ports=((30000, "python3 (pid 7)"), (30001, "nginx (pid 8)")), wanted="w"
    )
    assert plan_of(rest(engine=free)).actions == (m.StartEngine("", 30002, "w"),)
    full = replace(free, busy_ports=tuple((p, f"python3 (pid {p})") for p in range(30000, 30020)))
    plan = plan_of(rest(engine=full))
    assert plan.reason == "ports-busy"
    assert "30000: python3 (pid 30000)" in plan.sentence


def test_en_05_en_06_progress_judges_a_healthy_engine_that_hangs() -> None:
    """Health is fine all the time: worker, engine, person, in this order."""
    healthy = stalled()
    assert plan_of(healthy, looked_s=50).reason == "extracting"
    assert plan_of(healthy, looked_s=70).actions == (m.StopWorker("w1", "worker-stalled"),)
    first = acted(m.StopWorker("w0", "worker-stalled"), 200)
    assert plan_of(healthy, 70, [first]).actions == (m.StopEngine("e1", "engine-stalled"),)
    second = acted(m.StopEngine("e0", "engine-stalled"), 150)
    assert plan_of(healthy, 70, [first, second]).reason == "stalled"


def test_en_06_workers_that_give_up_by_themselves_hide_no_hung_engine() -> None:
    down = m.Worker(
        m.Unit(m.WORKER_UNIT, active="failed", invocation="w3", result="exit-code", status=75, since_s=4990)
    )
    events: list[budget.Event] = []
    for i in range(2):
        events += [acted(m.StartWorker("e1", f"w{i}"), 300 - i), died("exit-code 75", 290 - i, unit=m.WORKER_UNIT)]
    assert plan_of(busy(worker=down), 50, events).reason == "worker-start"
    assert plan_of(busy(worker=down), 70, events).actions == (m.StopEngine("e1", "engine-stalled"),)
    second = acted(m.StopEngine("e0", "engine-stalled"), 150)
    assert plan_of(busy(worker=down), 70, [*events, second]).reason == "worker-start", "the engine once only"
    fresh = busy(worker=down, engine=engine(replace(ENGINE, since_s=NOW.mono_s - 80)))
    assert plan_of(fresh, 70, events).reason == "worker-start", "that was another engine"
    just = died("exit-code 75", 2.0, unit=m.WORKER_UNIT)
    again = [*events, second, acted(m.StartWorker("e1", "w9"), 60), just]
    assert plan_of(busy(worker=down), 70, again).reason == "stalled"


def test_en_06_workers_that_we_stopped_or_that_never_began_accuse_no_engine() -> None:
    """A disk that goes away twice, or a bus that is busy, is not the engine's fault."""
    down = m.Worker(m.Unit(m.WORKER_UNIT, invocation="w3", since_s=4990))
    events: list[budget.Event] = []
    for i in range(2):
        events += [acted(m.StartWorker("e1", f"w{i}"), 300 - i), acted(m.StopWorker(f"w{i}", "volume-absent"), 290 - i)]
        start = m.StartWorker("e1", f"v{i}")
        events += [acted(start, 280 - i), budget.Ended(NOW, start, m.Outcome("failed", "dbus is down"))]
    assert kinds(plan_of(busy(worker=down), 70, events)) != ["StopEngine"]


def test_rs_07_a_worker_that_waits_for_its_disk_is_no_stall() -> None:
    """It fills the disk itself, up to less than a sample above the floor: there the first rung sees room."""
    paused = busy(worker=m.Worker(WORKER, paused="130 MiB free, 146 MiB needed"))
    past = past_of(paused, looked_s=3000)
    plan = plan_with(paused, past)
    assert (plan.reason, plan.actions) == ("worker-paused", ())
    assert "146 MiB needed" in plan.sentence
    after = busy(now=replace(NOW, mono_s=NOW.mono_s + 5))
    past = budget.look(past, after, CONFIG)
    assert plan_with(after, past).reason == "extracting", "it has just begun again"
    later = busy(now=replace(NOW, mono_s=NOW.mono_s + 70))
    assert plan_with(later, budget.look(past, later, CONFIG)).reason == "worker-stalled"


def test_en_06_new_samples_wipe_what_was_held_against_them() -> None:
    first = acted(m.StopWorker("w0", "worker-stalled"), 200, settled=41)
    second = acted(m.StopEngine("e0", "engine-stalled"), 150, settled=41)
    assert plan_of(stalled(), 70, [first, second]).actions == (m.StopWorker("w1", "worker-stalled"),)


def test_en_07_a_silent_probe_restarts_nothing_while_rows_land() -> None:
    silent = busy(engine=engine(health="silent"))
    assert plan_of(silent, looked_s=40).reason == "extracting"


def test_en_08_a_silent_start_is_found_and_stale_locks_go_only_with_the_engine() -> None:
    plan = plan_of(loading(for_s=60), looked_s=55)
    assert plan.reason == "engine-silent"
    assert kinds(plan) == ["StopEngine"]
    lock = ("/cache/lock",)
    assert plan_of(rest(engine=young(DOWN, stale=lock))).actions == (m.SweepStale(lock),)
    assert "SweepStale" not in kinds(plan_of(busy(engine=engine(stale=lock))))


def test_en_09_a_hang_in_set_up_ends_at_its_deadline() -> None:
    assert plan_of(loading(for_s=49), looked_s=48).reason == "engine-loading"
    assert plan_of(loading(for_s=52), looked_s=51).reason == "engine-silent"


def test_en_10_a_growing_log_extends_the_patience() -> None:
    """Loads for three times the configured patience; its log grows to the end, then no more."""
    past, start_s = budget.Past(), NOW.mono_s
    unit = replace(ENGINE, since_s=start_s)
    for age in range(0, 310, 10):
        seen = loading(now=replace(NOW, mono_s=start_s + age), engine=young(unit, log_bytes=age * 10))
        past = budget.look(past, seen, CONFIG)
        assert plan_with(seen, past).reason == "engine-loading", age
    quiet = replace(seen, now=replace(NOW, mono_s=start_s + 330))
    assert plan_with(quiet, budget.look(past, quiet, CONFIG)).reason == "engine-late"


def plan_with(seen: m.Observation, past: budget.Past) -> m.Plan:
    return decide(CONFIG, seen, past)


def test_en_11_en_13_starts_without_progress_end_in_a_hold_with_the_last_words() -> None:
    dead = rest(engine=young(DOWN, last_lines=("RuntimeError: no kernel image",)))
    assert plan_of(dead, events=crashes(1)).reason == "engine-start"
    plan = plan_of(dead, events=crashes(3))
    assert plan.reason == "engine-budget"
    assert "no kernel image" in plan.sentence


@pytest.mark.parametrize(
    ("seen", "start", "reason"),
    [
        pytest.param(rest(), m.StartEngine("", 30000, "wanted"), "engine-blocked", id="engine"),
        pytest.param(busy(worker=STOPPED), m.StartWorker("e1", "w1"), "worker-blocked", id="worker"),
    ],
)
def test_en_11_orders_to_start_that_come_to_nothing_end_in_a_hold(
    seen: m.Observation, start: m.StartEngine | m.StartWorker, reason: str
) -> None:
    """A condition in a drop-in: systemd says yes, and the unit stays as it was."""
    assert plan_of(seen, events=[acted(start, 4)]).actions == (start,), "the first may have been cut by a death"
    plan = plan_of(seen, events=[acted(start, 6), acted(start, 4)])
    assert (plan.reason, plan.actions) == (reason, ())
    assert "2 orders" in plan.sentence
    assert plan_of(seen, events=[acted(start, 60), acted(start, 50)]).actions == (start,), "seldom, not never"


def test_en_11_starts_that_ran_or_were_refused_are_no_orders_in_vain() -> None:
    """systemd forgets the invocation of a unit that ended well: each start in a boot looks like the first."""
    events: list[budget.Event] = []
    for i in range(6):
        events += [acted(m.StartWorker("e1", ""), 600 - 100 * i, settled=i)]
        events += [acted(m.StopWorker(f"w{i}", "volume-absent"), 590 - 100 * i, settled=i)]
    again = m.StartWorker("e1", "")
    assert plan_of(busy(worker=m.Worker(m.Unit(m.WORKER_UNIT))), events=events).actions == (again,)
    start, events = m.StartEngine("", 30000, "wanted"), []
    for i in range(5):
        order = acted(start, 470 - 100 * i)
        events += [order, budget.Ended(order.now, start, m.Outcome("failed", "dbus is down"))]
    assert plan_of(rest(), events=events).actions == (start,)


def test_en_11_waits_double() -> None:
    events: list[budget.Event] = [acted(m.StartEngine("a", 30000, "w"), 30), died("signal 11", 1.0)]
    assert plan_of(rest(engine=young(DOWN)), events=events).reason == "engine-backoff"
    assert [budget.backoff_s(n, 10, 900) for n in (1, 2, 3, 9)] == [10, 20, 40, 900]


def test_en_12_crashes_with_progress_in_between_never_hold() -> None:
    events = [e for n in range(20) for e in crashes(1, settled=20 + n)]
    assert plan_of(rest(engine=young(DOWN)), events=events).reason == "engine-start"


def test_en_13_the_budget_survives_a_reboot_and_a_person_ends_it() -> None:
    booted = rest(now=replace(NOW, boot="boot-2"))
    events = [*crashes(2), *crashes(1, boot="boot-2")]
    assert plan_of(booted, events=events).reason == "engine-budget"
    assert plan_of(booted, events=[*events, budget.Reset(NOW)]).reason == "engine-start"


def test_en_13_a_volume_that_is_late_is_no_progress() -> None:
    """Below its mount point there is neither a manifest nor a sample."""
    away = rest(now=replace(NOW, boot="boot-2"), volume=m.Volume("not-mounted"), progress=None)
    past = past_of(away, events=crashes(3))
    assert budget.failures(past, m.ENGINE_UNIT, "boot-2") == 3
    there = rest(now=replace(NOW, boot="boot-2"))
    assert plan_with(there, budget.look(past, there, CONFIG)).reason in ("engine-budget", "gpus-settling")
    stop = budget.Acted(NOW, m.StopWorker("w1", "volume-absent"), budget.settled_of(away))
    assert budget.failures(past_of(rest(), events=[*crashes(3), stop]), m.ENGINE_UNIT, NOW.boot) == 3


def test_en_13_starts_cut_by_reboots_weigh_less_but_not_nothing() -> None:
    cut: list[budget.Event] = [acted(m.StartEngine("", 30000, "w"), 10, f"old-{n}") for n in range(11)]
    assert plan_of(rest(), events=cut).reason == "engine-start"
    assert plan_of(rest(), events=[*cut, acted(m.StartEngine("", 30000, "w"), 9, "old-x")]).reason == "engine-budget"


def test_en_14_en_15_only_a_proof_of_this_very_start_lets_the_worker_run() -> None:
    ready = busy(proof=None, worker=STOPPED)
    assert plan_of(ready).actions == (m.RunProof("e1", "p1"),)
    old = m.Proof("e0", True)
    assert plan_of(busy(proof=old, worker=STOPPED)).actions == (m.RunProof("e1", "p1"),)
    assert plan_of(busy(proof=old)).actions == (m.StopWorker("w1", "worker-unproved"),)


@pytest.mark.parametrize(
    ("code", "reason"),
    [("inert", "proof-inert"), ("spool", "proof-spool"), ("continuity", "proof-continuity"), ("norm", "proof-content"),
     ("?", "proof-failed")],
)  # fmt: skip
def test_en_14_a_failed_proof_holds(code: str, reason: str) -> None:
    failed = busy(proof=m.Proof("e1", False, code, "words of the proof"), worker=STOPPED)
    ran = acted(m.RunProof("e1", "p0"), 50)
    plan = plan_of(failed, events=[ran])
    assert (plan.reason, plan.actions) == (reason, ())
    assert "words of the proof" in plan.sentence
    assert kinds(plan_of(failed, events=[ran, budget.Reset(NOW)])) == ["RunProof"], "a person mended it"


def test_en_14_a_proof_that_could_not_be_made_is_tried_again_and_costs_no_load_of_weights() -> None:
    blocked = busy(proof=m.Proof("e1", False, "blocked", "somebody has manifest.lock"), worker=STOPPED)
    ran = acted(m.RunProof("e1", "p0"), 50)
    assert kinds(plan_of(blocked, events=[ran])) == ["RunProof"]
    just = acted(m.RunProof("e1", "p0"), 0)
    plan = plan_of(blocked, events=[ran, ran, just])
    assert (plan.reason, plan.actions) == ("proof-blocked", ())
    assert "manifest.lock" in plan.sentence
    assert kinds(plan_of(blocked, events=[acted(m.RunProof("e1", "p0"), 400)] * 9)) == ["RunProof"]


def test_en_14_an_engine_that_does_not_answer_its_proof_is_restarted() -> None:
    mute = busy(proof=m.Proof("e1", False, "timeout", "no answer"), worker=STOPPED)
    ran = acted(m.RunProof("e1", "p0"), 50)
    assert kinds(plan_of(mute, events=[ran])) == ["RunProof"]
    assert kinds(plan_of(mute, events=[ran, ran])) == ["StopEngine"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [("absent", "patching"), ("older", "patching"), ("foreign", "patch-foreign"), ("read-only", "patch-read-only"),
     ("unsupported", "release-unsupported"), ("missing", "engine-missing")],
)  # fmt: skip
def test_en_16_the_capture_is_looked_for_before_each_start(state: str, reason: str) -> None:
    lost = rest(engine=young(m.Unit(m.ENGINE_UNIT), capture=m.Capture(state, "0.5.23")))
    assert plan_of(lost).reason == reason
    running = busy(engine=engine(capture=m.Capture(state, "0.5.23")))
    assert plan_of(running).reason == "extracting", "a running engine is judged by its proof"


def test_en_16_a_patch_that_does_not_take_holds() -> None:
    lost = rest(engine=young(m.Unit(m.ENGINE_UNIT), capture=m.Capture("absent", "0.5.23")))
    tried = acted(m.ApplyPatch("0.5.23"), 60)
    assert plan_of(lost, events=[tried, tried]).reason == "patch-failed"


def test_sy_12_a_new_supervisor_adopts_what_runs() -> None:
    """No history at all, everything runs and is proved: nothing is started, stopped or proved again."""
    past = budget.look(budget.Past(), busy(), CONFIG)
    plan = plan_with(busy(), past)
    assert (plan.reason, plan.actions) == ("extracting", ())
    assert past_of(busy()).starts == ()
    assert WORKER.up
