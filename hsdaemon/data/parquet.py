"""Parquet: row groups read in small batches, so that a group of any size fits."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hsdaemon.data.rows import Limits, judge
from hsdaemon.data.sample import BadRow, Sample
from hsdaemon.errors import DataError

BATCH_ROWS = 64  # rows decoded at a time: 64 of 32,768 tokens are 16 MiB
COLUMNS = ("input_ids", "loss_mask", "id")


class Unreadable(Exception):
    """A row of the file that cannot be read; the text says why, on one line."""


@dataclasses.dataclass(slots=True)
class _Cursor:
    """A place in one row group: the batches still to come and the one at hand."""

    group: int
    first: int  # row number of the first row of `batch`
    batch: Any
    rest: Iterator[Any]


class Table:
    """Some columns of a file, row by row. names: all columns that it has; rows: how many, as the file says. Raises
    DataError for a file that is no Parquet."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path)
            self.names = sorted(set(self._file.schema_arrow.names))
        except (OSError, pa.ArrowException, ValueError) as error:  # a name that is no text, too
            raise DataError(f"cannot read the data set {path}: {_words(error)}; write it again") from None
        self._columns = [c for c in columns if c in self.names]
        meta = self._file.metadata
        self._starts = [0]
        for group in range(meta.num_row_groups):
            self._starts.append(self._starts[-1] + meta.row_group(group).num_rows)
        self.rows = self._starts[-1]
        self._cursor: _Cursor | None = None
        self._damaged: dict[int, tuple[int, str]] = {}  # group -> its first row that cannot be read, and why

    def close(self) -> None:
        self._file.close()

    def at(self, row: int) -> dict[str, Any]:
        """The row's values by column. Raises Unreadable, DataError when the disk fails."""
        group = bisect.bisect_right(self._starts, row) - 1
        first, cause = self._damaged.get(group, (self.rows, ""))
        if row >= first:  # a group is read in order: what lies behind the damage is out of reach
            raise Unreadable(cause)
        try:
            cursor = self._seek(row, group)
        except (OSError, pa.ArrowException, ValueError) as error:
            self._cursor = None
            if getattr(error, "errno", None):  # the disk, not the file: the row may be good
                raise DataError(f"cannot read the data set {self._path}: {_words(error)}; see to its disk") from None
            self._damaged[group] = row, f"cannot be read: {_words(error)}"
            raise Unreadable(self._damaged[group][1]) from None
        batch, i = cursor.batch, row - cursor.first
        try:
            return {name: _value(batch.column(j), i) for j, name in enumerate(batch.schema.names)}
        # Arrow raises what Python's types do for a text, a date, a zone or a decimal that is none.
        except Exception as error:  # noqa: BLE001
            raise Unreadable(f"cannot be read: {_words(error)}") from None

    def _seek(self, row: int, group: int) -> _Cursor:
        """The cursor whose batch holds `row`: forwards in the group at hand, else from the group's start."""
        cursor = self._cursor
        if cursor is None or cursor.group != group or row < cursor.first:
            rest = self._file.iter_batches(BATCH_ROWS, row_groups=[group], columns=self._columns, use_threads=False)
            cursor = self._cursor = _Cursor(group, self._starts[group], _next(rest), rest)
        while row >= cursor.first + cursor.batch.num_rows:
            cursor.first += cursor.batch.num_rows
            cursor.batch = _next(cursor.rest)
        return cursor


class Parquet:
    """A DataSet over a .parquet file."""

    def __init__(self, path: Path, limits: Limits, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self._limits = limits
        self._table = Table(path, COLUMNS)
        if "input_ids" not in self._table.names:
            has = ", ".join(self._table.names)
            raise DataError(f"cannot read the data set {path}: no column input_ids; it has {has}")

    def rows(self, start: int = 0, hint: int = 0) -> Iterator[Sample | BadRow]:  # noqa: ARG002  # hints are for lines
        row = start
        while row < self._table.rows:
            yield self._at(row)
            row += 1

    def end_hint(self) -> int:
        return 0

    def read(self, row: int, hint: int) -> Sample | BadRow:  # noqa: ARG002
        if row >= self._table.rows:
            return BadRow(row, "parquet", f"the file ends at row {self._table.rows - 1}")
        return self._at(row)

    def close(self) -> None:
        self._table.close()

    def _at(self, row: int) -> Sample | BadRow:
        try:
            fields = self._table.at(row)
        except Unreadable as error:
            return BadRow(row, "parquet", str(error))
        return judge(row, 0, fields["input_ids"], fields.get("loss_mask"), fields.get("id"), self._limits)


def _words(error: Exception) -> str:
    """Arrow's message on one line."""
    return " ".join(str(error).split())[:500]


def _next(batches: Iterator[Any]) -> Any:
    """Raises ValueError where the file's own account promised more."""
    batch = next(batches, None)
    if batch is None:
        raise ValueError("its row group has fewer rows than the file says")
    return batch


def _value(column: Any, i: int) -> object:
    """Entry i of a column: a list of whole numbers as an array, anything else as Python has it."""
    kind = column.type
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and (
        pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)
    ):
        scalar = column[i]
        values = scalar.values if scalar.is_valid else None
        if values is None or values.null_count:
            return None if values is None else [None]
        return np.asarray(values.to_numpy(zero_copy_only=False))
    return column[i].as_py()
