"""What the capture costs on one engine: the same prompts under request ids that are captured and under others.

One real server on the CPU, float32, chunked prefill. Pairs of rounds, captured first in every other pair; a captured
round ends when each of its dumps lay in the spool and was taken away. tok/s are medians over the rounds, ratio is the
median over the pairs; cpu_ratio is the same of the engine's CPU seconds per token, which other work on the machine
disturbs less. Ends with exit code 1 when the capture costs more than 3 per cent.

Last line: bench-capture: pairs= on_tok_s= off_tok_s= ratio= cpu_ratio=
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from msgspec import structs

from hsdaemon import wire
from hsdaemon.demo import stage
from hsdaemon.demo.actor import HS, Actor
from hsdaemon.engine import endpoint
from hsdaemon.work import client

KIND = structs.replace(stage.TINY, name="bench-capture", about="")
EPOCH = "00be4c4ca9700e00"
LENGTHS = (64, 1500)  # tokens
START_S, REPLY_S, DUMP_S = 240.0, 120.0, 30.0
LEAST = 0.97


@dataclass(frozen=True)
class Round:
    """One pass over the prompts: tokens per second, engine CPU seconds per token."""

    tok_s: float
    cpu_s: float


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
        bench = Bench(made, engine, args.prompts)
        for captured in (True, False):  # the first rounds warm up
            bench.round(captured=captured)
        pairs = [bench.pair(number) for number in range(args.pairs)]
    ratio = statistics.median(on.tok_s / off.tok_s for on, off in pairs)
    cpu = statistics.median(off.cpu_s / on.cpu_s for on, off in pairs)
    on, off = (statistics.median(pair[i].tok_s for pair in pairs) for i in (0, 1))
    print(
        f"bench-capture: pairs={args.pairs} on_tok_s={on:.0f} off_tok_s={off:.0f} ratio={ratio:.3f} cpu_ratio={cpu:.3f}"
    )
    return 0 if ratio >= LEAST else 1


class Bench:
    """The prompts and the engine that they are sent to."""

    def __init__(self, made: stage.Stage, engine: endpoint.Endpoint, prompts: int) -> None:
        draw = np.random.default_rng(1)
        self.prompts = [draw.integers(4, stage.VOCAB - 2, size) for size in draw.integers(*LENGTHS, prompts)]
        self.tokens = sum(map(len, self.prompts))
        self.spool, self.url = made.spool, f"{engine.url}/generate"
        self.family = psutil.Process(engine.pid)
        self.tries = 0

    def pair(self, number: int) -> tuple[Round, Round]:
        """Captured and not captured, in the order of the number."""
        first = self.round(captured=number % 2 == 0)
        second = self.round(captured=number % 2 == 1)
        on, off = (first, second) if number % 2 == 0 else (second, first)
        print(f"pair {number}: on={on.tok_s:.0f} off={off.tok_s:.0f} ratio={on.tok_s / off.tok_s:.3f}", flush=True)
        return on, off

    def round(self, *, captured: bool) -> Round:
        self.tries += 1
        begun, cpu = time.perf_counter(), self.cpu()
        asyncio.run(self.send(captured))
        took = time.perf_counter() - begun
        return Round(self.tokens / took, (self.cpu() - cpu) / self.tokens)

    async def send(self, captured: bool) -> None:
        gate = asyncio.Semaphore(KIND.concurrency)
        async with client.session() as http:

            async def one(row: int) -> None:
                async with gate:
                    ids = self.prompts[row]
                    rid = wire.RequestId(EPOCH, row, self.tries, len(ids))
                    named = rid if captured else str(rid).replace("hs1", "off")
                    reply = await client.generate(http, self.url, named, ids, 0, REPLY_S)
                    if isinstance(reply, client.Failure):
                        raise SystemExit(f"cannot measure: {reply}")
                    if captured:
                        await self.take(rid)

            await asyncio.gather(*map(one, range(len(self.prompts))))

    async def take(self, rid: wire.RequestId) -> None:
        """Wait for the dump and remove it, as a worker does after its commit."""
        dump, deadline = self.spool / wire.dump_name(rid), time.monotonic() + DUMP_S
        while not dump.exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"cannot measure: no dump of {rid}")
            await asyncio.sleep(0.002)
        dump.unlink()

    def cpu(self) -> float:
        """CPU seconds of the engine's processes so far."""
        times = [member.cpu_times() for member in (self.family, *self.family.children(recursive=True))]
        return sum(seen.user + seen.system for seen in times)


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
        if found is not None and asyncio.run(answers(found)):
            return found
    raise SystemExit(f"cannot start the engine:\n{actor.last_words()}")


async def answers(engine: endpoint.Endpoint) -> bool:
    async with client.session() as http:
        try:
            async with http.get(f"{engine.url}/health") as reply:
                return reply.status == 200
        except (OSError, aiohttp.ClientError):
            return False


if __name__ == "__main__":
    sys.exit(main())
