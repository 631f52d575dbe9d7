"""What the supervisor would do now, and why: two looks, as before any act, one decision; nothing done or recorded."""

from __future__ import annotations

from pathlib import Path

from hsdaemon.config import Config
from hsdaemon.core import budget, reasons, safety
from hsdaemon.core import model as m
from hsdaemon.core.decide import decide
from hsdaemon.core.facts import SIGHTING_S
from hsdaemon.history import History, Tick
from hsdaemon.host import build
from hsdaemon.host.board import ladder
from hsdaemon.host.clock import HostClock
from hsdaemon.machine.notify import Notify
from hsdaemon.observe import observe


def preview(config: Config, file: str, foreground: bool) -> str:
    """The words of `hs-extract plan`."""
    return words(look_twice(config, file, foreground))


def look_twice(config: Config, file: str, foreground: bool) -> Tick:
    """Two looks as far apart as a sighting needs, and what they lead to."""
    ports = build.ports(lambda: config, file, foreground, HostClock(), Notify({}))
    seen = observe(ports, config)
    past = budget.look(History.peek(Path(config.paths.state)).past, seen, config)
    ports.clock.wait(SIGHTING_S)
    seen = observe(ports, config)
    return decided(config, seen, budget.look(past, seen, config))


def decided(config: Config, seen: m.Observation, past: budget.Past) -> Tick:
    return Tick(seen, past, safety.veto(decide(config, seen, past), config, seen, past))


def words(tick: Tick) -> str:
    """A tick for a person: ladder, sentence, actions with the identity they are bound to, what to do."""
    plan = tick.plan
    reason = reasons.CATALOGUE.get(plan.reason)
    marks = {"met": "+", "here": ">", "open": " "}
    lines = [f"{marks[state]} {rung}" for rung, state in ladder(plan).items()]
    lines += ["", plan.sentence]
    lines += [f"would do: {action}" for action in plan.actions] or ["would do: nothing"]
    lines += [f"note: {note}" for note in plan.notes]
    if reason and reason.severity == "hold":
        lines.append(f"what a person can do: {reason.help}")
    return "\n".join(lines)
