"""What the supervisor would do now, and why. Looks for some seconds, decides once, does nothing. As root
it writes and removes one small file on the volume, as the supervisor does: only that shows a disk that takes nothing.

hs-extract plan
hs-extract plan --from /var/lib/hs-extract/ticks.jsonl        decide again what was decided then
hs-extract plan --from ticks.jsonl --tick 12                  the thirteenth tick of the file
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hsdaemon.cli.settings import add_config, load
from hsdaemon.errors import EXIT_OK
from hsdaemon.history import read_tick
from hsdaemon.host import build
from hsdaemon.host.preview import decided, preview, words

EXITS = {65: "the ticks file cannot be read"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--from", dest="ticks", metavar="FILE", type=Path, help="a ticks.jsonl instead of this host")
    parser.add_argument("--tick", metavar="N", type=int, default=-1, help="which of them, from 0 (default: the last)")


def run(args: argparse.Namespace) -> int:
    config = load(args)
    if args.ticks:
        kept = read_tick(args.ticks, args.tick)
        print(words(decided(config, kept.seen, kept.past)))
    else:
        print(preview(config, str(args.config), build.foreground(config)))
    return EXIT_OK
