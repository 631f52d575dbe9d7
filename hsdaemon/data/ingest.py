"""Rows of the data set into the manifest, batch by batch, behind a worker that is already at work.

A pass is resumed at the row where it was stopped. When the file has changed since, a new pass looks at every row again:
a row with the same content digest stays what it is, an edited one is done again or refused, by policy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import structlog
import xxhash

from hsdaemon.config import Data
from hsdaemon.data.dataset import DataSet
from hsdaemon.data.passes import Passes
from hsdaemon.data.sample import BadRow, Sample
from hsdaemon.errors import DataError, Transient

log = structlog.get_logger()

BATCH_ROWS = 1000
BATCH_TOKENS = 4_000_000  # a batch holds its ids in memory: 32 MB
BATCH_S = 0.5  # a slow source: rows are handed on after this long
ANCHOR_ROWS = 16
PAUSE_S = 5.0  # a full or locked disk is tried again after this long


def anchor(dataset: DataSet) -> str:
    """Digest of the first rows, in hex: tells another data set from this one without reading it."""
    hasher = xxhash.xxh3_128()
    for digest in first_digests(dataset):
        hasher.update(digest or b"-")
    return hasher.hexdigest()


def first_digests(dataset: DataSet) -> list[bytes | None]:
    """Content digests of the first ANCHOR_ROWS rows; None for a bad one."""
    rows = dataset.rows()
    first = [entry for _, entry in zip(range(ANCHOR_ROWS), rows, strict=False)]
    rows.close()  # type: ignore[attr-defined]  # both kinds are generators; the file is closed now, not later
    return [entry.digest if isinstance(entry, Sample) else None for entry in first]


def same_set(known: list[bytes | None], now: list[bytes | None]) -> bool:
    """Whether `now` is the known data set, some of its first rows edited perhaps: half of them must be the same."""
    pairs = list(zip(known, now, strict=False))
    return not pairs or 2 * sum(a == b for a, b in pairs) >= len(pairs)


def ingest(dataset: DataSet, manifest: Passes, policy: Data, stop: Callable[[], bool] = lambda: False) -> bool:
    """Bring the pass to its end. Gives False when `stop` said so first. Raises DataError by policy, DiskFull."""
    name, row, hint, complete = manifest.scan_state()
    if name != dataset.fingerprint:
        manifest.begin_scan(dataset.fingerprint)
        row, hint, complete = 0, 0, False
    if complete:
        return True
    for batch, end in _batches(dataset, row, hint):
        if stop():
            return False
        _require(batch, policy, dataset)
        seen = manifest.ingest(
            batch,
            batch[-1].row + 1,
            end,
            redo_edited=policy.on_edited_row == "redo",
            skip_twice=policy.on_bad_row == "skip",
        )
        for edited in seen.edited:
            log.warning("a row was edited: it is extracted again", row=edited)
    if not manifest.scan_state()[1]:
        raise DataError(f"cannot use {dataset.path}: it has no rows; write it again")
    manifest.end_scan()
    return True


def _batches(dataset: DataSet, row: int, hint: int) -> Iterator[tuple[list[Sample | BadRow], int]]:
    """Rows together with the hint of the row behind them; small ones first, so that the work can start."""
    batch: list[Sample | BadRow] = []
    tokens, most, since = 0, 64, time.monotonic()
    for entry in dataset.rows(row, hint):
        batch.append(entry)
        tokens += entry.tokens if isinstance(entry, Sample) else 0
        if len(batch) >= most or tokens >= BATCH_TOKENS or time.monotonic() - since >= BATCH_S:
            yield batch, dataset.end_hint()
            batch, tokens, most, since = [], 0, BATCH_ROWS, time.monotonic()
    if batch:
        yield batch, dataset.end_hint()


def _require(batch: list[Sample | BadRow], policy: Data, dataset: DataSet) -> None:
    """Raises DataError for the first row that the policy refuses."""
    for entry in batch:
        if isinstance(entry, BadRow) and _refused(entry, policy):
            key = "on_long_row" if entry.code == "too-long" else "on_bad_row"
            raise DataError(f'cannot use {dataset.path}: {entry}; mend the row, or set data.{key} = "skip"')


def _refused(row: BadRow, policy: Data) -> bool:
    return (policy.on_long_row if row.code == "too-long" else policy.on_bad_row) == "refuse"


class Background:
    """A pass in a thread of its own, with its own data set and manifest: the worker starts on the rows that are there.

    job(stop): the whole work of the thread. A full disk is waited out; any other failure is kept for `check`."""

    def __init__(self, job: Callable[[Callable[[], bool]], None]) -> None:
        self._job = job
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ingest", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> bool:
        """Whether it is done. Raises what ended it: DataError, StoreError, ..."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def join(self, deadline_s: float) -> None:
        """Wait for its end, at most so long."""
        self._thread.join(deadline_s)

    def stop(self, deadline_s: float = 30.0) -> None:
        """Ends it at the next batch; what it has recorded stays."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._job(self._stop.is_set)
                return
            except Transient as error:
                log.warning("the ingest waits", reason=str(error))
                self._stop.wait(PAUSE_S)
            except BaseException as error:  # noqa: BLE001  # kept for check(), which raises it in the worker
                self._error = error
                return
