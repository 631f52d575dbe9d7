"""See the main job work on this machine, without a GPU, and see it survive.

Makes a tiny model and a data set, starts SGLang on the CPU with the capture in it and the worker beside it, kills each
of them twice without a warning, and compares every state that was stored with what transformers computes. With --real:
SmolLM2-135M-Instruct and English text instead. Needs the environment that `make venv` sets up.

The folder stays for you to look at; the next demo empties it, and never one that is not a demo's.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from hsdaemon.demo import run as play
from hsdaemon.demo import stage
from hsdaemon.errors import EXIT_FINDINGS, EXIT_OK

ENGINES = WORKERS = 2  # kills of each
EXITS = {1: "something was lost, corrupt, extracted twice, or differs from transformers"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--real", action="store_true", help="a real pretrained model and real text (2 to 8 minutes)")
    parser.add_argument("--folder", metavar="FOLDER", type=Path, help="where (default: build/demo or build/demo-real)")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the instants of the kills")


def run(args: argparse.Namespace) -> int:
    """Ends with `demo: ok done= redone= lost= corrupt= max_abs_err=`."""
    kind = stage.REAL if args.real else stage.TINY
    folder = (args.folder or Path("build") / kind.name).resolve()
    signal.signal(signal.SIGTERM, _interrupt)
    _say(f"making {kind.about}, in {folder}")
    made = stage.build(kind, folder, args.seed)
    story, verdict = play.run(made, play.schedule(kind.rows, ENGINES, WORKERS, args.seed), _say)
    problems = story.problems(verdict)
    for problem in problems:
        _say(f"  {problem}")
    _say(f"look around: hs-extract status -c {made.config}")
    _say(story.line(verdict))
    return EXIT_FINDINGS if problems else EXIT_OK


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Whoever stops the demo stops its engine too."""
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(line)
    sys.stdout.flush()
