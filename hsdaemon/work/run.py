"""One run of the worker as a process: open everything, work, tell, stop when told, say how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import structlog

from hsdaemon.config import Config
from hsdaemon.data import store as stores
from hsdaemon.data.adopt import QUARANTINE
from hsdaemon.data.dataset import fingerprint
from hsdaemon.data.formats import get_format
from hsdaemon.data.identity import row_limits
from hsdaemon.data.lock import LockHeld
from hsdaemon.data.publish import Publisher
from hsdaemon.data.spool import Spool, new_epoch
from hsdaemon.data.sqlite import open_reader
from hsdaemon.data.store import Store
from hsdaemon.errors import EXIT_FINDINGS, EXIT_OK, HsError, Transient
from hsdaemon.machine.notify import Notify
from hsdaemon.work.checks import wanted_by
from hsdaemon.work.progress import eta_s
from hsdaemon.work.report import Report, Reporter, last_line
from hsdaemon.work.worker import Parts, Worker

TELL_S = 1.0
OPEN_POLL_S = 1.0
STEP_S = 120.0  # a group of files (1 GiB) that a rebuilt manifest takes over, on a slow disk
STUCK_S = 5.0  # threads that have not ended by then hang in the kernel
STOP_S = 60.0  # after a drain: leases given back, threads, the checkpoint
EXIT_UNFINISHED = Transient.exit_code
_log = structlog.get_logger()


def extract(config: Config) -> int:
    """Work until every row is settled or a reason to stop. Gives the exit code; prints the last line."""
    notify = Notify()
    reporter = Reporter(config.paths.run, notify)
    epoch = new_epoch()
    store = _open(config, epoch, reporter, notify)
    hung = False
    try:
        worker = asyncio.run(_run(config, epoch, store, notify, reporter))
        report = describe(worker, store, epoch)
        reporter.tell(report, time.monotonic())
    except HsError as error:  # before the work began: what a former worker said last is no cause of this end
        reporter.tell(_starting(epoch, "stopped", stopped_by=str(error)), time.monotonic())
        raise
    finally:
        hung = _hung()
        if not hung:
            store.close()
    print(last_line(report), flush=True)
    if hung:
        _leave(worker, report)
    if worker.error is not None:
        raise worker.error
    return _code(report)


def _leave(worker: Worker, report: Report) -> NoReturn:
    """A thread in the kernel would keep the process for ever. What it holds is adopted or redone by the next one."""
    error = worker.error
    cause = f": {error}" if error else ""
    print(f"hs-extract: leaving a thread behind that the disk does not let go{cause}", file=sys.stderr, flush=True)
    os._exit(error.exit_code if isinstance(error, HsError) else _code(report))


def _open(config: Config, epoch: str, reporter: Reporter, notify: Notify) -> Store:
    """Wait for the volume: nothing is written before its marker is seen. Raises what waiting does not cure."""
    while True:
        try:
            return stores.open_store(config, epoch, beat=lambda: notify.extend(STEP_S))
        except Transient as error:
            reporter.tell(_starting(epoch, "waiting", waits_for=str(error)), time.monotonic())
            notify.extend(10 * OPEN_POLL_S)
            time.sleep(OPEN_POLL_S)  # for the volume, as long as it takes: the reason is told each time
        except LockHeld:
            raise  # the status file is the other worker's
        except HsError as error:
            reporter.tell(_starting(epoch, "stopped", stopped_by=str(error)), time.monotonic())
            raise


def _starting(epoch: str, phase: str, waits_for: str = "", stopped_by: str = "") -> Report:
    counts = (0, 0, 0, 0, 0, False, 0)
    return Report(epoch, os.getpid(), phase, waits_for, *counts, 0.0, 0.0, 0.0, None, 0, 0, stopped_by)


async def _run(config: Config, epoch: str, store: Store, notify: Notify, reporter: Reporter) -> Worker:
    spool = Spool.open(Path(config.spool.path), epoch, config.spool.budget_mib << 20)
    worker = Worker(_parts(config, epoch, store, spool), store.manifest.counts())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _told_to_stop, worker, notify)
    store.background.start()
    reporter.open()
    notify.ready()
    notify.patience(2 * config.worker.stall_s)
    beside = asyncio.create_task(_tell(worker, store, epoch, notify, reporter))
    try:
        await worker.run()
    finally:
        beside.cancel()
        reporter.close()
        worker.shutdown()
    return worker


def _parts(config: Config, epoch: str, store: Store, spool: Spool) -> Parts:
    fmt = get_format(config.output.format)
    identity, limits = store.identity, row_limits(config, store.facts)

    def space(size: int) -> None:
        store.guard.take()
        store.guard.check(size)
        store.keep_ballast()

    def holds(row: int, name: str) -> bool:  # asked seldom, and by any thread
        with contextlib.closing(open_reader(store.manifest.path)) as manifest:
            return manifest.holds(row, name)

    return Parts(
        config=config,
        wanted=wanted_by(identity),
        identity=identity,
        manifest=store.manifest,
        dataset=store.dataset,
        publisher=Publisher(store.root, store.root / QUARANTINE, fmt, identity, epoch, store.guard.check, holds=holds),
        spool=spool,
        space=space,
        background=store.background.check,
        replaced=lambda: fingerprint(store.dataset.path, limits) != store.dataset.fingerprint,
    )


def _told_to_stop(worker: Worker, notify: Notify) -> None:
    _log.info("told to stop", in_flight=worker.in_flight, again=worker.draining)
    notify.stopping()
    notify.extend(worker.parts.config.worker.drain_s + STOP_S)
    worker.drain()


async def _tell(worker: Worker, store: Store, epoch: str, notify: Notify, reporter: Reporter) -> None:
    """The watchdog hears of rows that were settled and of waits that have a name, never of a loop that merely turns."""
    fed, pool = -1, ThreadPoolExecutor(1, "backup")
    loop = asyncio.get_running_loop()
    backup: asyncio.Future[object] | None = None
    try:
        while True:
            await worker.count()
            reporter.tell(describe(worker, store, epoch), time.monotonic())
            moved = worker.meter.samples + worker.retries
            if moved != fed or worker.phase in ("paused", "waiting"):
                fed = moved
                notify.watchdog()
            if backup is None or backup.done():
                backup = loop.run_in_executor(pool, _back_up, store)
            await asyncio.sleep(TELL_S)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _back_up(store: Store) -> None:
    """With a connection of its own: the worker's belongs to its thread."""
    try:
        with contextlib.closing(open_reader(store.manifest.path)) as manifest:
            store.backups.tick(manifest, time.monotonic())
    except HsError as error:  # the work needs no copy
        _log.warning("no backup of the manifest", reason=str(error))


def describe(worker: Worker, store: Store, epoch: str) -> Report:
    """The worker now."""
    counts, speed = worker.counts, worker.meter.speed(time.monotonic())
    stopped = str(worker.error) if worker.error is not None else ""
    finished = counts.finished and not worker.error
    return Report(
        epoch=epoch,
        pid=os.getpid(),
        phase="stopped" if stopped else "done" if finished else worker.phase,
        waits_for="" if finished else worker.waits_for,
        total=counts.total,
        done=counts.done,
        failed=counts.failed,
        skipped=counts.skipped,
        pending=counts.open,
        ingest_complete=counts.ingest_complete,
        in_flight=worker.in_flight,
        samples_s=speed.samples,
        tokens_s=speed.tokens,
        mb_s=speed.mbytes,
        eta_s=eta_s(speed, counts.open, counts.open_tokens),
        retries=worker.retries,
        redone=store.interrupted - store.adopted,
        stopped_by=stopped,
    )


def _code(report: Report) -> int:
    if report.pending or not report.ingest_complete:
        return EXIT_UNFINISHED
    return EXIT_FINDINGS if report.failed else EXIT_OK


def _hung() -> bool:
    """Whether a thread of ours does not end."""
    deadline = time.monotonic() + STUCK_S
    names = ("manifest", "writer", "space", "reader", "backup")
    ours = [t for t in threading.enumerate() if t.name.startswith(names)]
    for thread in ours:
        thread.join(max(0.0, deadline - time.monotonic()))
    return any(thread.is_alive() for thread in ours)
