"""List the rows that failed or were skipped, each with its reason and the number of tries.

Failed rows are tombstones: no restart tries them again. Once the cause is gone, `hs-extract retry --all` revives them.

  hs-extract errors
  hs-extract errors --all --json      also rows that were tried again and are pending
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hsdaemon.cli.settings import add_config, load
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.manifest import Fault, State
from hsdaemon.data.sqlite import SqliteManifest, open_reader
from hsdaemon.errors import EXIT_FINDINGS, EXIT_OK

EXITS = {1: "there are failed rows"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--all", action="store_true", help="also rows that were tried again and are not done yet")


def run(args: argparse.Namespace) -> int:
    manifest = open_reader(manifest_path(load(args).output))
    states = [State.failed, State.skipped, *([State.pending, State.leased] if args.all else [])]
    try:
        failed = _print(_every(manifest, states), as_json=args.json)
    finally:
        manifest.close()
    return EXIT_FINDINGS if failed else EXIT_OK


def _every(manifest: SqliteManifest, states: list[State]) -> Iterator[Fault]:
    after = -1
    while page := manifest.faults(states, after):
        yield from page
        after = page[-1].row


def _print(faults: Iterator[Fault], *, as_json: bool) -> int:
    """Print them as they come; gives the number of failed ones."""
    failed = 0
    table = Table("row", "name", "state", "code", "tries", "reason", box=None)
    for fault in faults:
        failed += fault.state is State.failed
        if as_json:
            print(json.dumps({**dataclasses.asdict(fault), "state": fault.state.name}))
            continue
        name, reason = escape(fault.name), escape(fault.reason)
        table.add_row(str(fault.row), name, fault.state.name, fault.code, str(fault.attempts), reason)
    if not as_json:
        Console().print(table if table.row_count else "no row failed or was skipped")
    return failed
