"""The status board: <paths.run>/status.json, one tick as people are shown it, replaced after every tick.

It is there while the supervisor runs and stays when it ends; `age_s` tells how old it is. After a reboot there is none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsdaemon.core import budget, reasons
from hsdaemon.core import model as m
from hsdaemon.core.decide import LADDER
from hsdaemon.errors import HsError
from hsdaemon.history import Tick
from hsdaemon.machine import disk
from hsdaemon.wire import parse_json

NAME = "status.json"
NOT_STARTED = "not-started"  # the reason on the board of a supervisor that cannot begin
WAITING_S = 10.0  # it shows itself every two seconds: an older one is gone
RUNGS = (*(rung.__name__ for rung in LADDER), "done")


class Board:
    """Shows ticks in a file. A full tmpfs costs the file, never the tick."""

    def __init__(self, run: str) -> None:
        self._path = Path(run) / NAME

    def show(self, tick: Tick, events: Sequence[budget.Event] = ()) -> None:
        self._write(facts(tick, events))

    def wait(self, sentence: str) -> None:
        """Of a supervisor that cannot begin and looks at nothing: its sentence alone."""
        self._write(waiting(sentence, time.time()))

    def _write(self, shown: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, HsError):
            disk.replace(self._path, json.dumps(shown).encode(), 0o644)

    def read(self) -> dict[str, Any] | None:
        """The last tick's facts, or None where there are none or where they cannot be understood."""
        try:
            found = parse_json(disk.read_own(self._path))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def waiting(sentence: str, wall_s: float) -> dict[str, Any]:
    """The facts of a supervisor that cannot begin. wall_s: now, by the wall clock."""
    reason = reasons.CATALOGUE[NOT_STARTED]
    return {
        "pid": os.getpid(),
        "wall_s": wall_s,
        "ladder": dict.fromkeys(RUNGS, "open"),
        "rung": "",
        "reason": reason.code,
        "severity": reason.severity,
        "sentence": sentence,
        "todo": reason.help,
        "actions": [],
        "notes": [],
        "gpus": [],
        "holders": [],
        "proof": None,
        "proved": False,
        "events": [],
    }


def facts(tick: Tick, events: Sequence[budget.Event] = ()) -> dict[str, Any]:
    """A tick for people and programs: ladder, plan, and what was seen, in plain JSON values."""
    seen, plan = tick.seen, tick.plan
    reason = reasons.CATALOGUE.get(plan.reason)
    return {
        "pid": os.getpid(),
        "boot": seen.now.boot,
        "mono_s": seen.now.mono_s,
        "wall_s": seen.now.wall_s,
        "ladder": ladder(plan),
        "rung": plan.rung,
        "reason": plan.reason,
        "severity": reason.severity if reason else "wait",
        "sentence": plan.sentence,
        "todo": reason.help if reason and reason.severity == "hold" else "",
        "actions": [type(action).__name__ for action in plan.actions],
        "notes": list(plan.notes),
        "gpus": _plain(seen.gpus),
        "holders": _plain(seen.holders),
        "engine": _plain(seen.engine),
        "proof": _plain(seen.proof),
        "proved": _proved(seen),
        "worker": _plain(seen.worker),
        "progress": _plain(seen.progress),
        "volume": _plain(seen.volume),
        "spool": _plain(seen.spool),
        "leases": [_plain(lease) for lease in tick.past.leases],
        "events": [_event(event) for event in events],
    }


def _proved(seen: m.Observation) -> bool:
    """The last verdict is about this very start of the engine, and good."""
    if not isinstance(seen.proof, m.Proof) or not isinstance(seen.engine, m.Engine):
        return False
    return seen.proof.ok and seen.proof.invocation == seen.engine.unit.invocation


def _event(event: budget.Event) -> dict[str, Any]:
    """An event and its one line for people, "" for the good end of an act."""
    return {"kind": type(event).__name__, "wall_s": event.now.wall_s, "text": _text(event), "event": _plain(event)}


def _text(event: budget.Event) -> str:
    match event:
        case budget.Acted(action=action):
            return f"{type(action).__name__} {getattr(action, 'name', '')}".rstrip()
        case budget.Ended(action=action, outcome=outcome):
            told = outcome.result != "done" or outcome.cause
            return f"{type(action).__name__}: {outcome.result} {outcome.cause}".rstrip() if told else ""
        case budget.Died(unit=unit, cause=cause):
            return f"{unit} ended: {cause}"
        case budget.Reset():
            return "a person cleared budgets and breakers"


def ladder(plan: m.Plan) -> dict[str, str]:
    """Each rung: met, here (where the plan stands), open (not looked at yet)."""
    if plan.rung not in RUNGS:
        return dict.fromkeys(RUNGS, "open")
    here = RUNGS.index(plan.rung)
    finished = plan.reason in ("done", "extracting")
    return {
        name: "met" if at < here or (at == here and finished) else "here" if at == here else "open"
        for at, name in enumerate(RUNGS)
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"unreadable": fields} if isinstance(value, m.Unreadable) else fields
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
