"""What the capture costs on one engine: the same prompts under request ids that are captured and under others.

One real server on the CPU, float32, chunked prefill. Pairs of rounds, captured first in every other pair; a captured
round ends when each of its dumps lay in the spool and was taken away. tok/s are medians over the rounds, ratio is the
median over the pairs; cpu_ratio is the same of the engine's CPU seconds per token, which other work on the machine
disturbs less. Ends with exit code 1 when the capture costs more than 3 per cent.

Last line: bench-capture: pairs= on_tok_s= off_tok_s= ratio= cpu_ratio=
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import structs

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.load import EPOCH, Load, Round, answers
from hsdaemon import wire
from hsdaemon.demo import stage
from hsdaemon.demo.actor import HS, Actor
from hsdaemon.engine import endpoint

KIND = structs.replace(stage.TINY, name="bench-capture", about="")
LENGTHS = (64, 1500)  # tokens
START_S = 240.0
LEAST = 0.97


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8, help="of a round")
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny")
    parser.add_argument("--folder", type=Path, default=Path("build/bench-capture"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped too
    kind = structs.replace(KIND, model=args.model, rows=args.prompts, lengths=LENGTHS)
    made = stage.build(kind, args.folder.resolve(), seed=0)
    with served(made) as engine:
        draw = np.random.default_rng(1)
        prompts = [draw.integers(4, stage.VOCAB - 2, size) for size in draw.integers(*LENGTHS, args.prompts)]
        load = Load(prompts, made.spool, engine.url, engine.pid, KIND.concurrency)
        for captured in (True, False):  # the first rounds warm up
            load.round(captured=captured)
        pairs = [played(load, number) for number in range(args.pairs)]
    ratio = statistics.median(on.tok_s / off.tok_s for on, off in pairs)
    cpu = statistics.median(off.cpu_s / on.cpu_s for on, off in pairs)
    on, off = (statistics.median(pair[i].tok_s for pair in pairs) for i in (0, 1))
    print(
        f"bench-capture: pairs={args.pairs} on_tok_s={on:.0f} off_tok_s={off:.0f} ratio={ratio:.3f} cpu_ratio={cpu:.3f}"
    )
    return 0 if ratio >= LEAST else 1


def played(load: Load, number: int) -> tuple[Round, Round]:
    """Captured and not captured, in the order of the number."""
    first = load.round(captured=number % 2 == 0)
    second = load.round(captured=number % 2 == 1)
    on, off = (first, second) if number % 2 == 0 else (second, first)
    print(f"pair {number}: on={on.tok_s:.0f} off={off.tok_s:.0f} ratio={on.tok_s / off.tok_s:.3f}", flush=True)
    return on, off


@contextlib.contextmanager
def served(made: stage.Stage) -> Iterator[endpoint.Endpoint]:
    """The engine as `hs-extract serve` starts it, ready for this epoch."""
    made.spool.mkdir(parents=True, exist_ok=True)
    (made.spool / wire.EPOCH_FILE).write_text(EPOCH)
    actor = Actor("engine", (*HS, "serve", "-c", str(made.config)), made.folder / "engine.log")
    actor.start()
    try:
        yield ready(actor, made)
    finally:
        actor.stop()
        shutil.rmtree(made.spool, ignore_errors=True)


def ready(actor: Actor, made: stage.Stage) -> endpoint.Endpoint:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and actor.ended(0.5) is None:
        found = endpoint.read(str(made.folder / "run"))
        if found is not None and answers(found.url):
            return found
    raise SystemExit(f"cannot start the engine:\n{actor.last_words()}")


if __name__ == "__main__":
    sys.exit(main())
