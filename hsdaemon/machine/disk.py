"""Publish, replace, append, read tolerantly: each fsync of the product is in this file.

The rule after a failed fsync: the kernel drops the dirty mark together with the error, so the data are lost even when
the next fsync says 0. That inode is given up and its content is written again to a new one; a second failure in a row
means that the volume cannot be trusted (`BadVolume`), and nothing more is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from hsdaemon.errors import DiskFull, HsError, StoreError

BLOCK = 4096  # bytes: O_DIRECT offsets, lengths and addresses are multiples of it
_FULL = (errno.ENOSPC, errno.EDQUOT)


class BadVolume(StoreError):
    """The volume lost data or refuses writes: hold, with the errno. A person must look at the disk."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.errno = number


class SyncFailed(OSError):
    """An fsync failed: what was written to that inode is lost."""


def sync(fd: int) -> None:
    """fsync once. Raises SyncFailed; the descriptor must not be synced again after that."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise SyncFailed(error.errno, error.strerror) from None


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. Raises SyncFailed."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents, each name durable before anything is put below it. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    sync_folder(folder.parent)  # a crash here leaves an empty folder, or none


def free_bytes(folder: Path) -> int:
    """Bytes that we may use: f_bavail, since root's reserve is not ours. Raises OSError."""
    seen = os.statvfs(folder)
    return seen.f_bavail * seen.f_frsize


def is_full(folder: Path, needed: int) -> bool:
    """Whether `needed` bytes and an inode are not to be had. Judged by statvfs: messages of libraries lie."""
    seen = os.statvfs(folder)
    return seen.f_bavail * seen.f_frsize < needed or (seen.f_files > 0 and seen.f_favail == 0)


def explain(error: OSError, folder: Path, needed: int = 0) -> HsError:
    """The failure of a write below `folder`, typed: DiskFull pauses, BadVolume holds."""
    cause = os.strerror(error.errno) if error.errno else str(error)
    try:
        full = error.errno in _FULL or is_full(folder, needed)
    except OSError:
        full = False
    if full and error.errno not in (errno.EIO, errno.EROFS):
        return DiskFull(f"cannot write below {folder}: disk full ({cause}); free space, work goes on by itself")
    return BadVolume(f"cannot write below {folder}: {cause}; check the volume, then start again", error.errno)


def twice(folder: Path, write: Callable[[], None], needed: int = 0) -> None:
    """Run `write`, which makes a new inode each time, once more when an fsync failed. Raises DiskFull, BadVolume."""
    try:
        try:
            write()
        except SyncFailed as error:
            if error.errno in (errno.EROFS, *_FULL):
                raise
            write()
    except OSError as error:
        raise explain(error, folder, needed) from error


def replace(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Put `data` under `path`: old or new content after any crash, never a mixture. Raises DiskFull, BadVolume."""
    twice(path.parent, lambda: _replace(path, data, mode), len(data))


def _replace(path: Path, data: bytes, mode: int) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            write_all(fd, memoryview(data))
            sync(fd)  # before the rename: a crash in between leaves the old content and a draft
        finally:
            os.close(fd)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)  # a crash before it leaves the old or the new content, whole


def append(path: Path, line: bytes) -> None:
    """Add one line (without its newline), durable when this returns. A torn end of an earlier crash stays a line of its
    own. Raises DiskFull, BadVolume."""
    try:
        _append(path, line)
    except SyncFailed:
        old = path.read_bytes()
        replace(path, old)  # the page cache still has the line: a new inode brings it to the device
    except OSError as error:
        raise explain(error, path.parent, len(line)) from error


def _append(path: Path, line: bytes) -> None:
    fresh = not path.exists()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        end = os.fstat(fd).st_size
        torn = end > 0 and os.pread(fd, 1, end - 1) != b"\n"
        try:
            write_all(fd, memoryview((b"\n" if torn else b"") + line + b"\n"))
        except OSError:
            os.ftruncate(fd, end)
            raise
        sync(fd)  # a crash before it leaves the line, a torn end or nothing
    finally:
        os.close(fd)
    if fresh:
        sync_folder(path.parent)


def write_all(fd: int, data: memoryview) -> None:
    """write(2) until all is written: a short write is not an error. Raises OSError."""
    while data:
        data = data[os.write(fd, data) :]


def read(path: Path, limit: int = 64 << 20) -> bytes | None:
    """The content, or None when there is no file. Raises StoreError when it cannot be read or exceeds `limit` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}; check the file and the volume") from error
    if len(data) > limit:
        raise StoreError(f"cannot read {path}: it is larger than {limit} bytes; it is none of ours")
    return data


def read_lines(path: Path, limit: int = 64 << 20) -> list[bytes]:
    """The whole lines of a file that `append` wrote: of a larger file the last `limit` bytes, a torn end left out."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - limit)
            file.seek(start)
            data = file.read(limit)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}; check the file and the volume") from error
    lines = data.split(b"\n")[:-1]
    return [line for line in (lines[1:] if start else lines) if line]


def probe_write(folder: Path) -> OSError | None:
    """Write, sync and remove a small file: mount options do not tell a read-only or failed file system."""
    name = folder / f".hs-probe.{os.getpid()}.tmp"
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, memoryview(b"probe"))
            os.fsync(fd)
        finally:
            os.close(fd)
            name.unlink(missing_ok=True)
    except OSError as error:
        return error
    return None
