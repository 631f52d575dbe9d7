"""Time, and a wait that signals cut short. A wait is the only place where the supervisor sleeps."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator

from hsdaemon.core.model import Now
from hsdaemon.machine.identity import boot_id


class HostClock:
    """The port Clock. `asked`: signals that came since the start, by number, in order."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._boot = boot_id()
        self.asked: list[int] = []
        self._woken = False

    def now(self) -> Now:
        return Now(time.monotonic(), time.time(), self._boot)

    def wait(self, seconds: float) -> None:
        """Until then, or until a signal: what it asks for is in `asked`. One that has come since the last wait, and may
        be answered already, ends this one at once: what was looked at before it is to be looked at again."""
        self._take()
        if not self._woken:
            select.select([self._read], [], [], max(0.0, seconds))
            self._take()
        self._woken = False

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while got := os.read(self._read, 512):
                self.asked.extend(got)
                self._woken = True

    def taken(self, number: int) -> bool:
        """Whether this signal came since it was last taken; forgets it."""
        self._take()
        came = number in self.asked
        self.asked = [n for n in self.asked if n != number]
        return came

    @contextlib.contextmanager
    def listening(self, *numbers: int) -> Iterator[None]:
        """Turn these signals into events, for the main thread of a process."""
        before = {number: signal.signal(number, _nothing) for number in numbers}
        wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)


def _nothing(_number: int, _frame: object) -> None:
    """The wake-up descriptor carries the number; a handler must exist for it to be written."""
