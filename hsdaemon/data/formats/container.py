"""Torch's zip container, written without torch and in one pass.

Every entry is stored. Small entries carry their CRC32 in front; a plane's CRC is known only when it has gone by, so it
follows the data (flag bit 3) and stands in the central directory. Tensor data start at multiples of 64 bytes, as torch
has them, so that mapped loads are aligned. Nothing in here depends on the clock: the same sample gives the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isal import isal_zlib

from hsdaemon.data.formats.parts import STAMP_ENTRY, Part, Plane

ROOT = "archive"
ALIGN = 64  # bytes
ZIP64_AT = 0xFFFFFFFF  # sizes and offsets from here on need 8 bytes
STORAGES = {"int64": "LongStorage", "bfloat16": "BFloat16Storage", "float16": "HalfStorage", "float32": "FloatStorage"}
_DATE = 0x21  # 1980-01-01
_STREAMED = 0x0808  # CRC and sizes follow the data; the name is UTF-8
_PLAIN = 0x0800
_LONG = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the dict: contiguous, offset 0. data: its bytes, or the plane that holds them."""

    dtype: str
    shape: tuple[int, ...]
    data: Part


Value = Tensor | str | bool | int


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    flags: int
    crc: int
    size: int
    offset: int
    wide: bool


def container(values: dict[str, Value], stamp: bytes) -> Iterator[Part]:
    """The pieces of a file that torch.load reads as `values`. Planes must have their CRC set before the next piece."""
    tensors = [value.data for value in values.values() if isinstance(value, Tensor)]
    data = [(f"data/{i}", tensor) for i, tensor in enumerate(tensors)]
    head: list[tuple[str, Part]] = [("data.pkl", pickle_dict(values)), ("byteorder", b"little")]
    return archive([*head, *data, ("version", b"3\n"), (STAMP_ENTRY, stamp)])


def archive(entries: Sequence[tuple[str, Part]]) -> Iterator[Part]:
    """The pieces of a zip with these entries, all stored, tensor data aligned."""
    at, written = 0, []
    for name, data in entries:
        full = f"{ROOT}/{name}".encode()
        size = data.size if isinstance(data, Plane) else len(data)
        wide = size >= ZIP64_AT or at >= ZIP64_AT
        crc = 0 if isinstance(data, Plane) else isal_zlib.crc32(data)
        flags = _STREAMED if isinstance(data, Plane) else _PLAIN
        head = _local(full, flags, crc, size, wide, at if name.startswith("data/") else None)
        yield head
        yield data
        tail = b""
        if isinstance(data, Plane):
            crc = data.crc
            tail = struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\7\10", crc, size, size)
            yield tail
        written.append(_Entry(full, flags, crc, size, at, wide))
        at += len(head) + size + len(tail)
    yield _directory(written, at)


def _local(name: bytes, flags: int, crc: int, size: int, wide: bool, at: int | None) -> bytes:
    """Local header; `at`: offset of the header when the data behind it must be aligned."""
    sizes = (0, 0) if flags == _STREAMED else (size, size)
    extra = struct.pack("<HHQQ", 1, 16, *sizes) if wide else b""
    if at is not None:
        bare = at + 30 + len(name) + len(extra) + 4
        pad = -bare % ALIGN
        extra += struct.pack("<2sH", b"FB", pad) + b"Z" * pad
    short = (_LONG, _LONG) if wide else sizes
    need = 45 if wide else 20
    return (
        struct.pack("<4s5H3I2H", b"PK\3\4", need, flags, 0, 0, _DATE, crc, *short, len(name), len(extra)) + name + extra
    )


def _directory(entries: list[_Entry], at: int) -> bytes:
    """Central directory and end records."""
    body = b"".join(map(_central, entries))
    count, size = len(entries), len(body)
    if at + size >= ZIP64_AT:
        end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, at)
        body += end64 + struct.pack("<4sIQI", b"PK\6\7", 0, at + size, 1)
        at = _LONG
    return body + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, at, 0)


def _central(entry: _Entry) -> bytes:
    extra = struct.pack("<HHQQQ", 1, 24, entry.size, entry.size, entry.offset) if entry.wide else b""
    size, offset, need = (_LONG, _LONG, 45) if entry.wide else (entry.size, entry.offset, 20)
    fixed = (b"PK\1\2", need, need, entry.flags, 0, 0, _DATE, entry.crc, size, size)
    return struct.pack("<4s6H3I5H2I", *fixed, len(entry.name), len(extra), 0, 0, 0, 0, offset) + entry.name + extra


def pickle_dict(values: dict[str, Value]) -> bytes:
    """Protocol-2 pickle of a dict of tensors and plain values; its only globals are torch's own for a tensor."""
    out, number = [b"\x80\x02}("], 0
    for key, value in values.items():
        out.append(_pickled(key))
        out.append(_tensor(value, number) if isinstance(value, Tensor) else _pickled(value))
        number += isinstance(value, Tensor)
    return b"".join([*out, b"u."])


def pickle_counts(counts: dict[int, int]) -> bytes:
    """Protocol-2 pickle of a dict of integers."""
    return b"".join([b"\x80\x02}(", *(_pickled(key) + _pickled(count) for key, count in counts.items()), b"u."])


def _tensor(tensor: Tensor, number: int) -> bytes:
    count, strides = 1, [0] * len(tensor.shape)
    for axis in reversed(range(len(tensor.shape))):
        strides[axis] = count
        count *= tensor.shape[axis]
    storage = b"ctorch\n" + STORAGES[tensor.dtype].encode() + b"\n"
    return b"".join(
        [
            b"ctorch._utils\n_rebuild_tensor_v2\n(",
            b"(" + _pickled("storage") + storage + _pickled(str(number)) + _pickled("cpu") + _pickled(count) + b"tQ",
            _pickled(0) + _tuple(tensor.shape) + _tuple(strides) + b"\x89",
            b"ccollections\nOrderedDict\n)R",
            b"tR",
        ]
    )


def _tuple(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_pickled, numbers)) + b"t"


def _pickled(value: str | bool | int) -> bytes:
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, str):
        raw = value.encode()
        return b"X" + struct.pack("<I", len(raw)) + raw
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + struct.pack("<B", len(raw)) + raw
