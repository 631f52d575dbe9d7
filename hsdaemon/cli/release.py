"""Give evicted units back as they were: the lease away, enabled again if it was, started again if it was up.

A running supervisor would evict them again, so it must be stopped first, unless its work is done. The undo records lie
in paths.state/leases and survive reboots.

  hs-extract release                    all of them
  hs-extract release vllm-kimi.service  these
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hsdaemon.cli.settings import add_config, load
from hsdaemon.config import Config
from hsdaemon.errors import EXIT_FINDINGS, EXIT_OK, Transient
from hsdaemon.host import build, solo
from hsdaemon.host.board import Board
from hsdaemon.host.wishes import WishFiles
from hsdaemon.machine.dbus import UNITS
from hsdaemon.machine.lease import Leases

EXITS = {1: "a unit could not be given back; the line says why", 75: "the supervisor runs and would evict them again"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("units", nargs="*", metavar="UNIT", help="names of units (default: all that are leased)")


def run(args: argparse.Namespace) -> int:
    config = load(args)
    held = Leases(UNITS, Path(config.paths.state)).names()
    names = tuple(args.units) or held
    unknown = sorted(set(names) - set(held))
    if unknown:
        print(f"release: no lease on {', '.join(unknown)}; leased: {', '.join(held) or 'nothing'}")
        return EXIT_FINDINGS
    if solo.holder(config.paths.run) is not None:
        return _ask(config, names)
    units = build.units(config, str(args.config), foreground=False)
    failed = 0
    for name in names:
        outcome = units.release(name)
        failed += outcome.result != "done"
        print(f"{name}: {outcome.result} {outcome.cause}".rstrip())
    print(f"release: released={len(names) - failed} failed={failed}")
    return EXIT_FINDINGS if failed else EXIT_OK


def _ask(config: Config, names: tuple[str, ...]) -> int:
    """The supervisor does it itself once its work is done."""
    board = Board(config.paths.run).read()
    if board is None or board.get("reason") != "done":
        raise Transient("cannot release: the supervisor runs and would evict them again; hs-extract stop, then release")
    WishFiles(config.paths.run).ask_release(names)
    print(f"release: asked={len(names)} the supervisor does it at its next turn")
    return EXIT_OK
