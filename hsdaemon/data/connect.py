"""SQLite as we use it: one way to open a file, one way to write, one table from SQLite's errors to ours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw

from hsdaemon.data import schema
from hsdaemon.errors import DiskFull, StoreError, Transient

BUSY_MS = 30_000
FULL_BELOW = 2**20  # bytes free: an I/O error below it is a full disk, whatever its text says

# A bad disk or a stray writer: the three files are set aside together and the manifest is built anew.
DAMAGE = (apsw.CorruptError, apsw.NotADBError)


class Damaged(StoreError):
    """The database file is not whole."""


class Database:
    """A connection with transactions. Columns are typed by the schema's strict tables, not by Python. distrusted: what
    was read here is damaged, which no integrity check may find again."""

    def __init__(self, path: Path, connection: apsw.Connection) -> None:
        self.path = path
        self.db = connection
        self.distrusted = False

    @contextlib.contextmanager
    def write(self) -> Iterator[None]:
        with self.mapped():
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        with self.mapped():
            self.db.execute("BEGIN")
            try:
                yield
            finally:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")

    @contextlib.contextmanager
    def mapped(self) -> Iterator[None]:
        try:
            yield
        except apsw.Error as error:
            found = translated(error, self.path)
            self.distrusted |= isinstance(found, Damaged)
            raise found from error
        except UnicodeDecodeError as error:  # a text of the file; no integrity check of SQLite looks at that
            raise self.damaged(f"a text in it is damaged ({error})") from error

    def damaged(self, cause: str) -> Damaged:
        """The error for what cannot be, to be raised."""
        self.distrusted = True
        return Damaged(f"cannot read {self.path}: {cause}; a worker's start rebuilds it")

    def one(self, sql: str, bound: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        with self.mapped():
            return self.db.execute(sql, bound).fetchone()

    def all(self, sql: str, bound: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self.mapped():
            return self.db.execute(sql, bound).fetchall()

    def meta(self, key: str) -> Any:
        found = self.one("SELECT value FROM meta WHERE key = ?", (key,))
        if found is None:
            raise self.damaged(f"it has no {key}")
        return found[0]

    def put(self, key: str, value: Any) -> None:
        self.db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", (key, value))


def translated(error: apsw.Error, path: Path) -> StoreError | Transient:
    """Our error for SQLite's. A full disk is told by the space there is, never by the message alone."""
    if isinstance(error, DAMAGE):
        return Damaged(f"cannot read {path}: the database is damaged ({error}); a worker's start rebuilds it")
    if isinstance(error, apsw.FullError) or _full(path):
        return DiskFull(f"cannot write {path}: no space left on its disk; free some, the work goes on by itself")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return Transient(f"cannot write {path}: another process has held it for {BUSY_MS // 1000} s; see who does")
    return StoreError(f"cannot use {path}: {error}; see to its disk")


def _full(path: Path) -> bool:
    try:
        stat = os.statvfs(path.parent)
    except OSError:
        return False
    return stat.f_bavail * stat.f_frsize < FULL_BELOW


def connect(path: Path, flags: int) -> apsw.Connection:
    """Raises StoreError, DiskFull. With SQLITE_OPEN_URI the file is taken as one that nobody changes meanwhile."""
    schema.require_sqlite(apsw.sqlite_lib_version())
    if not flags & apsw.SQLITE_OPEN_CREATE and not path.exists():
        raise StoreError(f"cannot open {path}: there is no manifest; run hs-extract extract, or scan to adopt files")
    try:
        name = f"file:{quote(str(path))}?immutable=1" if flags & apsw.SQLITE_OPEN_URI else str(path)
        connection = apsw.Connection(name, flags=flags)
        connection.set_busy_timeout(BUSY_MS)
        for pragma in (
            "page_size = 4096",
            "synchronous = FULL",
            "foreign_keys = ON",
            "trusted_schema = OFF",
            "cell_size_check = ON",
            "mmap_size = 0",
        ):
            connection.execute(f"PRAGMA {pragma}")
    except apsw.Error as error:
        raise translated(error, path) from error
    return connection


def pragma(connection: apsw.Connection, name: str) -> int:
    found = connection.execute(f"PRAGMA {name}").fetchone()
    return int(found[0]) if found else 0


def known(connection: apsw.Connection, path: Path) -> int:
    """Version of the tables, read before anything is written."""
    version = pragma(connection, "user_version")
    schema.require_known(version, pragma(connection, "application_id"), str(path))
    return version


def require_wal(connection: apsw.Connection, path: Path) -> None:
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != ("wal",):
        raise StoreError(f"cannot use {path}: its file system has no WAL (got {mode}); set output.manifest")
    connection.execute("PRAGMA wal_autocheckpoint = 1000")
    connection.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
