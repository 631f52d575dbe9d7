"""Looking and acting through the ports: every action reaches one port, every failure stays a value."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from fakes import ports
from world import CONFIG, VLLM, World, tuned

from hsdaemon.act import act
from hsdaemon.core import model as m
from hsdaemon.observe import observe

DONE, NO = m.Outcome("done"), m.Outcome("failed", "why")
CASES: list[tuple[m.Action, list[tuple[Any, ...]]]] = [
    (m.LeaseUnit(VLLM, "enabled", True), [("units.lease", VLLM, "enabled", True)]),
    (m.DisableUnit(VLLM), [("units.disable", VLLM)]),
    (m.StopUnit(VLLM, "v1"), [("units.stop", VLLM, "v1")]),
    (m.KillUnit(VLLM, "v1", (9, 10)), [("units.kill", VLLM, "v1", (9, 10))]),
    (m.KillProcess(7, 70, "/x", "KILL"), [("procs.signal", 7, 70, "/x", "KILL")]),
    (m.ReleaseUnits(("a", "b")), [("units.release", "a"), ("units.release", "b")]),
    (m.ApplyPatch("0.5.23"), [("engine.apply_patch", "0.5.23")]),
    (m.SweepStale(("/l",)), [("engine.sweep", ("/l",))]),
    (m.SweepSpool(3), [("spool.sweep",)]),
    (m.StartScan("s0"), [("units.start", m.SCAN_UNIT, "s0")]),
    (m.StartEngine("e0", 30001, "f"), [("engine.prepare", 30001, "f"), ("units.start", m.ENGINE_UNIT, "e0")]),
    (m.StopEngine("e1", "done"), [("units.stop", m.ENGINE_UNIT, "e1")]),
    (m.RunProof("e1", "p0"), [("proof.prepare", "e1"), ("units.start", m.PROOF_UNIT, "p0")]),
    (m.StopProof("p1"), [("units.stop", m.PROOF_UNIT, "p1")]),
    (m.StartWorker("e1", "w0"), [("units.start", m.WORKER_UNIT, "w0")]),
    (m.StopWorker("w1", "done"), [("units.stop", m.WORKER_UNIT, "w1")]),
]


class Spy:
    """Ports that note each call and answer as told."""

    def __init__(self, answers: dict[str, m.Outcome] | None = None, path: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answers, self._path = answers or {}, path

    def __getattr__(self, name: str) -> Any:
        if not self._path:
            inner = Spy(self._answers, name)
            inner.calls = self.calls
            return inner

        def call(*args: Any) -> m.Outcome:
            self.calls.append((f"{self._path}.{name}", *args))
            return self._answers.get(f"{self._path}.{name}", DONE)

        return call


@pytest.mark.parametrize(("action", "calls"), CASES, ids=[type(c[0]).__name__ for c in CASES])
def test_each_action_reaches_its_port(action: m.Action, calls: list[tuple[Any, ...]]) -> None:
    spy = Spy()
    assert act(spy, action) == DONE  # type: ignore[arg-type]
    assert spy.calls == calls


def test_no_action_is_forgotten() -> None:
    assert {type(action) for action, _ in CASES} == set(get_args(m.Action))
    assert set(m.DISRUPTIVE) < set(get_args(m.Action))


@pytest.mark.parametrize("action", [m.StartEngine("", 1, ""), m.RunProof("", "")])
def test_what_cannot_be_prepared_is_not_started(action: m.Action) -> None:
    spy = Spy({"engine.prepare": NO, "proof.prepare": NO})
    assert act(spy, action) == NO  # type: ignore[arg-type]
    assert not [call for call in spy.calls if call[0] == "units.start"]


def test_one_unit_that_cannot_be_given_back_keeps_no_other() -> None:
    spy = Spy({"units.release": NO})
    end = act(spy, m.ReleaseUnits(("a", "b")))  # type: ignore[arg-type]
    assert end == m.Outcome("failed", "a: why; b: why")
    assert len(spy.calls) == 2


@pytest.mark.parametrize("fault", ["hang", "no-library"])
def test_an_unreadable_port_is_a_value_in_its_place(fault: str) -> None:
    world = World(1)
    world.nvml, world.volume, world.blind_manifest, world.units_until = fault, "hang", "busy", 1e9
    seen = observe(ports(world), CONFIG)
    broken = {f.name for f in fields(seen) if isinstance(getattr(seen, f.name), m.Unreadable)}
    assert broken == {"gpus", "holders", "units", "volume", "engine", "proof_unit", "scan_unit", "worker", "progress"}


def test_units_that_do_not_exist_are_told_from_units_that_cannot_be_read() -> None:
    world = World(1)
    del world.services[m.WORKER_UNIT]
    hands = ports(world)
    hands.units.read = lambda names, patterns=(): ()  # type: ignore[method-assign]
    seen = observe(hands, CONFIG)
    assert isinstance(seen.worker, m.Worker)
    assert seen.worker.unit.load == "not-found"


def test_ours_are_not_among_the_others() -> None:
    world = World(1)
    world.fault("vllm")
    seen = observe(ports(world), CONFIG)
    assert not isinstance(seen.units, m.Unreadable)
    assert [u.name for u in seen.units] == [VLLM]


def test_an_engine_on_the_cpu_asks_no_gpu() -> None:
    hands = replace(ports(World(1)), gpus=None, procs=None)  # type: ignore[arg-type]
    seen = observe(hands, tuned(CONFIG, engine={"device": "cpu"}))
    assert (seen.gpus, seen.holders, seen.xids) == ((), (), ())
