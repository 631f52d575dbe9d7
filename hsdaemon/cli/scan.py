"""Make the manifest from the files alone: after it was lost, or for a tree that never had one.

Reads the data set, then every file in rows_A-B folders: it is opened, its checksums are verified, its token ids and
loss mask are compared with its row, its states must be finite and of the right shape. Good files are taken over (under
the name that the trainer looks for), bad ones are put aside into the quarantine folder, nothing is deleted. Says for
every folder how many it has and what its gaps are: old errors in the middle, or the tail that was cut off. No worker
may run meanwhile.

  hs-extract scan
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

from rich.console import Console
from rich.table import Table

from hsdaemon.cli.settings import add_config, load
from hsdaemon.data.adopt import FolderReport
from hsdaemon.data.spool import new_epoch
from hsdaemon.data.sqlite import ADOPTING
from hsdaemon.data.store import adopt_tree, open_for_scan
from hsdaemon.errors import EXIT_FINDINGS, EXIT_OK

EXITS = {1: "a file was bad or belongs to no row", 75: "a worker has the output, or the volume is not there"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a folder")


def run(args: argparse.Namespace) -> int:
    store = open_for_scan(load(args), new_epoch())
    try:
        reports = adopt_tree(store, unstamped=True)
        store.manifest.mark(ADOPTING, 0)
        store.backups.tick(store.manifest, time.monotonic())  # no worker adopts what says nothing of itself
        counts = store.manifest.counts()
    finally:
        store.close()
    if args.json:
        for report in reports:
            print(json.dumps(dataclasses.asdict(report)))
    else:
        Console().print(_table(reports))
        for report in reports:
            for row, reason in sorted(report.bad.items()):
                print(f"row {row}: {report.name}: {reason}")
    bad = sum(len(r.bad) for r in reports)
    unknown = sum(len(r.unknown) for r in reports)
    print(
        f"scan: files={sum(r.files for r in reports)} adopted={sum(r.adopted for r in reports)} bad={bad} "
        f"unknown={unknown} old_gaps={sum(r.old for r in reports)} tail={counts.pending - _inside(reports)} "
        f"done={counts.done} pending={counts.pending}"
    )
    return EXIT_FINDINGS if bad or unknown else EXIT_OK


def _inside(reports: list[FolderReport]) -> int:
    """Pending rows that are not behind the last good file."""
    last = max((r.last for r in reports), default=-1)
    return sum(row <= last for r in reports for row in r.gaps)


def _table(reports: list[FolderReport]) -> Table:
    table = Table("folder", "files", "good", "bad", "old errors", "cut-off tail", box=None)
    for r in reports:
        numbers = (r.files, r.known + r.adopted, len(r.bad), r.old, r.tail)
        table.add_row(r.name, *(str(n) for n in numbers))
    return table
