"""What was seen and done, in this boot and before.

    <state>/history.jsonl   intents and ends, one a line, each synced before the act: survives reboots and power cuts
    <state>/ticks.jsonl     what was seen, known and planned, when it changed: a post-mortem, and input of `plan --from`
    <state>/reset           made by a human's `hs-extract reset`, taken by the next tick

A crash between intent and act leaves an intent without an end: the next tick looks at the world and decides anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from hsdaemon.config import Config
from hsdaemon.core import budget
from hsdaemon.core import model as m
from hsdaemon.core.budget import Past
from hsdaemon.errors import DataError, HsError, StoreError
from hsdaemon.machine import disk
from hsdaemon.wire import parse_json

MOST_BYTES = 1 << 20  # then the events are replaced by the past they fold to
TICK_BYTES = 8 << 20  # then the older half is dropped
EVENT_BYTES = 64 << 10  # more than the newest twenty events
TICK_EVERY_S = 60.0  # an unchanged plan is written this seldom
log = structlog.get_logger()

NOUNS: dict[str, type] = {
    kind.__name__: kind
    for module in (m, budget)
    for kind in vars(module).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}


def encode(value: Any) -> Any:
    """A noun as plain JSON values; its kind is under "_"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"_": type(value).__name__, **fields}
    return [encode(v) for v in value] if isinstance(value, tuple | list) else value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a decoded value is what the field of a noun says: no fold and no decision checks that again."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in of)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        each = of[:1] * len(value) if of[-1] is ... else of
        return len(each) == len(value) and all(map(_fits, value, each))
    if origin is typing.Literal:
        return value in of
    if hint is int:
        return type(value) is int and abs(value) < 1 << 63
    return type(value) is float or _fits(value, int) if hint is float else isinstance(value, hint)


def decode(value: Any) -> Any:
    """The noun back. Fields that a newer program wrote are dropped; raises ValueError for anything else unknown."""
    if isinstance(value, list):
        return tuple(decode(v) for v in value)
    if not isinstance(value, dict):
        return value
    kind = NOUNS.get(str(value.get("_")))
    if kind is None:
        raise ValueError(f"cannot read history: no noun {value.get('_')!r}")
    hints = _hints(kind)
    fields = {k: decode(v) for k, v in value.items() if k in hints}
    for name, found in fields.items():
        if not _fits(found, hints[name]):
            raise ValueError(f"cannot read history: {kind.__name__}.{name} is {found!r}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"cannot read history: {error}") from None


def line(value: Any) -> bytes:
    return json.dumps(encode(value), separators=(",", ":")).encode()


def parse(raw: bytes) -> Any:
    """Raises ValueError for a torn or foreign line."""
    try:
        return decode(parse_json(raw))
    except (RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read history: {error}") from None


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """All that a decision was made from, and the decision."""

    seen: m.Observation
    past: Past
    plan: m.Plan


NOUNS["Tick"] = Tick


class History:
    """The record, and the past it folds to. One writer: the supervisor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.past = Past()
        self._events, self._ticks, self._reset = (folder / n for n in ("history.jsonl", "ticks.jsonl", "reset"))
        self._written: tuple[object, float] = ((), -TICK_EVERY_S)

    @classmethod
    def open(cls, folder: Path) -> History:
        """Make the folder and fold what is there. Raises StoreError when the folder cannot be."""
        with _said(folder):
            disk.make_folder(folder)
        return cls.peek(folder)

    @classmethod
    def peek(cls, folder: Path) -> History:
        """Fold what is there and write nothing. Unreadable lines are skipped, said once. Raises StoreError."""
        self = cls(folder)
        bad = 0
        for raw in disk.read_lines(self._events):
            try:
                self._fold(parse(raw))
            except ValueError:
                bad += 1
        if bad:
            log.warning("some lines of the history cannot be read and are ignored", lines=bad, file=str(self._events))
        return self

    def _fold(self, noun: object) -> None:
        if isinstance(noun, Past):
            self.past = noun
        elif isinstance(noun, budget.Event):
            self.past = budget.fold(self.past, noun)
        else:
            raise ValueError("cannot read history: not an event")

    def append(self, event: budget.Event) -> None:
        """Durable when it returns. Raises DiskFull, StoreError: then the event did not happen."""
        past = budget.fold(self.past, event)
        with _said(self.folder):
            disk.append(self._events, line(event))
        self.past = past
        self._shorten()

    def _shorten(self) -> None:
        """Replace a long record by the past it folds to. A crash leaves the old file or the new one, which fold to the
        same past; where it cannot be done, the next event tries again."""
        try:
            if self._events.stat().st_size > MOST_BYTES:
                disk.replace(self._events, line(budget.durable(self.past)) + b"\n")
        except (OSError, HsError) as error:
            log.warning("the record cannot be shortened", cause=str(error))

    def look(self, seen: m.Observation, config: Config) -> None:
        """Take a human's reset and record deaths that this look shows first, then fold the look itself. Raises as
        append does."""
        with _said(self.folder):
            if self._reset.exists():
                self.append(budget.Reset(seen.now))
                self._reset.unlink(missing_ok=True)  # a crash before it resets once more
        self.past = budget.look(self.past, seen, config)
        for death in budget.news(self.past, seen):
            self.append(death)

    def intend(self, seen: m.Observation, action: m.Action) -> None:
        """Written and synced before the act."""
        self.append(budget.Acted(seen.now, action, budget.settled_of(seen)))

    def ended(self, seen: m.Observation, action: m.Action, outcome: m.Outcome) -> None:
        self.append(budget.Ended(seen.now, action, outcome))

    def tick(self, tick: Tick) -> None:
        """Keep a tick when its plan is a new one, or seldom. Not synced; failing costs a post-mortem only."""
        key = (tick.plan.rung, tick.plan.reason, tick.plan.actions)
        now_s = tick.seen.now.mono_s
        if key == self._written[0] and now_s - self._written[1] < TICK_EVERY_S:
            return
        self._written = (key, now_s)
        try:
            if self._ticks.exists() and self._ticks.stat().st_size > TICK_BYTES:
                self._ticks.replace(self._ticks.with_suffix(".1.jsonl"))
            with open(self._ticks, "ab", opener=_no_link) as file:
                file.write(line(tick) + b"\n")
        except OSError as error:
            log.warning("the tick cannot be kept", cause=str(error))

    def events(self, most: int = 20) -> list[budget.Event]:
        """The newest events, oldest first."""
        found: list[budget.Event] = []
        try:
            newest = disk.read_lines(self._events, EVENT_BYTES)[-most:]
        except HsError:
            return []  # people miss some lines; the work goes on
        for raw in newest:
            try:
                noun = parse(raw)
            except ValueError:
                continue
            if isinstance(noun, budget.Event):
                found.append(noun)
        return found


def _no_link(path: str, flags: int) -> int:
    """Others may write into the folder."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextlib.contextmanager
def _said(folder: Path) -> Iterator[None]:
    """What the disk says, as a StoreError: the turn ends, the next one tries again."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot keep a record in {folder}: {error.strerror}; see to paths.state") from error


def ask_reset(folder: Path) -> None:
    """A human's `hs-extract reset`: budgets and breakers are cleared at the next tick. Raises StoreError, DiskFull."""
    disk.replace(folder / "reset", b"reset\n")


def read_tick(path: Path, number: int = -1) -> Tick:
    """One tick of a ticks file, the last by default. Raises DataError."""
    try:
        found = parse(disk.read_lines(path)[number])
    except (ValueError, IndexError, HsError) as error:
        raise DataError(f"cannot read a tick from {path}: {error}; name a ticks.jsonl") from error
    if not isinstance(found, Tick):
        raise DataError(f"cannot read a tick from {path}: it is another record; name a ticks.jsonl")
    return found
