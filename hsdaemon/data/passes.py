"""The manifest's side of a pass over the data set: rows come in, edited ones are noticed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hsdaemon.data.connect import Database
from hsdaemon.data.manifest import Ingested, State
from hsdaemon.data.sample import BadRow, Sample, default_name
from hsdaemon.errors import DataError, StoreError

NO_FILE = "path = NULL, size = 0, file_digest = NULL"


class EditedRow(DataError):
    """An extracted row has other content now, and the policy is to refuse that."""

    def __init__(self, row: int) -> None:
        super().__init__(
            f"cannot go on: row {row} of the data set was edited after it was extracted; restore it, or set "
            'data.on_edited_row = "redo"'
        )
        self.row = row


class Passes(Database):
    """Rows recorded in order, resumable at any row."""

    def scan_state(self) -> tuple[str, int, int, bool]:
        """Of the pass over the data set: fingerprint of the file, next row, its hint, whether it is complete."""
        with self.read():
            name, row, hint, complete = (self.meta(f"scan_{key}") for key in ("print", "row", "hint", "complete"))
        return name, row, hint, bool(complete)

    def begin_scan(self, fingerprint: str) -> None:
        """Start a pass from row 0: rows are claimed only once it has come by them."""
        with self.write():
            for key, value in (("scan_print", fingerprint), ("scan_row", 0), ("scan_hint", 0), ("scan_complete", 0)):
                self.put(key, value)

    def look_again(self) -> None:
        with self.write():
            self.put("scan_print", "")

    def end_scan(self) -> None:
        """The pass has seen the last row. Raises StoreError when rows that we know are gone from the data set."""
        with self.write():
            seen = self.meta("scan_row")
            known = self.one("SELECT coalesce(max(row) + 1, 0) FROM rows")
            if known is not None and known[0] > seen:
                raise StoreError(
                    f"cannot go on: the set has {seen} rows now and had {known[0]}; restore it or use another output"
                )
            self.put("scan_complete", 1)

    def ingest(
        self,
        batch: Sequence[Sample | BadRow],
        end_row: int,
        end_hint: int,
        *,
        redo_edited: bool = True,
        skip_twice: bool = True,
    ) -> Ingested:
        new = bad = 0
        edited = []
        with self.write():
            for entry in batch:
                judged = self._twice(entry)
                if judged is not entry and not skip_twice:
                    raise DataError(f'cannot use {judged}; rename it, or set data.on_bad_row = "skip"')
                old = self.one("SELECT digest, state FROM rows WHERE row = ?", (judged.row,))
                bad += isinstance(judged, BadRow)
                if old is None:
                    new += 1
                    self._insert(judged)
                elif old[0] != _digest(judged) and old[1] == State.done and not redo_edited:
                    raise EditedRow(judged.row)
                elif self._refresh(judged, old[0], State(old[1])):
                    edited.append(judged.row)
            self.put("scan_row", end_row)
            self.put("scan_hint", end_hint)
        return Ingested(new, tuple(edited), bad)

    def first_digests(self, rows: int) -> list[bytes | None]:
        """Content digests of the first rows, as recorded; None for a bad one."""
        return [r[0] for r in self.all("SELECT digest FROM rows WHERE row < ? ORDER BY row", (rows,))]

    def _twice(self, entry: Sample | BadRow) -> Sample | BadRow:
        """The entry, or a bad row when a row before it has its name."""
        if isinstance(entry, BadRow) or entry.name == default_name(entry.row):
            return entry
        other = self.one("SELECT row FROM rows WHERE name = ? AND row <> ?", (entry.name, entry.row))
        if other is None:
            return entry
        if other[0] > entry.row:  # from an earlier pass; this one has not come by there, and judges it when it does
            self.db.execute("UPDATE rows SET name = NULL WHERE row = ?", other)
            return entry
        return BadRow(entry.row, "name-twice", f"row {other[0]} has the id {entry.name!r} too", entry.hint)

    def _insert(self, entry: Sample | BadRow) -> None:
        if isinstance(entry, BadRow):
            self.db.execute("INSERT INTO rows (row, state, tokens, hint) VALUES (?, 4, 0, ?)", (entry.row, entry.hint))
            self.fault(entry.row, entry.code, entry.reason)
            return
        self.db.execute(
            "INSERT INTO rows (row, tokens, digest, hint, name) VALUES (?, ?, ?, ?, ?)",
            (entry.row, entry.tokens, entry.digest, entry.hint, _stored_name(entry)),
        )

    def _refresh(self, entry: Sample | BadRow, digest: bytes | None, state: State) -> bool:
        """Look at a known row again; gives whether its content changed."""
        if isinstance(entry, BadRow):
            self.db.execute(
                f"UPDATE rows SET state = 4, lease = NULL, tokens = 0, digest = NULL, name = NULL, hint = ?, {NO_FILE}"
                " WHERE row = ?",
                (entry.hint, entry.row),
            )
            self.fault(entry.row, entry.code, entry.reason)
            return digest is not None
        if digest == entry.digest and state is not State.skipped:
            self.db.execute(
                "UPDATE rows SET hint = ?1, name = ?2 WHERE row = ?3 AND (hint <> ?1 OR name IS NOT ?2)",
                (entry.hint, _stored_name(entry), entry.row),
            )
            return False
        self.db.execute(
            "UPDATE rows SET state = 0, lease = NULL, charged = 0, lost = 0, tokens = ?, digest = ?, hint = ?,"
            f" name = ?, {NO_FILE} WHERE row = ?",
            (entry.tokens, entry.digest, entry.hint, _stored_name(entry), entry.row),
        )
        return True

    def fault(self, row: int, code: str, reason: str) -> None:
        self.db.execute(
            "INSERT INTO faults VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET code = excluded.code,"
            " reason = excluded.reason, at = excluded.at",
            (row, code, reason[:2000], time.time()),
        )


def _stored_name(sample: Sample) -> str | None:
    return None if sample.name == default_name(sample.row) else sample.name


def _digest(entry: Sample | BadRow) -> bytes | None:
    return entry.digest if isinstance(entry, Sample) else None
