"""Is this file the whole, right sample of that row? Asked of files that no manifest vouches for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hsdaemon.data.formats import Damaged, Stamp, check_content, open_sample
from hsdaemon.data.formats import Stored as Opened
from hsdaemon.data.identity import RunIdentity
from hsdaemon.data.sample import Sample

BLOCK = 8 * 2**20  # bytes read at a time
_ROWS = 256  # rows judged at a time: 11 MB of three states of 7,168


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """The file holds what the data set row says. stamped: it also says itself which run it comes from."""

    size: int
    digest: bytes
    stamped: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Unfit:
    """Why not. code: "empty", "damaged", "format", "shape", "ids", "mask", "run", "states"."""

    code: str
    reason: str


def examine(path: Path, sample: Sample, identity: RunIdentity) -> Whole | Unfit:
    """Read all of the file. Raises StoreError for a sample that a newer program wrote, OSError when it is gone."""
    size = path.stat().st_size
    if size == 0:
        return Unfit("empty", "the file has 0 bytes")
    try:
        opened = open_sample(path)
        problem = _problem(opened, sample, identity)
        if problem is not None:
            return problem
        digest = file_digest(path)  # read before mapped states are touched: there a bad sector ends the process
        check_content(path)
    except Damaged as error:
        return Unfit("damaged", str(error))
    except OSError as error:
        return Unfit("damaged", f"cannot read {path}: {error.strerror}")
    return _states(opened) or Whole(size, digest, opened.stamp is not None)


def file_digest(path: Path) -> bytes:
    """xxh3-128 of the file, 16 bytes."""
    hasher = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(BLOCK)
        while n := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:n])
    return hasher.digest()


def _problem(opened: Opened, sample: Sample, identity: RunIdentity) -> Unfit | None:
    if opened.format != identity.format:
        return Unfit("format", f'it is a {opened.format} file; set output.format = "{opened.format}"')
    if opened.dtype != identity.dtype:
        return Unfit("format", f"its states are {opened.dtype}, this output has {identity.dtype}")
    wide = len(identity.layers) * identity.hidden
    if opened.final.shape[1] != identity.hidden or opened.aux.shape[1] != wide:
        return Unfit("shape", f"its states are {opened.aux.shape[1]} and {opened.final.shape[1]} wide")
    if not np.array_equal(opened.ids, sample.ids):
        return Unfit("ids", f"its {opened.ids.size} ids are not those of row {sample.row}")
    mask = np.ones_like(sample.ids) if sample.mask is None else sample.mask
    if opened.mask is not None and not np.array_equal(opened.mask, mask):
        return Unfit("mask", f"its loss mask is not that of row {sample.row}")
    if opened.format == "modelopt" and bool(opened.prenorm) != (identity.norm == "pre"):
        return Unfit("run", f"its norm flag does not say {identity.norm}")
    return None if opened.stamp is None else _stamp(opened.stamp, sample, identity)


def _stamp(stamp: Stamp, sample: Sample, identity: RunIdentity) -> Unfit | None:
    if stamp.run != identity.digest():
        here = (stamp.layers, stamp.norm, stamp.dtype)
        return Unfit("run", f"it was made by another run (layers, norm, dtype {here})")
    if (stamp.row, stamp.sample) != (sample.row, sample.digest.hex()):
        return Unfit("ids", f"it says it is row {stamp.row} with other content")
    return None


def _states(opened: Opened) -> Unfit | None:
    """Every value finite, no state of a token all zero: what publication asks of a dump."""
    width = opened.final.shape[1]
    for name, states in (("aux", opened.aux), ("final", opened.final)):
        for first in range(0, len(states), _ROWS):
            block = states[first : first + _ROWS]
            if not _finite(block):
                return Unfit(
                    "states", f"{name} states hold NaN or infinity in rows {first} to {first + len(block) - 1}"
                )
            if not _nonzero(block.reshape(-1, width)):
                return Unfit("states", f"{name} states are all zero in a row of {first} to {first + len(block) - 1}")
    return None


def _finite(block: np.ndarray[Any, Any]) -> bool:
    if block.dtype == np.uint16:  # bfloat16: all exponent bits set
        return not bool(((block & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(block).all())


def _nonzero(block: np.ndarray[Any, Any]) -> bool:
    values = block & 0x7FFF if block.dtype == np.uint16 else block
    return bool(values.any(axis=1).all())
