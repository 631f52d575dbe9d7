"""Opening an output for work: volume, lock, manifest, identity, what the last worker left; in this order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import structlog

from hsdaemon.config import Config
from hsdaemon.data import backup, ingest, lock
from hsdaemon.data.adopt import Adoption, FolderReport, has_samples
from hsdaemon.data.connect import Damaged
from hsdaemon.data.dataset import DataSet, open_dataset
from hsdaemon.data.examine import Whole, examine
from hsdaemon.data.formats import get_format, relative_path
from hsdaemon.data.identity import RunIdentity, row_limits, run_identity
from hsdaemon.data.manifest import Done, Known
from hsdaemon.data.room import room
from hsdaemon.data.sample import Sample
from hsdaemon.data.sqlite import ADOPTING, DISTRUSTED, SqliteManifest, create, exists, open_manifest
from hsdaemon.data.verify import Finding, reconcile
from hsdaemon.data.volume import MIB, Guard, file_system, require_local
from hsdaemon.errors import DiskFull, HsError, StoreError
from hsdaemon.machine import disk
from hsdaemon.machine.checkpoint import ModelFacts, read_model

log = structlog.get_logger()

REBUILDING = "rebuilding"  # mark: made anew or restored, and not all files are looked at yet
_SEEN = "something in it could not be"

FITS = "fits"  # mark: the whole set was seen to fit the disk; whoever fills it later makes the work pause


@dataclasses.dataclass(slots=True)
class Store:
    """An output that this process alone works on. `background`: the rest of the data set and the look at what is
    stored; the work may start before it has ended, and is complete only after it has."""

    config: Config
    root: Path
    facts: ModelFacts
    identity: RunIdentity
    dataset: DataSet
    manifest: SqliteManifest
    guard: Guard
    backups: backup.Backups
    background: ingest.Background
    _lock: lock.Lock
    interrupted: int = 0  # rows that were in flight when the last worker ended
    adopted: int = 0  # those of them whose file was whole already

    def keep_ballast(self) -> None:
        """Have the file that a full disk takes first; without the room for it the work goes on without."""
        try:
            disk.make_ballast(backup.ballast_path(self.config), self.config.output.ballast_mib * MIB)
        except (DiskFull, disk.BadVolume) as error:
            log.warning("no ballast for a full disk", reason=str(error))

    def close(self) -> None:
        """A clean stop: the log is moved into the database, the lock is free."""
        self.background.stop()
        try:
            self.manifest.checkpoint(truncate=True)
        except HsError as error:  # a full disk, perhaps: the log stays beside the database and loses nothing
            log.warning("the manifest's log is left to the next start", reason=str(error))
        self.manifest.close()
        self.dataset.close()
        self._lock.release()


def open_store(config: Config, epoch: str, release: str = "", beat: Callable[[], None] = lambda: None) -> Store:
    """Everything before the first request. Raises VolumeAway or DiskFull (wait, call again), LockHeld, StoreError,
    DataError, ConfigError. epoch: of this worker; release: of the engine, "" = not known yet; beat(): called again and
    again while a rebuilt manifest takes over the files, which may take an hour."""
    try:
        return _open(config, epoch, release, beat, may_have_samples=False)
    except Damaged as error:
        log.error("the manifest is damaged", problem=str(error))
        return _open(config, epoch, release, beat, may_have_samples=False)  # it is marked: now it is rebuilt


def _open(config: Config, epoch: str, release: str, beat: Callable[[], None], *, may_have_samples: bool) -> Store:
    guard = Guard(config.output)
    uuid = guard.take()
    facts = read_model(config.model.path)
    dataset = open_dataset(config.data, row_limits(config, facts))
    folder = backup.manifest_folder(config.output)
    require_local(folder, file_system(folder), allow_fuse=config.output.allow_fuse)
    with contextlib.ExitStack() as opened:
        opened.callback(dataset.close)
        held = lock.acquire(folder)
        opened.callback(held.release)
        offered = run_identity(config, facts, ingest.anchor(dataset), release)
        manifest, rebuilt = _manifest(config, offered, uuid, may_have_samples=may_have_samples)
        opened.callback(manifest.close)
        guard.uuid = manifest.volume()
        guard.check()
        identity = _pin(manifest, dataset, offered)
        if manifest.scan_state()[0] != dataset.fingerprint:
            manifest.begin_scan(dataset.fingerprint)  # before any claim: the old hints point anywhere in the new file
        require_room(config, facts, manifest)
        left = manifest.leased()
        freed = manifest.begin_epoch(epoch)
        store = Store(
            config=config,
            root=guard.target,
            facts=facts,
            identity=identity,
            dataset=dataset,
            manifest=manifest,
            guard=guard,
            backups=backup.Backups(backup.backup_path(config)),
            background=ingest.Background(lambda stop: _background(config, identity, guard, stop)),
            _lock=held,
        )
        manifest.relief = lambda: disk.drop_ballast(backup.ballast_path(config))
        store.keep_ballast()
        store.interrupted, store.adopted = freed, _adopt(store, left)
        if rebuilt:
            adopt_tree(store, unstamped=False, beat=beat)
            manifest.mark(REBUILDING, 0)
        rows = manifest.counts().total
        log.info("the output is open", rows=rows, interrupted=store.interrupted, adopted=store.adopted)
        opened.pop_all()
    return store


def _manifest(
    config: Config, offered: RunIdentity, uuid: str, *, may_have_samples: bool
) -> tuple[SqliteManifest, bool]:
    """The manifest, and whether it is being rebuilt: then the files must be looked at before any row is claimed."""
    path = backup.manifest_path(config.output)
    saved = backup.backup_path(config)
    if exists(path):
        opened = _checked(path)
        if isinstance(opened, SqliteManifest):
            if opened.mark(ADOPTING) and not may_have_samples:
                opened.close()
                raise StoreError(
                    f"cannot start in {config.output.path}: its samples are not all adopted; run hs-extract scan"
                )
            return opened, bool(opened.mark(REBUILDING))
        log.error("the manifest is damaged", problem=opened)
        backup.set_aside(path)
        # A backup would bring the same back.
        restored = None if opened == _SEEN else _restored(path, saved)
        return (restored or create(path, offered, uuid, mark=REBUILDING)), True
    found = has_samples(Path(config.output.path))
    if found and (restored := _restored(path, saved)) is not None:
        return restored, True
    if found and backup.was_set_aside(path):  # a rebuild met a full disk, or its end, before its first step
        return create(path, offered, uuid, mark=REBUILDING), True
    if found and not may_have_samples:
        raise StoreError(
            f"cannot start in {config.output.path}: it has samples and no manifest; run hs-extract scan to adopt them"
        )
    return create(path, offered, uuid, mark=ADOPTING if found else ""), False


def _checked(path: Path) -> SqliteManifest | str:
    """The manifest, with what can be mended in place mended; or what is wrong with it beyond that."""
    try:
        with contextlib.ExitStack() as refused:
            manifest = open_manifest(path)
            refused.callback(manifest.close)
            problem = manifest.integrity()
            if problem is not None:
                return problem
            if manifest.mark(DISTRUSTED):
                if not (mended := manifest.mend()):
                    return _SEEN
                log.warning("texts of the manifest were damaged: they are taken from the data set again", texts=mended)
            if manifest.recount():
                log.warning("the manifest's counts were not those of its rows: they were counted anew")
            refused.pop_all()
    except Damaged as error:
        return str(error)
    return manifest


def _restored(path: Path, saved: Path) -> SqliteManifest | None:
    """From the backup, marked. A crash before the mark costs what was done after the backup: a minute's rows."""
    manifest = backup.restore(path, saved)
    if manifest is not None:
        manifest.mark(REBUILDING, 1)
    return manifest


def _pin(manifest: SqliteManifest, dataset: DataSet, offered: RunIdentity) -> RunIdentity:
    """Compare the identities. The data set is the same when most of its first rows are: edited ones are policy."""
    pinned = manifest.identity()
    known = manifest.first_digests(ingest.ANCHOR_ROWS)
    if offered.dataset != pinned.dataset and known and ingest.same_set(known, ingest.first_digests(dataset)):
        offered = dataclasses.replace(offered, dataset=pinned.dataset)
    return manifest.pin(offered)


def _adopt(store: Store, left: list[Known]) -> int:
    """Rows that were in flight when the last worker ended: those whose file had its name already are done."""
    fmt = get_format(store.identity.format)
    paths = {known.row: store.root / relative_path(fmt, known.row, known.name) for known in left}
    for folder in {path.parent for path in paths.values()}:
        if folder.is_dir():
            disk.sweep_drafts(folder)  # a worker that is gone was writing in these folders, and in no others
    done = [found for known in left if (found := _whole(store, known, paths[known.row])) is not None]
    if not done:
        return 0
    disk.sync_volume(store.root)  # the worker died before, or after, it had synced the names
    return store.manifest.adopt(done)


def _whole(store: Store, known: Known, path: Path) -> Done | None:
    """What makes the row done, or None where there is no such file."""
    if path.is_symlink() or not path.is_file():
        return None
    entry = store.dataset.read(known.row, known.hint)
    if not isinstance(entry, Sample) or entry.digest != known.digest:
        return None
    verdict = examine(path, entry, store.identity)
    if not isinstance(verdict, Whole) or not verdict.stamped:
        return None
    return Done(known.row, 0, str(path.relative_to(store.root)), verdict.size, verdict.digest)


def adopt_tree(store: Store, *, unstamped: bool, beat: Callable[[], None] = lambda: None) -> list[FolderReport]:
    """Read the data set to its end, then every folder. beat(): called after each batch of rows or group of files."""

    def stop() -> bool:
        beat()
        return False

    ingest.ingest(store.dataset, store.manifest, store.config.data, stop)
    walk = Adoption(store.root, store.manifest, store.dataset, store.identity, unstamped=unstamped)
    return walk.walk(stop)


def open_for_scan(config: Config, epoch: str) -> Store:
    """The same for `scan`: samples without a manifest are no reason to refuse."""
    return _open(config, epoch, "", lambda: None, may_have_samples=True)


def require_room(config: Config, facts: ModelFacts, manifest: SqliteManifest) -> None:
    """Raises StoreError when a set that is read to its end will not fit; asked until it was seen to fit once."""
    counts = manifest.counts()
    if config.output.allow_short_disk or not counts.ingest_complete or manifest.mark(FITS):
        return
    found = room(config, facts, counts.open, counts.open_tokens, disk.free_bytes(Path(config.output.path)))
    if found.short:
        raise StoreError(
            f"cannot fit the samples in {config.output.path}: {found.needed:,} bytes needed, {found.free:,} free, "
            f"{found.reserve:,} kept free; free {found.short:,} bytes, take another volume, or set "
            "output.allow_short_disk = true: the work then pauses when the disk is full"
        )
    manifest.mark(FITS, 1)


def _background(config: Config, identity: RunIdentity, guard: Guard, stop: Callable[[], bool]) -> None:
    """The rest of the data set, the stored files (missing or short ones are pending again), the unknown ones. Raises
    VolumeAway where a volume that went away in between would make it see other things."""
    guard.again()  # there may be nobody else who would: all rows are done, perhaps
    facts = read_model(config.model.path)
    dataset = open_dataset(config.data, row_limits(config, facts))
    manifest = open_manifest(backup.manifest_path(config.output))
    try:
        if ingest.ingest(dataset, manifest, config.data, stop):
            require_room(config, facts, manifest)
            reconcile(guard, manifest, stop, _say)
            Adoption(guard.target, manifest, dataset, identity, unstamped=False).walk(stop)
    except OSError as error:
        guard.present()
        raise disk.explain(error, guard.target) from error
    finally:
        manifest.close()
        dataset.close()


def _say(finding: Finding) -> None:
    log.warning("a stored file is bad: its row is extracted again", row=finding.row, reason=finding.reason)
