"""What of an output survived, told by names and sizes alone: quick on millions of files, and nothing is opened."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from hsdaemon.data.adopt import SUFFIXES, Folder, folders

_ROW = re.compile(r"(?:data|hs)_([0-9]{1,12})", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class FolderCount:
    """One rows folder. expected: rows that it is for, as far as the data set goes; files: samples by name, empty files
    not among them; old: rows without a file before the tree's last file; tail: behind it."""

    name: str
    expected: int
    files: int
    empty: int
    old: int
    tail: int


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """All folders. named: False when files carry ids instead of row numbers: then gaps are counts, not places."""

    folders: tuple[FolderCount, ...]
    files: int
    bytes: int
    named: bool

    @property
    def old(self) -> int:
        return sum(folder.old for folder in self.folders)

    @property
    def tail(self) -> int:
        return sum(folder.tail for folder in self.folders)


def survey(root: Path, rows: int | None = None) -> Survey:
    """Count the samples below `root`. rows: of the data set, None = unknown. Raises OSError."""
    looked = [_look(folder) for folder in folders(root)] if root.is_dir() else []
    last = max((row for look in looked for row in look.rows), default=-1)
    counts = tuple(_count(look, last, rows) for look in looked)
    files = sum(look.files for look in looked)
    return Survey(counts, files, sum(look.bytes for look in looked), all(len(x.rows) == x.files for x in looked))


@dataclasses.dataclass(slots=True)
class _Look:
    folder: Folder
    rows: set[int] = dataclasses.field(default_factory=set)
    files: int = 0
    empty: int = 0
    bytes: int = 0


def _look(folder: Folder) -> _Look:
    look = _Look(folder)
    with os.scandir(folder.path) as entries:
        for entry in entries:
            if not entry.name.endswith(SUFFIXES) or entry.name[0] == "." or not entry.is_file(follow_symlinks=False):
                continue
            size = entry.stat(follow_symlinks=False).st_size
            look.bytes += size
            look.empty += not size
            look.files += bool(size)
            match = _ROW.fullmatch(entry.name.rpartition(".")[0])
            if size and match and folder.first <= int(match[1]) < folder.end:
                look.rows.add(int(match[1]))
    return look


def _count(look: _Look, last: int, rows: int | None) -> FolderCount:
    end = look.folder.end if rows is None else min(look.folder.end, rows)
    expected = max(0, end - look.folder.first)
    inside = max(0, min(end, last + 1) - look.folder.first)  # rows of this folder up to the tree's last file
    placed = sum(row <= last for row in look.rows)
    old = max(0, inside - placed) if look.rows else 0
    return FolderCount(
        name=look.folder.path.name,
        expected=expected,
        files=look.files,
        empty=look.empty,
        old=old,
        tail=max(0, expected - look.files - old),
    )
