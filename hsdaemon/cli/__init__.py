"""One file per verb. A verb parses, calls one room, prints, and gives the exit code.

A verb module has `add(parser)` and `run(args) -> int`, teaches in its docstring, which `--help` shows, and may have
EXITS, what its own exit codes mean. Verbs are imported only when they are called: none pays for another's imports.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Collection, Sequence
from types import ModuleType

from hsdaemon import __version__
from hsdaemon.errors import EXIT_USAGE, HsError
from hsdaemon.machine import log

# Verb and its one line of help; the module is hsdaemon.cli.<verb> with "-" as "_".
VERBS: dict[str, str] = {
    "init": "write a configuration and mark the volume",
    "check": "find out what is wrong before anything starts",
    "run": "the supervisor: keep everything going with nobody at the keyboard",
    "plan": "what the supervisor would do now, and why",
    "assess": "the report after a crash: what survived and what will be done",
    "stop": "stop supervisor, worker and engine",
    "reload": "make the supervisor read its configuration again",
    "release": "give evicted units back as they were",
    "reset": "clear budgets and breakers after a person has looked",
    "serve": "start SGLang with the capture",
    "extract": "run the worker: every row becomes a durable file",
    "prove": "show that the running engine can be trusted with this output",
    "status": "how far the work is, and what the supervisor says",
    "watch": "the status screen, refreshed",
    "errors": "list the rows that failed or were skipped, and why",
    "retry": "revive failed rows",
    "verify": "compare the stored files with the manifest",
    "scan": "make the manifest from the files alone",
    "patch": "show, apply or revert the capture's lines in SGLang's sources",
    "prepare": "turn chats into a data set with the model's own tokenizer and chat template",
    "demo": "see the main job work and survive, on this machine, without a GPU",
    "export": "what a trainer needs beside the samples, or the samples compressed",
    "completion": "print the shell completion: hs-extract completion bash",
}

EXIT_FAULT = 71  # EX_OSERR: Python's own 1 would say "found something", and 70 keeps the supervisor from another try
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_PIPE = 141  # 128 + SIGPIPE: the reader of our output went away

# What each exit code means wherever a verb says nothing else; hsdaemon.errors has the classes.
EXITS: dict[int, str] = {
    0: "done, and nothing was found wrong",
    1: "the command worked and found something lost, corrupt, failed or refused",
    2: "the command line is wrong",
    65: "the data set or a row of it cannot be used",
    69: "the engine or its release cannot be used",
    70: "a person must act first",
    EXIT_FAULT: "a fault of hsdaemon itself; the traceback says where",
    73: "the output folder, its manifest or the volume cannot be used",
    75: "not now: the next try may succeed, nothing is lost",
    78: "the configuration cannot be used",
    EXIT_INTERRUPTED: "interrupted from the keyboard",
    EXIT_PIPE: "whoever read the output went away",
}

TEACH = """\
start here:
  hs-extract init         writes a configuration and marks the volume
  hs-extract check        says what is wrong with it before anything starts
  hs-extract serve        one terminal: the engine
  hs-extract extract      another one: the work, as often killed and started as you like
  hs-extract status       how far it is

hs-extract VERB --help teaches the verb. The configuration is /etc/hs-extract.toml, $HS_EXTRACT_CONFIG or -c FILE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Gives the exit code; errors of ours are one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(words[:1])
    args = parser.parse_args(words)
    if args.verb is None:
        parser.print_help()
        return EXIT_USAGE
    log.setup()
    try:
        code = int(verb_module(args.verb).run(args))
        sys.stdout.flush()
    except HsError as error:
        print(f"hs-extract: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hs-extract: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except Exception:  # noqa: BLE001  # a bug: its traceback, and a code that no verb uses for what it found
        traceback.print_exc()
        return EXIT_FAULT
    return code


def verb_module(verb: str) -> ModuleType:
    return importlib.import_module(f"hsdaemon.cli.{verb.replace('-', '_')}")


def build_parser(wanted: Collection[str]) -> argparse.ArgumentParser:
    """The parser; only the `wanted` verbs' modules are imported to fill in their options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="hs-extract",
        description="Unattended extraction of hidden states for EAGLE-3 training.",
        epilog=f"{TEACH}\n\n{exit_words(EXITS)}",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"hs-extract {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, text in VERBS.items():
        if name not in wanted:
            verbs.add_parser(name, help=text)
            continue
        module = verb_module(name)
        exits = EXITS | getattr(module, "EXITS", {})
        sub = verbs.add_parser(
            name, help=text, description=module.__doc__, epilog=exit_words(exits), formatter_class=raw
        )
        module.add(sub)
    return parser


def exit_words(exits: dict[int, str]) -> str:
    """The exit codes as the end of a help text."""
    return "\n".join(["exit codes:", *(f"  {code:>3}  {text}" for code, text in sorted(exits.items()))])
