"""Cases of memory and disks that are decisions: what is seen, and what is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scenes import busy, crashes, engine, kinds, plan_of, rest, young
from world import CONFIG

from hsdaemon.core import model as m

FLOOR = CONFIG.output.reserve_mib << 20
STOPPED = m.Worker(m.Unit(m.WORKER_UNIT, invocation="w1", since_s=4100))


def test_rs_01_killed_for_memory_with_progress_in_between_restarts() -> None:
    events = [e for n in range(5) for e in crashes(1, "oom-kill 9", settled=20 + n)]
    assert plan_of(rest(), events=events).reason == "engine-start"


def test_rs_02_killed_for_memory_twice_without_progress_holds_with_its_cause() -> None:
    assert plan_of(rest(), events=crashes(1, "oom-kill 9")).reason == "engine-start"
    plan = plan_of(rest(), events=crashes(2, "oom-kill 9"))
    assert plan.reason == "engine-memory"
    assert "memory" in plan.sentence


def test_rs_03_orphans_are_swept_before_the_worker_starts() -> None:
    plan = plan_of(busy(worker=STOPPED, spool=m.Spool(orphans=20)))
    assert kinds(plan) == ["SweepSpool", "StartWorker"]
    assert kinds(plan_of(busy(spool=m.Spool(orphans=20)))) == [], "never beside a worker"


def test_rs_04_rs_06_a_volume_that_hangs_stops_nothing_and_starts_nothing() -> None:
    hung = m.Unreadable("volume", "no answer in 10 s", "hang")
    for seen in (busy(volume=hung), busy(volume=hung, worker=STOPPED), rest(volume=hung)):
        plan = plan_of(seen, looked_s=120)
        assert (plan.reason, plan.actions) == ("volume-hung", ())
    assert plan_of(busy()).reason == "extracting", "and everything goes on when it answers"


def test_rs_05_slow_is_not_stalled() -> None:
    """One sample within the stall time is progress, however slow."""
    assert plan_of(busy(), looked_s=55).actions == ()


def test_rs_07_paused_at_the_floor_with_hysteresis() -> None:
    def free(share: float) -> m.Volume:
        return m.Volume("ok", "", int(FLOOR * share), 1 << 44, "uuid")

    assert plan_of(busy(volume=free(1.05))).reason == "extracting"
    plan = plan_of(busy(volume=free(0.99)))
    assert plan.actions == (m.StopWorker("w1", "volume-full"),)
    assert plan_of(busy(volume=free(1.05), worker=STOPPED)).reason == "volume-full", "not at once again"
    assert plan_of(busy(volume=free(1.2), worker=STOPPED)).reason == "worker-start"


@pytest.mark.parametrize("verdict", ["not-mounted", "read-only", "io-error", "foreign", "no-marker"])
def test_st_09_st_10_st_11_a_volume_that_is_not_ours_pauses_the_work(verdict: str) -> None:
    lost = m.Volume(verdict, "its cause")
    running = plan_of(busy(volume=lost))
    assert kinds(running) == ["StopWorker"]
    assert "its cause" in running.sentence
    assert plan_of(rest(volume=lost)).actions == ()
    assert plan_of(busy(volume=lost, worker=STOPPED)).actions == (), "the engine is kept: it was expensive"


def test_sp_08_shared_memory_of_dead_engines_is_swept_between_stop_and_start() -> None:
    dead = rest(engine=young(m.Unit(m.ENGINE_UNIT), stale=("/dev/shm/sgl_shm_1", "/dev/shm/sgl_shm_2")))
    assert kinds(plan_of(dead)) == ["SweepStale"]
    assert kinds(plan_of(busy(engine=replace(engine(), stale=("/dev/shm/sgl_shm_1",))))) == []
