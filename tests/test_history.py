"""The record of what was seen and done, on a real disk."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import NOW, VLLM_UP, acted, busy, crashes, gpus, holder, past_of, plan_of, rest
from world import CONFIG, VLLM

from hsdaemon import history
from hsdaemon.core import budget, safety
from hsdaemon.core import model as m
from hsdaemon.core.decide import decide
from hsdaemon.errors import DataError, DiskFull
from hsdaemon.history import History, Tick
from hsdaemon.machine import disk

HELD = rest(gpus=gpus(75_805), holders=(holder(),), units=(VLLM_UP,))
LEASE = m.LeaseUnit(VLLM, "enabled", True)


def test_what_was_intended_is_known_after_a_restart(tmp_path: Path) -> None:
    first = History.open(tmp_path)
    first.look(HELD, CONFIG)
    first.intend(HELD, LEASE)
    again = History.open(tmp_path)
    assert again.past.leases == (budget.Lease(VLLM, "enabled", True),)
    assert again.past.starts == first.past.starts


@given(st.lists(st.sampled_from([LEASE, m.StopUnit(VLLM, "a"), m.StopUnit(VLLM, "b"), *[
    m.StartEngine("x", 1, "w"), m.StopEngine("e", "engine-stalled"), m.StartWorker("e", "w"), m.RunProof("e", ""),
    m.StopWorker("w", "worker-stalled"), m.KillUnit(VLLM, "a", (1, 2)), m.ReleaseUnits((VLLM,)),
]]), max_size=30), st.lists(st.sampled_from(["done", "failed", "moved-on"]), min_size=30, max_size=30))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_event_comes_back_as_it_was(actions: list[m.Action], ends: list[str]) -> None:
    past, events = budget.Past(), []
    for action, end in zip(actions, ends, strict=False):
        pair = (acted(action), budget.Ended(NOW, action, m.Outcome(end)))  # type: ignore[arg-type]
        for event in pair:
            assert history.parse(history.line(event)) == event
            past = budget.fold(past, event)
            events.append(event)
    assert history.parse(history.line(past)) == past


def test_a_torn_line_and_foreign_lines_are_ignored(tmp_path: Path) -> None:
    History.open(tmp_path).intend(HELD, LEASE)
    path = tmp_path / "history.jsonl"
    whole = path.read_bytes()
    for junk in (b"{", b"null\n", b'{"_":"Nobody"}\n', b"\xff\xfe\n", b"[" * 5000 + b"\n", whole[: len(whole) // 2]):
        path.write_bytes(junk + (b"" if junk.endswith(b"\n") else b"\n") + whole + whole[: len(whole) // 2])
        again = History.open(tmp_path)
        assert again.past.leases == (budget.Lease(VLLM, "enabled", True),)
        again.intend(HELD, m.StopUnit(VLLM, "v1"))
        assert History.open(tmp_path).past.evictions == ((VLLM, "v1"),), "and the next line is whole"


def test_a_field_of_a_newer_program_is_dropped() -> None:
    raw = json.loads(history.line(acted(LEASE)))
    raw["colour"] = "blue"
    raw["action"]["depth"] = 3
    assert history.decode(raw) == acted(LEASE)


def test_the_record_is_bounded_and_keeps_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_BYTES", 20_000)
    record = History.open(tmp_path)
    for event in [acted(LEASE), *crashes(2)]:
        record.append(event)
    for i in range(200):
        record.append(acted(m.StopUnit("vllm-b.service", f"i{i}")))
    assert (tmp_path / "history.jsonl").stat().st_size < 120_000
    again = History.open(tmp_path)
    assert again.past.leases == (budget.Lease(VLLM, "enabled", True),)
    assert budget.failures(again.past, m.ENGINE_UNIT, NOW.boot) == 2
    assert budget.returns(again.past, "vllm-b.service") == 200


def test_a_record_that_was_shortened_keeps_no_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that was free at some time is looked at again by the next supervisor, as often as any."""
    record = History.open(tmp_path)
    for second in range(5):
        record.look(rest(now=replace(NOW, mono_s=NOW.mono_s + second)), CONFIG)
    monkeypatch.setattr(history, "MOST_BYTES", 1)
    record.append(acted(LEASE))
    again = History.open(tmp_path)
    assert again.past.leases == (budget.Lease(VLLM, "enabled", True),)
    again.look(rest(now=replace(NOW, mono_s=NOW.mono_s + 3000)), CONFIG)
    assert {spell.count for spell in again.past.spells} == {1}


def test_a_record_that_cannot_be_shortened_has_its_event_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the act would be left out although its intent is counted."""
    record = History.open(tmp_path)
    monkeypatch.setattr(history, "MOST_BYTES", 1)

    def full(*_: object) -> None:
        raise DiskFull("cannot write: no space left; free some")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "replace", full)
        record.append(acted(LEASE))
    assert record.past.leases == History.open(tmp_path).past.leases != ()


def test_a_person_s_reset_is_taken_by_the_next_look(tmp_path: Path) -> None:
    record = History.open(tmp_path)
    for event in crashes(3):
        record.append(event)
    history.ask_reset(tmp_path)
    record.look(rest(), CONFIG)
    assert budget.failures(record.past, m.ENGINE_UNIT, NOW.boot) == 0
    assert not (tmp_path / "reset").exists()
    assert budget.failures(History.open(tmp_path).past, m.ENGINE_UNIT, NOW.boot) == 0


def test_a_death_is_recorded_once(tmp_path: Path) -> None:
    record = History.open(tmp_path)
    record.append(acted(m.StartEngine("", 30000, "wanted"), 100))
    dead = m.Engine(m.Unit(m.ENGINE_UNIT, active="failed", invocation="e1", result="signal", status=11, since_s=4950))
    for _ in range(3):
        record.look(rest(engine=dead), CONFIG)
    events = [e for e in record.events() if isinstance(e, budget.Died)]
    assert [e.cause for e in events] == ["signal 11"]


def test_a_tick_is_replayed_to_the_same_plan(tmp_path: Path) -> None:
    record = History.open(tmp_path)
    for seen in (HELD, rest(), busy()):
        record.tick(Tick(seen, past_of(seen), plan_of(seen)))
    for number, seen in ((0, HELD), (1, rest()), (-1, busy())):
        tick = history.read_tick(tmp_path / "ticks.jsonl", number)
        assert tick.seen == seen
        assert safety.veto(decide(CONFIG, tick.seen, tick.past), CONFIG, tick.seen, tick.past) == tick.plan


def test_equal_ticks_are_kept_seldom(tmp_path: Path) -> None:
    record = History.open(tmp_path)
    for second in range(0, 130, 5):
        seen = busy(now=replace(NOW, mono_s=NOW.mono_s + second))
        record.tick(Tick(seen, past_of(seen), plan_of(seen)))
    assert len((tmp_path / "ticks.jsonl").read_bytes().splitlines()) == 3


def test_a_file_of_ticks_that_is_none_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello\n")
    for path in (tmp_path / "x", tmp_path / "none"):
        with pytest.raises(DataError, match="cannot read a tick"):
            history.read_tick(path)


def test_every_noun_can_be_recorded() -> None:
    for noun in (HELD, busy(), past_of(HELD), plan_of(HELD)):
        assert history.parse(history.line(noun)) == noun
    assert {f.name for f in fields(m.Observation)} <= set(json.loads(history.line(HELD)))
