"""From the raw fields of a row to a Sample or a BadRow: the only place that judges a row."""

from __future__ import annotations

import dataclasses

import numpy as np

from hsdaemon.data.sample import BadRow, Sample, default_name, digest, name_problem


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a row may hold. vocab: ids are below it, None = unchecked; longest: tokens of a row, None = no limit."""

    vocab: int | None = None
    longest: int | None = None


def judge(row: int, hint: int, ids: object, mask: object, name: object, limits: Limits) -> Sample | BadRow:
    """Make the Sample, or say what is wrong first. ids, mask: lists or integer arrays; mask, name: None = absent."""
    problem = _ids_problem(ids)
    if problem:
        return BadRow(row, *problem, hint)
    array = np.asarray(ids, np.int64)
    low, high = int(array.min()), int(array.max())
    if low < 0 or (limits.vocab is not None and high >= limits.vocab):
        bad = low if low < 0 else high
        return BadRow(row, "ids-range", f"id {bad} is not within 0 to {_below(limits.vocab)}", hint)
    weights = None
    if mask is not None:
        problem = _mask_problem(mask, array.size)
        if problem:
            return BadRow(row, *problem, hint)
        weights = np.asarray(mask, np.int64)
    text = default_name(row) if name is None else _name(name)
    reason = name_problem(text, row) if text is not None else "it is neither a text nor a whole number"
    if text is None or reason is not None:
        return BadRow(row, "name", str(reason), hint)
    if limits.longest is not None and array.size > limits.longest:
        return BadRow(row, "too-long", f"{array.size} tokens, at most {limits.longest} fit the context", hint)
    return Sample(row, text, array, weights, digest(array, weights, text), hint)


def _below(vocab: int | None) -> str:
    return "any" if vocab is None else str(vocab - 1)


def _ids_problem(ids: object) -> tuple[str, str] | None:
    if ids is None:
        return "no-ids", "input_ids is missing"
    if not _integers(ids):
        return "no-ids", "input_ids is not a flat list of whole numbers within 64 bits"
    return ("empty", "input_ids has no entries") if len(ids) == 0 else None  # type: ignore[arg-type]  # sized: _integers


def _mask_problem(mask: object, tokens: int) -> tuple[str, str] | None:
    if not _integers(mask, bools=True):
        return "mask-type", "loss_mask is not a flat list of 0 and 1"
    array = np.asarray(mask, np.int64)
    if array.size != tokens:
        return "mask-length", f"loss_mask has {array.size} entries, input_ids {tokens}"
    if array.size and (array.min() < 0 or array.max() > 1):
        return "mask-type", "loss_mask holds values other than 0 and 1"
    return None if array.any() else ("mask-zero", "loss_mask is all zero")


def _integers(values: object, *, bools: bool = False) -> bool:
    """Whether `values` is a flat list or array of whole numbers of at most 64 bits."""
    if isinstance(values, np.ndarray):
        return values.ndim == 1 and values.dtype.kind in ("iub" if bools else "iu")
    if not isinstance(values, list):
        return False
    kinds = set(map(type, values))
    if not kinds <= ({int, bool} if bools else {int}):
        return False
    return not values or (min(values) >= -(2**63) and max(values) < 2**63)


def _name(name: object) -> str | None:
    if isinstance(name, bool):
        return None
    return str(name) if isinstance(name, str | int) else None
