"""The loop over a simulated host and a real record."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeNotifier, ports
from scenes import acted, crashes
from structlog.testing import capture_logs
from world import CONFIG, VLLM, World

from hsdaemon import loop
from hsdaemon.core import budget
from hsdaemon.core import model as m
from hsdaemon.errors import DiskFull
from hsdaemon.history import History, Tick
from hsdaemon.host.clock import HostClock
from hsdaemon.machine.ports import Ports


def until(world: World, hands: Ports, record: History, reason: str, most: int = 400) -> Tick:
    for _ in range(most):
        tick = loop.tick(hands, world.config, record)
        if tick.plan.reason == reason:
            return tick
        world.step(tick.plan.look_again_s)
    raise AssertionError(f"{reason} was not reached: {tick.plan.sentence}")


def test_from_boot_to_done_with_a_real_record(tmp_path: Path) -> None:
    world = World(1)
    world.fault("vllm")
    hands, record = ports(world), History.open(tmp_path)
    until(world, hands, record, "extracting")
    record = History.open(tmp_path)  # the supervisor is restarted: it adopts
    tick = until(world, hands, record, "extracting", most=1)
    assert tick.plan.actions == ()
    until(world, hands, record, "done")
    assert len(world.settled) == world.total
    assert not world.violations
    assert world.services[VLLM].active == "active", "given back as it was"
    assert world.services[VLLM].file_state == "enabled"


def test_intent_is_recorded_before_the_act(tmp_path: Path) -> None:
    world = World(1)
    world.fault("vllm")
    hands, record = ports(world), History.open(tmp_path)
    order: list[str] = []
    lease, append = hands.units.lease, record.append

    def spy_lease(name: str, file_state: str, was_up: bool) -> m.Outcome:
        order.append("act")
        return lease(name, file_state, was_up)

    def spy_append(event: budget.Event) -> None:
        if isinstance(getattr(event, "action", None), m.LeaseUnit):
            order.append(type(event).__name__)
        append(event)

    hands.units.lease, record.append = spy_lease, spy_append  # type: ignore[method-assign]
    until(world, hands, record, "evicting")
    assert order == ["Acted", "act", "Ended"]


def test_what_cannot_be_recorded_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1)
    world.fault("vllm")
    hands, record = ports(world), History.open(tmp_path)

    def full(event: budget.Event) -> None:
        raise DiskFull("cannot write: no space left; free some")

    monkeypatch.setattr(record, "append", full)
    tick = until(world, hands, record, "history-unwritable")
    assert "no space left" in tick.plan.sentence
    assert world.services[VLLM].active == "active"
    assert not world.services[VLLM].leased
    monkeypatch.undo()
    until(world, hands, record, "evicting")


def test_an_act_that_fails_ends_the_turn_and_is_said(tmp_path: Path) -> None:
    world = World(1)
    world.fault("vllm")
    hands, record = ports(world), History.open(tmp_path)
    hands.units.disable = lambda name: m.Outcome("failed", "dbus timed out")  # type: ignore[method-assign]
    tick = until(world, hands, record, "evicting")
    assert "DisableUnit: failed dbus timed out" in tick.plan.sentence
    assert world.services[VLLM].active == "active", "the stop after it was not tried"


def test_what_an_act_could_not_do_is_said_although_it_is_done(tmp_path: Path) -> None:
    world = World(1)
    world.fault("vllm")
    hands, record = ports(world), History.open(tmp_path)
    given = hands.units.release
    masked = "it is masked by now and cannot be started"
    hands.units.release = lambda name: replace(given(name), cause=masked)  # type: ignore[method-assign]
    tick = until(world, hands, record, "releasing")
    assert tick.plan.sentence.endswith(f"ReleaseUnits: done {VLLM}: {masked}")
    assert (
        budget.Ended(tick.seen.now, m.ReleaseUnits((VLLM,)), m.Outcome("done", f"{VLLM}: {masked}")) in record.events()
    )
    until(world, hands, record, "done")


def test_sy_09_only_a_finished_turn_feeds_the_watchdog(tmp_path: Path) -> None:
    world = World(1)
    hands, record = ports(world), History.open(tmp_path)
    notifier = hands.notifier
    assert isinstance(notifier, FakeNotifier)
    turns: list[Tick] = []

    def breaks() -> tuple[m.Gpu, ...] | m.Unreadable:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        loop.run(replace(hands, gpus=_Broken(hands, breaks)), lambda: CONFIG, record, lambda: False)  # type: ignore[arg-type]
    assert notifier.calls == []
    loop.run(hands, lambda: CONFIG, record, lambda: len(turns) >= 3, [turns.append])
    assert notifier.calls == ["ready", "watchdog", "watchdog", "watchdog", "stopping"]
    assert len(notifier.said) == 3


class _Broken:
    def __init__(self, hands: Ports, read: object) -> None:
        self.read, self.xids = read, hands.gpus.xids


def test_a_reloaded_config_counts_from_the_next_turn(tmp_path: Path) -> None:
    world = World(1)
    world.fault("stranger")
    hands, record = ports(world), History.open(tmp_path)
    asked: list[str] = []
    loop.run(hands, lambda: asked.append("turn") or CONFIG, record, lambda: len(asked) >= 8)  # type: ignore[func-returns-value]
    assert len(asked) >= 8


def test_a_supervisor_that_does_not_stop_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    world = World(3)
    record = History.open(tmp_path)
    for event in [acted(m.StartEngine("", 1, "w")), *crashes(1)]:
        record.append(event)
    until(world, ports(world), record, "engine-start")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", ["exists", "stat"])
def test_a_disk_that_fails_under_the_record_ends_the_turn_and_not_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    world = World(1)
    hands, record = ports(world), History.open(tmp_path)

    def fails(*_: object, **__: object) -> object:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fails)
        tick = until(world, hands, record, "history-unwritable")
        assert "Input/output error" in tick.plan.sentence
    until(world, hands, record, "extracting")


def test_a_note_whose_age_grows_is_said_once(tmp_path: Path) -> None:
    world, turns = World(1), [0]
    hands, record = ports(world), History.open(tmp_path)
    until(world, hands, record, "extracting")

    def hangs() -> m.Unreadable:
        turns[0] += 1
        return m.Unreadable("nvml", f"no answer; it last answered {turns[0]} s ago with 8 GPUs", "hang")

    blind = replace(hands, gpus=_Broken(hands, hangs))  # type: ignore[arg-type]
    with capture_logs() as told:
        loop.run(blind, lambda: CONFIG, record, lambda: turns[0] >= 4)
    notes = [entry["event"] for entry in told if "cannot be read" in entry["event"]]
    assert notes == [
        "GPUs cannot be read (no answer; it last answered 1 s ago with 8 GPUs); the running engine is left alone"
    ]


def test_a_signal_that_came_before_the_wait_is_not_slept_over() -> None:
    clock = HostClock()
    with clock.listening(signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), signal.SIGTERM)
        assert not clock.taken(signal.SIGHUP), "as the configuration asks, between the turn and its wait"
        before = time.monotonic()
        clock.wait(30)
        assert clock.asked == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGHUP)
        assert clock.taken(signal.SIGHUP), "in the middle of a turn that has looked at half of the world"
        clock.wait(30)
        assert time.monotonic() - before < 15
        before = time.monotonic()
        clock.wait(0.2)
        assert time.monotonic() - before >= 0.2, "each of them once"
