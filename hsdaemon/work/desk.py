"""The manifest from the event loop: one thread of its own, commits of several rows in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from hsdaemon.data.manifest import Done, Manifest
from hsdaemon.errors import DiskFull
from hsdaemon.work.pause import Pause

P = ParamSpec("P")
T = TypeVar("T")


class Desk:
    """Waits out a full disk: nothing was changed, so the same call is made again."""

    def __init__(self, manifest: Manifest, pause: Pause) -> None:
        self.manifest = manifest
        self._pause = pause
        self._pool = ThreadPoolExecutor(1, "manifest")
        self._pending: list[tuple[Done, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None

    async def do(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the manifest. Raises what it raises, DiskFull excepted."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await loop.run_in_executor(self._pool, lambda: call(*args, **kwargs))
            except DiskFull as error:
                self._pause.close(error)
                await self._pause.clear()

    async def commit(self, done: Done) -> None:
        """Record one row; whatever else waits by then goes into the same transaction. Raises LeaseLost."""
        future = asyncio.get_running_loop().create_future()
        self._pending.append((done, future))
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit_all())
        await future

    async def _commit_all(self) -> None:
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                await self.do(self.manifest.commit, [done for done, _ in batch])
            except Exception as error:  # noqa: BLE001  # every waiting row must hear of it, and raises it
                _tell(batch, error)
            else:
                _tell(batch, None)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _tell(batch: list[tuple[Done, asyncio.Future[None]]], error: Exception | None) -> None:
    for _, future in batch:
        if future.done():
            continue  # its row was cancelled
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
