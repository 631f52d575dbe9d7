"""Cases of GPUs and NVML that are decisions: what is seen, and what is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scenes import ALL, NOW, busy, gpus, holder, kinds, plan_of, rest
from world import CONFIG, tuned

from hsdaemon.core import budget
from hsdaemon.core import model as m
from hsdaemon.core.decide import decide


def blind(code: str) -> m.Unreadable:
    return m.Unreadable("nvml", f"cause of {code}", code)


def test_gp_01_memory_that_stays_is_waited_for_then_held_with_evidence() -> None:
    stuck = rest(gpus=gpus(76_000))
    assert plan_of(stuck, looked_s=30).reason == "gpus-settling"
    plan = plan_of(stuck, looked_s=70)
    assert plan.reason == "memory-not-freed"
    assert "0: 76000 MiB" in plan.sentence


def test_gp_02_one_busy_gpu_is_named() -> None:
    free, _ = gpus()
    plan = plan_of(rest(gpus=(free, m.Gpu("GPU-1", 1, "fake", 96_000, 40_000))))
    assert plan.reason == "gpus-settling"
    assert "GPU 1 " in plan.sentence


def test_gp_03_a_start_needs_several_looks_at_the_baseline() -> None:
    past = budget.Past()
    reasons = []
    for second in range(5):
        seen = rest(now=replace(rest().now, mono_s=5000.0 + second))
        past = budget.look(past, seen, CONFIG)
        reasons.append(decide(CONFIG, seen, past).reason)
    assert reasons == ["gpus-settling", "gpus-settling", "engine-start", "engine-start", "engine-start"]


def test_gp_03_looks_within_a_second_count_once() -> None:
    past = budget.Past()
    for part in range(20):
        past = budget.look(past, rest(now=replace(rest().now, mono_s=5000.0 + part / 100)), CONFIG)
    spell = past.spell("clear:GPU-0")
    assert spell is not None
    assert spell.count == 1


def test_gp_04_fabric_in_training_is_waited_for_and_its_daemon_named() -> None:
    seen = rest(gpus=gpus(fabric="in-progress"))
    assert plan_of(seen, looked_s=100).reason == "fabric-wait"
    plan = plan_of(seen, looked_s=310)
    assert plan.reason == "fabric-late"
    assert "nvidia-fabricmanager" in plan.sentence
    assert plan_of(rest(gpus=gpus(fabric="failed"))).reason == "fabric-late"


@pytest.mark.parametrize(
    ("case", "code", "reason"),
    [
        ("gp_05", "mismatch", "nvml-mismatch"),
        ("gp_06", "hang", "nvml-hung"),
        ("gp_07", "stuck", "nvml-stuck"),
        ("gp_14", "no-library", "nvml-absent"),
        ("gp_14", "no-driver", "nvml-absent"),
        ("sy_04", "no-permission", "nvml-denied"),
        ("sy_04", "sandbox", "nvml-denied"),
        ("other", "", "nvml-unreadable"),
    ],
)
def test_gp_05_gp_06_gp_07_gp_14_sy_04_unreadable_is_not_free(case: str, code: str, reason: str) -> None:
    at_rest = plan_of(rest(gpus=blind(code), holders=blind(code)))
    assert (at_rest.reason, at_rest.actions) == (reason, ())
    running = plan_of(busy(gpus=blind(code), holders=blind(code)))
    assert (running.reason, running.actions) == ("extracting", ()), f"{case}: a running engine is left alone"
    assert any("cannot be read" in note for note in running.notes)


def test_gp_05_a_mismatch_says_reboot_and_sy_04_names_the_sandbox() -> None:
    assert "reboot" in plan_of(rest(gpus=blind("mismatch"))).sentence
    assert "sandbox?" in plan_of(rest(gpus=blind("no-permission"))).sentence
    assert "sandbox?" in plan_of(rest(gpus=())).sentence


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (rest(gpus=gpus(lost=True)), "gpu-lost"),
        (rest(gpus=gpus(recovery="reboot")), "gpu-reboot-owed"),
        (rest(gpus=gpus(recovery="reset")), "gpu-reset-owed"),
        (rest(gpus=gpus(recovery="drain")), "gpu-reset-owed"),
        (rest(gpus=gpus(count=1)), "gpu-missing"),
    ],
)
def test_gp_08_no_start_on_gpus_that_are_lost_or_fewer(seen: m.Observation, reason: str) -> None:
    plan = plan_of(seen)
    assert (plan.reason, plan.actions) == (reason, ())


def test_gp_08_missing_gpus_are_named() -> None:
    config = tuned(CONFIG, gpus={"uuids": ("GPU-0", "GPU-9")})
    assert "GPU-9" in plan_of(rest(), config=config).sentence


def test_gp_09_memory_of_a_process_that_is_not_there_is_an_invisible_holder() -> None:
    ghost = holder(4711, "", kind="invisible", start_ticks=0, exe="")
    plan = plan_of(rest(gpus=gpus(76_000), holders=(ghost,)))
    assert (plan.reason, plan.actions) == ("holder-invisible", ())


def test_gp_10_a_holder_of_another_namespace_is_named_and_not_signalled() -> None:
    other = holder(77, "docker-ab12.scope", exe="/opt/rogue/x", container="ab12cd34")
    plan = plan_of(rest(gpus=gpus(76_000), holders=(other,)))
    assert (plan.reason, plan.actions) == ("holder-container", ())
    assert "ab12cd34" in plan.sentence


@pytest.mark.parametrize("told", [None, 0])
def test_gp_11_device_memory_decides_where_processes_tell_none(told: int | None) -> None:
    assert plan_of(rest(gpus=gpus(76_000))).reason == "gpus-settling"
    seen = rest(gpus=gpus(76_000), holders=(holder(77, "", used_mib=told, exe="/usr/bin/x"),))
    assert plan_of(seen).reason == "holder-unnamed"


def test_gp_12_idle_is_learned_for_each_gpu_and_both_are_clear() -> None:
    quiet, loud = m.Gpu("GPU-0", 0, "a", 96_000, 4), m.Gpu("GPU-1", 1, "a", 96_000, 500)
    assert plan_of(rest(gpus=(quiet, loud))).reason == "engine-start"
    grown = rest(gpus=(replace(quiet, used_mib=400), loud))
    past = budget.Past()
    for second in range(4):
        past = budget.look(past, rest(gpus=(quiet, loud), now=replace(rest().now, mono_s=4990.0 + second)), CONFIG)
    assert budget.idle_mib(past, quiet, CONFIG) == 260
    past = budget.look(past, grown, CONFIG)
    assert past.spell("stuck:GPU-0"), "400 MiB on a GPU that idles at 4 is somebody's"
    assert past.spell("clear:GPU-1")


@pytest.mark.parametrize("kind", ["mps", "graphics", "compute", "fd"])
def test_gp_13_any_kind_of_holder_counts_where_memory_is_held(kind: m.HolderKind) -> None:
    seen = rest(gpus=gpus(9_000), holders=(holder(77, "", kind=kind, exe="/usr/bin/x"),))
    plan = plan_of(seen)
    assert plan.reason == "holder-unnamed"
    assert kind in plan.sentence


@pytest.mark.parametrize("kind", ["graphics", "fd"])
def test_gp_13_a_display_or_an_open_descriptor_alone_is_no_holder(kind: m.HolderKind) -> None:
    seen = rest(holders=(holder(77, "", kind=kind, exe="/usr/bin/Xorg", gpus=ALL),))
    assert plan_of(seen).reason == "engine-start"


@pytest.mark.parametrize(
    ("code", "running", "at_rest"),
    [
        (13, "engine-xid", "engine-start"),
        (31, "engine-xid", "engine-start"),
        (94, "engine-xid", "engine-start"),
        (43, "extracting", "engine-start"),
        (79, "extracting", "gpu-xid"),
    ],
)
def test_gp_15_each_xid_has_its_act(code: int, running: str, at_rest: str) -> None:
    xids = (m.Xid("GPU-1", code, 4950.0),)
    assert plan_of(busy(xids=xids)).reason == running
    assert plan_of(rest(xids=xids)).reason == at_rest


def test_gp_15_each_line_is_used_once_and_the_driver_may_heal_it() -> None:
    before = (m.Xid("GPU-1", 13, 3000.0),)
    assert plan_of(busy(xids=before)).reason == "extracting", "the engine started after it"
    other = (m.Xid("GPU-7", 13, 4950.0),)
    assert plan_of(busy(xids=other)).reason == "extracting", "not a GPU of ours"
    healed = rest(xids=(m.Xid("GPU-1", 79, 4950.0),), gpus=gpus(recovery="none"))
    assert kinds(plan_of(healed)) == ["StartEngine"]


def test_gp_15_lines_of_gpus_that_nobody_can_read_restart_nothing() -> None:
    """Without NVML no line can be matched: it may be of a GPU that is none of ours."""
    unmatched = (m.Xid("", 31, 4950.0),)
    assert plan_of(busy(xids=unmatched, gpus=blind("hang"), holders=blind("hang"))).reason == "extracting"
    assert plan_of(busy(xids=unmatched)).reason == "engine-xid"


def test_gp_15_a_person_who_has_reset_the_gpu_ends_the_hold() -> None:
    """Drivers before 565 do not say that nothing is owed any more."""
    seen = rest(xids=(m.Xid("GPU-1", 79, 4950.0),))
    assert plan_of(seen).reason == "gpu-xid"
    assert plan_of(seen, events=[budget.Reset(replace(NOW, mono_s=4960.0))]).reason == "engine-start"
    assert plan_of(seen, events=[budget.Reset(replace(NOW, mono_s=4940.0))]).reason == "gpu-xid", "that was before it"
    assert plan_of(seen, events=[budget.Reset(m.Now(4960.0, 1.6e9, "boot-0"))]).reason == "gpu-xid", "another boot"
