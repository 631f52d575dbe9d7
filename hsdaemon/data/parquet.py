"""Parquet: row groups read in small batches, so that a group of any size fits."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
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


@dataclasses.dataclass(slots=True)
class _Cursor:
    """A place in one row group: the batches still to come and the one at hand."""

    group: int
    first: int  # row number of the first row of `batch`
    batch: Any
    rest: Iterator[Any]


class Parquet:
    """A DataSet over a .parquet file."""

    def __init__(self, path: Path, limits: Limits, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self._limits = limits
        try:
            self._file = pq.ParquetFile(path)
            names = set(self._file.schema_arrow.names)
        except (OSError, pa.ArrowException, ValueError) as error:  # a name that is no text, too
            raise DataError(f"cannot read the data set {path}: {_words(error)}; write it again") from None
        if "input_ids" not in names:
            raise DataError(f"cannot read the data set {path}: no column input_ids; it has {', '.join(sorted(names))}")
        self._columns = [c for c in COLUMNS if c in names]
        meta = self._file.metadata
        self._starts = [0]
        for group in range(meta.num_row_groups):
            self._starts.append(self._starts[-1] + meta.row_group(group).num_rows)
        self._cursor: _Cursor | None = None
        self._damaged: dict[int, tuple[int, str]] = {}  # group -> its first row that cannot be read, and why

    def rows(self, start: int = 0, hint: int = 0) -> Iterator[Sample | BadRow]:  # noqa: ARG002  # hints are for lines
        row = start
        while row < self._starts[-1]:
            yield self._at(row)
            row += 1

    def end_hint(self) -> int:
        return 0

    def read(self, row: int, hint: int) -> Sample | BadRow:  # noqa: ARG002
        if row >= self._starts[-1]:
            return BadRow(row, "parquet", f"the file ends at row {self._starts[-1] - 1}")
        return self._at(row)

    def close(self) -> None:
        self._file.close()

    def _at(self, row: int) -> Sample | BadRow:
        group = bisect.bisect_right(self._starts, row) - 1
        first, cause = self._damaged.get(group, (self._starts[-1], ""))
        if row >= first:  # a group is read in order: what lies behind the damage is out of reach
            return BadRow(row, "parquet", cause)
        try:
            cursor = self._seek(row, group)
        except (OSError, pa.ArrowException, ValueError) as error:
            self._cursor = None
            if getattr(error, "errno", None):  # the disk, not the file: the row may be good
                raise DataError(f"cannot read the data set {self.path}: {_words(error)}; see to its disk") from None
            self._damaged[group] = row, f"cannot be read: {_words(error)}"
            return BadRow(row, "parquet", self._damaged[group][1])
        batch, i = cursor.batch, row - cursor.first
        try:
            fields = {name: _value(batch.column(j), i) for j, name in enumerate(batch.schema.names)}
        except (pa.ArrowException, ValueError, OverflowError) as error:  # a text or a date that is none
            return BadRow(row, "parquet", f"cannot be read: {_words(error)}")
        return judge(row, 0, fields["input_ids"], fields.get("loss_mask"), fields.get("id"), self._limits)

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
