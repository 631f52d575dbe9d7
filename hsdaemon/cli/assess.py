"""The whole report after a crash, without changing anything: what survived, what is in the way, what will be done.

Host, volume, stored samples by folder with their gaps (old errors, or cut off), weights, capture in the engine's
sources, spool, GPUs and who holds them, units of the eviction policy, and the supervisor's next step. Files are
counted by name and size, not opened: hs-extract verify and scan do that.

  hs-extract assess
"""

from __future__ import annotations

import argparse

from hsdaemon.cli.settings import add_config, load
from hsdaemon.errors import EXIT_OK
from hsdaemon.host import build
from hsdaemon.host.assess import report
from hsdaemon.host.preview import look_on

EXITS: dict[int, str] = {}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    config = load(args)
    systemd = build.booted_by_systemd()
    print(report(config, look_on(config, str(args.config), build.foreground(config)), systemd), end="")
    return EXIT_OK
