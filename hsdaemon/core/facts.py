"""Questions about an observation that several rungs ask."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TypeVar

from hsdaemon.config import Config
from hsdaemon.core import model as m
from hsdaemon.core import reasons

SIGHTING_S = 2.0  # two looks at least this far apart, before anything is done to a holder
LOOP_S = 30.0  # a unit that is up at every look, each time as another run, is one that crashes and is started again
KILLS = 2  # SIGKILLs at one target; more change nothing
KILL_WAIT_S = 15.0
T = TypeVar("T")


def plan(rung: str, code: str, *actions: m.Action, look_s: float = 5.0, **said: object) -> m.Plan:
    """A plan with the catalogue's sentence."""
    return m.Plan(rung, code, reasons.say(code, **said), actions, look_s)


def known(value: T | m.Unreadable) -> T | None:
    """The fact, or None when it could not be had."""
    return None if isinstance(value, m.Unreadable) else value


def engine_up(seen: m.Observation) -> bool:
    """Our engine runs or loads; False also when that cannot be told."""
    engine = known(seen.engine)
    return engine is not None and engine.unit.up


def wanted(config: Config, gpus: tuple[m.Gpu, ...]) -> tuple[m.Gpu, ...]:
    """The GPUs of the config that are there."""
    if config.gpus.uuids:
        return tuple(g for g in gpus if g.uuid in config.gpus.uuids)
    return tuple(sorted(gpus, key=lambda g: g.index)[: config.gpu_count])


def ours(seen: m.Observation, holder: m.Holder) -> bool:
    """A process of our own units."""
    engine = known(seen.engine)
    return holder.unit in m.OUR_UNITS or (engine is not None and holder.pid in engine.unit.pids)


def unit_of(seen: m.Observation, holder: m.Holder) -> m.Unit | None:
    """The unit that systemd knows as the holder's; None for scopes, containers, unknown names and no unit."""
    units = known(seen.units) or ()
    real = (u for u in units if u.name == holder.unit and u.load != "not-found" and u.name.endswith(".service"))
    return next(real, None)


def how_unit(config: Config, name: str) -> str:
    """What the policy allows with a unit: "", report, stop, disable. Never anything with our own."""
    if name in m.OUR_UNITS or not name.endswith(".service"):
        return ""
    return next((e.how for e in config.evict.units if fnmatchcase(name, e.pattern)), "")


def how_process(config: Config, holder: m.Holder) -> str:
    """What the policy allows with a process outside units: "", report, stop."""
    if holder.container or holder.kind in ("invisible", "container") or not holder.exe:
        return ""
    return next((e.how for e in config.evict.processes if fnmatchcase(holder.exe, e.executable)), "")


def who(holder: m.Holder) -> str:
    """A holder, in an operator's words."""
    if holder.kind == "invisible":
        return f"pid {holder.pid} of another namespace, or none at all"
    name = holder.unit or holder.exe or "process"
    place = f" in container {holder.container[:12]}" if holder.container else ""
    return f"{name} (pid {holder.pid}, {holder.kind}{place})"


def shown(gpus: tuple[m.Gpu, ...], uuids: tuple[str, ...] | None = None) -> str:
    """Indexes of GPUs: "0, 5"."""
    return ", ".join(str(g.index) for g in gpus if uuids is None or g.uuid in uuids) or "?"


def first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no cause given"
