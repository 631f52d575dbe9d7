"""Run the extraction worker: every row of the data set becomes a durable file, or has a reason why not.

It needs the engine of hs-extract serve, finds it by itself, and waits for it by name. Kill it and start it as often as
you like: what was done stays done. SIGTERM finishes what is in flight (worker.drain_s); a second one stops at once.

  hs-extract extract
"""

from __future__ import annotations

import argparse

from hsdaemon.cli.settings import add_config, load
from hsdaemon.work.run import extract

EXITS = {
    0: "every row is done or skipped",
    1: "every row is settled, some failed: see hs-extract errors",
    70: "every row would fail the same way; the last line on stderr names the cause",
    75: "told to stop, or nothing moved for worker.stall_s; start it again",
}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    return extract(load(args))
