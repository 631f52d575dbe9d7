"""Cases of eviction that are decisions: what is seen, and what is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scenes import NOW, VLLM_UP, acted, gpus, holder, kinds, plan_of, rest
from world import CONFIG, VLLM, tuned

from hsdaemon.config import EvictUnit
from hsdaemon.core import budget, safety
from hsdaemon.core import model as m
from hsdaemon.core.decide import decide

HELD = rest(gpus=gpus(75_805), holders=(holder(),), units=(VLLM_UP,))
ROGUE = holder(77, "", exe="/opt/rogue/x")
STOP = m.StopUnit(VLLM, "v1")
TERM, KILL = m.KillProcess(77, 770, "/opt/rogue/x", "TERM"), m.KillProcess(77, 770, "/opt/rogue/x", "KILL")


def loose(*holders: m.Holder) -> m.Observation:
    return rest(gpus=gpus(75_805), holders=holders)


def test_ev_01_an_enabled_service_that_took_the_gpus_is_leased_disabled_and_stopped() -> None:
    plan = plan_of(HELD)
    assert plan.actions == (m.LeaseUnit(VLLM, "enabled", True), m.DisableUnit(VLLM), STOP)
    assert VLLM in plan.sentence


def test_ev_01_a_service_that_may_only_be_stopped_keeps_its_links() -> None:
    config = tuned(CONFIG, evict={"units": (EvictUnit("vllm*", "stop"),)})
    assert plan_of(HELD, config=config).actions == (m.LeaseUnit(VLLM, "enabled", True), STOP)


def test_ev_01_a_named_service_that_only_loads_yet_is_evicted_too() -> None:
    assert kinds(plan_of(rest(units=(VLLM_UP,))))[-1] == "StopUnit"


def test_ev_01_a_named_service_on_other_gpus_is_left_alone() -> None:
    four = gpus(5, 4)
    elsewhere = rest(gpus=four, holders=(holder(gpus=("GPU-2", "GPU-3")),), units=(VLLM_UP,))
    assert plan_of(elsewhere).reason == "engine-start"


def test_ev_03_a_unit_that_came_back_is_stopped_again_and_needs_no_second_lease() -> None:
    back = replace(HELD, units=(replace(VLLM_UP, invocation="v2", leased=True, file_state="disabled"),))
    events = [acted(m.LeaseUnit(VLLM, "enabled", True)), acted(STOP)]
    assert plan_of(back, events=events).actions == (m.StopUnit(VLLM, "v2"),)


def test_ev_04_ev_14_stopped_means_an_empty_cgroup() -> None:
    left = replace(HELD, units=(replace(VLLM_UP, active="inactive", pids=(10,), leased=True),))
    assert plan_of(left, looked_s=5).reason == "evict-stopping"
    plan = plan_of(left, looked_s=15)
    assert plan.actions == (m.KillUnit(VLLM, "v1", (10,)),)
    gone = rest(gpus=gpus(75_805))
    assert plan_of(gone).reason == "gpus-settling", "and memory at its baseline"


def test_ev_05_no_kill_storm() -> None:
    stuck = loose(replace(ROGUE, state="R", kill_pending=True))
    events = [acted(TERM, 100), acted(KILL, 60)]
    plan = plan_of(stuck, events=events)
    assert (plan.reason, plan.actions) == ("evict-stuck", ())
    assert "reboot" in plan.sentence
    unseen = loose(ROGUE)
    assert plan_of(unseen, events=[*events, acted(KILL, 40)]).reason == "evict-stuck", "pending or not"


def test_ev_06_a_holder_without_a_unit_goes_by_its_executable() -> None:
    assert plan_of(loose(ROGUE)).actions == (TERM,)
    scope = replace(ROGUE, unit="session-3.scope")
    assert plan_of(loose(scope)).actions == (TERM,)
    unknown = replace(ROGUE, exe="/usr/bin/other")
    assert plan_of(loose(unknown)).reason == "holder-unnamed"


def test_ev_06_ev_14_term_then_grace_then_kill() -> None:
    assert plan_of(loose(ROGUE), events=[acted(TERM, 5)]).reason == "evict-stopping"
    assert plan_of(loose(ROGUE), events=[acted(TERM, 15)]).actions == (KILL,)


def test_ev_07_an_action_carries_the_identity_it_was_decided_on() -> None:
    action = plan_of(loose(replace(ROGUE, start_ticks=999))).actions[0]
    assert action == replace(TERM, start_ticks=999)


def test_ev_08_all_holders_are_handled_one_after_the_other() -> None:
    """Eight holders: at most one disruptive act a tick, until none is left."""
    config = tuned(CONFIG, engine={"tp": 8})
    eight = [holder(80 + i, "", exe="/opt/rogue/x", gpus=(f"GPU-{i}",)) for i in range(8)]
    seen = rest(gpus=gpus(75_805, 8), holders=tuple(eight))
    handled = []
    while seen.holders:
        plan = plan_of(seen, config=config)
        (action,) = plan.actions
        assert isinstance(action, m.KillProcess)
        handled.append(action.pid)
        assert not isinstance(seen.holders, m.Unreadable)
        seen = replace(seen, holders=tuple(h for h in seen.holders if h.pid != action.pid))
    assert handled == [80 + i for i in range(8)]


def test_ev_09_one_reload_an_eviction() -> None:
    """Only a lease reloads, and a leased unit is not leased again."""
    assert kinds(plan_of(HELD)).count("LeaseUnit") == 1
    leased = replace(HELD, units=(replace(VLLM_UP, leased=True),))
    assert "LeaseUnit" not in kinds(plan_of(leased))


@pytest.mark.parametrize("policy", [(), (EvictUnit("vllm*", "report"),)], ids=["unnamed", "report"])
def test_ev_10_who_is_not_named_is_reported_and_waited_for(policy: tuple[EvictUnit, ...]) -> None:
    config = tuned(CONFIG, evict={"units": policy})
    plan = plan_of(HELD, looked_s=500, config=config)
    assert (plan.reason, plan.actions) == ("holder-unnamed", ())
    assert VLLM in plan.sentence


def test_ev_11_the_breaker_trips_after_the_budget_and_only_a_person_resets_it() -> None:
    events: list[budget.Event] = [acted(m.StopUnit(VLLM, f"old{i}"), 500 - i) for i in range(3)]
    plan = plan_of(HELD, events=events)
    assert (plan.reason, plan.actions) == ("breaker", ())
    later = replace(HELD, now=replace(NOW, mono_s=90_000.0))
    assert plan_of(later, events=events).reason == "breaker", "time does not reset it"
    rebooted = replace(HELD, now=replace(NOW, boot="boot-2"))
    assert plan_of(rebooted, events=events).reason == "breaker", "a reboot does not"
    assert plan_of(HELD, events=[*events, budget.Reset(NOW)]).reason == "evicting"


def test_ev_11_the_same_run_of_a_unit_counts_once() -> None:
    events: list[budget.Event] = [acted(STOP, 100), acted(STOP, 50), acted(STOP, 40)]
    assert budget.returns(_fold(events), VLLM) == 1


def _fold(events: list[budget.Event]) -> budget.Past:
    past = budget.Past()
    for event in events:
        past = budget.fold(past, event)
    return past


LEASE, DISABLE = m.LeaseUnit(VLLM, "enabled", True), m.DisableUnit(VLLM)
DEATHS: list[tuple[str, list[m.Action], dict[str, object], tuple[m.Action, ...]]] = [
    ("lease intended", [LEASE], {}, (LEASE, DISABLE, STOP)),
    ("leased", [LEASE], {"leased": True}, (DISABLE, STOP)),
    ("disable intended", [LEASE, DISABLE], {"leased": True}, (DISABLE, STOP)),
    ("disabled", [LEASE, DISABLE], {"leased": True, "file_state": "disabled"}, (STOP,)),
    ("stop intended", [LEASE, DISABLE, STOP], {"leased": True, "file_state": "disabled"}, (STOP,)),
    ("stopping", [LEASE, DISABLE, STOP], {"leased": True, "file_state": "disabled", "active": "deactivating"}, ()),
]


@pytest.mark.parametrize(("intents", "state", "then"), [d[1:] for d in DEATHS], ids=[d[0] for d in DEATHS])
def test_ev_12_a_death_after_any_step_is_understood(
    intents: list[m.Action], state: dict[str, object], then: tuple[m.Action, ...]
) -> None:
    """Intent is there, the act perhaps: the next plans complete the eviction, and the lease keeps the first state."""
    unit = replace(VLLM_UP, **state)  # type: ignore[arg-type]
    events: list[budget.Event] = [acted(a, 12.0) for a in intents]
    assert plan_of(replace(HELD, units=(unit,)), events=events).actions == then
    again = acted(m.LeaseUnit(VLLM, "disabled", False))
    assert _fold([*events, again]).leases == (budget.Lease(VLLM, "enabled", True),)


def test_ev_15_a_short_visitor_is_no_holder() -> None:
    for seen in (HELD, loose(ROGUE)):
        past = budget.look(budget.Past(), seen, CONFIG)
        plan = decide(CONFIG, seen, past)
        assert (plan.reason, plan.actions) == ("holder-new", ())


def test_ev_15_a_unit_that_crashes_and_is_started_again_all_the_time_is_seen_all_the_same() -> None:
    """A new run at every look: without an end to the looking, the engine would never start."""
    past, reasons = budget.Past(), []
    for second in range(0, 40, 2):
        unit = replace(VLLM_UP, invocation=f"v{second}", main_pid=second, pids=(second,))
        seen = rest(units=(unit,), now=replace(NOW, mono_s=5000.0 + second))
        past = budget.look(past, seen, CONFIG)
        plan = safety.veto(decide(CONFIG, seen, past), CONFIG, seen, past)
        reasons.append(plan.reason)
    assert reasons == ["holder-new"] * 15 + ["evicting"] * 5
    assert kinds(plan) == ["LeaseUnit", "DisableUnit", "StopUnit"], "the lease ends the loop"


def test_ev_15_two_looks_need_time_between_them() -> None:
    """Events may wake the loop twice within a moment: that is one look."""
    past = budget.Past()
    for part in range(5):
        seen = replace(HELD, now=replace(NOW, mono_s=5000.0 + part / 10))
        past = budget.look(past, seen, CONFIG)
    assert decide(CONFIG, seen, past).reason == "holder-new"


def test_ev_16_a_container_s_process_is_named_and_not_killed() -> None:
    inside = replace(ROGUE, unit="docker-" + "ab" * 32 + ".scope", container="ab" * 32)
    plan = plan_of(loose(inside), looked_s=500)
    assert (plan.reason, plan.actions) == ("holder-container", ())
    assert "abababababab" in plan.sentence
