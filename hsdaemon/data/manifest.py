"""The manifest as its users see it: rows, leases, counts. `SqliteManifest` (data/sqlite.py) is the one we have.

A row is pending, leased, done, failed or skipped. A lease is a number that grows with each claim and is never used
twice: whoever lost it (a worker taken for dead) changes nothing any more. Done means: the file is there, whole, and its
folder is synced; that is the caller's duty before `commit`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Protocol

from hsdaemon.data.identity import RunIdentity
from hsdaemon.data.sample import BadRow, Sample
from hsdaemon.errors import StoreError


class State(enum.IntEnum):
    """Of a row; the numbers are stored."""

    pending = 0
    leased = 1
    done = 2
    failed = 3  # tombstone: only `revive` brings it back
    skipped = 4  # the row itself cannot be used


class LeaseLost(StoreError):
    """Another worker has the row by now: stop, publish nothing more. rows: those that did not change."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(
            f"cannot record rows {', '.join(map(str, rows[:10]))}: another worker has claimed them since; "
            "this worker stops"
        )
        self.rows = tuple(rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A leased row. hint: for DataSet.read; the Sample read must have this digest, else `release` and wait for the
    ingest to notice the edit. attempt: 1 to 999, grows with every claim of the row (part of the request id, wraps);
    charged: tries that counted against worker.attempts so far; lost: connections to the engine that broke under it."""

    row: int
    name: str
    tokens: int
    digest: bytes
    hint: int
    attempt: int
    charged: int
    lease: int
    lost: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A published row. path: relative to the output; size: bytes; digest: xxh3-128 of the file, 16 bytes."""

    row: int
    lease: int
    path: str
    size: int
    digest: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A done row as recorded."""

    row: int
    name: str
    tokens: int
    row_digest: bytes  # of the data set row
    hint: int
    path: str
    size: int
    digest: bytes  # of the file


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """Any row as recorded. digest: of the data set row, None for a bad one; path, size: of its file, when done."""

    row: int
    name: str
    state: State
    digest: bytes | None
    hint: int
    path: str | None
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Why a row is failed, skipped or was tried again. at: seconds since 1970, for people only."""

    row: int
    name: str
    state: State
    code: str
    reason: str
    attempts: int  # charged ones
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """pending + leased + done + failed + skipped == total, always. total grows until ingest_complete."""

    total: int
    pending: int
    leased: int
    done: int
    failed: int
    skipped: int
    bytes: int  # of the done files
    tokens: int  # of the done rows
    open_tokens: int  # of the pending and leased rows
    ingest_complete: bool

    @property
    def open(self) -> int:
        """Rows that are still to be done."""
        return self.pending + self.leased

    @property
    def finished(self) -> bool:
        return self.ingest_complete and self.open == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """Of the last `seconds` of this boot, by the monotonic clock; all 0 when nothing was committed in them."""

    seconds: float
    samples_s: float
    tokens_s: float
    bytes_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Ingested:
    """What one batch of rows changed."""

    new: int
    edited: tuple[int, ...]  # rows whose content digest changed
    bad: int


class Manifest(Protocol):
    """Every method is one short transaction (writes: BEGIN IMMEDIATE, synchronous=FULL). One object is used by one
    thread at a time; other threads and processes open their own. Raises DiskFull when the disk is full (nothing
    changed, try again) and StoreError when the file cannot be used."""

    def identity(self) -> RunIdentity:
        """As pinned."""
        ...

    def pin(self, offered: RunIdentity) -> RunIdentity:
        """Compare with what is pinned, pin the release if it was not known. Raises IdentityMismatch."""
        ...

    def volume(self) -> str:
        """UUID of the volume that this output lives on."""
        ...

    def begin_epoch(self, epoch: str) -> int:
        """A worker starts (it holds the lock): rows leased by whoever came before are pending again, nothing is
        charged for them. Gives their number."""
        ...

    def claim(self, n: int, most_tokens: int | None = None) -> list[Claim]:
        """Lease up to n pending rows, least tried first, then by row. [] when there are none now. most_tokens: longer
        ones are passed over; None: none is too long."""
        ...

    def commit(self, done: Sequence[Done]) -> None:
        """All or none. Raises LeaseLost unless every row was still leased with that very lease."""
        ...

    def release(self, claims: Sequence[Claim]) -> None:
        """Give rows back untried (drain, engine gone): pending, nothing charged. Lost leases are ignored."""
        ...

    def retry(self, row: int, lease: int, code: str, reason: str, *, charge: bool, lost: bool = False) -> int:
        """Pending again, with the reason. lost: the engine died under it, which outlives this worker. Gives the charged
        tries including this one. Raises LeaseLost."""
        ...

    def fail(self, row: int, lease: int, code: str, reason: str) -> None:
        """Tombstone. The row stays failed until `revive`. Raises LeaseLost."""
        ...

    def skip(self, row: int, lease: int, code: str, reason: str) -> None:
        """The row itself cannot be used. Raises LeaseLost."""
        ...

    def counts(self) -> Counts:
        """In constant time, whatever the number of rows."""
        ...

    def rate(self, seconds: float) -> Rate:
        """Over the last `seconds`, not reaching behind the start of the present epoch."""
        ...

    def faults(self, states: Sequence[State], after: int = -1, limit: int = 1000) -> list[Fault]:
        """Rows in these states that have a reason, by row, from the one behind `after` on."""
        ...

    def revive(self, rows: Sequence[int] | None = None) -> int:
        """Failed rows (these, or all) are pending again with a fresh budget. Gives how many changed."""
        ...

    def stored(self, after: int = -1, limit: int = 1000) -> list[Stored]:
        """Done rows by row, from the one behind `after` on."""
        ...

    def requeue(self, rows: Sequence[int], code: str, reason: str) -> int:
        """Done rows are pending again (their files are bad or gone). Gives how many changed."""
        ...

    def adopt(self, done: Sequence[Done]) -> int:
        """Pending rows whose files were found and checked are done, and held ones with that lease. Gives how many."""
        ...

    def ingest(
        self,
        batch: Sequence[Sample | BadRow],
        end_row: int,
        end_hint: int,
        *,
        redo_edited: bool = True,
        skip_twice: bool = True,
    ) -> Ingested:
        """Record rows of the data set and how far the pass has come (the next row and its hint). Known rows with the
        same digest stay as they are, edited ones are pending again (or EditedRow is raised for a done one), bad ones
        skipped (or DataError is raised for a name that another row has)."""
        ...

    def look_again(self) -> None:
        """A row was not found as it was recorded: the next start looks at every row of the data set anew, whatever the
        file's size and time say."""
        ...

    def close(self) -> None: ...


def every_stored(manifest: Manifest, after: int = -1, page: int = 1000) -> Iterator[Stored]:
    """All done rows by row, in short reads that never hold up a checkpoint."""
    while batch := manifest.stored(after, page):
        yield from batch
        after = batch[-1].row
