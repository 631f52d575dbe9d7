"""States of one forward, put together on the device: cast once to the stored type, in the order of the dump."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from hsdaemon import wire
from hsdaemon.capture.store import SampleFailed

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """`count` rows of one request: from row `start` of its prompt, `source` of the forward, `place` of our buffer."""

    rid: wire.RequestId
    start: int
    count: int
    source: int
    place: int


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Bytes of a forward's rows: ids (int64), then the planes, one after the other."""

    hidden: int
    aux: int
    dtype: str
    interleaved: bool

    def layout(self, rows: int) -> wire.Layout:
        return wire.Layout(rows, self.hidden, self.aux, self.dtype, self.interleaved)

    def bytes(self, rows: int) -> int:
        return rows * (8 + sum(self.layout(rows).row_bytes))

    def planes(self, rows: int) -> list[tuple[int, int]]:
        """Offset and bytes of a row, for each plane."""
        found, at = [], 8 * rows
        for row in self.layout(rows).row_bytes:
            found.append((at, row))
            at += rows * row
        return found


def runs(pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Pieces that lie together, joined: (source, place, count) each. Normally one: a batch of our requests alone."""
    joined: list[tuple[int, int, int]] = []
    for piece in pieces:
        if joined and joined[-1][0] + joined[-1][2] == piece.source:
            source, place, count = joined.pop()
            joined.append((source, place, count + piece.count))
        else:
            joined.append((piece.source, piece.place, piece.count))
    return joined


def check(final: Any, aux: Any, rows: int, shape: Shape) -> list[torch.Tensor]:
    """The aux states as one tensor per layer. rows: what the batch holds. Raises SampleFailed when something lacks."""
    if not isinstance(final, torch.Tensor):
        raise SampleFailed("layers", "the engine handed on no final state")
    if aux is None:
        raise SampleFailed("layers", "the engine handed on no aux states: the layers are not marked")
    packed = [aux] if isinstance(aux, torch.Tensor) else list(aux)
    layers = [part for tensor in packed for part in torch.split(tensor, shape.hidden, dim=-1)]
    if len(layers) != shape.aux or any(part.shape[-1] != shape.hidden for part in (*layers, final)):
        widths = [tensor.shape[-1] for tensor in (*packed, final)]
        raise SampleFailed("layers", f"{shape.aux} aux states and one of {shape.hidden} columns are due, not {widths}")
    short = min(tensor.shape[0] for tensor in (*layers, final))
    if short < rows:
        raise SampleFailed("states", f"{short} rows came for {rows} tokens")
    return layers


def fill(flat: torch.Tensor, shape: Shape, pieces: Sequence[Piece], ids: Any, layers: list[Any], final: Any) -> None:
    """Copy the rows of `pieces` into `flat` (uint8, shape.bytes(rows)), on the device where both are."""
    rows = sum(piece.count for piece in pieces)
    dtype = DTYPES[shape.dtype]
    targets = [flat[at : at + rows * row].view(dtype).view(rows, -1) for at, row in shape.planes(rows)]
    columns = [
        part for target in targets for part in torch.split(target, shape.hidden, dim=1)
    ]  # aux 0, aux 1, ..., final
    numbers = flat[: 8 * rows].view(torch.int64)
    for source, place, count in runs(pieces):
        numbers[place : place + count].copy_(ids[source : source + count])
        for target, state in zip(columns, (*layers, final), strict=True):
            target[place : place + count].copy_(state[source : source + count])
