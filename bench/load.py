"""Prompts for one engine, under request ids that its capture takes or under others."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil  # type: ignore[import-untyped]  # ships no types

from hsdaemon import wire
from hsdaemon.work import client
from hsdaemon.work.decide import Failure

EPOCH = "00be4c4ca9700e00"
REPLY_S, DUMP_S = 120.0, 30.0
POLL_S = 0.002


@dataclass(frozen=True)
class Round:
    """One pass over the prompts. replied_s, ended_s: until the last reply, and until the last dump was taken away;
    cpu_s: the engine's CPU seconds per token."""

    tokens: int
    replied_s: float
    ended_s: float
    cpu_s: float

    @property
    def tok_s(self) -> float:
        return self.tokens / self.ended_s

    @property
    def prefill_tok_s(self) -> float:
        return self.tokens / self.replied_s


class Load:
    """The prompts and the engine that they are sent to. pid: its main process; concurrency: requests in flight."""

    def __init__(
        self, prompts: Sequence[npt.NDArray[np.int64]], spool: Path, url: str, pid: int, concurrency: int
    ) -> None:
        self.prompts, self.tokens = prompts, sum(map(len, prompts))
        self.spool, self.url, self.concurrency = spool, f"{url}/generate", concurrency
        self.family = psutil.Process(pid)
        self.tries = 0

    def round(self, *, captured: bool) -> Round:
        """Send every prompt; dumps are taken away as a worker does after its commit. Raises SystemExit: no dump."""
        cpu, begun = self._cpu(), time.perf_counter()
        dumps, replied_s = asyncio.run(self._send(captured, keep=False, dump_s=DUMP_S))
        ended_s = time.perf_counter() - begun
        if lost := [row for row, dump in enumerate(dumps) if dump is None and captured]:
            raise SystemExit(f"cannot measure: no dump of prompt {lost[0]}")
        return Round(self.tokens, replied_s, ended_s, (self._cpu() - cpu) / self.tokens)

    def dumps(self, dump_s: float) -> list[Path | None]:
        """Send every prompt once, captured, and leave the dumps where they are. None: none came within dump_s of its
        reply."""
        return asyncio.run(self._send(captured=True, keep=True, dump_s=dump_s))[0]

    async def _send(self, captured: bool, *, keep: bool, dump_s: float) -> tuple[list[Path | None], float]:
        """The dumps by prompt, and the seconds until the last reply."""
        self.tries += 1
        gate, begun, replied = asyncio.Semaphore(self.concurrency), time.perf_counter(), 0.0
        async with client.session() as http:

            async def one(row: int) -> Path | None:
                nonlocal replied
                async with gate:
                    ids = self.prompts[row]
                    rid = wire.RequestId(EPOCH, row, self.tries, len(ids))
                    named = rid if captured else str(rid).replace("hs1", "off")
                    reply = await client.generate(http, self.url, named, ids, 0, REPLY_S)
                    replied = time.perf_counter() - begun
                    if isinstance(reply, Failure):
                        raise SystemExit(f"cannot measure: {reply}")
                    dump = await self._dump(rid, dump_s) if captured else None
                if dump and not keep:
                    dump.unlink()
                return dump

            return await asyncio.gather(*map(one, range(len(self.prompts)))), replied

    async def _dump(self, rid: wire.RequestId, dump_s: float) -> Path | None:
        dump, failed = self.spool / wire.dump_name(rid), self.spool / wire.error_name(rid)
        deadline = time.monotonic() + dump_s
        while not dump.exists():
            if failed.exists() or time.monotonic() > deadline:
                return None
            await asyncio.sleep(POLL_S)
        return dump

    def _cpu(self) -> float:
        """CPU seconds of the engine's processes so far."""
        times = [member.cpu_times() for member in (self.family, *self.family.children(recursive=True))]
        return float(sum(seen.user + seen.system for seen in times))


def answers(url: str) -> bool:
    """Whether an engine there says that it is healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
