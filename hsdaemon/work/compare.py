"""Are two captures of the same tokens the same states? Kernels and batches differ a little, models differ a lot.

Pure arithmetic on arrays [tokens, columns]; bfloat16 comes as uint16, as the readers of dumps and samples give it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_BLOCK = 256  # rows at a time: 21,504 columns in float32 are 22 MB


@dataclass(frozen=True, slots=True)
class Likeness:
    """Medians over tokens: cosine of the two rows, and norm of their difference over the norm of the first.

    The median, not the worst: in a mixture of experts a router flip sends single tokens elsewhere."""

    cosine: float
    relative_error: float

    def worse(self, other: Likeness) -> Likeness:
        return Likeness(min(self.cosine, other.cosine), max(self.relative_error, other.relative_error))


def as_float32(states: npt.NDArray[Any], dtype: str) -> Floats:
    """States of a dump or a stored sample as float32. dtype: bfloat16 (as uint16), float16 or float32."""
    if dtype == "bfloat16":
        return (states.astype(np.uint32) << 16).view(np.float32)
    return states.astype(np.float32, copy=False)


def likeness(first: npt.NDArray[Any], second: npt.NDArray[Any], dtype: str) -> Likeness:
    """How alike two captures are. Both [tokens, columns] of `dtype`. Raises ValueError when their shapes differ."""
    if first.shape != second.shape or not len(first):
        raise ValueError(f"cannot compare states: shapes {first.shape} and {second.shape}; capture both again")
    cosines, errors = [], []
    for at in range(0, len(first), _BLOCK):
        a, b = (as_float32(x[at : at + _BLOCK], dtype).astype(np.float64) for x in (first, second))
        norms = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            cosines.append(np.einsum("ij,ij->i", a, b) / (norms[0] * norms[1]))
            errors.append(np.linalg.norm(a - b, axis=1) / norms[0])
    return Likeness(_median(cosines, worst=-1.0), _median(errors, worst=float("inf")))


def _median(parts: list[npt.NDArray[np.float64]], worst: float) -> float:
    """NaN (a zero row, a non-finite value) counts as the worst."""
    values = np.concatenate(parts)
    return float(np.median(np.where(np.isnan(values), worst, values)))
