"""One pass over a dump: read a block, judge it, checksum it, hash it and write it while it is in the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from isal import isal_zlib

from hsdaemon.data.formats import Format, Part, Plane, Row, norm_refusal
from hsdaemon.data.identity import RunIdentity
from hsdaemon.machine.disk import BLOCK
from hsdaemon.wire import HEADER_BYTES, DumpHeader, Layout, parse_rid, unpack_header

Words = np.ndarray[Any, np.dtype[Any]]
CHUNK_BYTES = 512 << 10  # judged and hashed at once: fits the second-level cache; a multiple of every element
# Bit patterns of the smallest non-finite value: as a signed and as an unsigned number. Two reductions find all of them:
# +Inf and NaN are the largest signed numbers, -Inf and -NaN the largest unsigned ones.
_WORDS = {"bfloat16": ("<i2", "<u2", 0x7F80), "float16": ("<i2", "<u2", 0x7C00), "float32": ("<i4", "<u4", 0x7F800000)}


class DumpRefused(Exception):
    """A dump that must not become a file. code: "dump" (cannot be read), "header" (not of this row or of an impossible
    shape), "run" (other layers, norm, dtype or width), "ids", "cover" (rows missing), "nonfinite", "zero-row",
    "zero-layer" (a layer is zero for every token)."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


@dataclass(frozen=True, slots=True)
class Written:
    """size in bytes and xxh3-128 of what was written."""

    size: int
    digest: bytes


class Dump:
    """A dump of the spool, opened and found to be this sample's. Raises DumpRefused on entering."""

    def __init__(self, path: Path, sample: Row, fmt: Format, run: RunIdentity) -> None:
        self._path, self._sample, self._format, self._run = path, sample, fmt, run
        self._fd = -1
        self.header: DumpHeader
        self.layout: Layout

    def __enter__(self) -> Dump:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            self.header = unpack_header(os.pread(self._fd, HEADER_BYTES, 0))
            self.layout = self.header.layout()
            self._judge()
        except (OSError, ValueError, KeyError) as error:
            self.__exit__(None, None, None)
            raise DumpRefused("dump", str(error)) from error
        except DumpRefused:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _judge(self) -> None:
        """Everything that the header and the ids tell before the first state is read."""
        head, sample = self.header, self._sample
        rid = parse_rid(head.rid)
        if rid is None or rid.row != sample.row:
            raise DumpRefused("header", f"the dump is of request {head.rid!r}, not of row {sample.row}")
        if head.tokens != len(sample.ids) or not head.tokens:
            raise DumpRefused("header", f"the dump has {head.tokens} tokens, the row {len(sample.ids)}")
        self._judge_run()
        if os.fstat(self._fd).st_size != self.layout.total:
            raise DumpRefused("header", f"the dump has {os.fstat(self._fd).st_size} bytes, not {self.layout.total}")
        ids = np.frombuffer(os.pread(self._fd, 8 * head.tokens, self.layout.ids_offset), "<i8")
        missing = np.flatnonzero(ids == -1)
        if head.rows != head.tokens or missing.size:
            first = f", first {missing[0]}" if missing.size else ""
            raise DumpRefused("cover", f"{head.rows} of {head.tokens} rows were captured{first}")
        if not np.array_equal(ids, sample.ids):
            at = int(np.flatnonzero(ids != sample.ids)[0])
            raise DumpRefused("ids", f"token {at} is {ids[at]}, the row has {sample.ids[at]}")

    def _judge_run(self) -> None:
        head, run = self.header, self._run
        for field, found, wanted in (
            ("layers", head.layers, run.layers),
            ("norm", head.norm, run.norm),
            ("dtype", head.dtype, run.dtype),
            ("hidden", head.hidden, run.hidden),
            ("interleaved", head.interleaved, self._format.interleaved),
        ):
            if found != wanted:
                raise DumpRefused("run", f"{field} is {found}, this run stores {wanted}")
        refusal = norm_refusal(self._format.name, head.norm)
        if refusal:
            raise DumpRefused("run", refusal)

    def read(self, index: int, at: int, into: memoryview) -> None:
        """Fill `into` from offset `at` of a plane. Raises DumpRefused."""
        start = self.layout.plane_offsets[index] + at
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._fd, [into[done:]], start + done)
            except OSError as error:
                raise DumpRefused("dump", f"cannot read it: {error.strerror}") from error
            if not got:
                raise DumpRefused("dump", "it became shorter while it was read")
            done += got


class StateCheck:
    """Judges a plane piece by piece: all values finite, no state of a token all zero, no layer zero for every token.

    A huge value is a value: massive activations of 20,000 and more are what models do.
    """

    def __init__(self, header: DumpHeader, index: int) -> None:
        layout = header.layout()
        names = [f"layer {layer}" for layer in header.layers]
        self._layers = [*names, "the final state"] if layout.interleaved else (names, ["the final state"])[index]
        signed, unsigned, self._infinite = _WORDS[layout.dtype]
        self._signed, self._unsigned = np.dtype(signed), np.dtype(unsigned)
        self._sign = 1 << (8 * layout.item - 1)
        self._unit = layout.hidden * layout.item  # bytes of one layer's state of one token
        self._seen = np.zeros(layout.tokens * len(self._layers), np.bool_)

    def feed(self, at: int, piece: memoryview) -> None:
        """Judge the bytes from offset `at` of the plane. Raises DumpRefused ("nonfinite")."""
        values = np.frombuffer(piece, self._unsigned)
        if values.view(self._signed).max() >= self._infinite or values.max() >= self._infinite | self._sign:
            bad = int(np.flatnonzero((values & (self._sign - 1)) >= self._infinite)[0])
            raise DumpRefused(
                "nonfinite", f"NaN or infinity in {self._where((at + bad * values.itemsize) // self._unit)}"
            )
        self._look(at, values)

    def _look(self, at: int, values: Words) -> None:
        """Note which states have a value that is not zero (and zero has two signs)."""
        width, start = self._unit // values.itemsize, at // values.itemsize
        skip = min(-start % width, values.size)
        whole = (values.size - skip) // width
        first = (start + skip) // width
        if skip:
            self._seen[start // width] |= self._any(values[:skip])
        rows = values[skip : skip + whole * width].reshape(whole, width)
        seen = (rows[:, 0] & (self._sign - 1)) != 0  # nearly always: the rest is read only where the first is zero
        doubtful = np.flatnonzero(~seen)
        if doubtful.size:
            seen[doubtful] = ((rows[doubtful] & (self._sign - 1)) != 0).any(axis=1)
        self._seen[first : first + whole] = seen
        if skip + whole * width < values.size:
            self._seen[first + whole] |= self._any(values[skip + whole * width :])

    def _any(self, values: Words) -> bool:
        return bool((values & (self._sign - 1)).any())

    def _where(self, unit: int) -> str:
        return f"{self._layers[unit % len(self._layers)]}, token {unit // len(self._layers)}"

    def finish(self) -> None:
        """Judge what only the whole plane tells. Raises DumpRefused ("zero-layer", "zero-row")."""
        seen = self._seen.reshape(-1, len(self._layers))
        dead = np.flatnonzero(~seen.any(axis=0))
        if dead.size and len(seen) > 1:
            raise DumpRefused("zero-layer", f"{self._layers[dead[0]]} is zero for every token")
        if not seen.all():
            raise DumpRefused("zero-row", f"all zero: {self._where(int(np.flatnonzero(~self._seen)[0]))}")


class _Assembly:
    """A file put together in one buffer, which is handed to `write` whenever it is full."""

    def __init__(self, write: Callable[[memoryview], None], buffer: memoryview) -> None:
        self._write, self._buffer, self._fill = write, buffer, 0
        self._digest, self._size = xxhash.xxh3_128(), 0

    def room(self, wanted: int) -> memoryview:
        return self._buffer[self._fill : self._fill + min(wanted, CHUNK_BYTES, len(self._buffer) - self._fill)]

    def took(self, piece: memoryview) -> int:
        """`piece` of the room has been filled."""
        self._digest.update(piece)
        self._size += len(piece)
        self._fill += len(piece)
        if self._fill == len(self._buffer):
            self._write(self._buffer)
            self._fill = 0
        return len(piece)

    def put(self, data: bytes) -> None:
        done = 0
        while done < len(data):
            piece = self.room(len(data) - done)
            piece[:] = data[done : done + len(piece)]
            done += self.took(piece)

    def put_plane(self, plane: Plane, source: Dump, check: StateCheck | None) -> None:
        done, crc = 0, 0
        while done < plane.size:
            piece = self.room(plane.size - done)
            source.read(plane.index, done, piece)
            if check:
                check.feed(done, piece)
                crc = isal_zlib.crc32(piece, crc)
            done += self.took(piece)
        plane.crc = crc
        if check:
            check.finish()

    def finish(self) -> Written:
        """Hand on the rest, padded with zeros to a block."""
        if self._fill:
            end = -(-self._fill // BLOCK) * BLOCK
            self._buffer[self._fill : end] = bytes(end - self._fill)
            self._write(self._buffer[:end])
        return Written(self._size, self._digest.digest())


def stream(
    parts: Iterable[Part], source: Dump, write: Callable[[memoryview], None], buffer: memoryview, judge: bool = True
) -> Written:
    """Write a file's pieces, judging the states as they go by. Raises DumpRefused, and what `write` raises."""
    assembly = _Assembly(write, buffer)
    for part in parts:
        if isinstance(part, Plane):
            assembly.put_plane(part, source, StateCheck(source.header, part.index) if judge else None)
        else:
            assembly.put(part)
    return assembly.finish()


def payload_digest(fmt: Format, sample: Row, source: Dump, buffer: memoryview) -> str:
    """xxh3-128 in hex of what follows the header: a format that carries it needs it before its first byte is written,
    which costs it a second look at the dump. Raises DumpRefused."""
    parts = iter(fmt.assemble(sample, source.header, b"", ""))
    next(parts)
    return stream(parts, source, lambda _: None, buffer, judge=False).digest.hex()
