"""One row of the data set, as it is sent to the engine and as it is stored."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import numpy.typing as npt
import xxhash

Ints = npt.NDArray[np.int64]

MAX_NAME_BYTES = 200  # a file name has 255: the rest is for suffixes, ours and the trainers'
_DEFAULT = re.compile(r"data_[0-9]+", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A usable row. ids, mask: int64 [tokens], the data set's values untouched; mask is None where the set has none
    (stored as ones). digest: 16 bytes over ids, mask and name. hint: where to read the row again (DataSet.read)."""

    row: int  # counted from 0
    name: str  # the data set's id, or data_<row>: unique, safe as a file name
    ids: Ints
    mask: Ints | None
    digest: bytes
    hint: int = 0

    @property
    def tokens(self) -> int:
        return int(self.ids.size)


@dataclasses.dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used. code: one of CODES; reason: for a person, without the row number."""

    row: int
    code: str
    reason: str
    hint: int = 0

    def __str__(self) -> str:
        return f"row {self.row}: {self.code}: {self.reason}"


# Every reason why a row is not used. "too-long" follows data.on_long_row, all others data.on_bad_row.
CODES = {
    "json": "the line is not one JSON object",
    "encoding": "the line is not UTF-8",
    "line-too-long": "the line is longer than a sample can be",
    "parquet": "the row group cannot be read",
    "no-ids": "input_ids is missing or not a list of whole numbers",
    "empty": "input_ids has no entries",
    "ids-range": "an id is below 0 or beyond the vocabulary",
    "mask-type": "loss_mask is not a list of 0 and 1",
    "mask-length": "loss_mask and input_ids differ in length",
    "mask-zero": "loss_mask is all zero: nothing to learn",
    "name": "the id cannot be a file name",
    "name-twice": "another row has the same id",
    "too-long": "longer than the engine's context",
}


def default_name(row: int) -> str:
    return f"data_{row}"


def name_problem(name: str, row: int) -> str | None:
    """Why `name` cannot name row's file, or None. Names never leave their folder, hide, or collide with a default."""
    if not name or len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        return f"its length is not 1 to {MAX_NAME_BYTES} bytes"
    if name[0] == "." or "/" in name or "\\" in name or not name.isprintable():
        return "it starts with a dot or has a slash, a backslash or an unprintable character"
    if _DEFAULT.fullmatch(name) and name != default_name(row):
        return "it is the default name of another row"
    return None


def digest(ids: Ints, mask: Ints | None, name: str) -> bytes:
    """16 bytes that change when ids, mask or name of the row change."""
    hasher = xxhash.xxh3_128(np.ascontiguousarray(ids, np.int64).data)
    hasher.update(b"|" if mask is None else b"|m" + np.ascontiguousarray(mask, np.int64).tobytes())
    hasher.update(b"|" + name.encode())
    return hasher.digest()
