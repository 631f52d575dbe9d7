"""Publication in threads of their own: small samples in groups, large ones by themselves."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hsdaemon.data.publish import Published, Publisher, Rejected
from hsdaemon.data.sample import Sample
from hsdaemon.data.spool import Dump

GROUP_BYTES = 5 << 20  # samples below this are synced together: their folder's fsync would cost more than their data
GROUP_ROWS = 32


@dataclass(slots=True)
class _Item:
    sample: Sample
    dump: Dump
    result: asyncio.Future[Published | Rejected]


class Writers:
    """A thread that hangs in the kernel holds up nobody but its own samples."""

    def __init__(self, publisher: Publisher, threads: int) -> None:
        self._publisher = publisher
        self._pools = [ThreadPoolExecutor(1, f"writer-{i}") for i in range(threads)]
        self._queue: deque[_Item] = deque()
        self._filled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._serve(pool)) for pool in self._pools]

    async def publish(self, sample: Sample, dump: Dump) -> Published | Rejected:
        """Durable when this returns. Raises what Publisher.publish raises."""
        item = _Item(sample, dump, asyncio.get_running_loop().create_future())
        self._queue.append(item)
        self._filled.set()
        return await item.result

    async def _serve(self, pool: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._filled.wait()
            group = self._group()
            if not group:
                self._filled.clear()
                continue
            pairs = [(item.sample, item.dump.path) for item in group]
            try:
                results = await loop.run_in_executor(pool, self._publisher.publish_many, pairs)
            except Exception as error:  # noqa: BLE001  # every sample of the group must hear of it, and raises it
                for item in group:
                    if not item.result.done():
                        item.result.set_exception(error)
                continue
            for item, result in zip(group, results, strict=True):
                if not item.result.done():
                    item.result.set_result(result)

    def _group(self) -> list[_Item]:
        """The next sample, and those behind it while all of them are small. Cancelled ones are passed over."""
        group: list[_Item] = []
        while self._queue and len(group) < GROUP_ROWS:
            small = self._queue[0].dump.size < GROUP_BYTES
            if group and not small:
                break
            item = self._queue.popleft()
            if not item.result.done():
                group.append(item)
            if not small:
                break
        return group

    def shutdown(self) -> None:
        for task in self._tasks:
            task.cancel()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
