"""Print what makes a shell complete verbs, options and files.

  bash    hs-extract completion bash > /usr/share/bash-completion/completions/hs-extract
  zsh     hs-extract completion zsh > "${fpath[1]}/_hs-extract"
  fish    hs-extract completion fish > ~/.config/fish/completions/hs-extract.fish

The text is complete in itself: pressing TAB starts no Python. Print it again after an upgrade.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from hsdaemon import cli

SHELLS = ("bash", "zsh", "fish")
_KINDS = {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY}  # by the metavar of an argument


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    """Print the completion of the whole command line for `args.shell`."""
    parser = cli.build_parser(cli.VERBS)
    for action in _actions(parser):
        if isinstance(action.metavar, str) and action.metavar in _KINDS:
            action.complete = _KINDS[action.metavar]  # type: ignore[attr-defined]  # shtab's own convention
    print(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _actions(sub)
