"""Samples and dumps as the capture would write them, for tests of what follows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hsdaemon import wire
from hsdaemon.data.formats import Format, get_format
from hsdaemon.data.identity import RunIdentity
from hsdaemon.data.publish import Publisher
from hsdaemon.data.sample import Sample, default_name

EPOCH = "00112233445566ff"
NORMS = {"specforge": "post", "modelopt": "post", "speculators": "pre"}
LAYERS = (1, 5, 9)
States = np.ndarray[Any, Any]
_attempts = itertools.count()


def run_of(fmt: str, *, hidden: int = 64, norm: str = "", dtype: str = "bfloat16") -> RunIdentity:
    return RunIdentity("d" * 32, "m" * 32, LAYERS, norm or NORMS[fmt], dtype, fmt, hidden, "0.5.23")


def sample_of(row: int = 0, tokens: int = 37, *, name: str = "", mask: bool = True, seed: int = 0) -> Sample:
    rng = np.random.default_rng((seed, row))
    ids = rng.integers(0, 1000, tokens).astype(np.int64)
    ones = (np.arange(tokens) >= tokens // 2).astype(np.int64)
    digest = rng.bytes(16)
    return Sample(row, name or default_name(row), ids, ones if mask else None, digest)


def bf16(values: States) -> States:
    """float32 -> bfloat16 bits (uint16), rounded to nearest even."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded: States = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2")


def widen(bits: States) -> States:
    """bfloat16 bits -> float32."""
    return (bits.astype("<u4") << 16).view("<f4")


def states_of(tokens: int, hidden: int = 64, seed: int = 0) -> States:
    """[tokens, 4, hidden] bfloat16 bits: three aux layers ascending, then the final state."""
    return bf16(np.random.default_rng(seed).standard_normal((tokens, 4, hidden), np.float32) + 1e-3)


def header_of(sample: Sample, run: RunIdentity, **changes: object) -> wire.DumpHeader:
    rid = wire.RequestId(EPOCH, sample.row, next(_attempts) % 1000, len(sample.ids))
    fields: dict[str, Any] = {
        "rid": str(rid),
        "tokens": len(sample.ids),
        "rows": len(sample.ids),
        "hidden": run.hidden,
        "layers": run.layers,
        "norm": run.norm,
        "dtype": run.dtype,
        "interleaved": get_format(run.format).interleaved,
        "release": run.release,
        "capture": wire.CAPTURE_VERSION,
        "launch": "l",
        "tp_rank": 0,
        "dp_rank": 0,
    }
    return wire.DumpHeader(**(fields | changes))


def dump_of(folder: Path, sample: Sample, run: RunIdentity, states: States, **changes: object) -> Path:
    """Write a dump of `states` [tokens, 4, hidden]; `changes`: other values in its header."""
    header = header_of(sample, run, **changes)
    layout = header.layout()
    path = folder / f"{header.rid}.hs"
    planes = [states] if header.interleaved else [states[:, :-1], states[:, -1]]
    with path.open("wb") as file:
        file.write(wire.pack_header(header))
        file.write(sample.ids.astype("<i8").tobytes())
        for offset, plane in zip(layout.plane_offsets, planes, strict=True):
            file.seek(offset)
            file.write(np.ascontiguousarray(plane).tobytes())
        file.truncate(layout.total)
    return path


def publisher_of(
    root: Path,
    run: RunIdentity,
    volume_check: Callable[[int], None] = lambda _: None,
    steps: Callable[[str], None] = lambda _: None,
) -> Publisher:
    fmt: Format = get_format(run.format)
    root.mkdir(exist_ok=True)
    return Publisher(root, root / "quarantine", fmt, run, EPOCH, volume_check, steps)
