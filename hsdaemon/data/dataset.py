"""The data set as a stream of rows: JSON lines or Parquet, never held in memory, each bad row typed with its number.

Rows are counted from 0; blank JSON lines are no rows. `rows` reads on from a row; `read` gets one row again by its hint
(JSON lines: the byte offset of its line; Parquet: unused, the row number finds the row group).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from hsdaemon.config import Data
from hsdaemon.data.jsonl import JsonLines
from hsdaemon.data.parquet import Parquet
from hsdaemon.data.rows import Limits
from hsdaemon.data.sample import BadRow, Sample
from hsdaemon.errors import DataError


class DataSet(Protocol):
    """A readable data set. One object is used by one thread at a time; open another for another thread."""

    @property
    def path(self) -> Path: ...

    @property
    def fingerprint(self) -> str:
        """Changes when the file (size, time, inode) or the limits change: then the rows are looked at again."""
        ...

    def rows(self, start: int = 0, hint: int = 0) -> Iterator[Sample | BadRow]:
        """Every row from `start` on, in order. hint: that of row `start`. Raises DataError when the file is gone."""
        ...

    def end_hint(self) -> int:
        """The hint of the row after the last one that `rows` gave."""
        ...

    def read(self, row: int, hint: int) -> Sample | BadRow:
        """One row again. The caller compares the digest: the file may have been edited since."""
        ...

    def close(self) -> None: ...


def fingerprint(path: Path, limits: Limits) -> str:
    """Of the file that has the name now. Raises DataError when there is none."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read the data set {path}: {error.strerror}; set data.path") from None
    if not path.is_file():
        raise DataError(f"cannot read the data set {path}: not a file; set data.path")
    if stat.st_size == 0:
        raise DataError(f"cannot read the data set {path}: the file is empty; write it again")
    return f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}:{limits.vocab}:{limits.longest}"


def open_dataset(config: Data, limits: Limits) -> DataSet:
    """Open config.path. Raises DataError when there is no such file or it is not of its kind as a whole."""
    path = Path(config.path)
    state = fingerprint(path, limits)
    return Parquet(path, limits, state) if path.suffix == ".parquet" else JsonLines(path, limits, state)
