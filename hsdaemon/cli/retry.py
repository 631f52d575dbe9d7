"""Revive failed rows: they are pending again with a fresh budget of tries, and the worker takes them up.

Nothing else revives a row, no restart and no reboot. Skipped rows stay skipped: mend the data set, then the next start
of the worker sees the change by itself.

  hs-extract retry --all
  hs-extract retry 4711 4712
"""

from __future__ import annotations

import argparse

from hsdaemon.cli.settings import add_config, load
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.sqlite import open_manifest
from hsdaemon.errors import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE

EXITS = {1: "a named row is not a failed one"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("rows", nargs="*", type=_row, help="row numbers, as `hs-extract errors` lists them")
    parser.add_argument("--all", action="store_true", help="every failed row")


def run(args: argparse.Namespace) -> int:
    if bool(args.rows) == args.all:
        print("hs-extract: cannot tell which rows: name some, or say --all")
        return EXIT_USAGE
    manifest = open_manifest(manifest_path(load(args).output))
    try:
        revived = manifest.revive(None if args.all else sorted(set(args.rows)))
    finally:
        manifest.close()
    print(f"retry: revived={revived}")
    return EXIT_OK if args.all or revived == len(set(args.rows)) else EXIT_FINDINGS


def _row(text: str) -> int:
    """Raises ArgumentTypeError for what is no row's number in any manifest."""
    if not text.isdecimal() or (row := int(text)) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"no row has the number {text}")
    return row
