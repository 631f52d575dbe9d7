"""The screen of `hs-extract status`: facts as lines. The board comes from a file: its content is not taken on trust."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hsdaemon.core import facts
from hsdaemon.core import model as m
from hsdaemon.work.progress import span

Line = tuple[str, str]
HOLDERS = 16
EVENTS = 5
MARKS = {"met": "+", "here": ">", "open": "·"}


class Event(msgspec.Struct, frozen=True):
    """What happened, and when by the wall clock. text: "" for what goes without saying."""

    wall_s: float
    text: str


class Shown(msgspec.Struct, frozen=True):
    """What is shown of a board. Facts that could not be had are dicts with the key "unreadable"."""

    pid: int
    wall_s: float
    ladder: dict[str, Literal["met", "here", "open"]]
    sentence: str
    severity: str
    todo: str
    notes: list[str]
    gpus: tuple[m.Gpu, ...] | dict[str, Any]
    holders: tuple[m.Holder, ...] | dict[str, Any]
    proof: dict[str, Any] | None
    proved: bool
    events: list[Event]


def table(seen: dict[str, Any]) -> Table:
    """One look of hsdaemon.cli.status.look. Nothing in it is markup: names come from other people's units."""
    grid = Table.grid(padding=(0, 2))
    for name, text in (*_work(seen), *_rooms(seen), *_supervisor(seen["supervisor"])):
        grid.add_row(Text(name, "bold"), Text(text))
    if seen["manifest"] == "ok":
        settled = seen["done"] + seen["failed"] + seen["skipped"]
        grid.add_row("", ProgressBar(total=max(seen["total"], 1), completed=settled, width=60))
    return grid


def _work(seen: dict[str, Any]) -> Iterator[Line]:
    if seen["manifest"] == "none":
        yield "done", "no manifest: nothing was extracted yet, or the volume is not there"
        return
    if seen["manifest"] != "ok":
        yield "done", seen["manifest"]
        return
    of = f"{seen['total']:,}{'' if seen['ingest_complete'] else '+ (still reading the data set)'}"
    share = 100 * seen["done"] / max(seen["total"], 1)
    reasons = ", ".join(f"{n} {code}" for code, n in sorted(seen["reasons"].items()))
    rate, room = seen["rates"]["ten_minutes"], seen["disk"]
    yield "done", f"{seen['done']:,} of {of}, {share:.1f} %, {_size(seen['bytes'])}"
    yield "pending", f"{seen['pending']:,}, in flight {seen['leased']:,}"
    yield "failed", f"{seen['failed']:,}, skipped {seen['skipped']:,}" + (f" ({reasons})" if reasons else "")
    speeds = rate["samples_s"], rate["tokens_s"], rate["bytes_s"] / 1e6
    yield "speed", "{:.2f} samples/s, {:,.0f} tok/s, {:,.1f} MB/s".format(*speeds)
    yield "left", "done" if seen["finished"] else span(seen["eta_s"])
    yield "disk", f"{_size(room['free'])} free, {_size(room['needed'])} needed"


def _rooms(seen: dict[str, Any]) -> Iterator[Line]:
    if "worker" in seen:
        pid = seen["worker"]["pid"]
        yield "worker", "not running" if pid is None else f"pid {pid}"
    yield "engine", _engine(seen["engine"])
    stored = seen.get("identity")
    yield "output", seen["output"] + (f" ({stored['format']}, {stored['dtype']})" if stored else "")


def _engine(engine: dict[str, Any] | None) -> str:
    if engine is None:
        return "not started"
    state = f"pid {engine['pid']}" if engine["alive"] else "gone"
    return f"{state}, SGLang {engine['release']} at {engine['url']}, {engine['ranks_attested']} ranks attested"


def _supervisor(found: dict[str, Any]) -> Iterator[Line]:
    shown = understood(found["board"]) if found["board"] else None
    if shown is None:
        what = "it has not looked yet, or its board is not one of this release" if found["pid"] else "not running"
        yield "supervisor", what if found["pid"] is None else f"pid {found['pid']}: {what}"
    else:
        yield from lines(shown, found["pid"], found["age_s"] + shown.wall_s)


def understood(board: dict[str, Any]) -> Shown | None:
    """None: it is from another release, or not a board."""
    try:
        return msgspec.convert(board, Shown)
    except msgspec.ValidationError:
        return None


def lines(board: Shown, running: int | None, now_s: float) -> Iterator[Line]:
    """Supervisor, ladder, sentence, what a person can do, GPUs and holders, proof, last events. now_s: wall clock."""
    seen = age(now_s - board.wall_s)
    if running is None:
        yield "supervisor", f"not running; what follows is what it saw {seen} ago"
    else:
        yield "supervisor", f"pid {running or board.pid}, looked {seen} ago"
    yield "ladder", " ".join(f"{MARKS[state]}{rung}" for rung, state in board.ladder.items())
    yield "now", board.sentence
    if board.todo:
        yield "to do", board.todo
    yield from (("note", note) for note in board.notes)
    yield from _gpus(board)
    yield "proof", _proof(board)
    for event in [event for event in board.events if event.text][-EVENTS:]:
        yield "event", f"{age(now_s - event.wall_s)} ago: {event.text}"


def _gpus(board: Shown) -> Iterator[Line]:
    if isinstance(board.gpus, dict):
        yield "GPUs", _unreadable(board.gpus)
        return
    for text, alike in itertools.groupby(board.gpus, _gpu):
        indexes = [gpu.index for gpu in alike]
        yield "GPU " + (f"{indexes[0]}-{indexes[-1]}" if len(indexes) > 1 else str(indexes[0])), text
    if isinstance(board.holders, dict):
        yield "held by", _unreadable(board.holders)
        return
    for holder in board.holders[:HOLDERS]:
        whose = " (ours)" if holder.unit in m.OUR_UNITS else ""
        yield "held by", f"{facts.who(holder)} on GPU {facts.shown(board.gpus, holder.gpus)}{whose}"


def _gpu(gpu: m.Gpu) -> str:
    used = "?" if gpu.used_mib is None else f"{gpu.used_mib / 1024:.1f}"
    owes = f", owes a {gpu.recovery}" if gpu.recovery not in ("", "none") else ""
    return f"{gpu.name} {used} of {gpu.total_mib / 1024:.1f} GiB{', lost' if gpu.lost else ''}{owes}"


def _proof(board: Shown) -> str:
    if board.proved:
        return "this start of the engine is proved"
    if board.proof is None:
        return "none yet"
    if "unreadable" in board.proof:
        return _unreadable(board.proof)
    if board.proof.get("ok"):
        return "an earlier start of the engine was proved, not this one"
    return f"failed: {board.proof.get('code')} {board.proof.get('detail')}".rstrip()


def _unreadable(fact: dict[str, Any]) -> str:
    inner = fact.get("unreadable")
    return f"cannot be read: {inner.get('cause') if isinstance(inner, dict) else inner}"


def age(seconds: float) -> str:
    """For people, of a time that lies behind: a stepped clock gives 0 s."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} m"
    return f"{minutes // 60} h {minutes % 60:02d} m" if minutes < 2880 else f"{minutes // 1440} d"


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
