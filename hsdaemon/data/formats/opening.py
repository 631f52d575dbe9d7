"""Read samples back without torch and without running a pickle: any file may be damaged or hostile.

Tensors are mapped read-only, and no state is touched by the opening; every offset is checked before it is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from isal import isal_zlib

from hsdaemon.data.formats.parts import STAMP_ENTRY, STAMP_KEY, Ints, Stamp, parse_stamp
from hsdaemon.data.formats.speculators import DIGEST_KEY, DTYPES
from hsdaemon.data.formats.walk import View, walk
from hsdaemon.errors import StoreError
from hsdaemon.wire import parse_json

_T = TypeVar("_T")
Array = np.ndarray[Any, Any]
NUMPY = {"int64": "<i8", "bfloat16": "<u2", "float16": "<f2", "float32": "<f4"}  # numpy has no bfloat16
_MAX_TEXT = 1 << 20  # bytes of a header or stamp; ours have less than 2,000
_MAX_PICKLE = 1 << 16  # bytes: ours have less than 2,000, and a walk takes their square at worst
_MAX_ENTRIES = 256
_BLOCK = 1 << 20  # bytes: small enough to stay in the cache


class Damaged(StoreError):
    """A file that is not a whole sample of a format we know."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A sample on disk, mapped read-only. bfloat16 comes as uint16. mask: None where the format has none; aux
    [S, A*H]; final [S, H]; prenorm: the flag in the file, None without one; stamp: None in files that are not ours."""

    format: str
    ids: Ints
    mask: Ints | None
    aux: Array
    final: Array
    dtype: str
    prenorm: bool | None
    stamp: Stamp | None


@dataclass(frozen=True, slots=True)
class _Entry:
    crc: int
    start: int  # of the data in the file
    size: int


@dataclass(frozen=True, slots=True)
class _Safe:
    tensors: dict[str, tuple[str, Array]]
    metadata: dict[str, str]
    start: int


def open_sample(path: Path) -> Stored:
    """Map a stored sample; its format is told by its keys, not by its name. Raises Damaged."""
    return _guarded(path, lambda raw: _open_zip(raw) if _is_zip(raw) else _open_safe(raw))


def read_stamp(path: Path) -> Stamp | None:
    """What the file says of itself; None when it says nothing. Raises Damaged."""
    return _guarded(path, lambda raw: _zip_stamp(raw, _entries(raw)) if _is_zip(raw) else _safe_stamp(_safe(raw)))


def check_content(path: Path) -> None:
    """Read all bytes against the checksums inside: CRC32 of zip entries, our digest in safetensors. Raises Damaged."""
    _guarded(path, lambda raw: _check_zip(raw) if _is_zip(raw) else _check_safe(raw))


def _guarded(path: Path, look: Callable[[mmap.mmap], _T]) -> _T:
    """Run `look` over the mapped file; whatever a strange file makes it raise becomes Damaged."""
    try:
        if path.is_fifo():
            raise ValueError("it is a pipe, which has no end")
        with path.open("rb") as file:
            return look(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise Damaged(f"cannot read {path}: {error.strerror or error}; run `hs-extract verify`") from error
    except (ValueError, KeyError, IndexError, TypeError, struct.error, OverflowError, RecursionError) as error:
        raise Damaged(f"cannot read {path}: {error}; run `hs-extract verify`") from error


def _is_zip(raw: mmap.mmap) -> bool:
    return raw[:4] == b"PK\3\4"


def _entries(raw: mmap.mmap) -> dict[str, _Entry]:
    """Entries of a stored zip by name below its root. Raises ValueError."""
    end = raw.rfind(b"PK\5\6", max(0, len(raw) - 65557))
    if end < 0:
        raise ValueError("it has no end of a zip archive: truncated")
    count, size, at, comment = struct.unpack_from("<HIIH", raw, end + 10)
    if end + 22 + comment != len(raw):
        raise ValueError("bytes follow the end of its zip archive")
    if at == 0xFFFFFFFF or count == 0xFFFF:
        if raw[end - 20 : end - 16] != b"PK\6\7":
            raise ValueError("it has no zip64 locator")
        (end64,) = struct.unpack_from("<Q", raw, end - 12)
        count, size, at = struct.unpack_from("<QQQ", raw, end64 + 32)
    if count > _MAX_ENTRIES or at + size > len(raw):
        raise ValueError("its zip directory is impossible")
    found: dict[str, _Entry] = {}
    for _ in range(count):
        at, name, entry = _central(raw, at)
        if name in found:
            raise ValueError(f"entry {name} is there twice")
        found[name] = entry
    return found


def _central(raw: mmap.mmap, at: int) -> tuple[int, str, _Entry]:
    """One record of the directory: offset of the next, name below the root, entry."""
    magic, _, _, flags, method, _, _, crc, packed, size, n, m, k = struct.unpack_from("<4s6H3I3H", raw, at)
    if magic != b"PK\1\2" or method or flags & 1:
        raise ValueError("its zip directory is damaged, or an entry is compressed")
    (offset,) = struct.unpack_from("<I", raw, at + 42)
    name = raw[at + 46 : at + 46 + n].decode()
    extra = raw[at + 46 + n : at + 46 + n + m]
    size, packed, offset = _wide(extra, (size, packed, offset))
    local, *_, name_bytes, extra_bytes = struct.unpack_from("<4s5H3I2H", raw, offset)
    start = offset + 30 + name_bytes + extra_bytes
    if local != b"PK\3\4" or packed != size or start + size > len(raw):
        raise ValueError(f"entry {name} lies outside the file")
    return at + 46 + n + m + k, name.partition("/")[2], _Entry(crc, start, size)


def _wide(extra: bytes, short: tuple[int, int, int]) -> tuple[int, ...]:
    """Sizes and offset with their 8-byte forms where the 4-byte ones are full."""
    at, values = 0, list(short)
    while at + 4 <= len(extra):
        tag, size = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            full = [i for i in range(3) if values[i] == 0xFFFFFFFF]
            for i, value in zip(full, struct.unpack_from(f"<{len(full)}Q", extra, at + 4), strict=True):
                values[i] = value
        at += 4 + size
    return tuple(values)


def _bytes(raw: mmap.mmap, entry: _Entry, most: int = _MAX_TEXT) -> bytes:
    if entry.size > most:
        raise ValueError("an entry is too large")
    return raw[entry.start : entry.start + entry.size]


def _zip_stamp(raw: mmap.mmap, entries: dict[str, _Entry]) -> Stamp | None:
    return parse_stamp(_bytes(raw, entries[STAMP_ENTRY])) if STAMP_ENTRY in entries else None


def _array(raw: mmap.mmap, entries: dict[str, _Entry], value: object) -> tuple[str, Array]:
    """A contiguous tensor, mapped: its dtype and values."""
    if not isinstance(value, View):
        raise ValueError("a tensor is missing")
    entry, dtype = entries[f"data/{value.slot.key}"], np.dtype(NUMPY[value.slot.dtype])
    count = math.prod(value.shape)
    dense = tuple(math.prod(value.shape[i + 1 :]) for i in range(len(value.shape)))
    loose = any(n > 1 and a != b for n, a, b in zip(value.shape, value.stride, dense, strict=True))
    if loose or (value.offset + count) * dtype.itemsize > entry.size:
        raise ValueError("a tensor is a view or larger than its data")
    flat = np.frombuffer(raw, dtype, count, entry.start + value.offset * dtype.itemsize)
    return value.slot.dtype, flat.reshape(value.shape)


def _ids(found: tuple[str, Array]) -> Ints:
    if found[0] != "int64" or found[1].ndim != 1:
        raise ValueError("ids or mask are not int64 [S]")
    ids: Ints = found[1]
    return ids


def _open_zip(raw: mmap.mmap) -> Stored:
    entries = _entries(raw)
    values = walk(_bytes(raw, entries["data.pkl"], _MAX_PICKLE))
    specforge = "hidden_state" in values
    keys = ("hidden_state", "aux_hidden_state") if specforge else ("hidden_states", "aux_hidden_states")
    (dtype, final), (aux_dtype, aux) = (_array(raw, entries, values.get(key)) for key in keys)
    if specforge:
        if final.ndim != 3 or aux.ndim != 3 or final.shape[0] != 1 or aux.shape[0] != 1:
            raise ValueError("a state is not [1,S,H]")
        final, aux = final[0], aux[0]
    mask = _ids(_array(raw, entries, values["loss_mask"])) if "loss_mask" in values else None
    flag = values.get("hidden_states_prenorm")
    if flag is not None and not isinstance(flag, bool):
        raise ValueError("hidden_states_prenorm is not a bool")
    if aux_dtype != dtype:
        raise ValueError("the states' dtypes differ")
    ids = _ids(_array(raw, entries, values.get("input_ids")))
    name = "specforge" if specforge else "modelopt"
    return _whole(Stored(name, ids, mask, aux, final, dtype, flag, _zip_stamp(raw, entries)))


def _whole(sample: Stored) -> Stored:
    """Raises ValueError when lengths or widths do not fit each other."""
    rows = {len(sample.ids), len(sample.aux), len(sample.final)}
    rows |= {len(sample.mask)} if sample.mask is not None else set()
    if len(rows) != 1 or sample.aux.ndim != 2 or sample.final.ndim != 2 or sample.dtype == "int64":
        raise ValueError("its tensors' shapes do not fit each other")
    if not len(sample.ids) or not sample.final.shape[1] or sample.aux.shape[1] % sample.final.shape[1]:
        raise ValueError("its tensors are empty or of odd widths")
    return sample


def _safe(raw: mmap.mmap) -> _Safe:
    """A safetensors file's tensors, mapped. Raises ValueError."""
    (size,) = struct.unpack_from("<Q", raw, 0)
    if size > _MAX_TEXT or 8 + size > len(raw):
        raise ValueError("it is neither a zip archive nor safetensors")
    head = parse_json(raw[8 : 8 + size])
    if not isinstance(head, dict):
        raise ValueError("its header is no object")
    metadata = head.pop("__metadata__", {})
    tensors, end = {}, 0
    for name, info in head.items():
        begin, stop = info["data_offsets"]
        dtype = np.dtype(NUMPY[DTYPES[info["dtype"]]])
        shape = tuple(info["shape"])
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, stop)):
            raise ValueError(f"the shape of {name} is not one")
        if stop - begin != math.prod(shape) * dtype.itemsize or 8 + size + stop > len(raw):
            raise ValueError(f"tensor {name} lies outside the file: truncated")
        flat = np.frombuffer(raw, dtype, math.prod(shape), 8 + size + begin)
        tensors[name] = (DTYPES[info["dtype"]], flat.reshape(shape))
        end = max(end, stop)
    if 8 + size + end != len(raw):
        raise ValueError("bytes follow the last tensor")
    return _Safe(tensors, metadata if isinstance(metadata, dict) else {}, 8 + size)


def _safe_stamp(safe: _Safe) -> Stamp | None:
    raw = safe.metadata.get(STAMP_KEY)
    return parse_stamp(raw.encode()) if isinstance(raw, str) else None


def _open_safe(raw: mmap.mmap) -> Stored:
    safe = _safe(raw)
    dtype, states = safe.tensors["hidden_states"]
    if states.ndim != 3 or states.shape[1] < 2:
        raise ValueError("hidden_states is not [S,L,H]")
    aux = states[:, :-1].reshape(len(states), -1)  # a view: each token's states lie together
    ids = _ids(safe.tensors["token_ids"])
    return _whole(Stored("speculators", ids, None, aux, states[:, -1], dtype, True, _safe_stamp(safe)))


def _check_zip(raw: mmap.mmap) -> None:
    for name, entry in _entries(raw).items():
        crc = 0
        for at in range(entry.start, entry.start + entry.size, _BLOCK):
            crc = isal_zlib.crc32(raw[at : min(at + _BLOCK, entry.start + entry.size)], crc)
        if crc != entry.crc:
            raise ValueError(f"the content of {name} is damaged (CRC32)")


def _check_safe(raw: mmap.mmap) -> None:
    safe = _safe(raw)
    digest = safe.metadata.get(DIGEST_KEY)
    if digest is None:
        raise ValueError("it carries no digest: its content cannot be judged")
    found = xxhash.xxh3_128()
    for at in range(safe.start, len(raw), _BLOCK):
        found.update(raw[at : at + _BLOCK])
    if found.hexdigest() != digest:
        raise ValueError("its content is damaged (xxh3-128)")
