"""The journal of a supervisor: each event once, in the order in which it happened, with an id that stays."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import ports
from scenes import VLLM_UP, busy, rest
from structlog.testing import capture_logs
from world import VLLM, World

from hsdaemon import loop
from hsdaemon.core import model as m
from hsdaemon.core import reasons, story
from hsdaemon.history import History

EXTRACTING = m.Plan("work_running", "extracting", "extracting")
STOPPING = m.Plan("volume_ready", "volume-full", "full", (m.StopWorker("w1", "volume-full"),))


def test_from_an_evicted_rogue_to_done_each_event_is_told_once(tmp_path: Path) -> None:
    world = World(1)
    world.fault("vllm")
    hands, turns = ports(world), [0]

    def over() -> bool:
        turns[0] += 1
        world.step(1.0)
        return turns[0] > 600

    with capture_logs() as told:
        loop.run(hands, lambda: world.config, History.open(tmp_path), over)
    events = [entry["_event"] for entry in told if "_event" in entry]
    assert events == ["started", "evicted", "engine-up", "proved", "extracting", "done"]
    assert VLLM in next(entry["event"] for entry in told if entry.get("_event") == "evicted")
    assert all(re.fullmatch("[0-9a-f]{32}", entry["message_id"]) for entry in told if "_reason" in entry)


@pytest.mark.parametrize(
    ("before", "seen", "plan", "codes"),
    [
        pytest.param(None, rest(), m.Plan("engine_up", "engine-start", ""), ["started"], id="a fresh host"),
        pytest.param(None, busy(), EXTRACTING, ["started", "extracting"], id="adopted"),
        pytest.param((busy(), EXTRACTING), busy(), EXTRACTING, [], id="nothing new"),
        pytest.param((busy(), EXTRACTING), busy(), STOPPING, ["paused"], id="a full disk"),
        pytest.param(
            (rest(units=(VLLM_UP,)), m.Plan("gpus_ours", "evicting", "")),
            rest(units=(replace(VLLM_UP, active="inactive", pids=(), leased=True),)),
            m.Plan("gpus_ours", "gpus-settling", ""), ["evicted"], id="evicted",
        ),
        pytest.param(
            (rest(units=(VLLM_UP,)), m.Plan("gpus_ours", "evicting", "")),
            rest(units=(replace(VLLM_UP, active="inactive", leased=True),)),
            m.Plan("gpus_ours", "evict-stopping", ""), [], id="told to stop, processes left",
        ),
        pytest.param(
            (rest(units=(VLLM_UP,)), m.Plan("gpus_ours", "holder-unnamed", "")),
            rest(units=(replace(VLLM_UP, active="inactive", pids=()),)),
            m.Plan("gpus_ours", "gpus-settling", ""), [], id="it went by itself",
        ),
        pytest.param(
            (busy(), EXTRACTING), busy(), m.Plan("work_running", "worker-refused", ""), ["held"], id="a hold",
        ),
        pytest.param(
            (busy(), EXTRACTING), rest(engine=m.Unreadable("units", "dbus")), EXTRACTING, [], id="unknown",
        ),
    ],
)  # fmt: skip
def test_what_a_turn_shows_for_the_first_time(
    before: tuple[m.Observation, m.Plan] | None, seen: m.Observation, plan: m.Plan, codes: list[str]
) -> None:
    assert [event.kind.code for event in story.events(before, seen, plan)] == codes


def test_what_is_adopted_is_named() -> None:
    (event, _) = story.events(None, busy(), EXTRACTING)
    assert "engine (pid 50) and worker (pid 60)" in event.sentence


def test_ids_are_unique_and_in_the_manual() -> None:
    ids = [kind.message_id for kind in story.KINDS] + [r.message_id for r in reasons.CATALOGUE.values()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", i) for i in ids)
    assert story.page() in (Path(story.__file__).parents[2] / "docs/operations.md").read_text()


def test_the_words_of_a_hold_are_a_line_of_their_own_and_figures_are_not_repeated(tmp_path: Path) -> None:
    world = World(1)
    world.fault("stranger")
    turns = [0]

    def over() -> bool:
        turns[0] += 1
        world.step(1.0)
        return turns[0] > 30

    with capture_logs() as told:
        loop.run(ports(world), lambda: world.config, History.open(tmp_path), over)
    held = [entry["event"] for entry in told if entry.get("_event") == "held"]
    assert len(held) == 1
    assert "evict.units" in held[0]
    assert len({entry["event"] for entry in told}) == len(told)
