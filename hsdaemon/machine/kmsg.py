"""Xid lines of the kernel log. Each record is read once and kept; the kernel forgets, we do not.

Its clock is its own, which nobody sets right: it drifts by tens of seconds a month. What is read now is not of later.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from dataclasses import dataclass, replace

from hsdaemon.core.model import Unreadable

DEVICE = "/dev/kmsg"
RECORD = 8192  # bytes: the kernel's longest record
KEPT = 1000  # lines: a GPU in trouble can write many
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d+)")


@dataclass(frozen=True)
class XidLine:
    """One error line: PCI address as domain:bus:device, seconds since boot."""

    pci: str
    code: int
    at_s: float


def parse(record: str) -> XidLine | None:
    """A record "priority,sequence,microseconds,flags;text", None when it is no Xid line."""
    head, _, text = record.partition(";")
    found = _XID.search(text)
    fields = head.split(",")
    if found is None or len(fields) < 3 or not fields[2].isdigit():
        return None
    return XidLine(found[1].lower(), int(found[2]), int(fields[2]) / 1e6)


class KernelLog:
    """The log from this boot's start to now, read without waiting."""

    def __init__(self, device: str = DEVICE) -> None:
        self._device = device
        self._fd = -1
        self._lines: list[XidLine] = []

    def xids(self) -> tuple[XidLine, ...] | Unreadable:
        """All Xid lines so far, oldest first."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._read()
        except OSError as error:
            return Unreadable("kmsg", f"cannot read {self._device}: {error.strerror}")
        return tuple(self._lines)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while record := self._record():
                line = parse(record)
                if line is not None:
                    line = replace(line, at_s=min(line.at_s, time.monotonic()))
                    self._lines = [*self._lines[1 - KEPT :], line]

    def _record(self) -> str:
        """The next record; "" at the end of a recorded file."""
        while True:
            try:
                return os.read(self._fd, RECORD).decode(errors="replace")
            except OSError as error:
                if error.errno != errno.EPIPE:  # EPIPE: overwritten before we read it, the next read goes on
                    raise
