"""Who may be sent next: slots and spool bytes, the oldest first, shorter ones past it only so often.

The oldest that does not fit lets the largest that fits pass, so that the engine has work; after `patience` such passes
only the oldest may go, so that a long row is never starved by short ones. A row that not even the empty spool could
hold at present stands aside and holds up nobody: a tmpfs may grow again, and no row is to blame for its size.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from hsdaemon.data.spool import Budget

PATIENCE = 64  # passes: two rounds of a usual concurrency


class TooLarge(ValueError):
    """The spool as it is configured is smaller than this dump."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A row that wants to be sent. size: bytes of its dump; alone: nothing may be in flight beside it."""

    size: int
    alone: bool = False
    passed: int = 0


@dataclass(slots=True)
class Queue:
    """Decides without waiting: `ask`, then `admit`; `leave` when a ticket has gone either way."""

    slots: int
    budget: Budget
    patience: int = PATIENCE
    waiting: list[Ticket] = field(default_factory=list)
    flying: list[Ticket] = field(default_factory=list)

    def ask(self, ticket: Ticket) -> None:
        """Queue up. Raises TooLarge when it could never be admitted, whatever becomes of the tmpfs."""
        if ticket.size > self.budget.most:
            raise TooLarge(f"its dump needs {ticket.size} bytes, the whole spool has {self.budget.most}")
        self.waiting.append(ticket)

    @property
    def outsized(self) -> int:
        """How many wait for a larger spool: not even an empty one could hold them at present."""
        return sum(not self._able(ticket) for ticket in self.waiting)

    def admit(self) -> list[Ticket]:
        """Everything that may go now; its bytes are claimed."""
        admitted = []
        while (ticket := self._choose()) is not None:
            self.waiting.remove(ticket)
            self.flying.append(ticket)
            self.budget.claim(ticket.size)
            admitted.append(ticket)
        return admitted

    def _choose(self) -> Ticket | None:
        able = [t for t in self.waiting if self._able(t)]
        if not able or len(self.flying) >= self.slots or any(t.alone for t in self.flying):
            return None
        oldest = able[0]
        if self._fits(oldest):
            return oldest
        if oldest.passed >= self.patience:
            return None
        fitting = [t for t in able if self._fits(t)]
        if fitting:
            oldest.passed += 1
        return max(fitting, key=lambda t: t.size, default=None)

    def _able(self, ticket: Ticket) -> bool:
        return ticket.size <= self.budget.total

    def _fits(self, ticket: Ticket) -> bool:
        return ticket.size <= self.budget.free and not (ticket.alone and self.flying)

    def leave(self, ticket: Ticket) -> None:
        """Done, failed or given up: its slot and its bytes are free."""
        if ticket in self.flying:
            self.flying.remove(ticket)
            self.budget.release(ticket.size)
        elif ticket in self.waiting:
            self.waiting.remove(ticket)


class Admission:
    """The queue with tasks waiting in it."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._ready: dict[Ticket, asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def admitted(self, size: int, *, alone: bool = False) -> AsyncIterator[None]:
        """Wait for a slot and `size` bytes; both are given back at the end. Raises TooLarge when it can never be."""
        ticket = Ticket(size, alone)
        self.queue.ask(ticket)
        ready = self._ready[ticket] = asyncio.Event()
        try:
            self.wake()
            await ready.wait()
            yield
        finally:
            self.queue.leave(ticket)
            self._ready.pop(ticket, None)
            self.wake()

    def wake(self) -> None:
        """Look at the queue again: a slot is free, or the budget has grown."""
        for ticket in self.queue.admit():
            self._ready[ticket].set()
