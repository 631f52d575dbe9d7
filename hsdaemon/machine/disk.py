"""Publish, replace, append, read tolerantly: each fsync of the product is in this file.

The rule after a failed fsync: the kernel drops the dirty mark together with the error, so the data are lost even when
the next fsync says 0. That inode is given up and its content is written again to a new one; a second failure in a row
means that the volume cannot be trusted (`BadVolume`), and nothing more is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hsdaemon.errors import DiskFull, HsError, StoreError

BLOCK = 4096  # bytes: O_DIRECT offsets, lengths and addresses are multiples of it
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNABLE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EXDEV, errno.EISDIR, errno.ENOENT)
# Drafts and probes of an epoch, write probes of a process.
_DRAFT = re.compile(r"\..+\.[0-9a-f]{16}\.tmp|\.hs-probe\.[0-9]+\.tmp|\.hs-extract-probe-[0-9]+", re.ASCII)
_RENAME_NOREPLACE, _SYNC_RANGE_WRITE, _AT_FDCWD = 1, 2, -100
_libc = ctypes.CDLL(None, use_errno=True)


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


def sync_volume(folder: Path) -> None:
    """Make everything durable that was written to the file system of `folder`, whoever wrote it. Raises SyncFailed."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise SyncFailed(number, os.strerror(number))
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Make a whole new tree durable: files, then the folders that name them. Raises SyncFailed, OSError."""
    for path in folder.iterdir():
        if path.is_symlink():
            continue
        if path.is_dir():
            sync_tree(path)
            continue
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            sync(fd)
        finally:
            os.close(fd)
    sync_folder(folder)


def make_folder(folder: Path) -> None:
    """Create `folder`, its name durable before anything is put below it; one that is there may have been made just
    before a crash, so its name is synced too. Its parent must be there: a path that went away with its volume is not
    made anew on the disk below. Raises OSError, SyncFailed."""
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
    try:
        sync_folder(folder.parent)  # a crash here leaves an empty folder, or none
    except SyncFailed:
        with contextlib.suppress(OSError):  # the next try must make the name anew
            folder.rmdir()
        raise


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
    """Put `data` under `path`: old or new content after any crash, never a mixture. A file that root replaces stays its
    owner's, who could not replace it any more in a sticky folder. Raises DiskFull, BadVolume."""
    twice(path.parent, lambda: _replace(path, data, mode), len(data))


def _replace(path: Path, data: bytes, mode: int) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            same_owner(fd, path)
            write_all(fd, memoryview(data))
            sync(fd)  # before the rename: a crash in between leaves the old content and a draft
        finally:
            os.close(fd)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)  # a crash before it leaves the old or the new content, whole


def same_owner(fd: int, path: Path) -> None:
    """What root makes belongs to the owner of `path`, if there is one."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a container without the right, a file system without owners: root's, then
            old = path.lstat()
            os.fchown(fd, old.st_uid, old.st_gid)


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
    # No link: others may write into the folder, and whoever appends may be root.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
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


def open_own(path: Path) -> io.FileIO:
    """A file of ours in a folder where others write, too: a pipe, a device or a link there neither holds the reader up
    nor leads it elsewhere. Raises OSError."""
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return file


def read_own(path: Path, limit: int = 8 << 20) -> bytes:
    """The content of a small one. Raises OSError, for more than `limit` bytes also."""
    with open_own(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, "it is none of ours, it is too large", str(path))
    return data


def read_lines(path: Path, limit: int = 64 << 20) -> list[bytes]:
    """The whole lines of a file that `append` wrote: of a larger file the last `limit` bytes, a torn end left out."""
    try:
        with open_own(path) as file:
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
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            write_all(fd, memoryview(b"probe"))
            os.fsync(fd)
        finally:
            os.close(fd)
            name.unlink(missing_ok=True)
    except OSError as error:
        return error
    return None


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a file system can do for a publication. way: how a whole file gets its name without overwriting another."""

    way: str  # "linkat": an inode without a name is linked; "renameat2", "link": from a temporary name
    direct: bool  # O_DIRECT


class Draft:
    """A file in the making: without a name, or under a temporary one that no trainer reads, until `name` gives its own.

    Blocks come in order, each a multiple of BLOCK long and aligned to it; the last one may be padded.
    """

    def __init__(self, folder: Path, name: str, size: int, able: Abilities, epoch: str) -> None:
        """Open and allocate: a full disk speaks before the first byte. A crash leaves a draft. Raises OSError."""
        self._able, self._at = able, 0
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._draft = "" if able.way == "linkat" else f".{name}.{epoch}.tmp"
        self._fd = -1
        try:
            kind = os.O_CREAT | os.O_EXCL if self._draft else os.O_TMPFILE
            flags = os.O_WRONLY | os.O_CLOEXEC | kind | (os.O_DIRECT if able.direct else 0)
            self._fd = os.open(self._draft or ".", flags, 0o666, dir_fd=self._folder)
            _allocate(self._fd, -(-size // BLOCK) * BLOCK)
        except OSError:
            self.close()
            raise

    def write(self, block: memoryview) -> None:
        """Raises OSError."""
        write_all(self._fd, block)
        if not self._able.direct:
            # Bounds dirty memory; it makes nothing durable, so its result means nothing.
            _libc.sync_file_range(self._fd, ctypes.c_int64(self._at), ctypes.c_int64(len(block)), _SYNC_RANGE_WRITE)
        self._at += len(block)

    def truncate(self, size: int) -> None:
        """To the true size, in bytes. Raises OSError."""
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Raises SyncFailed."""
        sync(self._fd)

    def name(self, name: str) -> None:
        """Give it its name. Raises FileExistsError rather than overwrite; the name is durable once the folder is."""
        if self._able.way == "linkat":
            # src_dir_fd makes CPython call linkat(2) and follow the link in /proc.
            source = f"/proc/self/fd/{self._fd}"
            os.link(source, name, src_dir_fd=0, dst_dir_fd=self._folder, follow_symlinks=True)
        elif self._able.way == "renameat2":
            _rename_new(self._folder, self._draft, name)
            self._draft = ""
        else:
            os.link(self._draft, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def close(self) -> None:
        """Forget it; without a name it is gone."""
        if self._folder < 0:
            return
        if self._fd >= 0:
            os.close(self._fd)
        if self._draft:
            with contextlib.suppress(OSError):  # swept at the next start
                os.unlink(self._draft, dir_fd=self._folder)
        os.close(self._folder)
        self._folder = self._fd = -1


def _allocate(fd: int, size: int) -> None:
    """fallocate(2); where the file system has none, writing finds the full disk. Raises OSError."""
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))


def _rename_new(folder: int, old: str, new: str) -> None:
    """renameat2(RENAME_NOREPLACE) inside a folder. Raises OSError."""
    if _libc.renameat2(folder, old.encode(), folder, new.encode(), _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new)


def probe_abilities(folder: Path, epoch: str) -> Abilities:
    """Try each way in `folder` once, the best first. Raises StoreError when none names a file without overwriting."""
    reasons = []
    for way in ("linkat", "renameat2", "link"):
        for direct in (True, False):
            error = _attempt(folder, Abilities(way, direct), epoch)
            if error is None:
                return Abilities(way, direct)
            if error.errno not in _UNABLE:
                raise explain(error, folder) from error
            reasons.append(f"{way}{' with O_DIRECT' if direct else ''}: {os.strerror(error.errno)}")
    raise StoreError(
        f"cannot publish below {folder}: its file system cannot name a file without overwriting another "
        f"({'; '.join(reasons)}); use a local ext4, xfs or btrfs"
    )


def _attempt(folder: Path, able: Abilities, epoch: str) -> OSError | None:
    """Publish a probe twice: the second must be refused, for the name is taken."""
    final = folder / f".probe.{epoch}.tmp"
    try:
        for taken in (False, True):
            with contextlib.closing(Draft(folder, "probe-draft", BLOCK, able, epoch)) as draft:
                draft.write(memoryview(mmap.mmap(-1, BLOCK)))
                draft.truncate(1)
                draft.sync()
                try:
                    draft.name(final.name)
                except FileExistsError:
                    if not taken:
                        raise
                else:
                    if taken:
                        return OSError(errno.EOPNOTSUPP, "it overwrites")
    except OSError as error:
        return error
    finally:
        final.unlink(missing_ok=True)
    return None


def sweep_drafts(folder: Path) -> int:
    """Remove the temporary names that a dead writer or probe left in `folder`; gives how many. Raises OSError."""
    stale = [entry for entry in folder.iterdir() if _DRAFT.fullmatch(entry.name)]
    for entry in stale:
        entry.unlink(missing_ok=True)
    return len(stale)


def set_aside(path: Path, folder: Path) -> Path:
    """Move a file into quarantine: another folder of the same file system and a suffix that no trainer reads, so that
    nothing is deleted and nothing bad is trained on. Raises OSError."""
    make_folder(folder)
    aside = folder / f"{path.name}.{secrets.token_hex(4)}.bad"
    path.rename(aside)  # a crash here leaves it under one of the two names
    sync_folder(folder)
    sync_folder(path.parent)
    return aside


def make_ballast(path: Path, size: int) -> None:
    """A fully allocated file of `size` bytes to give up on a full disk. Raises DiskFull, BadVolume."""
    with contextlib.suppress(OSError):
        if path.stat().st_blocks * 512 >= size:
            return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            sync(fd)
        except OSError:
            path.unlink(missing_ok=True)  # a failed allocation leaves the file grown
            raise
        finally:
            os.close(fd)
        sync_folder(path.parent)
    except OSError as error:
        raise explain(error, path.parent, size) from error


def drop_ballast(path: Path) -> bool:
    """Give the ballast up; False when there is none. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        return True
    return False
