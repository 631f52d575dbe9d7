"""The manifest in SQLite: WAL, synchronous=FULL, every write a short BEGIN IMMEDIATE.

A crash at any instant leaves the last committed transaction, whole. The file is never opened by other means: closing
any descriptor on it would drop the locks that SQLite holds for the whole process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw

from hsdaemon.data import schema
from hsdaemon.data.connect import DAMAGE, Damaged, connect, known, pragma, require_wal, translated
from hsdaemon.data.identity import RunIdentity, identity_from_json, require_same
from hsdaemon.data.manifest import Claim, Counts, Done, Fault, Known, LeaseLost, Rate, State, Stored
from hsdaemon.data.passes import NO_FILE, Passes
from hsdaemon.data.sample import default_name, name_problem
from hsdaemon.errors import DiskFull, HsError, StoreError, Transient
from hsdaemon.machine import disk
from hsdaemon.machine.identity import boot_id

MANIFEST_NAME = "manifest.db"
ADOPTING = "adopting"  # mark: samples of a tree without a manifest are being adopted; 0 when that is finished
DISTRUSTED = "damaged"  # mark: something in it could not be, although its integrity was ok
BUCKET_S = 10  # seconds of one progress bucket
QUICK_ABOVE = 8192  # pages: 32 MiB, about 250,000 rows; a million take 0.4 s instead of 1.3
KEEP_BUCKETS = 8640  # a day of them


def boot_seconds() -> float:
    """Seconds since boot, sleep included: no step of the wall clock changes it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SqliteManifest(Passes):
    """A Manifest in one file. Open one object per thread; none crosses a fork."""

    def __init__(self, path: Path, connection: apsw.Connection, clock: Callable[[], float] = boot_seconds) -> None:
        super().__init__(path, connection)
        self._clock = clock
        self.relief: Callable[[], bool] = lambda: False  # makes room on a full disk, once; False: there is none left
        self._boot = boot_id()
        self._file = _inode(path)

    # -- identity

    def identity(self) -> RunIdentity:
        try:
            return identity_from_json(str(self.meta("identity")))
        except ValueError as error:
            raise self.damaged(str(error)) from None

    def pin(self, offered: RunIdentity) -> RunIdentity:
        with self.write():
            pinned = self.identity()
            require_same(pinned, offered)
            if offered.release and not pinned.release:
                self.put("identity", offered.to_json())
                return offered
            return pinned

    def volume(self) -> str:
        return str(self.meta("volume"))

    # -- leases

    def begin_epoch(self, epoch: str) -> int:
        with self.write():
            self.db.execute("UPDATE rows SET state = 0, lease = NULL WHERE state = 1")
            freed = self.db.changes()
            self.db.execute("INSERT INTO epochs (epoch, boot, started) VALUES (?, ?, ?)", self._now(epoch))
            oldest = int(self._clock()) // BUCKET_S - KEEP_BUCKETS
            current = "(SELECT max(id) FROM epochs)"
            self.db.execute(f"DELETE FROM progress WHERE epoch < {current} OR bucket < ?", (oldest,))
        return freed

    def _now(self, epoch: str) -> tuple[str, str, float]:
        return epoch, self._boot, self._clock()

    def claim(self, n: int, most_tokens: int | None = None) -> list[Claim]:
        found = self.all(
            "SELECT row, name, tokens, digest, hint, tries, charged, lost FROM rows WHERE state = 0 AND row < ?"
            " AND tokens <= ifnull(?, tokens) ORDER BY charged, row LIMIT ?",
            (self.meta("scan_row"), most_tokens, n),
        )
        if not found:  # nothing to write: idle polls cost no fsync
            return []
        with self.write():
            lease = self.meta("lease")
            claims = []
            for row, name, tokens, digest, hint, tries, charged, lost in found:
                lease += 1
                self.db.execute(
                    "UPDATE rows SET state = 1, lease = ?, tries = tries + 1"
                    " WHERE row = ? AND state = 0 AND digest = ?",
                    (lease, row, digest),
                )
                if self.db.changes():
                    shown = self._named(row, name)
                    claims.append(Claim(row, shown, tokens, digest, hint, tries % 999 + 1, charged, lease, lost))
            self.put("lease", lease)
        return claims

    def commit(self, done: Sequence[Done]) -> None:
        try:
            self._commit(done)
        except DiskFull:
            if not self.relief():
                raise
            self._commit(done)

    def _commit(self, done: Sequence[Done]) -> None:
        if _inode(self.path) != self._file and self.path.parent.is_dir():
            raise Transient(
                f"cannot record rows in {self.path}: the file was moved, removed or replaced while it was open; put it "
                "back, or start again: the last copy is restored and the files are adopted"
            )
        lost, tokens = [], 0
        with self.write():
            for d in done:
                changed = self.one(
                    "UPDATE rows SET state = 2, lease = NULL, path = ?, size = ?, file_digest = ?"
                    " WHERE row = ? AND lease = ? AND state = 1 RETURNING tokens",
                    (d.path, d.size, d.digest, d.row, d.lease),
                )
                tokens += 0 if changed is None else changed[0]
                if changed is None:
                    lost.append(d.row)
            if lost:
                raise LeaseLost(lost)
            self._progress(len(done), tokens, sum(d.size for d in done))

    def _progress(self, samples: int, tokens: int, size: int) -> None:
        self.db.execute(
            "INSERT INTO progress VALUES ((SELECT max(id) FROM epochs), ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " samples = samples + excluded.samples, tokens = tokens + excluded.tokens, bytes = bytes + excluded.bytes",
            (int(self._clock()) // BUCKET_S, samples, tokens, size),
        )

    def release(self, claims: Sequence[Claim]) -> None:
        with self.write():
            for c in claims:
                self.db.execute(
                    "UPDATE rows SET state = 0, lease = NULL WHERE row = ? AND lease = ? AND state = 1",
                    (c.row, c.lease),
                )

    def retry(self, row: int, lease: int, code: str, reason: str, *, charge: bool, lost: bool = False) -> int:
        with self.write():
            changed = self.one(
                "UPDATE rows SET state = 0, lease = NULL, charged = charged + ?, lost = lost + ?"
                " WHERE row = ? AND lease = ? AND state = 1 RETURNING charged",
                (int(charge), int(lost), row, lease),
            )
            if changed is None:
                raise LeaseLost([row])
            self.fault(row, code, reason)
        return int(changed[0])

    def fail(self, row: int, lease: int, code: str, reason: str) -> None:
        self._end(State.failed, row, lease, code, reason)

    def skip(self, row: int, lease: int, code: str, reason: str) -> None:
        self._end(State.skipped, row, lease, code, reason)

    def _end(self, state: State, row: int, lease: int, code: str, reason: str) -> None:
        with self.write():
            self.db.execute(
                "UPDATE rows SET state = ?, lease = NULL, charged = charged + 1"
                " WHERE row = ? AND lease = ? AND state = 1",
                (state, row, lease),
            )
            if not self.db.changes():
                raise LeaseLost([row])
            self.fault(row, code, reason)

    # -- what there is

    def counts(self) -> Counts:
        with self.read():
            by = {row[0]: row[1:] for row in self.db.execute("SELECT state, n, tokens, bytes FROM counts")}
            complete = bool(self.meta("scan_complete"))
        if by.keys() != set(State):
            raise self.damaged("it has no counts")
        n = {state: by[state][0] for state in State}
        return Counts(
            total=sum(n.values()),
            pending=n[State.pending],
            leased=n[State.leased],
            done=n[State.done],
            failed=n[State.failed],
            skipped=n[State.skipped],
            bytes=by[State.done][2],
            tokens=by[State.done][1],
            open_tokens=by[State.pending][1] + by[State.leased][1],
            ingest_complete=complete,
        )

    def claims(self) -> int:
        """How often rows were claimed in all: beyond one a row, the work that was done again."""
        found = self.one("SELECT total(tries) FROM rows")
        return int(found[0]) if found else 0

    def rate(self, seconds: float) -> Rate:
        epoch = self.one("SELECT id, started, boot FROM epochs ORDER BY id DESC LIMIT 1")
        if epoch is None or epoch[2] != self._boot:
            return Rate(0.0, 0.0, 0.0, 0.0)
        now = self._clock()
        first = max(int(now - seconds), int(epoch[1])) // BUCKET_S
        total = self.one(
            "SELECT coalesce(sum(samples), 0), coalesce(sum(tokens), 0), coalesce(sum(bytes), 0) FROM progress"
            " WHERE epoch = ? AND bucket >= ?",
            (epoch[0], first),
        ) or (0, 0, 0)
        span = max(now - max(first * BUCKET_S, epoch[1]), 1.0)
        return Rate(span, total[0] / span, total[1] / span, total[2] / span)

    def faults(self, states: Sequence[State], after: int = -1, limit: int = 1000) -> list[Fault]:
        marks = ",".join("?" * len(states))
        rows = self.all(
            "SELECT rows.row, name, state, coalesce(code, ''), coalesce(reason, ''), charged, coalesce(at, 0)"
            f" FROM faults CROSS JOIN rows ON rows.row = faults.row WHERE faults.row > ? AND state IN ({marks})"
            " ORDER BY faults.row LIMIT ?",
            (after, *states, limit),
        )
        return [Fault(r[0], self._named(r[0], r[1]), State(r[2]), *r[3:]) for r in rows]

    def revive(self, rows: Sequence[int] | None = None) -> int:
        wanted = "" if rows is None else " AND row = ?"
        changed = 0
        with self.write():
            for bound in [()] if rows is None else [(row,) for row in rows]:
                self.db.execute(f"UPDATE rows SET state = 0, charged = 0, lost = 0 WHERE state = 3{wanted}", bound)
                changed += self.db.changes()
        return changed

    def stored(self, after: int = -1, limit: int = 1000) -> list[Stored]:
        rows = self.all(
            "SELECT row, name, tokens, digest, hint, path, size, file_digest FROM rows"
            " WHERE row > ? AND state = 2 ORDER BY row LIMIT ?",
            (after, limit),
        )
        return [Stored(r[0], self._named(r[0], r[1]), *r[2:]) for r in rows]

    def requeue(self, rows: Sequence[int], code: str, reason: str) -> int:
        changed = 0
        with self.write():
            for row in rows:
                self.db.execute(
                    f"UPDATE rows SET state = 0, charged = 0, lost = 0, {NO_FILE} WHERE row = ? AND state = 2", (row,)
                )
                if self.db.changes():
                    changed += 1
                    self.fault(row, code, reason)
        return changed

    def adopt(self, done: Sequence[Done]) -> int:
        changed = 0
        with self.write():
            for d in done:
                self.db.execute(
                    "UPDATE rows SET state = 2, lease = NULL, path = ?, size = ?, file_digest = ?"
                    " WHERE row = ? AND (state IN (0, 3) OR (state = 1 AND lease = ?))",
                    (d.path, d.size, d.digest, d.row, d.lease),
                )
                changed += self.db.changes()
        return changed

    def hold(self, rows: Sequence[int]) -> dict[int, int]:
        """Lease pending and failed rows, so that no worker takes them while their files are looked at; gives the leases
        of those that nobody has and that are not done. Ends with `adopt` or `let_go`; a crash in between leaves them to
        begin_epoch."""
        held: dict[int, int] = {}
        if not rows:
            return held
        with self.write():
            lease = self.meta("lease")
            for row in rows:
                sql = "UPDATE rows SET state = 1, lease = ? WHERE row = ? AND state IN (0, 3)"
                self.db.execute(sql, (lease + 1, row))
                if self.db.changes():
                    lease += 1
                    held[row] = lease
            self.put("lease", lease)
        return held

    def let_go(self, held: Sequence[tuple[int, int, State]]) -> None:
        """Give held rows back as they were: row, lease, state before."""
        if not held:
            return
        with self.write():
            sql = "UPDATE rows SET state = ?, lease = NULL WHERE row = ? AND lease = ? AND state = 1"
            for row, lease, state in held:
                self.db.execute(sql, (State.failed if state is State.failed else State.pending, row, lease))

    def between(self, first: int, end: int) -> list[Known]:
        """Rows first to end - 1 as recorded, the skipped ones too."""
        rows = self.all(
            "SELECT row, name, state, digest, hint, path, size FROM rows WHERE row >= ? AND row < ? ORDER BY row",
            (first, end),
        )
        return [Known(r[0], self._named(r[0], r[1]), State(r[2]), *r[3:]) for r in rows]

    def leased(self) -> list[Known]:
        """Rows that a worker has, or had when it died."""
        rows = self.all("SELECT row, name, state, digest, hint, path, size FROM rows WHERE state = 1 ORDER BY row")
        return [Known(r[0], self._named(r[0], r[1]), State(r[2]), *r[3:]) for r in rows]

    def holds(self, row: int, name: str) -> bool:
        """Whether the row has this name now: an edited set may have given it another."""
        found = self.one("SELECT name FROM rows WHERE row = ? AND state <> 4", (row,))
        return found is not None and self._named(row, found[0]) == name

    def longest(self) -> tuple[int, int] | None:
        """Row and hint of the longest row that is or will be captured; None while there is none."""
        found = self.one("SELECT row, hint FROM rows WHERE state IN (0, 1, 2) ORDER BY tokens DESC LIMIT 1")
        return None if found is None else (int(found[0]), int(found[1]))

    def spread(self, n: int) -> list[Stored]:
        """Up to n done rows: the first, the last, then one near the middle between them."""
        ends = self.one("SELECT min(row), max(row) FROM rows WHERE state = 2")
        if ends is None or ends[0] is None:
            return []
        starts = [ends[0], ends[1], (ends[0] + ends[1]) // 2][:n]
        found = {kept.row: kept for start in starts for kept in self.stored(start - 1, 1)}
        return list(found.values())

    # -- upkeep

    def _named(self, row: int, name: str | None) -> str:
        """A row's name as it is used for files: none that no row of a data set can have."""
        if name is None:
            return default_name(row)
        problem = name_problem(name, row) if isinstance(name, str) else "it is no text"
        if problem is not None:
            raise self.damaged(f"the name of row {row} is none: {problem}")
        return name

    def mend(self) -> int:
        """Take out the texts that cannot be: the next pass over the data set brings the names back, the look at the
        files the paths. Gives how many there were; then nothing else is distrusted."""
        names, paths, faults = list[int](), list[int](), list[int]()
        with self.write():
            for row, name, path in self.db.execute("SELECT row, CAST(name AS BLOB), CAST(path AS BLOB) FROM rows"):
                if name is not None and name_problem(_text(name), row):
                    names.append(row)
                if path is not None and not _text(path):
                    paths.append(row)
            for row, code, reason in self.db.execute(
                "SELECT row, CAST(code AS BLOB), CAST(reason AS BLOB) FROM faults"
            ):
                if not _text(code + reason):
                    faults.append(row)
            self.db.executemany("UPDATE rows SET name = NULL WHERE row = ?", [(row,) for row in names])
            self.db.executemany("UPDATE rows SET path = 'unreadable' WHERE row = ?", [(row,) for row in paths])
            self.db.executemany(
                "UPDATE faults SET code = 'unreadable', reason = 'unreadable' WHERE row = ?", [(row,) for row in faults]
            )
            found = len(names) + len(paths) + len(faults)
            if found:
                self.put("scan_print", "")
                self.put(DISTRUSTED, 0)
        return found

    def mark(self, key: str, value: int | None = None) -> int:
        """A place kept for a resumable command; with a value, set it."""
        if value is not None:
            with self.write():
                self.put(key, value)
            return value
        found = self.one("SELECT value FROM meta WHERE key = ?", (key,))
        return 0 if found is None else int(found[0])

    def integrity(self) -> str | None:
        """What is wrong with the file, or None. Large ones are not compared with their indexes: that takes seconds."""
        try:
            with self.mapped():
                kind = "quick_check" if pragma(self.db, "page_count") > QUICK_ABOVE else "integrity_check"
                found = self.db.execute(f"PRAGMA {kind}(1)").fetchall()
                if found == [("ok",)] and schema.rules(self.db) != schema.own_rules():
                    return "its triggers and indexes are not those that it was made with"
        except Damaged as error:
            return str(error)
        return None if found == [("ok",)] else str(found[0][0])

    def recount(self) -> bool:
        """Count the rows where a count is not theirs: triggers would carry the error on for ever. Gives whether one was
        wrong."""
        with self.write():
            rows = self.db.execute("SELECT state, count(*), sum(tokens), sum(size) FROM rows GROUP BY state")
            counted = dict.fromkeys(map(int, State), (0, 0, 0)) | {row[0]: row[1:] for row in rows}
            if counted == {row[0]: row[1:] for row in self.db.execute("SELECT state, n, tokens, bytes FROM counts")}:
                return False
            self.db.executemany(
                "INSERT OR REPLACE INTO counts VALUES (?, ?, ?, ?)", [(state, *sums) for state, sums in counted.items()]
            )
        return True

    def checkpoint(self, *, truncate: bool = False) -> None:
        """Move the log into the database. A reader in the way is no error: the next one will do."""
        mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if truncate else apsw.SQLITE_CHECKPOINT_PASSIVE
        with self.mapped(), contextlib.suppress(apsw.BusyError, apsw.LockedError):
            self.db.wal_checkpoint(mode=mode)

    def vacuum_into(self, path: Path) -> None:
        """Write a whole copy as of now to `path`, which must not exist."""
        with self.mapped():
            self.db.execute("VACUUM INTO ?", (str(path),))

    def close(self) -> None:
        """What was found damaged is marked for the next start, which rebuilds it."""
        if self.distrusted:
            with contextlib.suppress(HsError):
                self.mark(DISTRUSTED, 1)
        self.db.close()


def create(path: Path, identity: RunIdentity, volume: str, *, mark: str = "") -> SqliteManifest:
    """A new manifest; mark: one that it bears from the start, of samples that were there before it.

    A crash leaves an empty database, which is no manifest (`exists`). Raises StoreError when there is one already.
    """
    connection = connect(path, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
    values: dict[str, str | int] = {"identity": identity.to_json(), "volume": volume, "lease": 0}
    values |= {mark: 1} if mark else {}
    scan: dict[str, str | int] = {"scan_print": "", "scan_row": 0, "scan_hint": 0, "scan_complete": 0}
    try:
        if pragma(connection, "user_version"):
            raise StoreError(f"cannot make {path}: there is a manifest already")
        require_wal(connection, path)
        schema.migrate(connection, 0, (values | scan).items())
    except apsw.Error as error:
        connection.close()
        raise translated(error, path) from error
    except StoreError:
        connection.close()
        raise
    try:
        disk.sync_folder(path.parent)
    except OSError as error:
        connection.close()
        raise disk.explain(error, path.parent) from error
    return SqliteManifest(path, connection)


def exists(path: Path) -> bool:
    """Whether a manifest was made here; a damaged one counts. Raises StoreError when that cannot be told."""
    if not path.exists():
        return False
    try:
        with contextlib.closing(connect(path, apsw.SQLITE_OPEN_READWRITE)) as connection:
            return bool(pragma(connection, "user_version") or pragma(connection, "schema_version"))
    except (Damaged, *DAMAGE):
        return True
    except apsw.Error as error:
        raise translated(error, path) from error


def open_manifest(path: Path, *, clock: Callable[[], float] = boot_seconds) -> SqliteManifest:
    """Open for reading and writing; older versions are migrated. Raises StoreError when there is none, Damaged."""
    connection = connect(path, apsw.SQLITE_OPEN_READWRITE)
    try:
        version = known(connection, path)
        require_wal(connection, path)
        schema.migrate(connection, version)
    except apsw.Error as error:
        connection.close()
        raise translated(error, path) from error
    except StoreError:
        connection.close()
        raise
    return SqliteManifest(path, connection, clock)


def open_reader(path: Path) -> SqliteManifest:
    """Open for reading alone: works on a full or read-only disk. Raises StoreError, Damaged."""
    try:
        return _reader(path, apsw.SQLITE_OPEN_READONLY)
    except (DiskFull, StoreError):
        if _log_of(path):
            raise
        # No room for the index that readers share: without a log nobody writes, and none is needed.
        return _reader(path, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)


def _reader(path: Path, flags: int) -> SqliteManifest:
    connection = connect(path, flags)
    try:
        known(connection, path)
    except apsw.Error as error:
        connection.close()
        raise translated(error, path) from error
    except StoreError:
        connection.close()
        raise
    return SqliteManifest(path, connection)


def _text(raw: Any) -> str:
    """What the bytes say; nothing where they are no text."""
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError:
        return ""


def _inode(path: Path) -> tuple[int, int] | None:
    """Which file has this name; it is not opened. None when there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _log_of(path: Path) -> int:
    """Bytes in the write-ahead log."""
    log = path.with_name(f"{path.name}-wal")
    return log.stat().st_size if log.exists() else 0
