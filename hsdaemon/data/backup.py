"""The manifest's second copy, on another file system, and the way back from a damaged one."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

import structlog
import xxhash

from hsdaemon.config import Config, Output
from hsdaemon.data.sqlite import MANIFEST_NAME, SqliteManifest, open_manifest, open_reader
from hsdaemon.errors import HsError, StoreError
from hsdaemon.machine import disk

log = structlog.get_logger()

EVERY_S = 60.0
SUFFIXES = ("-wal", "-shm", "")  # of the database's files


def manifest_folder(output: Output) -> Path:
    """Where the manifest, its lock and the ballast lie: beside the samples, or on the local disk that is configured."""
    return Path(output.manifest or output.path)


def manifest_path(output: Output) -> Path:
    return manifest_folder(output) / MANIFEST_NAME


def ballast_path(config: Config) -> Path:
    """The file that is given up on a full disk, so that the manifest can still commit."""
    return manifest_folder(config.output) / "ballast"


def backup_path(config: Config) -> Path:
    """Its name tells the output, so that several can share a folder."""
    which = xxhash.xxh3_64_hexdigest(config.output.path.encode())
    return Path(config.output.backup or config.paths.state) / f"manifest-{which}.db"


def back_up(manifest: SqliteManifest, to: Path) -> None:
    """A whole, checked copy as of now; a crash leaves the old one or the new one. Raises StoreError, DiskFull."""
    draft = to.with_name(f".{to.name}.tmp")
    try:
        disk.make_folder(to.parent)
        draft.unlink(missing_ok=True)
        manifest.vacuum_into(draft)
        problem = _problem(draft)
        if problem is not None:
            raise StoreError(f"cannot keep a backup in {to.parent}: the copy is damaged ({problem}); see to that disk")
        _finish(draft, manifest.path)
        draft.replace(to)
        disk.sync_folder(to.parent)
    except OSError as error:
        raise disk.explain(error, to.parent) from error


def _finish(path: Path, like: Path) -> None:
    """Durable, and of the owner of `like`: a worker could neither write root's nor replace it in a sticky folder."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        disk.same_owner(fd, like)
        disk.sync(fd)
    finally:
        os.close(fd)


def _problem(path: Path) -> str | None:
    """What is wrong with a database, or None."""
    try:
        with contextlib.closing(open_reader(path)) as copy:
            return copy.integrity()
    except HsError as error:
        return str(error)


class Backups:
    """Backs up when a minute has passed and something was committed since; a failure is said and tried again."""

    def __init__(self, to: Path, every_s: float = EVERY_S) -> None:
        self.to, self._every = to, every_s
        self._next = 0.0
        self._seen: object = None

    def tick(self, manifest: SqliteManifest, now: float) -> bool:
        """now: monotonic seconds. Gives whether a backup was made."""
        if now < self._next:
            return False
        self._next = now + self._every
        counts = manifest.counts()
        if counts == self._seen:
            return False
        try:
            back_up(manifest, self.to)
        except HsError as error:
            log.warning("no backup of the manifest", reason=str(error))
            return False
        self._seen = counts
        return True


def set_aside(path: Path) -> None:
    """Move what there is of the database, its log and its index aside together: they belong to each other. Raises
    StoreError."""
    left = [suffix for suffix in SUFFIXES if path.with_name(path.name + suffix).exists()]
    if not left:
        return
    names = (f"{path.name}.damaged-{n}" for n in itertools.count(1))
    aside = next(name for name in names if not any(path.with_name(name + suffix).exists() for suffix in SUFFIXES))
    try:
        # Log and index first: a crash in between leaves the database without them, still damaged, never half restored.
        for suffix in left:
            path.with_name(path.name + suffix).rename(path.with_name(aside + suffix))
        disk.sync_folder(path.parent)
    except OSError as error:
        raise disk.explain(error, path.parent) from error
    log.warning("what was left of the manifest was put aside", file=aside)


def was_set_aside(path: Path) -> bool:
    """Whether there was a manifest here that was damaged: the samples are its."""
    return any(path.parent.glob(f"{path.name}.damaged-*"))


def restore(path: Path, backup: Path) -> SqliteManifest | None:
    """Bring the last good backup back, or None when there is none."""
    if not backup.exists() or _problem(backup) is not None:
        return None
    set_aside(path)  # a log without its database would be played into the copy
    disk.replace(path, backup.read_bytes(), 0o644)
    _finish(path, backup)
    age = max(0.0, time.time() - backup.stat().st_mtime)
    log.warning("the manifest was restored from its backup", backup=str(backup), age_s=round(age))
    return open_manifest(path)
