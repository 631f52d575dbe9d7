"""The disk cannot take more just now: one reason, everybody waits, work goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from hsdaemon.errors import HsError, Transient

POLL_S = 1.0
_log = structlog.get_logger()


class Pause:
    """Open until `close`; `poll` opens it again once `space(needed)` finds nothing wrong."""

    def __init__(self, space: Callable[[int], None], poll_s: float = POLL_S) -> None:
        self.reason = ""
        self._space = space
        self._poll_s = poll_s
        self._open = asyncio.Event()
        self._open.set()
        self._pool = ThreadPoolExecutor(1, "space")  # a dead mount hangs the one look, not the loop

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    async def clear(self) -> None:
        """Wait until the disk may be used. Without end: a full disk waits for a person, and says so."""
        await self._open.wait()

    def close(self, error: HsError) -> None:
        """Pause everybody. Whoever reports the worker says the reason."""
        self._open.clear()
        self.reason = str(error)

    async def poll(self, needed: Callable[[], int]) -> None:
        """Runs beside the work. needed: free bytes above the floor at which work goes on. Raises what is fatal."""
        loop = asyncio.get_running_loop()
        while True:
            if self._open.is_set():
                await asyncio.sleep(self._poll_s)
                continue
            try:
                await loop.run_in_executor(self._pool, self._space, needed())
            except Transient as error:
                self.reason = str(error)
                await asyncio.sleep(self._poll_s)
            else:
                self.reason = ""
                self._open.set()
                _log.info("work goes on")

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
