"""The worker: rows from claim to commit, many at once, until there are none or something says stop."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from hsdaemon import wire
from hsdaemon.config import Config
from hsdaemon.data.dataset import DataSet
from hsdaemon.data.identity import RunIdentity
from hsdaemon.data.manifest import Claim, Counts, Done, Manifest
from hsdaemon.data.publish import Publisher
from hsdaemon.data.room import most_tokens
from hsdaemon.data.sample import BadRow, Sample
from hsdaemon.data.spool import Spool
from hsdaemon.errors import Fatal, HsError, Transient
from hsdaemon.work import client, decide
from hsdaemon.work.admission import Admission, Queue, TooLarge
from hsdaemon.work.checks import Wanted
from hsdaemon.work.decide import Fail, Failure, Kind, Stop
from hsdaemon.work.desk import Desk
from hsdaemon.work.finder import Finder
from hsdaemon.work.pause import Pause
from hsdaemon.work.progress import Meter
from hsdaemon.work.tries import Tries
from hsdaemon.work.writers import Writers

WINDOW = 2  # rows claimed and read ahead, as a multiple of worker.concurrency
IDLE_S = 0.2  # between two looks for rows when there are none to claim
WATCH_S = 0.5  # between two looks at stalls
COUNT_S = 1.0
LATE_S = 5.0  # between two looks at the spool: still ours, its room, dumps of requests that were given up
GIVE_UP_S = 5.0  # what is cancelled ends within this, or hangs in the kernel
_log = structlog.get_logger()


class Stalled(Transient):
    """Nothing moves; another start, or another engine, may cure it."""


class RunStopped(Fatal):
    """Every row would fail the same way: a person must look at the cause."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a worker works with. space(bytes): takes the volume anew and raises what forbids writing so much;
    background(): whether every row of the data set is in the manifest, raises what forbids going on;
    replaced(): whether the data set's file is another one by now."""

    config: Config
    wanted: Wanted
    identity: RunIdentity
    manifest: Manifest
    dataset: DataSet
    publisher: Publisher
    spool: Spool
    space: Callable[[int], None]
    background: Callable[[], bool] = lambda: True
    replaced: Callable[[], bool] = lambda: False


class Worker:
    """Made and run inside one event loop. `error`: why it stopped by itself; None when it finished or was told to."""

    def __init__(self, parts: Parts, counts: Counts, clock: Callable[[], float] = time.monotonic) -> None:
        limits = parts.config.worker
        self.parts, self.counts, self._clock = parts, counts, clock
        self.error: BaseException | None = None
        self.draining = False
        self.retries = 0  # tries that gave nothing
        self.meter = Meter(clock())
        self.pause = Pause(parts.space)
        self._streak = decide.Streak(limits.stop_after_failures)
        self._stall = decide.Stall(limits.stall_s, clock())
        self._desk = Desk(parts.manifest, self.pause)
        self._writers = Writers(parts.publisher, limits.writer_threads)
        self._queue = Queue(limits.concurrency, parts.spool.budget)
        self._admission = Admission(self._queue)
        self._reader = ThreadPoolExecutor(1, "reader")
        self._halted = asyncio.Event()
        self._changed = asyncio.Event()
        self._rows: dict[asyncio.Task[None], Claim] = {}
        self._not_before: dict[int, float] = {}
        self._live: set[wire.RequestId] = set()
        self._sent: set[int] = set()
        self._largest = 0  # bytes of the largest dump so far
        self._finder: Finder | None = None
        self._tries: Tries | None = None
        self._counting: asyncio.Future[Counts] | None = None

    @property
    def in_flight(self) -> int:
        return len(self._queue.flying)

    @property
    def waits_for(self) -> str:
        """What the work waits for now, as a sentence; "" when it moves."""
        if self.pause.paused:
            return self.pause.reason
        if self._roomless:
            return self._wants_room()
        if self._finder is not None and self._finder.reason:
            return self._finder.reason
        return f"the engine to answer {len(self._sent)} requests" if self._sent else ""

    @property
    def _roomless(self) -> bool:
        """Nothing is in flight, and yet the spool has no room for anything that waits."""
        return bool(self._queue.waiting) and not self._queue.flying

    def _wants_room(self) -> str:
        needed, spool = self._queue.waiting[0].size >> 20, self.parts.spool
        return (
            f"{needed + 1} MiB of room in the spool {spool.root}, which has {spool.budget.total >> 20}: "
            "something else fills its tmpfs, or it is too small"
        )

    @property
    def phase(self) -> str:
        if self.draining:
            return "draining"
        if self.pause.paused or self._roomless:
            return "paused"
        return "waiting" if self._finder is not None and self._finder.reason else "working"

    def drain(self) -> None:
        """Send nothing more and finish what is in flight; a second call gives that up too."""
        if self.draining:
            for task in self._rows:
                task.cancel()
        self.draining = True
        self._halted.set()
        self._changed.set()

    async def run(self) -> None:
        """Until every row is settled, a drain, or an error. Every lease that is still held is given back."""
        self._writers.start()
        async with client.session() as http:
            self._finder = Finder(self.parts.config.paths.run, http, self._attested)
            self._tries = Tries(
                self.parts.config, self.parts.wanted, http, self._finder, self.parts.spool, self._writers, self._desk,
                self.pause, self._live, self._sent,
            )  # fmt: skip
            side = [asyncio.create_task(self._guard(job)) for job in (self._watch, self._keep_spool, self._poll_space)]
            try:
                await self._until_halted(asyncio.create_task(self._guard(self._feed)))
                await self._finish()
            finally:
                for task in side:
                    task.cancel()

    async def _until_halted(self, feeding: asyncio.Task[None]) -> None:
        """The feed ends by itself soon after a halt, unless it hangs with the disk under the manifest: then it is left
        behind, and what it claims meanwhile is the next epoch's."""
        halted = asyncio.create_task(self._halted.wait())
        try:
            await asyncio.wait({feeding, halted}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({feeding}, timeout=GIVE_UP_S)
        finally:
            halted.cancel()
            feeding.cancel()

    async def _guard(self, job: Callable[[], Coroutine[object, object, None]]) -> None:
        """Run a coroutine function; what it raises stops the worker and is kept for the caller."""
        try:
            await job()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  # kept in `error`, raised by whoever called `run`
            self._halt(error)

    def _halt(self, error: BaseException) -> None:
        self.error = self.error or error
        self._halted.set()
        self._changed.set()

    async def _poll_space(self) -> None:
        await self.pause.poll(lambda: 2 * self._largest)

    # Feeding: from the manifest to tasks.

    async def _feed(self) -> None:
        window = WINDOW * self.parts.config.worker.concurrency
        while not self._halted.is_set():
            outsized = self._queue.outsized
            room = window - len(self._rows) + outsized  # those that wait for a larger spool are in nobody's way
            claims: list[Claim] = []
            if room * 4 >= window:
                most = most_tokens(self.parts.wanted.layout, self._queue.budget.total) if outsized else None
                claims = await self._desk.do(self.parts.manifest.claim, room, most)
            for claim in claims:
                task = asyncio.create_task(self._guard(functools.partial(self._row, claim)))
                self._rows[task] = claim
                task.add_done_callback(self._ended)
            if not claims and not self._rows:
                self.counts = await self._desk.do(self.parts.manifest.counts)
                if self.counts.finished and self.parts.background():
                    await self._require_same_set()
                    return
            self._changed.clear()
            # Beside outsized rows a look that finds none has passed over all their like.
            await self._wait(self._changed, LATE_S if outsized and not claims else IDLE_S)

    async def _require_same_set(self) -> None:
        """Raises Stalled when the file was replaced: what is done is done for the rows that were there before."""
        if await asyncio.get_running_loop().run_in_executor(self._reader, self.parts.replaced):
            path = self.parts.dataset.path
            raise Stalled(f"cannot call it done: {path} was replaced while the worker ran; start it again")

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self.error is None:  # what was cut short keeps its lease until `_finish`
            self._rows.pop(task, None)
        self._changed.set()

    async def _finish(self) -> None:
        """Drain within the bound, or cancel at once; then give back what is still leased."""
        rows = set(self._rows)
        going = {task for task in rows if self.error is None and self._rows[task].row in self._sent}
        for task in rows - going:
            task.cancel()
        if going:
            await asyncio.wait(going, timeout=self.parts.config.worker.drain_s)
        for task in going:
            task.cancel()
        if rows:
            await asyncio.wait(rows, timeout=GIVE_UP_S)
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await self._desk.do(self.parts.manifest.release, list(self._rows.values()))
                self.counts = await self._desk.do(self.parts.manifest.counts)
        except (TimeoutError, HsError) as error:  # the next epoch frees what this one still holds
            _log.warning("leases are left to the next worker", rows=len(self._rows), reason=str(error))

    @staticmethod
    async def _wait(event: asyncio.Event, seconds: float) -> None:
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return

    # One row.

    async def _row(self, claim: Claim) -> None:
        await self._backoff(claim.row)
        sample = await self._read(claim)
        size = self.parts.wanted.layout(sample.tokens).total
        lone = decide.alone(claim.lost)
        try:
            async with self._admission.admitted(size, alone=lone):
                await self.pause.clear()
                assert self._tries is not None
                result = await self._tries.run(claim, sample)
        except TooLarge as error:
            result = Failure(Kind.refused, "spool", f"{error}; raise spool.budget_mib")
        if isinstance(result, Failure):
            await self._failed(claim, result)
        else:
            self._done(claim, result, size)

    async def _backoff(self, row: int) -> None:
        left = self._not_before.pop(row, 0.0) - self._clock()
        if left > 0:
            await asyncio.sleep(left)

    async def _read(self, claim: Claim) -> Sample:
        """The row's content. Raises Stalled when the data set was edited since the row was recorded."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._reader, self.parts.dataset.read, claim.row, claim.hint)
        if isinstance(found, BadRow) or found.digest != claim.digest:
            path = self.parts.dataset.path
            await self._desk.do(self.parts.manifest.release, [claim])
            await self._desk.do(self.parts.manifest.look_again)
            raise Stalled(f"cannot go on: row {claim.row} of {path} was edited while the worker runs; start it again")
        return found

    def _done(self, claim: Claim, done: Done, size: int) -> None:
        now = self._clock()
        self.meter.add(now, claim.tokens, done.size)
        self._stall.progress(now)
        self._streak.success()
        self._largest = max(self._largest, size)

    async def _failed(self, claim: Claim, failure: Failure) -> None:
        limits, manifest = self.parts.config.worker, self.parts.manifest
        self.retries += 1
        lost = failure.kind is Kind.lost
        verdict = decide.after(failure, claim.charged, claim.lost + lost, limits.attempts, limits.backoff_s)
        _log.warning("try failed", row=claim.row, sample=claim.name, code=failure.code, reason=failure.reason)
        where = (claim.row, claim.lease, failure.code)
        if isinstance(verdict, Fail):
            await self._desk.do(manifest.fail, *where, verdict.reason)
            self._stall.progress(self._clock())  # a settled row is progress, the streak has its own rule
        elif isinstance(verdict, Stop):
            await self._desk.do(manifest.retry, *where, failure.reason, charge=False)
            raise RunStopped(f"cannot go on: {verdict.cause}")
        else:
            self._not_before[claim.row] = self._clock() + verdict.wait_s
            await self._desk.do(manifest.retry, *where, failure.reason, charge=verdict.charge, lost=lost)
        stop = self._streak.failure(claim.row, claim.charged, failure)
        if stop is not None:
            raise RunStopped(f"cannot go on: {stop.cause}")

    # Beside the rows.

    async def count(self) -> None:
        """Look at the counts again; a hanging disk keeps the old ones."""
        if self._counting is None or self._counting.done():
            self._counting = asyncio.ensure_future(self._desk.do(self.parts.manifest.counts))
        done, _ = await asyncio.wait([self._counting], timeout=COUNT_S)
        for task in done:
            if not task.cancelled() and task.exception() is None:
                self.counts = task.result()

    async def _watch(self) -> None:
        """The stall rule: every wait above ends here at the latest."""
        while True:
            await asyncio.sleep(WATCH_S)
            self.parts.background()
            nothing = not self._rows and not self.counts.open
            idle = self.pause.paused or self._roomless or nothing or self._halted.is_set()
            stop = self._stall.look(self._clock(), idle=idle, waits_for=self.waits_for or "the data set")
            if stop is not None:
                raise Stalled(f"cannot go on: {stop.cause}")

    async def _keep_spool(self) -> None:
        spool = self.parts.spool
        while True:
            await asyncio.sleep(LATE_S)
            spool.keep()
            spool.discard_others(self._live)
            spool.measure()
            self._admission.wake()

    def _attested(self, attest: wire.Attest) -> None:
        """A rank says how it captures. Raises RunStopped when that is not what this run needs."""
        wanted = self.parts.wanted
        pairs = (
            ("spool", str(self.parts.spool.root), attest.spool),
            ("layers", wanted.layers, attest.layers),
            ("norm", wanted.norm, attest.norm),
            ("dtype", wanted.dtype, attest.dtype),
            ("hidden", wanted.hidden, attest.hidden),
            ("layout", wanted.interleaved, attest.interleaved),
        )
        for name, mine, theirs in pairs:
            if mine != theirs:
                raise RunStopped(
                    f"cannot use engine {attest.launch}: its capture has {name} {theirs}, this run needs {mine}; "
                    "stop it and start it with hs-extract serve and this configuration"
                )

    def shutdown(self) -> None:
        """Let go of the threads and the spool. A thread that hangs in the kernel is left behind."""
        for part in (self._writers, self._desk, self.pause):
            part.shutdown()
        self._reader.shutdown(wait=False, cancel_futures=True)
        self.parts.spool.close()
