"""What the supervisor would do now, and why: as many looks as an act needs, one decision; nothing done or recorded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hsdaemon.config import Config
from hsdaemon.core import budget, reasons, safety
from hsdaemon.core import model as m
from hsdaemon.core.decide import decide
from hsdaemon.history import History, Tick
from hsdaemon.host import build
from hsdaemon.host.board import ladder
from hsdaemon.host.clock import HostClock
from hsdaemon.machine.notify import Notify
from hsdaemon.observe import observe

LOOK_S = 1.05  # looks less than a second apart count once
NOT_ROOT = (
    "looked at without root: what others' processes have open, the kernel's log and whether the volume takes a write "
    "are not seen"
)


def preview(config: Config, file: str, foreground: bool) -> str:
    """The words of `hs-extract plan`."""
    return words(look_on(config, file, foreground))


def look_on(config: Config, file: str, foreground: bool) -> Tick:
    """Looks as many and as far apart as a sighting and a free GPU need, and what they lead to."""
    root = os.geteuid() == 0
    ports = build.ports(lambda: config, file, foreground, HostClock(), Notify({}), writes=root)
    past = History.peek(Path(config.paths.state)).past
    for left in reversed(range(max(3, config.gpus.clear_polls))):
        seen = observe(ports, config)
        past = budget.look(past, seen, config)
        if left:
            ports.clock.wait(LOOK_S)
    tick = decided(config, seen, past)
    return tick if root else replace(tick, plan=replace(tick.plan, notes=(*tick.plan.notes, NOT_ROOT)))


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
