"""From a dump in the spool to a durable file under its final name, in one pass over its bytes.

The order is the point: whole content, fsync, name, fsync of the folder; only then may the manifest say "done". A crash
between any two steps leaves nothing, or a whole file that is adopted. The dump stays until the manifest has committed:
it is what every repair is made from.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import xxhash

from hsdaemon.data.formats import (
    Damaged,
    Format,
    Row,
    Stamp,
    check_content,
    file_size,
    make_stamp,
    read_stamp,
    relative_path,
)
from hsdaemon.data.identity import RunIdentity
from hsdaemon.data.stream import Dump, DumpRefused, Written, payload_digest, stream
from hsdaemon.machine import disk

BUFFER_BYTES = 8 << 20  # one write; large enough that a device's latency does not show
_BLOCK = 1 << 20
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Published:
    """A durable file. path: below the output folder; digest: xxh3-128 of the file; adopted: it was already there."""

    row: int
    path: str
    size: int
    digest: bytes
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """A dump that must not become a file. code: see stream.DumpRefused; "name": the sample cannot name a file."""

    row: int
    code: str
    detail: str


Outcome = Published | Rejected


@dataclass(slots=True)
class _Ready:
    """A synced draft that waits for its name."""

    sample: Row
    path: str
    draft: disk.Draft
    written: Written


class Publisher:
    """Publishes below `root`; any number of threads may call it. Quarantine: a folder of the same file system.

    volume_check(bytes) runs before every publication and raises what stops it. steps(name) hears of each step done, in
    order: checked, opened, written, truncated, synced, named, folder synced. holds(row, name): whether a file of that
    row and name that is in the way is still wanted.
    """

    def __init__(
        self,
        root: Path,
        quarantine: Path,
        fmt: Format,
        run: RunIdentity,
        epoch: str,
        volume_check: Callable[[int], None],
        steps: Callable[[str], None] = lambda _: None,
        holds: Callable[[int, str], bool] = lambda _row, _name: True,
    ) -> None:
        """Probes what the file system can do and removes what a dead writer left. Raises StoreError, DiskFull."""
        self._root, self._quarantine, self._format, self._run, self._epoch = root, quarantine, fmt, run, epoch
        self._volume_check, self._steps, self._holds = volume_check, steps, holds
        self._identity = run.digest()
        self._bad: disk.BadVolume | None = None
        try:
            disk.sweep_drafts(root)  # a power cut in the middle of a probe leaves its name
        except OSError as error:
            raise disk.explain(error, root) from error
        self._able = disk.probe_abilities(root, epoch)
        if self._able.way != "linkat":  # the output has one writer, so whatever is left is a dead one's
            for folder in root.glob("rows_*-*"):
                disk.sweep_drafts(folder)
        self._folders: set[Path] = set()  # whose names are durable
        self._local = threading.local()

    @property
    def abilities(self) -> disk.Abilities:
        return self._able

    def publish(self, sample: Row, dump: Path) -> Outcome:
        """One sample: durable when this returns. Raises DiskFull, BadVolume, and what volume_check raises."""
        return self.publish_many([(sample, dump)])[0]

    def publish_many(self, items: Sequence[tuple[Row, Path]]) -> list[Outcome]:
        """Small samples together: each file synced, then each folder once. Outcomes in the order of `items`.

        A failed fsync loses what was written: all is written anew from the dumps, once; the second failure in a row
        marks the volume bad for good. Raises DiskFull, BadVolume, and what volume_check raises.
        """
        if self._bad is not None:
            raise self._bad
        size = sum(_bytes_of(dump) for _, dump in items)
        outcomes: list[Outcome] = []

        def write() -> None:
            self._volume_check(size)
            self._steps("checked")
            outcomes[:] = self._publish(items)

        try:
            disk.twice(self._root, write, size)
        except disk.BadVolume as error:
            if error.errno == errno.EIO:  # others (read-only, gone) may be cured without a new process
                self._bad = error
            raise
        return outcomes

    def _publish(self, items: Sequence[tuple[Row, Path]]) -> list[Outcome]:
        """One attempt. Raises OSError, SyncFailed; the names it gave are taken back when a folder cannot be synced."""
        named: list[Path] = []
        with contextlib.ExitStack() as stack:
            ready = [self._prepare(sample, dump, stack) for sample, dump in items]
            try:
                outcomes = [item if isinstance(item, Rejected) else self._name(item, named) for item in ready]
                for folder in sorted({self._root / item.path for item in outcomes if isinstance(item, Published)}):
                    disk.sync_folder(folder.parent)
            except disk.SyncFailed:
                for path in named:
                    path.unlink(missing_ok=True)
                raise
        self._steps("folder synced")
        return outcomes

    def _prepare(self, sample: Row, dump: Path, stack: contextlib.ExitStack) -> _Ready | Rejected:
        """Steps 1 to 5: the whole, synced content without a name."""
        try:
            path = relative_path(self._format, sample.row, sample.name)
            with Dump(dump, sample, self._format, self._run) as source:
                return self._write(sample, path, source, stack)
        except DumpRefused as error:
            return Rejected(sample.row, error.code, error.detail)
        except ValueError as error:
            return Rejected(sample.row, "name", str(error))

    def _write(self, sample: Row, path: str, source: Dump, stack: contextlib.ExitStack) -> _Ready:
        """Raises DumpRefused, OSError."""
        folder = (self._root / path).parent
        if folder not in self._folders or not folder.is_dir():  # the volume may have come back without it
            disk.make_folder(folder)
            self._folders.add(folder)
        stamp = make_stamp(self._format, sample, source.header, self._identity)
        digest = payload_digest(self._format, sample, source, self._buffer()) if self._format.payload_digest else ""
        size = file_size(self._format, sample, source.header, stamp)
        draft = disk.Draft(folder, Path(path).name, size, self._able, self._epoch)
        stack.callback(draft.close)
        self._steps("opened")
        written = stream(
            self._format.assemble(sample, source.header, stamp, digest), source, draft.write, self._buffer()
        )
        self._steps("written")
        draft.truncate(size)
        self._steps("truncated")
        draft.sync()
        self._steps("synced")
        return _Ready(sample, path, draft, written)

    def _name(self, ready: _Ready, named: list[Path]) -> Outcome:
        """Step 6: the name, never over another file. What holds it is adopted when equal, else set aside, once."""
        row, path, written = ready.sample.row, self._root / ready.path, ready.written
        outcome = Published(row, ready.path, written.size, written.digest)
        try:
            ready.draft.name(path.name)
        except FileExistsError:
            if _same(path, written):
                return replace(outcome, adopted=True)
            other = _stamp_of(path)
            if other is not None and other.row != row and self._holds(other.row, other.name):
                return Rejected(row, "name", f"{ready.path} is row {other.row}'s")
            aside = disk.set_aside(path, self._quarantine)
            _log.warning("another file had the name: it is set aside", row=row, file=ready.path, aside=str(aside))
            ready.draft.name(path.name)
        named.append(path)
        self._steps("named")
        return outcome

    def _buffer(self) -> memoryview:
        """This thread's aligned buffer."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        buffer: memoryview = self._local.buffer
        return buffer


def _bytes_of(dump: Path) -> int:
    """Size of a dump; 0 when it is not there, which is found out later."""
    try:
        return dump.stat().st_size
    except OSError:
        return 0


def _same(path: Path, written: Written) -> bool:
    """Whether this is a file of exactly this content, which is durable then: another program may have copied it here a
    moment ago. Raises OSError, SyncFailed."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    found = xxhash.xxh3_128()
    with disk.open_own(path) as file:
        if os.fstat(file.fileno()).st_size != written.size:
            return False
        while block := file.read(_BLOCK):
            found.update(block)
        if found.digest() != written.digest:
            return False
        disk.sync(file.fileno())
    return True


def _stamp_of(path: Path) -> Stamp | None:
    """What a whole, undamaged file says of itself; None when it says nothing or cannot be believed."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return None
    try:
        check_content(path)
        return read_stamp(path)
    except Damaged:
        return None
