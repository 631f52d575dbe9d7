"""Find out what is wrong before anything starts: configuration, model folder, data set, volume, space.

Reads the whole data set once, row by row, and names every row that cannot be used. Prints the bytes that the samples
will need against the bytes that are free, and how long it takes at a rate. Changes nothing.

  hs-extract check
  hs-extract check --rate 2500            tokens/s, as `status` shows it for a similar job
  hs-extract check --allow-short-disk     too little space is said, and is no reason to refuse
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import apsw

from hsdaemon.cli.settings import add_config, load
from hsdaemon.config import Config
from hsdaemon.data import room, schema, spool
from hsdaemon.data.backup import manifest_folder, manifest_path
from hsdaemon.data.dataset import DataSet, open_dataset
from hsdaemon.data.formats import norm_refusal
from hsdaemon.data.identity import context_tokens, row_limits
from hsdaemon.data.sample import BadRow
from hsdaemon.data.sqlite import open_reader
from hsdaemon.data.volume import file_system, read_marker, require_local, volume_root
from hsdaemon.errors import EXIT_OK, ConfigError, DataError, HsError, StoreError
from hsdaemon.machine import disk
from hsdaemon.machine.checkpoint import ModelFacts, physical_layers, read_model
from hsdaemon.work.progress import span

SHOWN = 20  # bad rows that are printed; all are counted
EXITS = {1: "something is wrong: each line says what and what to do"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--rate", type=float, metavar="TOK/S", help="tokens per second, to tell the time it takes")
    parser.add_argument(
        "--allow-short-disk", action="store_true", help="a set that does not fit the disk is no problem"
    )


@dataclasses.dataclass(slots=True)
class Totals:
    """What a pass over the data set counted. spooled: rows whose dump is larger than the whole spool."""

    rows: int = 0
    good: int = 0
    tokens: int = 0
    longest: int = 0
    bad: Counter[str] = dataclasses.field(default_factory=Counter)
    refused: int = 0
    spooled: list[int] = dataclasses.field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    config = load(args)
    schema.require_sqlite(apsw.sqlite_lib_version())
    print(f"sqlite: {apsw.sqlite_lib_version()}")
    failed = 0
    facts = read_model(config.model.path)
    for look in (_model, _volume, _manifest):
        failed += _say(look, config, facts)
    dataset = open_dataset(config.data, row_limits(config, facts))
    totals = _read(config, facts, dataset)
    failed += _rows(config, totals)
    failed += _spool(config, facts, totals)
    failed += _space(config, facts, totals, allowed=args.allow_short_disk or config.output.allow_short_disk)
    if args.rate:
        print(f"time: {span(totals.tokens / args.rate)} at {args.rate:,.0f} tok/s")
    print(
        f"check: rows={totals.rows} usable={totals.good} bad={sum(totals.bad.values())} tokens={totals.tokens} "
        f"longest={totals.longest} problems={failed}"
    )
    return 1 if failed else EXIT_OK


def _say(look: Callable[[Config, ModelFacts], str], config: Config, facts: ModelFacts) -> int:
    """Print one line; gives 1 when it is a problem."""
    try:
        print(look(config, facts))
    except HsError as error:
        print(error)
        return 1
    return 0


def _model(config: Config, facts: ModelFacts) -> str:
    layers = physical_layers(config.model.layers, facts)
    refusal = norm_refusal(config.output.format, config.model.norm)
    if refusal:
        raise ConfigError(f"cannot use model.norm = {config.model.norm!r}: {refusal}; change it or output.format")
    context = context_tokens(config, facts)
    return f"model: {facts.kind}, {facts.layers} layers, width {facts.hidden}, context {context}, aux layers {layers}"


def _volume(config: Config, _facts: ModelFacts) -> str:
    root = volume_root(config.output)
    uuid = read_marker(root)
    if config.output.volume_is_mount and not root.is_mount():
        raise StoreError(f"cannot use {root}: nothing is mounted there; mount the volume")
    folder = _existing(manifest_folder(config.output))
    require_local(folder, file_system(folder), allow_fuse=config.output.allow_fuse)
    problem = disk.probe_write(_existing(Path(config.output.path)))
    if problem is not None:
        raise disk.explain(problem, Path(config.output.path))
    return f"volume: {root} is {uuid}"


def _manifest(config: Config, _facts: ModelFacts) -> str:
    if not manifest_path(config.output).exists():
        return "manifest: none yet"
    manifest = open_reader(manifest_path(config.output))
    try:
        problem = manifest.integrity()
        counts = manifest.counts()
    finally:
        manifest.close()
    if problem:
        raise StoreError(f"cannot trust {manifest_path(config.output)}: {problem}; the worker's start rebuilds it")
    return f"manifest: {counts.done} of {counts.total} rows done"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _read(config: Config, facts: ModelFacts, dataset: DataSet) -> Totals:
    totals = Totals()
    most = room.largest_in_spool(config, facts)
    names: dict[int, int] = {}
    for entry in dataset.rows():
        totals.rows += 1
        judged = entry if isinstance(entry, BadRow) else _twice(entry.row, entry.name, names) or entry
        if isinstance(judged, BadRow):
            _bad(config, judged, totals)
            continue
        totals.good += 1
        totals.tokens += judged.tokens
        totals.longest = max(totals.longest, judged.tokens)
        if judged.tokens > most:
            totals.spooled.append(judged.row)
    return totals


def _twice(row: int, name: str, names: dict[int, int]) -> BadRow | None:
    """The row as a bad one when its id came before; ids are kept as 8-byte hashes."""
    if name == f"data_{row}":
        return None
    first = names.setdefault(hash(name), row)
    return None if first == row else BadRow(row, "name-twice", f"row {first} has the id {name!r} too")


def _bad(config: Config, row: BadRow, totals: Totals) -> None:
    policy = config.data.on_long_row if row.code == "too-long" else config.data.on_bad_row
    totals.bad[row.code] += 1
    totals.refused += policy == "refuse"
    if sum(totals.bad.values()) <= SHOWN:
        print(f"{row} ({policy})")


def _rows(config: Config, totals: Totals) -> int:
    """Print what is wrong with the rows; gives the number of problems."""
    if totals.bad:
        print("bad rows: " + ", ".join(f"{n} {code}" for code, n in sorted(totals.bad.items())))
    problems = 0
    if totals.rows == 0:
        problems += 1
        print(f"cannot use {config.data.path}: it has no rows; write it again")
    if totals.refused:
        problems += 1
        print(DataError(f"cannot use {totals.refused} rows: see above; mend them, or set data.on_bad_row to skip"))
    if totals.spooled:
        problems += 1
        shown = ", ".join(map(str, totals.spooled[:10]))
        print(
            f"cannot take {len(totals.spooled)} rows ({shown}): each one's dump is larger than spool.budget_mib = "
            f"{config.spool.budget_mib}; raise it"
        )
    return problems


def _spool(config: Config, facts: ModelFacts, totals: Totals) -> int:
    """Print what its tmpfs holds at the most against the longest sample that may be sent; gives 1 when it must grow."""
    found = os.statvfs(_existing(Path(config.spool.path)))
    size, budget = found.f_blocks * found.f_frsize, config.spool.budget_mib << 20
    holds = spool.capacity(budget, size, size, spool.memory_limit())
    longest = min(totals.longest, room.largest_in_spool(config, facts))
    needed = room.layout(config, facts, longest).total if longest else 0
    print(f"spool: {holds >> 20} MiB for dumps in {config.spool.path}, the longest sample needs {(needed >> 20) + 1}")
    if needed <= holds:
        return 0
    print(
        f"cannot hold the longest sample in {config.spool.path}: its tmpfs is too small, or memory.max is; enlarge it "
        "(mount -o remount,size=..., docker --shm-size), or set spool.path to another one"
    )
    return 1


def _space(config: Config, facts: ModelFacts, totals: Totals, *, allowed: bool) -> int:
    """Print bytes needed and free; gives 1 when it does not fit and that is not allowed."""
    done_rows = done_tokens = 0
    if manifest_path(config.output).exists():
        manifest = open_reader(manifest_path(config.output))
        counts = manifest.counts()
        manifest.close()
        done_rows, done_tokens = counts.done, counts.tokens
    folder = _existing(Path(config.output.path))
    rows, tokens = max(0, totals.good - done_rows), max(0, totals.tokens - done_tokens)
    found = room.room(config, facts, rows, tokens, disk.free_bytes(folder))
    print(f"disk: {found.needed:,} bytes needed, {found.free:,} free below {folder}, {found.reserve:,} kept free")
    if not found.short:
        return 0
    print(
        f"cannot fit: {found.short:,} bytes are missing; free them, take another volume, or set "
        "output.allow_short_disk = true (the work then pauses when the disk is full)"
    )
    return 0 if allowed else 1
