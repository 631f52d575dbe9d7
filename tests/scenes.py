"""Observations for tables: a host on which all is well, and what the core plans after looking at it for a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from world import CONFIG, VLLM

from hsdaemon.config import Config
from hsdaemon.core import budget, safety
from hsdaemon.core import model as m
from hsdaemon.core.decide import decide

NOW = m.Now(5000.0, 1.7e9, "boot-1")
ALL = ("GPU-0", "GPU-1")
ENGINE = m.Unit(
    m.ENGINE_UNIT, active="active", sub="running", invocation="e1", main_pid=50, pids=(50, 51), since_s=4000
)
WORKER = m.Unit(m.WORKER_UNIT, active="active", sub="running", invocation="w1", main_pid=60, pids=(60,), since_s=4100)
PROOF = m.Unit(m.PROOF_UNIT, invocation="p1", since_s=4090)
PROVED = m.Proof("e1", True)
ENDPOINT = m.Endpoint("launch-1", 50, 7, 30000, "wanted", "0.5.23")
VLLM_UP = m.Unit(VLLM, active="active", invocation="v1", main_pid=9, pids=(9, 10), file_state="enabled", since_s=4900)


def gpus(used: int | None = 5, count: int = 2, **more: Any) -> tuple[m.Gpu, ...]:
    return tuple(m.Gpu(f"GPU-{i}", i, "fake", 96_000, used, **more) for i in range(count))


def holder(pid: int = 9, unit: str = VLLM, **more: Any) -> m.Holder:
    base = m.Holder("compute", pid, pid * 10, ALL, 75_800, unit, f"/system.slice/{unit}", "/opt/vllm/bin/python")
    return replace(base, **more)


def rest(**more: Any) -> m.Observation:
    """After a boot: everything is free and nothing runs yet."""
    base = m.Observation(
        now=NOW,
        volume=m.Volume("ok", "", 500 << 30, 1 << 44, "uuid"),
        gpus=gpus(),
        holders=(),
        units=(),
        engine=m.Engine(m.Unit(m.ENGINE_UNIT, since_s=4000), None, m.Capture("ours", "0.5.23"), "wanted"),
        proof_unit=m.Unit(m.PROOF_UNIT),
        proof=None,
        worker=m.Worker(m.Unit(m.WORKER_UNIT)),
        progress=m.Progress(100, 40, 1, 1, True),
    )
    return replace(base, **more)


def engine(unit: m.Unit = ENGINE, **more: Any) -> m.Engine:
    base = m.Engine(unit, ENDPOINT, m.Capture("ours", "0.5.23"), "wanted", "seen", "ok", 1000, 100.0)
    return replace(base, **more)


def busy(**more: Any) -> m.Observation:
    """Extracting."""
    mine = holder(50, m.ENGINE_UNIT, used_mib=70_000, exe="/usr/bin/python3")
    base = rest(
        gpus=gpus(70_005), holders=(mine,), engine=engine(), proof_unit=PROOF, proof=PROVED, worker=m.Worker(WORKER)
    )
    return replace(base, **more)


def loading(for_s: float = 50.0, **more: Any) -> m.Observation:
    """The engine loads since `for_s` seconds and does not answer yet."""
    unit = replace(ENGINE, since_s=NOW.mono_s - for_s)
    base = replace(busy(proof=None, worker=m.Worker(m.Unit(m.WORKER_UNIT))), engine=young(unit))
    return replace(base, **more)


def young(unit: m.Unit, **more: Any) -> m.Engine:
    return engine(unit, health="refused", attest="none", **more)


def past_of(
    seen: m.Observation, looked_s: float = 8.0, events: Sequence[budget.Event] = (), config: Config = CONFIG
) -> budget.Past:
    """The past after these events and five equal looks, the first one `looked_s` ago."""
    past = budget.Past()
    for event in events:
        past = budget.fold(past, event)
    for part in range(5):
        ago = looked_s * (4 - part) / 4
        past = budget.look(past, replace(seen, now=replace(seen.now, mono_s=seen.now.mono_s - ago)), config)
    return past


def plan_of(
    seen: m.Observation, looked_s: float = 8.0, events: Sequence[budget.Event] = (), config: Config = CONFIG
) -> m.Plan:
    """What is done after that, past the veto."""
    past = past_of(seen, looked_s, events, config)
    return safety.veto(decide(config, seen, past), config, seen, past)


def kinds(plan: m.Plan) -> list[str]:
    return [type(a).__name__ for a in plan.actions]


def acted(action: m.Action, ago_s: float = 100.0, boot: str = NOW.boot, settled: int | None = 42) -> budget.Acted:
    return budget.Acted(m.Now(NOW.mono_s - ago_s, NOW.wall_s - ago_s, boot), action, settled)


def died(cause: str, ago_s: float = 90.0, boot: str = NOW.boot, unit: str = m.ENGINE_UNIT) -> budget.Died:
    return budget.Died(m.Now(NOW.mono_s - ago_s, NOW.wall_s - ago_s, boot), unit, f"i{ago_s}", cause, 42)


def crashes(count: int, cause: str = "signal 11", boot: str = NOW.boot, settled: int = 42) -> list[budget.Event]:
    """So many starts of the engine that ended badly, the last one long ago."""
    events: list[budget.Event] = []
    for i in range(count):
        ago = 3000.0 - 100 * i
        events += [acted(m.StartEngine(f"i{i}", 30000, "wanted"), ago, boot, settled)]
        events += [replace(died(cause, ago - 20, boot), settled=settled)]
    return events
