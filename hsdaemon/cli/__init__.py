"""One file per verb. A verb parses, calls one room, prints, and gives the exit code.

A verb module has HELP (one line), `add(parser)` and `run(args) -> int`, and teaches in its docstring, which `--help`
shows. Verbs are imported only when they are called, so that none pays for another's imports.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hsdaemon import __version__
from hsdaemon.errors import EXIT_USAGE, HsError

# Verb and its one line of help; the module is hsdaemon.cli.<verb> with "-" as "_".
VERBS: dict[str, str] = {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Gives the exit code; errors of ours are one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(words[0] if words and words[0] in VERBS else None)
    args = parser.parse_args(words)
    if args.verb is None:
        parser.print_help()
        return EXIT_USAGE
    try:
        return int(importlib.import_module(_module(args.verb)).run(args))
    except HsError as error:
        print(f"hs-extract: {error}", file=sys.stderr)
        return error.exit_code


def _module(verb: str) -> str:
    return f"hsdaemon.cli.{verb.replace('-', '_')}"


def _parser(verb: str | None) -> argparse.ArgumentParser:
    """The parser; only the called verb's module is imported to fill in its options."""
    parser = argparse.ArgumentParser(prog="hs-extract", description="Unattended extraction of hidden states.")
    parser.add_argument("--version", action="version", version=f"hs-extract {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, text in VERBS.items():
        module = importlib.import_module(_module(name)) if name == verb else None
        sub = verbs.add_parser(
            name,
            help=text,
            description=module.__doc__ if module else text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module:
            module.add(sub)
    return parser
