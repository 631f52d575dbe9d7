"""What a format is made of: facts of a sample, pieces of a file in order, the stamp by which a file tells itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from hsdaemon.errors import StoreError
from hsdaemon.wire import DumpHeader, Layout

ROWS_PER_FOLDER = 2000
STAMP_VERSION = 1
STAMP_ENTRY = "hsdaemon.json"  # zip entry below the root of a torch container
STAMP_KEY = "hsdaemon"  # key of __metadata__ in safetensors
OVERHEAD_BYTES = 4096  # container around the tensors, at most; a longer sample name adds its length

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Row(Protocol):
    """One row of the data set, as a format needs it. ids, mask: int64 [S]; no mask means ones; digest: 16 bytes."""

    @property
    def row(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def ids(self) -> Ints: ...
    @property
    def mask(self) -> Ints | None: ...
    @property
    def digest(self) -> bytes: ...


@dataclass(slots=True)
class Plane:
    """A plane of the dump that goes into the file as it is. Whoever streams it sets `crc` before asking for more."""

    index: int
    size: int
    crc: int = 0


Part = bytes | Plane


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of itself. sample: hex digest of the row; run: identity of the run, as the manifest pins it."""

    version: int = STAMP_VERSION
    format: str
    row: int
    name: str
    sample: str
    layers: tuple[int, ...]
    norm: str
    dtype: str
    release: str
    run: str


class Format(Protocol):
    """How one trainer's files look."""

    name: str
    interleaved: bool  # layout of the dump that this format takes
    payload_digest: bool  # True: the file carries a digest of its tensors, which must be known before its first byte

    def file_name(self, row: int, name: str) -> str:
        """Raises ValueError for a name that no file may have."""
        ...

    def payload(self, layout: Layout) -> int:
        """Bytes of all tensors."""
        ...

    def assemble(self, sample: Row, header: DumpHeader, stamp: bytes, digest: str) -> Iterator[Part]:
        """The file's pieces in order; `digest`: hex xxh3-128 of the tensors' bytes where `payload_digest`, else ""."""
        ...


def make_stamp(fmt: Format, sample: Row, header: DumpHeader, run: str) -> bytes:
    """The stamp of a sample, as JSON."""
    return msgspec.json.encode(
        Stamp(
            format=fmt.name,
            row=sample.row,
            name=sample.name,
            sample=sample.digest.hex(),
            layers=header.layers,
            norm=header.norm,
            dtype=header.dtype,
            release=header.release,
            run=run,
        )
    )


def parse_stamp(raw: bytes) -> Stamp:
    """Raises StoreError for a stamp of a later version, ValueError for one that is none."""
    try:
        version = msgspec.json.decode(raw, type=_Version).version
        if version > STAMP_VERSION:
            raise StoreError(f"cannot read a sample of version {version}: this release knows {STAMP_VERSION}; upgrade")
        return msgspec.json.decode(raw, type=Stamp)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the stamp is damaged: {error}") from None


class _Version(msgspec.Struct):
    version: int


def folder_name(row: int) -> str:
    """Folder of a row: 2,000 rows each, end exclusive."""
    start = row // ROWS_PER_FOLDER * ROWS_PER_FOLDER
    return f"rows_{start}-{start + ROWS_PER_FOLDER}"


def relative_path(fmt: Format, row: int, name: str) -> str:
    """Path of a row's file below the output folder. Raises ValueError for a name that no file may have."""
    return f"{folder_name(row)}/{fmt.file_name(row, name)}"


def file_bound(fmt: Format, layout: Layout, name: str = "") -> int:
    """Bytes that a sample's file takes at most: what budgets count with."""
    return fmt.payload(layout) + OVERHEAD_BYTES + 2 * len(name)


def file_size(fmt: Format, sample: Row, header: DumpHeader, stamp: bytes) -> int:
    """Bytes of a sample's file, exactly: no checksum changes it."""
    parts = fmt.assemble(sample, header, stamp, "")
    return sum(part.size if isinstance(part, Plane) else len(part) for part in parts)


def mask_of(sample: Row) -> Ints:
    """The loss mask; ones where the data set has none."""
    return sample.mask if sample.mask is not None else np.ones(len(sample.ids), np.int64)


def int64_bytes(values: Ints) -> bytes:
    """Little-endian bytes, whatever view the values are."""
    return np.ascontiguousarray(values, "<i8").tobytes()
