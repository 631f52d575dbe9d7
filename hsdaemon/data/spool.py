"""The worker's side of the spool: folder, epoch, byte budget, sweep, and what has become of a request's dump.

A dump counts only under its final name, which the capture gives it by a rename when it is whole. The folder is on a
tmpfs: a reboot empties it, and nothing waits for what was in it.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from hsdaemon import wire
from hsdaemon.errors import StoreError
from hsdaemon.machine import disk

RESERVE_BYTES = 64 << 20  # of the tmpfs: it is shared with others, who must not meet a full one
_CGROUP_HEADROOM = 0.5  # of a memory limit: the process that writes the dumps needs the rest
_UNLIMITED = 1 << 62


def new_epoch() -> str:
    """Name one run of a worker: 16 hex digits, never the same twice, whatever pid, clock and boot say."""
    return secrets.token_hex(8)


def capacity(config_bytes: int, free_bytes: int, memory_limit: int) -> int:
    """Bytes that dumps may take: the setting, the tmpfs less a reserve, or our share of memory: the smallest."""
    return max(0, min(config_bytes, free_bytes - RESERVE_BYTES, int(memory_limit * _CGROUP_HEADROOM)))


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
    """Bytes claimed for dumps: claimed before a request is sent, given back when its dump is gone."""

    def __init__(self, total: int) -> None:
        self.total = total
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
    """One spool folder in the hands of one worker's epoch."""

    def __init__(self, root: Path, epoch: str, budget: Budget) -> None:
        self.root = root
        self.epoch = epoch
        self.budget = budget

    @classmethod
    def open(cls, root: Path, epoch: str, config_bytes: int) -> Spool:
        """Make the folder if need be, sweep dead epochs, announce ours. Raises StoreError.

        The epoch is written before the sweep: the capture stops writing for the dead one first. A crash in between
        leaves orphans, which the next start sweeps.
        """
        _own_folder(root)
        disk.replace(root / wire.EPOCH_FILE, epoch.encode())
        sweep(root, epoch)
        free = os.statvfs(root)
        room = capacity(config_bytes, free.f_bavail * free.f_frsize, memory_limit())
        return cls(root, epoch, Budget(room))

    def look(self, rid: wire.RequestId) -> Dump | wire.DumpError | Broken | None:
        """What the capture has made of this request so far; None: nothing yet."""
        path = self.root / wire.dump_name(rid)
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                header = wire.unpack_header(file.read(wire.HEADER_BYTES))
        except FileNotFoundError:
            return self._error(rid)
        except (OSError, ValueError) as error:
            return Broken(str(error))
        return Dump(path, size, header)

    def _error(self, rid: wire.RequestId) -> wire.DumpError | Broken | None:
        try:
            return wire.dump_error((self.root / wire.error_name(rid)).read_text(errors="replace"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return Broken(str(error))

    def discard(self, rid: wire.RequestId) -> None:
        """Remove the dump and the error file of a request; a part belongs to the capture, which is still writing it."""
        for name in (wire.dump_name(rid), wire.error_name(rid)):
            (self.root / name).unlink(missing_ok=True)

    def discard_others(self, live: set[wire.RequestId]) -> int:
        """Remove what came late for requests that were given up. Gives the number of files."""
        gone = 0
        for name in os.listdir(self.root) if self.root.is_dir() else ():
            rid = wire.spool_rid(name)
            if rid is not None and rid not in live and not name.startswith(wire.PART_PREFIX):
                (self.root / name).unlink(missing_ok=True)
                gone += 1
        return gone


def sweep(root: Path, epoch: str) -> int:
    """Remove dumps, errors and parts of every epoch but `epoch`; foreign names stay. Gives the number of files."""
    gone = 0
    for name in os.listdir(root):
        rid = wire.spool_rid(name)
        if rid is not None and rid.epoch != epoch:
            (root / name).unlink(missing_ok=True)
            gone += 1
    return gone


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
