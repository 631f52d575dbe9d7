"""Make the running supervisor read its configuration again.

The file is checked first: what cannot be used is refused here. Settings of the loop, eviction and proof count from the
next turn; a changed argument line of the engine is applied at its next natural stop, or now with --now, which ends
the engine's present load of weights.

  hs-extract reload
  hs-extract reload --now
"""

from __future__ import annotations

import argparse
import signal

from hsdaemon.cli.settings import add_config, load
from hsdaemon.errors import EXIT_OK, Transient
from hsdaemon.host import solo
from hsdaemon.host.wishes import WishFiles

EXITS = {75: "no supervisor runs", 78: "the file cannot be used; the running one keeps its former settings"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--now", action="store_true", help="restart the engine when its argument line has changed")


def run(args: argparse.Namespace) -> int:
    config = load(args)
    if not solo.holder(config.paths.run):
        raise Transient("cannot reload: no supervisor runs; systemctl start hs-extract reads the file anyway")
    pid = solo.tell(config.paths.run, signal.SIGHUP)
    if args.now:  # after the signal: whoever sees the wish knows of the new configuration
        WishFiles(config.paths.run).ask_reload()
        solo.tell(config.paths.run, signal.SIGHUP)  # and looks at once
    print(f"reload: asked pid={pid} now={'yes' if args.now else 'no'}")
    return EXIT_OK
