"""Are the files what the manifest says? Quick: presence and size. Deep: the digest of every byte, at a bounded rate."""

from __future__ import annotations

import dataclasses
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from hsdaemon.data.adopt import QUARANTINE
from hsdaemon.data.examine import BLOCK
from hsdaemon.data.manifest import Stored, every_stored
from hsdaemon.data.sqlite import SqliteManifest
from hsdaemon.data.volume import Guard
from hsdaemon.machine import disk

_PATH = re.compile(r"rows_[0-9]{1,12}-[0-9]{1,12}/[^/\0]{1,255}")
MARK = "verify_after"  # the last row that a deep run has read
MARK_S = 5.0  # seconds of reading that an interruption may cost


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A done row whose file is not what was stored. code: "missing", "size", "digest", "unreadable"."""

    row: int
    path: str
    code: str
    reason: str


class Pace:
    """Holds a reader to `rate` bytes/s. wait(seconds) sleeps, or returns early to stop."""

    def __init__(self, rate: float, wait: Callable[[float], object] = time.sleep) -> None:
        self._rate, self._wait = rate, wait
        self._start = time.monotonic()
        self._bytes = 0

    def spent(self, size: int) -> None:
        self._bytes += size
        ahead = self._bytes / self._rate - (time.monotonic() - self._start)
        if ahead > 0:
            self._wait(ahead)


def location(root: Path, path: str) -> Path | None:
    """Where a row's file lies, or None for a path that no file of this output has: the manifest may be damaged, and
    nothing outside the output is looked at or moved."""
    inside = isinstance(path, str) and _PATH.fullmatch(path) is not None and not path.partition("/")[2].startswith(".")
    return root / path if inside else None


def quick(root: Path, stored: Stored) -> Finding | None:
    """Presence and size of one file."""
    path = location(root, stored.path)
    if path is None:
        return Finding(stored.row, stored.path, "missing", "its path leads out of the output")
    try:
        found = path.lstat()
    except FileNotFoundError:
        return Finding(stored.row, stored.path, "missing", "the file is gone")
    except OSError as error:
        return Finding(stored.row, stored.path, "unreadable", error.strerror or str(error))
    if not stat.S_ISREG(found.st_mode):
        return Finding(stored.row, stored.path, "missing", "it is no file")
    if found.st_size != stored.size:
        return Finding(stored.row, stored.path, "size", f"it has {found.st_size} bytes, {stored.size} were stored")
    return None


def deep(root: Path, stored: Stored, pace: Pace | None = None) -> Finding | None:
    """Presence, size and the digest of all bytes of one file."""
    problem = quick(root, stored)
    if problem is not None:
        return problem
    hasher = xxhash.xxh3_128()
    try:
        with (root / stored.path).open("rb", buffering=0) as file:
            buffer = bytearray(BLOCK)
            while n := file.readinto(buffer):
                hasher.update(memoryview(buffer)[:n])
                if pace is not None:
                    pace.spent(n)
    except OSError as error:
        return Finding(stored.row, stored.path, "unreadable", error.strerror or str(error))
    if hasher.digest() != stored.digest:
        return Finding(stored.row, stored.path, "digest", "its content is not what was stored")
    return None


def verify(
    root: Path, manifest: SqliteManifest, seen: Callable[[Stored], None], *, is_deep: bool, pace: Pace | None = None
) -> Iterator[Finding]:
    """All done rows. A deep run goes on where the last one was stopped and keeps its place as it goes."""
    after, kept = manifest.mark(MARK) - 1 if is_deep else -1, time.monotonic()
    for stored in every_stored(manifest, after):
        finding = deep(root, stored, pace) if is_deep else quick(root, stored)
        if finding is not None:
            yield finding
        seen(stored)
        if is_deep and time.monotonic() - kept >= MARK_S:
            manifest.mark(MARK, stored.row + 1)
            kept = time.monotonic()
    if is_deep:
        manifest.mark(MARK, 0)


def repair(guard: Guard, manifest: SqliteManifest, finding: Finding) -> bool:
    """Put the bad file aside and queue the row; gives whether it was still done. A crash in between leaves the row done
    without its file: the next verify or start finds that. Raises DiskFull, BadVolume, VolumeAway: without the volume
    every file would be missing."""
    guard.present()
    path = location(guard.target, finding.path)
    try:
        if path is not None and (path.is_symlink() or path.exists()):
            disk.set_aside(path, guard.target / QUARANTINE)
    except OSError as error:
        raise disk.explain(error, guard.target) from error
    return manifest.requeue([finding.row], finding.code, finding.reason) == 1


def reconcile(guard: Guard, manifest: SqliteManifest, stop: Callable[[], bool], say: Callable[[Finding], None]) -> int:
    """At a worker's start: missing or short files are queued again. Gives how many. Raises what `repair` does."""
    repaired = 0
    for stored in every_stored(manifest):
        if stop():
            break
        finding = quick(guard.target, stored)
        if finding is not None and finding.code != "unreadable":
            repaired += repair(guard, manifest, finding)
            say(finding)
    return repaired
