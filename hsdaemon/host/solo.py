"""One supervisor per host and run folder: a kernel lock, freed with its holder whatever way that ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hsdaemon.errors import Fatal, StoreError, Transient
from hsdaemon.machine import disk

NAME = "supervisor.lock"
LOOKED_AT_S = 0.4


@contextlib.contextmanager
def only_one(run: str) -> Iterator[None]:
    """Hold the lock. Raises Transient naming the pid of the one that has it, StoreError when `run` cannot be used."""
    path = Path(run) / NAME
    try:
        disk.make_folder(path.parent)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise StoreError(f"cannot use {run}: {error.strerror}; run it as root or set paths.run") from None
    try:
        _take(fd)
        yield
    finally:
        os.close(fd)


def holder(run: str) -> int | None:
    """The pid of the supervisor that runs here; None when none does."""
    try:
        fd = os.open(Path(run) / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.pread(fd, 32, 0)
        return int(said) if said.strip().isdigit() else 0
    finally:
        os.close(fd)
    return None


def tell(run: str, number: int) -> int | None:
    """Send the supervisor a signal; its pid, None when none runs. Raises Fatal when it is somebody else's."""
    pid = holder(run)
    if not pid:
        return None
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return None
    except PermissionError:
        raise Fatal(f"cannot reach the supervisor: pid {pid} belongs to another user; run this as root") from None
    return pid


def _take(fd: int) -> None:
    """Whoever looks at the lock has it for an instant: only one who keeps it is a supervisor."""
    end = time.monotonic() + LOOKED_AT_S
    while not _taken(fd):
        if time.monotonic() < end:
            time.sleep(LOOKED_AT_S / 20)  # flock has no time-out of its own
            continue
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
        raise Transient(f"cannot start the supervisor: pid {pid or '?'} is one already; stop it first")
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
