"""One worker per output: a kernel lock on a file, freed by the kernel with its holder, whatever way that ended.

What is written inside is for the message only; nothing judges by it whether the lock is stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

from hsdaemon.errors import StoreError
from hsdaemon.machine import disk
from hsdaemon.machine.identity import boot_id, start_ticks
from hsdaemon.wire import parse_json

LOCK_NAME = "manifest.lock"


class LockHeld(StoreError):
    """Another worker has this output."""

    exit_code = 75  # it may end


class Lock:
    """Held until `release` or the end of the process; never crosses an exec."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Free the lock; the file stays, empty, so that `status` names nobody."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)


def create(folder: Path) -> None:
    """Make the lock file, so that a full disk later does not keep the worker from its lock."""
    os.close(_open(folder / LOCK_NAME))


def acquire(folder: Path) -> Lock:
    """Raises LockHeld naming the holder, StoreError when the file cannot be opened."""
    path = folder / LOCK_NAME
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(fd)
        os.close(fd)
        raise LockHeld(f"cannot start a worker: {holder} has {path}; stop it first") from None
    _sign(fd)
    return Lock(fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise StoreError(f"cannot open the lock {path}: {error.strerror}; see to the folder") from None


def _sign(fd: int) -> None:
    """Say who we are. On a full disk the lock holds all the same, only the message is poorer."""
    text = json.dumps({"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "boot_id": boot_id()})
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)
    except OSError:
        return


def living_holder(folder: Path) -> int | None:
    """Pid of the worker that wrote itself down and still runs, for `status`; never touches the lock."""
    try:
        who = parse_json(disk.read_own(folder / LOCK_NAME, 4096))
        pid, ticks, boot = int(who["pid"]), int(who["start_ticks"]), str(who["boot_id"])
        return pid if boot == boot_id() and start_ticks(pid) == ticks else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _holder(fd: int) -> str:
    try:
        who = parse_json(os.pread(fd, 4096, 0))
        return f"pid {int(who['pid'])} (start {int(who['start_ticks'])}, boot {who['boot_id']!s:.8})"
    except (ValueError, KeyError, TypeError):
        return "another process"
