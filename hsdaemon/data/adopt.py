"""Files that the manifest does not know: found by folder, examined against the data set, taken over or put aside.

A tree that never had a manifest is adopted the same way. Files are told by their keys, not by their suffix: a `.pt`
with SpecForge's keys gets the name under which SpecForge finds it. Nothing is deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from hsdaemon.data.dataset import DataSet
from hsdaemon.data.examine import Unfit, examine
from hsdaemon.data.formats import Damaged, get_format, read_stamp, relative_path
from hsdaemon.data.identity import RunIdentity
from hsdaemon.data.manifest import Done, Known, State
from hsdaemon.data.sample import BadRow
from hsdaemon.data.sqlite import SqliteManifest
from hsdaemon.machine import disk

log = structlog.get_logger()

QUARANTINE = "quarantine"
SUFFIXES = (".ckpt", ".pt", ".safetensors")
_FOLDER = re.compile(r"rows_([0-9]{1,12})-([0-9]{1,12})", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Folder:
    """A rows folder: its name and the rows that it is for."""

    path: Path
    first: int
    end: int


@dataclasses.dataclass(slots=True)
class FolderReport:
    """What was found in one folder. files: samples by name; adopted: taken over now; known: done before; bad: reason by
    file; gaps: rows without a good file."""

    name: str
    files: int = 0
    known: int = 0
    adopted: int = 0
    unknown: list[str] = dataclasses.field(default_factory=list)
    bad: dict[int, str] = dataclasses.field(default_factory=dict)
    gaps: list[int] = dataclasses.field(default_factory=list)
    last: int = -1  # the last row that has a good file
    tail: int = 0  # of the gaps: behind the last good file of the whole tree
    old: int = 0  # of the gaps: before it, without a file


def folders(root: Path) -> list[Folder]:
    """The rows folders of an output, in the order of their rows."""
    found = []
    for entry in os.scandir(root):
        match = _FOLDER.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False) and int(match[1]) < int(match[2]):
            found.append(Folder(Path(entry.path), int(match[1]), int(match[2])))
    return sorted(found, key=lambda f: f.first)


def has_samples(root: Path) -> bool:
    """Whether any rows folder holds a sample file."""
    return root.is_dir() and any(True for folder in folders(root) for _ in _files(folder.path))


def _files(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        if entry.name.endswith(SUFFIXES) and entry.name[0] != "." and entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


GROUP_FILES, GROUP_BYTES = 64, 1 << 30  # adopted together: what a crash makes the next walk examine again


@dataclasses.dataclass(slots=True)
class _Group:
    """Files to be examined together, by row."""

    files: dict[int, Path] = dataclasses.field(default_factory=dict)
    bytes: int = 0

    def add(self, path: Path, row: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # put aside by the worker that makes the row
            self.bytes += path.stat().st_size
            self.files[row] = path

    @property
    def full(self) -> bool:
        return len(self.files) >= GROUP_FILES or self.bytes >= GROUP_BYTES


class Adoption:
    """One walk over an output. unstamped: also take files that do not say which run they are from (a person asked)."""

    def __init__(
        self, root: Path, manifest: SqliteManifest, dataset: DataSet, identity: RunIdentity, *, unstamped: bool
    ) -> None:
        self.root, self.manifest, self.dataset, self.identity = root, manifest, dataset, identity
        self.unstamped = unstamped
        self._format = get_format(identity.format)

    def walk(self, stop: Callable[[], bool] = lambda: False) -> list[FolderReport]:
        """Every folder; gaps are classified at the end."""
        reports = []
        for folder in folders(self.root):
            if stop():
                break
            report = self.folder(folder, stop)
            reports.append(report)
            log.info(
                "folder looked at", folder=report.name, files=report.files, adopted=report.adopted, bad=len(report.bad)
            )
        return classify(reports)

    def folder(self, folder: Folder, stop: Callable[[], bool]) -> FolderReport:
        """One folder: unknown files are adopted or put aside. A crash leaves each file under one of its two names."""
        report = FolderReport(folder.path.name)
        rows = {known.row: known for known in self.manifest.between(folder.first, folder.end)}
        good = {known.row for known in rows.values() if known.state is State.done}
        paths = {known.path for known in rows.values() if known.path}
        stems = self._stems(list(rows.values()))
        own = {self.root / relative_path(self._format, row, known.name) for row, known in rows.items()}
        group = _Group()
        # What has a row's own name is judged first: it may be the only good file that the row has.
        for path in sorted(_files(folder.path), key=lambda path: (path not in own, path)):
            report.files += 1
            row = stems.get(path.stem)
            if f"{folder.path.name}/{path.name}" in paths:
                report.known += 1
            elif row is None or rows[row].state is State.skipped:
                self._stray(path, report)
            elif row in group.files:  # two files of one row: the first decides
                good |= self._take(group, rows, report)
                group = _Group()
                self._second(path, rows[row], good, group, report)
            else:
                self._second(path, rows[row], good, group, report)
            if group.full:
                good |= self._take(group, rows, report)
                group = _Group()
                if stop():
                    break
        good |= self._take(group, rows, report)
        report.last = max(good, default=-1)
        report.gaps = [r.row for r in rows.values() if r.state is not State.skipped and r.row not in good]
        return report

    def _second(self, path: Path, known: Known, good: set[int], group: _Group, report: FolderReport) -> None:
        """A file whose row is done already is that row's file, another name of it, or is put aside; others are for the
        group."""
        own = self.root / relative_path(self._format, known.row, known.name)
        if known.row not in good:
            group.add(path, known.row)
        elif path == own:
            report.known += 1  # named since by a worker, or the manifest has its path wrong, which `verify` finds
        elif _same(path, own):
            path.unlink()  # a crash of an earlier walk left both names
        else:
            self._aside(path, known.row, "the row has another file", report)

    def _stray(self, path: Path, report: FolderReport) -> None:
        """A file of no row. What an edit took out of the data set is put aside, since a trainer would find it; what is
        not from this run, or only has another name, is left to a person."""
        try:
            stamp = read_stamp(path)
        except Damaged:
            stamp = None
        if stamp is not None and stamp.run == self.identity.digest():
            for known in self.manifest.between(stamp.row, stamp.row + 1):
                if known.state is State.skipped or known.name != stamp.name:
                    self._aside(path, known.row, "the row has another id now, or cannot be used any more", report)
                    return
        report.unknown.append(path.name)

    def _stems(self, rows: list[Known]) -> dict[str, int]:
        """File stems of all three trainers -> row; our own format's first, where two rows would share one."""
        found: dict[str, int] = {}
        for known in rows:
            found[Path(self._format.file_name(known.row, known.name)).stem] = known.row
        for known in rows:
            for stem in (known.name, f"data_{known.row}", f"hs_{known.row}"):
                found.setdefault(stem, known.row)
        return found

    def _take(self, group: _Group, rows: dict[int, Known], report: FolderReport) -> set[int]:
        """Examine the group's files for their rows, which no worker gets meanwhile; gives the rows that are done, by
        them or by a worker. One sync and one commit for all: each costs more than a small file's bytes."""
        held = self.manifest.hold(list(group.files))
        adopted: set[int] = set()
        try:
            judged = [self._judge(group.files[row], rows[row], lease, report) for row, lease in held.items()]
            done = [verdict for verdict in judged if verdict is not None]
            if done:
                self._name([(group.files[d.row], self.root / d.path) for d in done])
                report.adopted += self.manifest.adopt(done)
                adopted = {d.row for d in done}
        finally:
            self.manifest.let_go([(row, lease, rows[row].state) for row, lease in held.items() if row not in adopted])
        # A row that could not be held is a worker's, or was finished by one since: its file is that worker's business.
        return adopted | (group.files.keys() - held.keys())

    def _judge(self, path: Path, known: Known, lease: int, report: FolderReport) -> Done | None:
        """What makes the row done, or None: then the file was put aside, or left when that is not ours to do."""
        entry = self.dataset.read(known.row, known.hint)
        if isinstance(entry, BadRow) or entry.digest != known.digest:
            report.unknown.append(path.name)
            return None
        verdict = examine(path, entry, self.identity)
        if isinstance(verdict, Unfit):
            if verdict.code == "format":
                report.unknown.append(path.name)
                report.bad[known.row] = f"left in place: {verdict.reason}"
            else:
                self._aside(path, known.row, f"{verdict.code}: {verdict.reason}", report)
            return None
        if not (verdict.stamped or self.unstamped):
            report.unknown.append(path.name)
            return None
        final = relative_path(self._format, known.row, known.name)
        return Done(known.row, lease, final, verdict.size, verdict.digest)

    def _name(self, moves: list[tuple[Path, Path]]) -> None:
        """Give files the names under which their trainer finds them, never over others; durable, and their bytes too:
        they may have been copied here a moment ago."""
        moved = [(old, new) for old, new in moves if old != new]
        for folder in {new.parent for _, new in moved}:
            disk.make_folder(folder)
        for old, new in moved:
            if not _same(old, new):  # a crash of an earlier walk left both names
                self._free(new)
                os.link(old, new, follow_symlinks=False)
        disk.sync_volume(self.root)  # a crash here leaves both names of a file: the next walk goes on
        for old, _ in moved:
            old.unlink()
        for folder in {old.parent for old, _ in moved}:
            disk.sync_folder(folder)

    def _free(self, name: Path) -> None:
        """Whatever has the name of a row that nobody has: a file of another kind, a link, a folder."""
        if os.path.lexists(name):
            aside = disk.set_aside(name, self.root / QUARANTINE)
            log.warning("something else had a sample's name: it is put aside", file=str(name), aside=aside.name)

    def _aside(self, path: Path, row: int, reason: str, report: FolderReport) -> None:
        aside = disk.set_aside(path, self.root / QUARANTINE)
        report.bad[row] = reason
        log.warning("a file was put aside", row=row, file=str(path), aside=aside.name, reason=reason)


def _same(path: Path, other: Path) -> bool:
    """Two names of one file; a link to it is none."""
    return os.path.lexists(other) and os.path.samestat(path.lstat(), other.lstat())


def classify(reports: list[FolderReport]) -> list[FolderReport]:
    """Gaps before the last good file of the tree are old errors, those behind it are where the run was cut off."""
    last = max((report.last for report in reports), default=-1)
    for report in reports:
        missing = [row for row in report.gaps if row not in report.bad]
        report.tail = sum(row > last for row in missing)
        report.old = len(missing) - report.tail
    return reports
