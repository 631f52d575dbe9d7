"""Change several files of a folder: all of them or none, whenever the power goes.

    .NAME.hsdaemon          beside each file: its new content, synced
    .hsdaemon-swap.json     in the folder: which files, their content before and after; its appearance decides

A crash before the journal's name is there leaves the old files and drafts that `finish` removes. After it, `finish`
carries on: each file is renamed over at once, so it is old or new, never a mixture.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hsdaemon.errors import EngineError
from hsdaemon.machine import disk
from hsdaemon.wire import parse_json

JOURNAL = ".hsdaemon-swap.json"
_LIMIT = 64 << 20  # bytes of one source file, more than any has


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody else changes `folder` meanwhile. Raises EngineError when somebody does."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise EngineError(f"cannot patch {folder}: another hs-extract is at it; wait for it and try again") from None
    finally:
        os.close(fd)


def swap(folder: Path, changes: Mapping[str, tuple[bytes, bytes]]) -> None:
    """Replace each file (path below `folder`) from its first content, which it must still have, to its second one.

    Raises OSError with the old files in place.
    """
    try:
        for name, (_, new) in changes.items():
            _write(_draft(folder / name), new, (folder / name).lstat())
        for parent in {(folder / name).parent for name in changes}:
            disk.sync_folder(parent)
        _decide(folder, {name: [_digest(old), _digest(new)] for name, (old, new) in changes.items()})
    except OSError:
        with contextlib.suppress(OSError):  # what cannot be removed now is removed next time
            sweep(folder, changes)
        raise
    finish(folder)


def finish(folder: Path) -> bool:
    """Carry on what a crash left. Gives whether there was anything. Raises OSError; then it can be tried again."""
    entries = _read(folder / JOURNAL)
    for name, (old, new) in entries.items():
        _rename(folder / name, old, new)
        _forget_compiled(folder / name)
    sweep(folder, entries)
    for parent in {(folder / name).parent for name in entries}:
        disk.sync_folder(parent)  # a crash before it: the journal is still there and this runs again
    if entries:
        (folder / JOURNAL).unlink()
    return bool(entries)


def sweep(folder: Path, names: Iterable[str]) -> None:
    """Remove drafts of a change that was never decided. Raises OSError."""
    for draft in [_draft(folder / name) for name in (JOURNAL, *names)]:
        if draft.exists():  # unlink alone fails on a read-only file system even where nothing is there
            draft.unlink()


def pending(folder: Path) -> bool:
    """Whether a crash left a decided change that nobody has finished."""
    return (folder / JOURNAL).exists()


def _decide(folder: Path, digests: dict[str, list[str]]) -> None:
    draft = _draft(folder / JOURNAL)
    _write(draft, json.dumps(digests).encode(), None)
    draft.rename(folder / JOURNAL)
    disk.sync_folder(folder)  # a crash before it: decided or not, both are understood


def _rename(path: Path, old: str, new: str) -> None:
    """Only from the content that was decided upon to the one that was promised: a reinstall in between wins."""
    draft = _draft(path)
    if _content(path) == old and _content(draft) == new:
        draft.rename(path)


def _forget_compiled(path: Path) -> None:
    """Compiled forms of the old content: Python tells most stale ones by time and size, but not those compiled
    "unchecked", nor a change within the same second that keeps the size."""
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _write(draft: Path, data: bytes, like: os.stat_result | None) -> None:
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if like is not None:
            if (os.geteuid(), os.getegid()) != (like.st_uid, like.st_gid):
                os.fchown(fd, like.st_uid, like.st_gid)
            os.fchmod(fd, stat.S_IMODE(like.st_mode))
        disk.write_all(fd, memoryview(data))
        disk.sync(fd)
    finally:
        os.close(fd)


def _read(journal: Path) -> dict[str, tuple[str, str]]:
    raw = disk.read(journal, _LIMIT)
    if raw is None:
        return {}
    try:
        entries = {str(name): (str(old), str(new)) for name, (old, new) in parse_json(raw).items()}
        if not entries or not all(map(_below, entries)):
            raise ValueError
    except (ValueError, TypeError, AttributeError):
        cause = "it is none of ours; remove it and look at the files beside it"
        raise EngineError(f"cannot read {journal}: {cause}") from None
    return entries


def _below(name: str) -> bool:
    """Whether it names a file below the folder."""
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.hsdaemon")


def _content(path: Path) -> str | None:
    data = disk.read(path, _LIMIT)
    return None if data is None else _digest(data)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
