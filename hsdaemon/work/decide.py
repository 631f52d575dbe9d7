"""What follows from a try that failed. Nothing here touches anything: same input, same answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tenacity import RetryCallState, wait_exponential
from tenacity.wait import wait_base

LONGEST_WAIT_S = 60.0
ALONE_AFTER = 2  # lost connections: from then on the row is sent with nothing beside it, so that guilt is certain
MIN_CRASHES = 3  # lost connections before a row is failed: one in company, one as suspect, one alone


class Kind(enum.Enum):
    """Whose fault it is."""

    sample = "sample"  # this try gave nothing usable: charged, tried again within the row's budget
    refused = "refused"  # the server will never take this row: failed at once
    lost = "lost"  # the server died under it: not charged, but remembered
    pressure = "pressure"  # no room, engine draining: not charged
    run = "run"  # every row would have it: the worker stops


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a try gave no file. code: one word for lists and counts; reason: for a person."""

    kind: Kind
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Retry:
    """The row is pending again and stays untouched for `wait_s`."""

    charge: bool
    wait_s: float


@dataclass(frozen=True, slots=True)
class Fail:
    """Tombstone with this reason."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker stops; `cause` is the sentence a person reads."""

    cause: str


def backoff_s(first_s: float, tries: int) -> float:
    """Seconds before try number tries + 1: doubled each time, bounded."""
    wait: wait_base = wait_exponential(multiplier=first_s, max=LONGEST_WAIT_S)
    state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]  # the wait looks at attempt_number alone
    state.attempt_number = tries
    return wait(state)


def after(failure: Failure, charged: int, losses: int, attempts: int, first_wait_s: float) -> Retry | Fail | Stop:
    """What follows. charged: tries charged before this one; losses: connections lost under the row, with this one."""
    if failure.kind is Kind.run:
        return Stop(failure.reason)
    if failure.kind is Kind.refused:
        return Fail(failure.code, failure.reason)
    if failure.kind is Kind.pressure:
        return Retry(charge=False, wait_s=first_wait_s)
    if failure.kind is Kind.lost:
        if losses >= max(MIN_CRASHES, attempts):
            return Fail("engine-lost", f"the engine was lost {losses} times in a row under this row: {failure.reason}")
        return Retry(charge=False, wait_s=0.0)
    if charged + 1 >= attempts:
        return Fail(failure.code, f"{failure.reason} (try {charged + 1} of {attempts})")
    return Retry(charge=True, wait_s=backoff_s(first_wait_s, charged + 1))


def alone(losses: int) -> bool:
    """Whether a row must be sent with nothing beside it."""
    return losses >= ALONE_AFTER


@dataclass(slots=True)
class Streak:
    """Rows that failed their first try with no success in between: when it is long, the cause is not the rows.

    Later tries do not count: poison rows meet at the end of a job, when all others are done.
    """

    limit: int
    rows: set[int] = field(default_factory=set)

    def success(self) -> None:
        self.rows.clear()

    def failure(self, row: int, charged: int, failure: Failure) -> Stop | None:
        """Count it. charged: tries charged before this one."""
        if charged == 0 and failure.kind in (Kind.sample, Kind.refused):
            self.rows.add(row)
        if len(self.rows) < self.limit:
            return None
        return Stop(f"{len(self.rows)} samples failed in a row, the last one, row {row}, with: {failure.reason}")


@dataclass(slots=True)
class Stall:
    """Nothing was done for too long although it could have been. Times are seconds of the monotonic clock."""

    limit_s: float
    since: float

    def progress(self, now: float) -> None:
        self.since = now

    def look(self, now: float, *, idle: bool, waits_for: str) -> Stop | None:
        """idle: the work is paused on purpose or there is none, which is no stall."""
        if idle:
            self.since = now
        if now - self.since <= self.limit_s:
            return None
        return Stop(f"no sample was done for {now - self.since:.0f} s while rows are pending; waiting for {waits_for}")
