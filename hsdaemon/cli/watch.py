"""The screen of `hs-extract status`, refreshed every two seconds until all is done.

hs-extract watch
hs-extract watch --json | jq .supervisor.board.sentence
"""

from __future__ import annotations

import argparse

from hsdaemon.cli import status

EXITS = status.EXITS


def add(parser: argparse.ArgumentParser) -> None:
    status.add_options(parser)
    parser.set_defaults(watch=True)


def run(args: argparse.Namespace) -> int:
    return status.run(args)
