"""Clear budgets and breakers, after a person has looked: the supervisor tries again at its next turn.

What it clears: failed starts and their backoff, evictions that the breaker counted, proofs and patches that failed.
What it keeps: the manifest, leases of evicted units, what runs.

  hs-extract reset
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from hsdaemon.cli.settings import add_config, load
from hsdaemon.errors import EXIT_OK
from hsdaemon.history import ask_reset
from hsdaemon.host import solo

EXITS: dict[int, str] = {}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    config = load(args)
    if not Path(config.paths.state).is_dir():
        print(f"reset: nothing to clear, there is no {config.paths.state}")
        return EXIT_OK
    ask_reset(Path(config.paths.state))
    pid = solo.tell(config.paths.run, signal.SIGHUP)  # it reads the configuration again too, and looks at once
    print("reset: asked" if pid else "reset: asked; no supervisor runs now, the next one does it")
    return EXIT_OK
