"""How far the work is: rows done, failed, skipped, pending; speed and time left; engine, worker and disk.

Everything comes from the manifest and the small files of paths.run, so it takes less than a second with a million
samples and writes nothing, also on a full disk. Rates are those of the worker's present run.

  hs-extract status
  hs-extract status --watch
  hs-extract status --json | jq .done
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from hsdaemon.cli.settings import add_config, load
from hsdaemon.config import Config
from hsdaemon.data import lock
from hsdaemon.data.backup import manifest_folder, manifest_path
from hsdaemon.data.manifest import State
from hsdaemon.data.room import stored_bytes
from hsdaemon.data.sqlite import SqliteManifest, open_reader
from hsdaemon.engine import endpoint
from hsdaemon.errors import EXIT_FINDINGS, EXIT_OK, ConfigError
from hsdaemon.machine import disk
from hsdaemon.machine.checkpoint import read_model
from hsdaemon.work.progress import span

WINDOWS = {"minute": 60.0, "ten_minutes": 600.0, "hour": 3600.0}
REFRESH_S = 2.0
EXITS = {1: "there are failed rows: hs-extract errors lists them"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--watch", action="store_true", help="go on, until interrupted; with --json one line each time")


def run(args: argparse.Namespace) -> int:
    config = load(args)
    manifest = open_reader(manifest_path(config.output))
    try:
        if args.watch:
            _watch(config, manifest, as_json=args.json)
        facts = look(config, manifest)
    finally:
        manifest.close()
    if args.json:
        print(json.dumps(facts))
    else:
        Console().print(screen(facts))
    return EXIT_FINDINGS if facts["failed"] else EXIT_OK


def _watch(config: Config, manifest: SqliteManifest, *, as_json: bool) -> None:
    """Until the work is finished."""
    live = None if as_json else Live(console=Console(), auto_refresh=False)
    with live or _Lines() as out:
        while True:
            facts = look(config, manifest)
            if live is None:
                print(json.dumps(facts), flush=True)
            else:
                out.update(screen(facts), refresh=True)
            if facts["finished"]:
                return
            time.sleep(REFRESH_S)


class _Lines:
    """Stands in for Live where lines are wanted."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()


def look(config: Config, manifest: SqliteManifest) -> dict[str, Any]:
    """Every fact of the screen, ready for JSON. Bytes, seconds, tokens."""
    counts = manifest.counts()
    rates = {name: dataclasses.asdict(manifest.rate(seconds)) for name, seconds in WINDOWS.items()}
    identity = manifest.identity()
    return {
        **dataclasses.asdict(counts),
        "open": counts.open,
        "finished": counts.finished,
        "eta_s": _eta(counts.open, counts.open_tokens, rates["ten_minutes"]),
        "rates": rates,
        "reasons": _reasons(manifest),
        "identity": dataclasses.asdict(identity),
        "output": config.output.path,
        "disk": _disk(config, counts.open, counts.open_tokens),
        "worker": {"pid": lock.living_holder(manifest_folder(config.output))},
        "engine": _engine(config),
    }


def _eta(rows: int, tokens: int, rate: dict[str, float]) -> float | None:
    if rows == 0:
        return 0.0
    if rate["tokens_s"] > 0 and tokens:
        return tokens / rate["tokens_s"]
    return rows / rate["samples_s"] if rate["samples_s"] > 0 else None


def _reasons(manifest: SqliteManifest) -> dict[str, int]:
    """Failed and skipped rows by reason, of the first thousand."""
    found: dict[str, int] = {}
    for fault in manifest.faults([State.failed, State.skipped]):
        found[fault.code] = found.get(fault.code, 0) + 1
    return found


def _disk(config: Config, rows: int, tokens: int) -> dict[str, int | None]:
    try:
        free: int | None = disk.free_bytes(Path(config.output.path))
    except OSError:
        free = None
    try:
        needed: int | None = stored_bytes(config, read_model(config.model.path), rows, tokens)
    except ConfigError:
        needed = None
    return {"free": free, "needed": needed, "reserve": config.output.reserve_mib * 2**20}


def _engine(config: Config) -> dict[str, Any] | None:
    found = endpoint.read(config.paths.run)
    if found is None:
        return None
    attests = list((Path(config.paths.run) / "attest").glob(f"attest-{found.launch}-*.json"))
    return {
        "alive": endpoint.alive(found),
        "pid": found.pid,
        "url": found.url,
        "release": found.release,
        "ranks_attested": len(attests),
        "log": found.log,
    }


def screen(facts: dict[str, Any]) -> Table:
    """The table of one look."""
    table = Table.grid(padding=(0, 2))
    for name, text in _lines(facts):
        table.add_row(f"[bold]{name}", text)
    total = max(facts["total"], 1)
    settled = facts["done"] + facts["failed"] + facts["skipped"]
    table.add_row("", ProgressBar(total=total, completed=settled, width=60))
    return table


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rate, disk_facts, engine = facts["rates"]["ten_minutes"], facts["disk"], facts["engine"]
    of = f"{facts['total']:,}{'' if facts['ingest_complete'] else '+ (still reading the data set)'}"
    share = 100 * facts["done"] / max(facts["total"], 1)
    reasons = ", ".join(f"{n} {code}" for code, n in sorted(facts["reasons"].items()))
    worker = facts["worker"]["pid"]
    return [
        ("done", f"{facts['done']:,} of {of}, {share:.1f} %, {_size(facts['bytes'])}"),
        ("pending", f"{facts['pending']:,}, in flight {facts['leased']:,}"),
        ("failed", f"{facts['failed']:,}, skipped {facts['skipped']:,}" + (f" ({reasons})" if reasons else "")),
        (
            "speed",
            f"{rate['samples_s']:.2f} samples/s, {rate['tokens_s']:,.0f} tok/s, {rate['bytes_s'] / 1e6:,.1f} MB/s",
        ),
        ("left", "done" if facts["finished"] else span(facts["eta_s"])),
        ("disk", f"{_size(disk_facts['free'])} free, {_size(disk_facts['needed'])} needed"),
        ("worker", "not running" if worker is None else f"pid {worker}"),
        ("engine", _engine_line(engine)),
        ("output", f"{facts['output']} ({facts['identity']['format']}, {facts['identity']['dtype']})"),
    ]


def _engine_line(engine: dict[str, Any] | None) -> str:
    if engine is None:
        return "not started"
    state = f"pid {engine['pid']}" if engine["alive"] else "gone"
    return f"{state}, SGLang {engine['release']} at {engine['url']}, {engine['ranks_attested']} ranks attested"


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
