"""A file of chats to a data set: one pass, one row in memory, the result under its name only when it is whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from hsdaemon.data.chat import BadChat, Template, tokens
from hsdaemon.data.jsonl import MAX_LINE, next_line
from hsdaemon.data.parquet import Table, Unreadable
from hsdaemon.data.tokenizer import Tokenizer
from hsdaemon.errors import DataError
from hsdaemon.machine import disk

COLUMNS = ("messages", "conversations", "tools", "id")


@dataclasses.dataclass(slots=True)
class Counts:
    """What became of the rows. trained: tokens that the assistant says."""

    rows: int = 0
    written: int = 0
    skipped: int = 0
    tokens: int = 0
    trained: int = 0


def prepare(
    source: Path,
    target: Path,
    template: Template,
    tokenizer: Tokenizer,
    on_bad_row: Literal["skip", "refuse"],
    say: Callable[[str], None],
) -> Counts:
    """Write `target` (JSON lines with id, input_ids, loss_mask) from the chats in `source`. say: takes a line per row
    skipped. Raises DataError, DiskFull, BadVolume; then `target` is as it was."""
    counts = Counts()
    draft = target.with_name(f".{target.name}.part")
    try:
        with draft.open("wb") as file:
            for line in _lines(source, template, tokenizer, on_bad_row, say, counts):
                file.write(line)
            if not counts.written:
                raise DataError(f"cannot prepare {source}: none of its {counts.rows} rows can be used; see above")
            file.flush()
            disk.sync(file.fileno())  # a crash before the rename leaves a hidden draft, which the next run replaces
        draft.replace(target)
        disk.sync_folder(target.parent)
    except OSError as error:
        raise disk.explain(error, target.parent) from error
    finally:
        draft.unlink(missing_ok=True)
    return counts


def _lines(
    source: Path,
    template: Template,
    tokenizer: Tokenizer,
    on_bad_row: str,
    say: Callable[[str], None],
    counts: Counts,
) -> Iterator[bytes]:
    for number, row in enumerate(_rows(source)):
        counts.rows += 1
        try:
            if isinstance(row, BadChat):
                raise row
            sample = tokens(row, template, tokenizer)
            name = _name(row)
        except BadChat as bad:
            if on_bad_row == "refuse":
                raise DataError(f"cannot prepare {source}: row {number}: {bad}; mend it, or skip such rows") from None
            counts.skipped += 1
            say(f"row {number} skipped: {bad}")
            continue
        counts.written += 1
        counts.tokens += len(sample.ids)
        counts.trained += sum(sample.mask)
        fields = {**name, "input_ids": sample.ids, "loss_mask": sample.mask}
        yield json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _name(row: dict[str, Any]) -> dict[str, str]:
    name = row.get("id")
    if name is None:
        return {}
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise BadChat("id", f"it is {type(name).__name__}")
    return {"id": str(name)}


def _rows(source: Path) -> Iterator[dict[str, Any] | BadChat]:
    """Every row, counted from 0; blank lines are no rows. Raises DataError when the file as a whole is not readable."""
    if source.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"cannot prepare {source}: the name tells the kind; name a .jsonl or .parquet")
    try:
        yield from _parquet(source) if source.suffix == ".parquet" else _jsonl(source)
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror}; see to the file") from None


def _jsonl(source: Path) -> Iterator[dict[str, Any] | BadChat]:
    with source.open("rb") as file:
        while line := next_line(file):
            if len(line) > MAX_LINE:
                yield BadChat("json", f"the line has more than {MAX_LINE} bytes")
            elif not line.isspace():
                yield _object(line)


def _object(line: bytes) -> dict[str, Any] | BadChat:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return BadChat("json", f"not UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return BadChat("json", str(error)[:200])
    return row if isinstance(row, dict) else BadChat("json", f"it is {type(row).__name__}, not an object")


def _parquet(source: Path) -> Iterator[dict[str, Any] | BadChat]:
    with contextlib.closing(Table(source, COLUMNS)) as table:
        if not {"messages", "conversations"} & set(table.names):
            has = ", ".join(table.names)
            raise DataError(f"cannot prepare {source}: no column messages or conversations; it has {has}")
        for number in range(table.rows):
            try:
                row: dict[str, Any] | BadChat = table.at(number)
            except Unreadable as error:
                row = BadChat("parquet", str(error))
            yield row


def default_target(source: Path) -> Path:
    """Beside the source: train.jsonl gives train.ids.jsonl."""
    return source.with_name(f"{source.stem}.ids.jsonl")


def writable(target: Path) -> None:
    """Raises DataError when `target` cannot be written, before hours are spent on it."""
    if target.suffix != ".jsonl":
        raise DataError(f"cannot write {target}: the result is JSON lines; name a .jsonl")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise DataError(f"cannot write {target}: {target.parent} is not a folder we may write to; make it")
