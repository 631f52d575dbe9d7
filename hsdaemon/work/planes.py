"""The states in a dump, mapped: for the proof, which compares them. The worker streams dumps and never maps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsdaemon.data.formats.opening import NUMPY
from hsdaemon.data.spool import Dump
from hsdaemon.work.compare import as_float32


@dataclass(frozen=True, slots=True)
class Planes:
    """ids int64 [tokens]; aux [tokens, A * H]; final [tokens, H]; bfloat16 comes as uint16."""

    ids: npt.NDArray[np.int64]
    aux: npt.NDArray[Any]
    final: npt.NDArray[Any]
    dtype: str

    def states(self) -> list[tuple[str, npt.NDArray[Any]]]:
        """Each state by name, [tokens, H]."""
        h = self.final.shape[1]
        aux = [(f"aux state {i + 1}", self.aux[:, i * h : (i + 1) * h]) for i in range(self.aux.shape[1] // h)]
        return [*aux, ("the final state", self.final)]

    def shapes(self) -> tuple[object, ...]:
        """Tokens, columns of the aux states, columns of the final state, dtype."""
        return len(self.ids), self.aux.shape[1], self.final.shape[1], self.dtype

    def first(self, rows: int) -> Planes:
        return Planes(self.ids[:rows], self.aux[:rows], self.final[:rows], self.dtype)

    def problem(self, ids: npt.NDArray[np.int64]) -> str | None:
        """What is wrong with the values for a prompt of these ids, or None."""
        if not np.array_equal(self.ids, ids):
            return "the token ids in the dump are not those that were sent"
        for name, states in self.states():
            values = as_float32(states, self.dtype)
            if not np.isfinite(values).all():
                return f"{name} has values that are not finite"
            if not values.any(axis=1).all():
                return f"{name} has a row of zeros"
        return None


def read_planes(dump: Dump) -> Planes:
    """Copy the states of a whole dump, whose header and size were checked. Raises OSError."""
    header, layout = dump.header, dump.header.layout()
    kind = np.dtype(NUMPY[header.dtype])
    raw = np.fromfile(dump.path, np.uint8)
    ids = raw[layout.ids_offset : layout.ids_offset + 8 * header.tokens].view("<i8")
    planes = [
        raw[at : at + size * header.tokens].view(kind).reshape(header.tokens, -1)
        for at, size in zip(layout.plane_offsets, layout.row_bytes, strict=True)
    ]
    if header.interleaved:
        aux = header.hidden * len(header.layers)
        planes = [planes[0][:, :aux], planes[0][:, aux:]]
    return Planes(ids, planes[0], planes[1], header.dtype)
