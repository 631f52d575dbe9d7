"""Stored samples made smaller without losing a bit, in a folder beside them: no trainer reads it, restoring gives back
the very files. The bytes of each value go into planes; the plane with sign and exponent shrinks, the others are noise.

    0          MAGIC, length of the JSON (u32 LE), JSON: size and item in bytes, digest of the payload (xxh3-128)
    a block    payload length (u32 LE), length of the packed plane (u32 LE), the lower planes as they are, zstd
    the end    xxh3-128 of all bytes before it, 16 bytes

A block holds BLOCK bytes of the payload, the last one fewer; its last bytes that fill no value are with the planes.
"""

from __future__ import annotations

import dataclasses
import os
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash

from hsdaemon.data.manifest import Stored
from hsdaemon.data.verify import location
from hsdaemon.errors import ConfigError, DataError, StoreError
from hsdaemon.machine import disk

try:
    import zstandard
except ImportError as error:  # an extra
    raise ConfigError("cannot compress: zstandard is not installed; pip install 'hsdaemon[compress]'") from error

MAGIC = b"HSZIP01\n"
SUFFIX = ".hsz"
BLOCK = 8 << 20
ITEMS = {"bfloat16": 2, "float16": 2, "float32": 4}
_MOST_HEADER = 4096
_DIGEST = 16  # bytes
# Exponents repeat at short range: a table that stays in the first cache and no search beat the usual levels.
_FAST = zstandard.ZstdCompressionParameters(
    compression_level=1, strategy=zstandard.STRATEGY_FAST, hash_log=6, min_match=7, window_log=17
)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one compressed file. size: bytes of the payload; item: of one value; digest: of the payload, hex."""

    size: int
    item: int
    digest: str


@dataclasses.dataclass(slots=True)
class Tally:
    """Of a whole export, in bytes; skipped: files that were there already."""

    files: int = 0
    skipped: int = 0
    payload: int = 0
    packed: int = 0


def pack(source: BinaryIO, header: Header) -> Iterator[bytes]:
    """The compressed file of a payload. Raises DataError at its end when it is not the payload of `header`."""
    whole, payload = xxhash.xxh3_128(), xxhash.xxh3_128()
    text = msgspec.json.encode(header)
    packer = zstandard.ZstdCompressor(compression_params=_FAST)
    parts: Iterable[bytes] = (MAGIC, struct.pack("<I", len(text)), text)
    while True:
        for part in parts:
            whole.update(part)
            yield part
        block = source.read(BLOCK)
        if not block:
            break
        payload.update(block)
        parts = _pack_block(block, header.item, packer)
    if payload.hexdigest() != header.digest:
        raise DataError("its content is not what was stored; run hs-extract verify --deep")
    yield whole.digest()


def _pack_block(block: bytes, item: int, packer: zstandard.ZstdCompressor) -> tuple[bytes, ...]:
    whole = len(block) // item * item
    values = np.frombuffer(block, np.uint8, whole).reshape(-1, item)
    top = packer.compress(values[:, item - 1].tobytes())
    lower = tuple(values[:, plane].tobytes() for plane in range(item - 1))
    return struct.pack("<II", len(block), len(top)), *lower, block[whole:], top


def unpack(path: Path) -> Iterator[bytes]:
    """The payload of a compressed file, block by block. Raises DataError, at the latest at the end, when one bit of the
    file or of the payload is not what it was."""
    whole, payload, size = xxhash.xxh3_128(), xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as file:
            header, text = _header(file)
            whole.update(text)
            while size < header.size:
                raw = _unpack_block(file, header, whole)
                payload.update(raw)
                size += len(raw)
                yield raw
            if (size, payload.hexdigest()) != (header.size, header.digest):
                raise ValueError("its payload is not what was packed")
            if file.read(_DIGEST + 1) != whole.digest():
                raise ValueError("its bytes are not what was written")
    except (ValueError, struct.error, zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise DataError(f"cannot restore {path}: {error}; remove it and compress that sample again") from error


def read_header(path: Path) -> Header:
    """Raises DataError, OSError."""
    with path.open("rb") as file:
        try:
            return _header(file)[0]
        except (ValueError, struct.error, msgspec.MsgspecError) as error:
            raise DataError(f"cannot restore {path}: {error}; remove it and compress that sample again") from error


def _header(file: BinaryIO) -> tuple[Header, bytes]:
    start = file.read(len(MAGIC) + 4)
    (size,) = struct.unpack_from("<I", start, len(MAGIC))
    if not start.startswith(MAGIC) or size > _MOST_HEADER:
        raise ValueError("it is no compressed sample")
    text = file.read(size)
    header = msgspec.json.decode(text, type=Header)
    if header.item not in ITEMS.values() or header.size < 0 or not re.fullmatch("[0-9a-f]{32}", header.digest):
        raise ValueError("its header is impossible")
    return header, start + text


def _unpack_block(file: BinaryIO, header: Header, whole: xxhash.xxh3_128) -> bytes:
    lengths = file.read(8)
    size, packed = struct.unpack("<II", lengths)
    values, rest = divmod(size, header.item)
    if not 0 < size <= BLOCK or packed > 2 * BLOCK:
        raise ValueError("a block of it is impossible")
    raw = file.read(values * (header.item - 1) + rest + packed)
    top = raw[len(raw) - packed :]
    if len(raw) != values * (header.item - 1) + rest + packed or zstandard.frame_content_size(top) != values:
        raise ValueError("it is cut short")
    whole.update(lengths)
    whole.update(raw)
    made = np.empty((values, header.item), np.uint8)
    for plane in range(header.item - 1):
        made[:, plane] = np.frombuffer(raw, np.uint8, values, plane * values)
    made[:, header.item - 1] = np.frombuffer(zstandard.ZstdDecompressor().decompress(top), np.uint8)
    return made.tobytes() + raw[values * (header.item - 1) :][:rest]


def compress_rows(rows: Iterable[Stored], root: Path, target: Path, dtype: str) -> Tally:
    """A compressed file below `target` for each done row; files that are there are not made again, so it may be
    interrupted. Raises DataError for a stored file that is not what the manifest says, StoreError, DiskFull."""
    able, tally = _able(target), Tally()
    for stored in rows:
        source = location(root, stored.path)
        if source is None:
            raise DataError(
                f"cannot compress row {stored.row}: its path leads out of the output; run hs-extract verify"
            )
        goal = target / f"{stored.path}{SUFFIX}"
        header = Header(stored.size, ITEMS[dtype], stored.digest.hex())
        if goal.exists() and read_header(goal) == header:
            tally.skipped += 1
            continue
        try:
            with source.open("rb") as file:
                tally.packed += _put(goal, pack(file, header), stored.size, able)
        except DataError as error:
            raise DataError(f"cannot compress {source}: {error}") from None
        except OSError as error:  # of the source: `_put` has its own
            raise DataError(f"cannot compress {source}: {error.strerror}; run hs-extract verify") from None
        tally.files += 1
        tally.payload += stored.size
    return tally


def restore_all(source: Path, target: Path) -> Tally:
    """Every compressed file below `source` as the file that it was, below `target`; what is there is left alone.
    Raises DataError, StoreError, DiskFull."""
    able, tally = _able(target), Tally()
    for path in sorted(source.rglob(f"*{SUFFIX}")):
        goal = target / path.relative_to(source).with_suffix("")
        if goal.exists():
            tally.skipped += 1
            continue
        tally.payload += _put(goal, unpack(path), read_header(path).size, able)
        tally.packed += path.stat().st_size
        tally.files += 1
    if not tally.files + tally.skipped:
        raise StoreError(f"cannot restore from {source}: there is no {SUFFIX} file in it; name another folder")
    return tally


def _able(target: Path) -> disk.Abilities:
    """Buffered, since packed blocks have any length."""
    disk.make_folder(target)
    return dataclasses.replace(disk.probe_abilities(target, f"{os.getpid():x}"), direct=False)


def _put(goal: Path, blocks: Iterable[bytes], size: int, able: disk.Abilities) -> int:
    """Write and name a file once it is whole; gives its bytes. A crash leaves none under that name."""
    written = 0
    try:
        disk.make_folder(goal.parent)
        draft = disk.Draft(goal.parent, goal.name, size, able, f"{os.getpid():x}")
        try:
            for block in blocks:
                draft.write(memoryview(block))
                written += len(block)
            draft.truncate(written)
            draft.sync()
            goal.unlink(missing_ok=True)
            draft.name(goal.name)
        finally:
            draft.close()
        disk.sync_folder(goal.parent)
    except OSError as error:
        raise disk.explain(error, goal.parent, size) from error
    return written
