"""The worker's side of the spool: folder, epoch, byte budget, sweep, and what has become of a request's dump.

A dump counts only under its final name, which the capture gives it by a rename when it is whole. The folder is on a
tmpfs: a reboot empties it, and nothing waits for what was in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog

from hsdaemon import wire
from hsdaemon.errors import DiskFull, StoreError
from hsdaemon.machine import disk

RESERVE_BYTES = 64 << 20  # of the tmpfs: it is shared with others, who must not meet a full one
RESERVE_SHARE = 16  # a small tmpfs keeps one part in so many instead: most of it is there for dumps
_CGROUP_HEADROOM = 0.5  # of a memory limit: the process that writes the dumps needs the rest
_MOST_ERROR = 64 << 10  # bytes of an error file: ours have less than a thousand
_UNLIMITED = 1 << 62
_log = structlog.get_logger()


class SpoolTaken(StoreError):
    """Another living worker uses the same spool: each would sweep the other's dumps."""

    exit_code = 75  # it may end


def new_epoch() -> str:
    """Name one run of a worker: 16 hex digits, never the same twice, whatever pid, clock and boot say."""
    return secrets.token_hex(8)


def capacity(config_bytes: int, free_bytes: int, size_bytes: int, memory_limit: int) -> int:
    """Bytes that dumps may take: the setting, the free part of a tmpfs of `size_bytes` less a reserve, or our share of
    memory: the smallest."""
    reserve = min(RESERVE_BYTES, size_bytes // RESERVE_SHARE)
    return max(0, min(config_bytes, free_bytes - reserve, int(memory_limit * _CGROUP_HEADROOM)))


def memory_limit(cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of the tightest memory.max above this process; a very large number when there is none."""
    try:
        unified = [line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return _UNLIMITED
    here = cgroup_root / (unified[0].lstrip("/") if unified else "")
    limits = [_limit(folder / "memory.max") for folder in (here, *here.parents) if folder.is_relative_to(cgroup_root)]
    return min(limits, default=_UNLIMITED)


def _limit(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return _UNLIMITED
    return int(text) if text.isdecimal() else _UNLIMITED


class Budget:
    """Bytes claimed for dumps: claimed before a request is sent, given back when its dump is gone. total: as of now;
    most: what is configured, and what it becomes on a tmpfs that is large enough and left alone by others."""

    def __init__(self, total: int, most: int | None = None) -> None:
        self.total = total
        self.most = total if most is None else most
        self.claimed = 0

    @property
    def free(self) -> int:
        return self.total - self.claimed

    def claim(self, size: int) -> bool:
        """Take `size` bytes if they are free."""
        if size > self.free:
            return False
        self.claimed += size
        return True

    def release(self, size: int) -> None:
        """Give `size` claimed bytes back."""
        if size > self.claimed:
            raise AssertionError(f"{size} bytes released, {self.claimed} claimed")
        self.claimed -= size


@dataclass(frozen=True, slots=True)
class Dump:
    """A whole dump. size: bytes of the file; header: what the capture says of it."""

    path: Path
    size: int
    header: wire.DumpHeader


@dataclass(frozen=True, slots=True)
class Broken:
    """There is a file under the dump's or the error's name, and it is not what it should be."""

    reason: str


class Spool:
    """One spool folder in the hands of one worker's epoch. losses: how often it was removed under us."""

    def __init__(self, root: Path, epoch: str, config_bytes: int, announced: BinaryIO) -> None:
        self.root = root
        self.epoch = epoch
        self.losses = 0
        self._config_bytes = config_bytes
        self._announced = announced
        self.budget = Budget(self._room(), config_bytes)

    @classmethod
    def open(cls, root: Path, epoch: str, config_bytes: int) -> Spool:
        """Make the folder if need be, sweep dead epochs, announce ours. Raises StoreError, DiskFull.

        The epoch is written before the sweep: the capture stops writing for the dead one first. A crash in between
        leaves orphans, which the next start sweeps.
        """
        announced = _announce(root, epoch)
        sweep(root, epoch)
        return cls(root, epoch, config_bytes, announced)

    def close(self) -> None:
        """Let the capture write nothing more for us, remove what it wrote, leave the folder to another worker. A crash
        in between leaves orphans, which the next start sweeps."""
        path = self.root / wire.EPOCH_FILE
        with contextlib.suppress(OSError):
            if path.stat().st_ino == os.fstat(self._announced.fileno()).st_ino:
                path.unlink()
                sweep(self.root, "")
        self._announced.close()

    def keep(self) -> None:
        """Announce our epoch again when the folder was removed or emptied under us. Raises SpoolTaken, StoreError."""
        mine = os.fstat(self._announced.fileno())
        try:
            seen = (self.root / wire.EPOCH_FILE).lstat()
        except OSError:
            _log.warning("the spool was removed under the worker: it is made anew", spool=str(self.root))
            announced = _announce(self.root, self.epoch)
            self._announced.close()
            self._announced = announced
            self.losses += 1
            return
        if (seen.st_dev, seen.st_ino) != (mine.st_dev, mine.st_ino):
            raise SpoolTaken(f"cannot go on with the spool {self.root}: another worker has taken it; set spool.path")

    def measure(self) -> None:
        """Take the budget anew: others fill and empty the same tmpfs. Raises OSError when the folder is gone."""
        self.budget.total = self._room()

    def _room(self) -> int:
        """Bytes for dumps now."""
        found = os.statvfs(self.root)
        size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return capacity(self._config_bytes, free + self._dumped(), size, memory_limit())

    def _dumped(self) -> int:
        """Bytes of dumps and parts, which are claimed already."""
        total = 0
        for name in os.listdir(self.root):
            if wire.spool_rid(name) is not None:
                with contextlib.suppress(FileNotFoundError):  # published meanwhile
                    total += (self.root / name).lstat().st_blocks * 512
        return total

    def look(self, rid: wire.RequestId) -> Dump | wire.DumpError | Broken | None:
        """What the capture has made of this request so far; None: nothing yet."""
        path = self.root / wire.dump_name(rid)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb", buffering=0) as file:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    return Broken("it is no file")
                size, header = found.st_size, wire.unpack_header(file.read(wire.HEADER_BYTES))
        except FileNotFoundError:
            return self._error(rid)
        except (OSError, ValueError) as error:
            return Broken(str(error))
        return Dump(path, size, header)

    def _error(self, rid: wire.RequestId) -> wire.DumpError | Broken | None:
        try:
            text = disk.read_own(self.root / wire.error_name(rid), _MOST_ERROR)
            return wire.dump_error(text.decode(errors="replace"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return Broken(str(error))

    def discard(self, rid: wire.RequestId) -> None:
        """Remove the dump and the error file of a request; a part belongs to the capture, which is still writing it."""
        for name in (wire.dump_name(rid), wire.error_name(rid)):
            _remove(self.root / name)

    def discard_others(self, live: set[wire.RequestId]) -> int:
        """Remove what came late for requests that were given up. Gives the number of files."""
        gone = 0
        for name in os.listdir(self.root) if self.root.is_dir() else ():
            rid = wire.spool_rid(name)
            if rid is not None and rid not in live and not name.startswith(wire.PART_PREFIX):
                gone += _remove(self.root / name)
        return gone


def sweep(root: Path, epoch: str) -> int:
    """Remove dumps, errors and parts of every epoch but `epoch`; foreign names stay. Gives the number of files."""
    gone = 0
    for name in os.listdir(root):
        rid = wire.spool_rid(name)
        if rid is not None and rid.epoch != epoch:
            gone += _remove(root / name)
    return gone


def _remove(path: Path) -> bool:
    """Whether a file went. A folder under a name of ours is not from us: it stays, and holds up nothing."""
    try:
        path.unlink()
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        return False
    return True


def _announce(root: Path, epoch: str) -> BinaryIO:
    """Write the epoch and lock it for as long as we live. Raises SpoolTaken, StoreError, DiskFull."""
    _own_folder(root)
    path = root / wire.EPOCH_FILE
    try:
        with contextlib.suppress(FileNotFoundError), _locked(path):
            pass  # whoever wrote it is dead
        try:
            disk.replace(path, epoch.encode())
        except DiskFull:  # by what a dead worker left, perhaps
            sweep(root, epoch)
            disk.replace(path, epoch.encode())
        return _locked(path)
    except BlockingIOError:
        cause = "the living worker of another output has it"
        raise SpoolTaken(f"cannot use the spool {root}: {cause}; set spool.path to a folder of its own") from None
    except OSError as error:
        raise StoreError(f"cannot use the spool {root}: {error.strerror}; set spool.path to a tmpfs folder") from None


def _locked(path: Path) -> BinaryIO:
    """Raises BlockingIOError when somebody has it, OSError."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def _own_folder(root: Path) -> None:
    """The folder exists, is a real folder, is ours and closed to others. Raises StoreError."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise StoreError(f"cannot use the spool {root}: it is a link or a file; remove it or set spool.path")
        if found.st_uid != os.geteuid():
            raise StoreError(f"cannot use the spool {root}: it belongs to uid {found.st_uid}; set spool.path")
        if stat.S_IMODE(found.st_mode) != 0o700:
            root.chmod(0o700)
    except OSError as error:
        raise StoreError(f"cannot use the spool {root}: {error.strerror}; set spool.path to a tmpfs folder") from None
