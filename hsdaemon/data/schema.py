"""The manifest's tables, and the steps from each older version to the next.

`counts` is kept by triggers inside the transaction that changes a row: it balances at every commit, and `status` reads
five rows instead of a million. Rows are never deleted. The tables are strict: no value of another type goes in, and one
that a bad disk has made is found by the integrity check of the next start.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import apsw

from hsdaemon.errors import StoreError

APPLICATION_ID = 0x68736578  # "hsex"
OLDEST_SQLITE = (3, 51, 3)  # before it, a writer and a checkpoint at the same instant lose committed pages

_V1 = """
CREATE TABLE meta (
  key TEXT PRIMARY KEY, value ANY NOT NULL,
  CHECK (typeof(value) = iif(key IN ('identity', 'volume', 'scan_print'), 'text', 'integer'))
) STRICT, WITHOUT ROWID;

CREATE TABLE rows (
  row INTEGER PRIMARY KEY,
  state INTEGER NOT NULL DEFAULT 0 CHECK (state BETWEEN 0 AND 4),
  tokens INTEGER NOT NULL CHECK (tokens >= 0),
  digest BLOB,                          -- of the data set row; NULL for a bad one
  hint INTEGER NOT NULL CHECK (hint >= 0),
  name TEXT,                            -- NULL: the default one
  tries INTEGER NOT NULL DEFAULT 0,     -- claims
  charged INTEGER NOT NULL DEFAULT 0,   -- tries that count against the budget
  lease INTEGER,
  path TEXT, size INTEGER NOT NULL DEFAULT 0, file_digest BLOB,
  CHECK ((state = 1) = (lease IS NOT NULL)),
  CHECK ((state = 2) = (path IS NOT NULL)),
  CHECK (state = 4 OR digest IS NOT NULL)
) STRICT;
CREATE UNIQUE INDEX rows_name ON rows (name) WHERE name IS NOT NULL;
CREATE INDEX rows_pending ON rows (charged, row) WHERE state = 0;
CREATE INDEX rows_leased ON rows (row) WHERE state = 1;
CREATE INDEX rows_ended ON rows (row) WHERE state >= 3;

CREATE TABLE counts (
  state INTEGER PRIMARY KEY, n INTEGER NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL
) STRICT;
INSERT INTO counts VALUES (0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0), (3, 0, 0, 0), (4, 0, 0, 0);
CREATE TRIGGER rows_added AFTER INSERT ON rows BEGIN
  UPDATE counts SET n = n + 1, tokens = tokens + NEW.tokens, bytes = bytes + NEW.size WHERE state = NEW.state;
END;
CREATE TRIGGER rows_changed AFTER UPDATE OF state, tokens, size ON rows BEGIN
  UPDATE counts SET n = n - 1, tokens = tokens - OLD.tokens, bytes = bytes - OLD.size WHERE state = OLD.state;
  UPDATE counts SET n = n + 1, tokens = tokens + NEW.tokens, bytes = bytes + NEW.size WHERE state = NEW.state;
END;
CREATE TRIGGER rows_kept BEFORE DELETE ON rows BEGIN SELECT RAISE(ABORT, 'rows are never deleted'); END;

CREATE TABLE faults (row INTEGER PRIMARY KEY, code TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL) STRICT;
CREATE TABLE epochs (
  id INTEGER PRIMARY KEY, epoch TEXT NOT NULL, boot TEXT NOT NULL, started REAL NOT NULL  -- seconds since that boot
) STRICT;
CREATE TABLE progress (
  epoch INTEGER, bucket INTEGER,        -- of BUCKET_S seconds since boot
  samples INTEGER NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
  PRIMARY KEY (epoch, bucket)
) STRICT, WITHOUT ROWID;
"""

# lost: connections to the engine that broke under a row since it was last done, or given a fresh budget
_V2 = "ALTER TABLE rows ADD COLUMN lost INTEGER NOT NULL DEFAULT 0"

STEPS = (_V1, _V2)  # STEPS[n] leads from version n to n + 1
VERSION = len(STEPS)


def require_sqlite(version: str) -> None:
    """Raises StoreError for a library with the WAL-reset race. version: "3.54.1"."""
    if tuple(map(int, version.split("."))) < OLDEST_SQLITE:
        needed = ".".join(map(str, OLDEST_SQLITE))
        raise StoreError(
            f"cannot use SQLite {version}: it can lose committed pages; install apsw with SQLite {needed} or later"
        )


def require_known(version: int, application: int, path: str) -> None:
    """Raises StoreError for a file that is not ours or that a newer program wrote."""
    if version > VERSION:
        raise StoreError(
            f"cannot open {path}: it has version {version}, this program knows up to {VERSION}; use the newer program"
        )
    if application != APPLICATION_ID:
        raise StoreError(f"cannot open {path}: it is not a manifest; move it away or name another output.path")


def rules(connection: apsw.Connection) -> list[tuple[str, str]]:
    """Triggers and indexes, as they are written in the file: no integrity check reads what they say."""
    sql = "SELECT name, sql FROM sqlite_schema WHERE type <> 'table' AND sql IS NOT NULL ORDER BY name"
    return [(str(name), str(text)) for name, text in connection.execute(sql)]


@functools.cache
def own_rules() -> list[tuple[str, str]]:
    """Those of a manifest of this version."""
    fresh = apsw.Connection(":memory:")
    migrate(fresh, 0)
    return rules(fresh)


def migrate(connection: apsw.Connection, version: int, values: Iterable[tuple[str, str | int]] = ()) -> None:
    """Bring the tables up to VERSION in one transaction: a crash leaves the old one. values: new meta rows."""
    if version == VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for step in STEPS[version:]:
            connection.execute(step)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", values)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; COMMIT")
    except apsw.Error:
        connection.execute("ROLLBACK")
        raise
