"""Dumps on their way into the spool: one hidden file per request, filled piece by piece, renamed when whole.

Needs neither torch nor the engine. Never maps a file: on a full tmpfs a store through a mapping is signal 7, while
posix_fallocate is an errno.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hsdaemon import wire

POLL_S = 0.02  # another process deletes dumps and nothing tells us
STALE_S = 900.0  # a part that nobody continues for so long belongs to an aborted request
STALE_TURNS = 64  # so does one that so many forwards passed by: the engine finishes what it has begun first
KEEP_FAILED = 4096  # request ids whose later pieces are ignored


class SampleFailed(Exception):
    """This one sample has no dump; the engine and the other samples go on."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclasses.dataclass(slots=True)
class Part:
    """An open hidden file. `rows`: rows written so far, which is also where the next piece must start."""

    fd: int
    rid: wire.RequestId
    layout: wire.Layout
    rows: int
    touched: float
    turn: int

    def given_up(self) -> bool:
        """Whether the worker has taken the file's name away."""
        return os.fstat(self.fd).st_nlink == 0


def living_epoch(spool: str) -> str | None:
    """The epoch of the living worker, None while there is none."""
    try:
        return (Path(spool) / wire.EPOCH_FILE).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


class Store:
    """The spool as one writer sees it. template: the header of every dump, its rid, tokens and rows left out."""

    def __init__(
        self, config: wire.CaptureConfig, template: wire.DumpHeader, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = Path(config.spool)
        self._budget, self._wait_s = config.budget, config.wait_s
        self._template, self._clock, self._turn = template, clock, 0
        self._until = clock() + config.wait_s  # samples of one forward share one wait for room
        self._parts: dict[wire.RequestId, Part] = {}
        self._failed: collections.OrderedDict[wire.RequestId, None] = collections.OrderedDict()

    def start(self) -> None:
        """Make the folder and remove parts of former engines: nobody will continue them."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.folder.glob(f"{wire.PART_PREFIX}*{wire.PART_SUFFIX}"):
            if wire.spool_rid(path.name):
                path.unlink(missing_ok=True)

    def used(self) -> int:
        """Bytes of all files in the spool but the smallest: the epoch and error files, which nobody claims room for."""
        sizes: list[int] = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # deleted while we look
                sizes.append(entry.stat(follow_symlinks=False).st_size)
        return sum(size for size in sizes if size > wire.HEADER_BYTES)

    def write(self, rid: wire.RequestId, start: int, ids: memoryview, planes: Sequence[memoryview]) -> bool:
        """Store rows `start`, `start` + 1, ... of `rid`; True when the dump is whole and visible.

        ids: int64, 8 bytes a row; planes: as in the layout. Raises SampleFailed, with nothing of the sample left.
        """
        if rid in self._failed and start:
            return False
        try:
            part = self._part(rid, start)
            count = len(ids) // 8
            if start + count > rid.tokens:
                raise SampleFailed("states", f"row {start + count - 1} came of a prompt of {rid.tokens} tokens")
            self._rows(part, start, ids, planes)
            part.rows, part.touched, part.turn = start + count, self._clock(), self._turn
            return part.rows == rid.tokens and self._finish(part)
        except OSError as error:
            raise self._gone(rid, "spool-full" if _full(error) else "capture", f"cannot write: {error}") from None
        except SampleFailed as failed:
            raise self._gone(rid, failed.code, failed.reason) from None

    def fail(self, rid: wire.RequestId, code: str, reason: str) -> None:
        """Drop what there is of `rid` and leave an error file in its place."""
        self._drop(rid)
        self._failed[rid] = None
        while len(self._failed) > KEEP_FAILED:
            self._failed.popitem(last=False)
        draft = self.folder / wire.part_name(rid)
        with contextlib.suppress(OSError):  # no room even for this: the worker's deadline finds it, the attest says it
            draft.write_text(wire.to_json(wire.DumpError(str(rid), code, reason[:1000])), encoding="utf-8")
            draft.replace(self.folder / wire.error_name(rid))

    def turn(self) -> None:
        """A forward came."""
        self._turn += 1
        self._until = self._clock() + self._wait_s
        self.sweep()

    def sweep(self) -> None:
        """Remove parts of dead epochs and of requests that nobody continues or waits for."""
        epoch, now = living_epoch(str(self.folder)), self._clock()
        for rid, part in list(self._parts.items()):
            stale = now - part.touched > STALE_S or self._turn - part.turn > STALE_TURNS
            if rid.epoch != epoch or stale or part.given_up():
                self._drop(rid)

    def _part(self, rid: wire.RequestId, start: int) -> Part:
        if start == 0:  # the first piece, or the engine took the request back and starts again
            self._drop(rid)
            self._failed.pop(rid, None)
            self._parts[rid] = self._open(rid)
        part = self._parts.get(rid)
        if part is None or part.rows != start:
            at = "nothing" if part is None else f"row {part.rows}"
            raise SampleFailed("states", f"row {start} came where {at} was next: earlier rows were not computed")
        return part

    def _open(self, rid: wire.RequestId) -> Part:
        h = self._template
        layout = wire.Layout(rid.tokens, h.hidden, len(h.layers), h.dtype, h.interleaved)
        if not rid.tokens:
            raise SampleFailed("states", "a prompt of 0 tokens has no states")
        fd = self._claim(self.folder / wire.part_name(rid), layout.total)
        part = Part(fd, rid, layout, 0, self._clock(), self._turn)
        self._parts[rid] = part
        _pwrite(fd, memoryview(b"\xff" * (8 * rid.tokens)), layout.ids_offset)  # -1: no row captured
        return part

    def _claim(self, path: Path, total: int) -> int:
        """A file of `total` bytes within the budget. Waits for room, at most wait_s in all samples of a forward.

        Raises SampleFailed, OSError.
        """
        if total > self._budget:
            raise SampleFailed("spool-full", f"{total} bytes are more than the whole budget of {self._budget}")
        while True:
            fd = self._allocate(path, total)
            if fd is not None:
                return fd
            if self._clock() >= self._until:
                used = self.used()
                raise SampleFailed("spool-full", f"no room for {total} bytes in {self._wait_s:g} s: {used} are in use")
            self.sweep()
            time.sleep(POLL_S)  # until _until; whoever deletes dumps tells nobody

    def _allocate(self, path: Path, total: int) -> int | None:
        with self._only_one():
            if self.used() + total > self._budget:
                return None
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(fd, 0, total)
            except OSError as error:
                os.close(fd)
                path.unlink(missing_ok=True)
                if _full(error):
                    return None
                raise
            return fd

    @contextlib.contextmanager
    def _only_one(self) -> Iterator[None]:
        """Several groups write into one spool: look and take in one step."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _rows(self, part: Part, start: int, ids: memoryview, planes: Sequence[memoryview]) -> None:
        _pwrite(part.fd, ids, part.layout.ids_offset + 8 * start)
        for data, offset, row in zip(planes, part.layout.plane_offsets, part.layout.row_bytes, strict=True):
            _pwrite(part.fd, data, offset + row * start)

    def _finish(self, part: Part) -> bool:
        """The header last, then the name: a crash before it leaves a part, which the next start removes."""
        rid = part.rid
        header = dataclasses.replace(self._template, rid=str(rid), tokens=rid.tokens, rows=part.rows)
        _pwrite(part.fd, memoryview(wire.pack_header(header)), 0)
        os.close(part.fd)
        del self._parts[rid]
        (self.folder / wire.part_name(rid)).rename(self.folder / wire.dump_name(rid))
        return True

    def _gone(self, rid: wire.RequestId, code: str, reason: str) -> SampleFailed:
        self.fail(rid, code, reason)
        return SampleFailed(code, reason)

    def _drop(self, rid: wire.RequestId) -> None:
        part = self._parts.pop(rid, None)
        if part is not None:
            os.close(part.fd)
            (self.folder / wire.part_name(rid)).unlink(missing_ok=True)


def _full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done
