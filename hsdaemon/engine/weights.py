"""Are the weights whole? Told by the checkpoint's own index and by sizes: a shard that is missing or cut is found in
milliseconds instead of after minutes of loading."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

from msgspec import Struct

from hsdaemon.errors import EngineError
from hsdaemon.wire import parse_json

_MAX_HEADER = 256 << 20  # bytes of a safetensors header; the largest known ones are some megabytes


class Weights(Struct, frozen=True):
    """shards: files that the index names; missing: those that are not there; cut: shorter than their header says."""

    shards: int
    bytes: int
    missing: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return bool(self.shards) and not self.missing and not self.cut


def look(folder: Path) -> Weights:
    """Raises OSError when the folder cannot be read."""
    names = _named(folder) or sorted(path.name for path in folder.glob("*.safetensors"))
    missing = tuple(name for name in names if not (folder / name).is_file())
    there = [folder / name for name in names if name not in missing]
    cut = tuple(path.name for path in there if path.suffix == ".safetensors" and path.stat().st_size < _least(path))
    return Weights(len(names), sum(path.stat().st_size for path in there), missing, cut)


def require(folder: Path) -> None:
    """Raises EngineError for weights that are not whole, or that this account may not read: the engine itself says of
    those that they do not exist."""
    closed = [
        path.name for path in sorted(folder.glob("*.safetensors")) if not os.access(path, os.R_OK, effective_ids=True)
    ]
    if closed:
        raise EngineError(
            f"cannot start the engine: {folder / closed[0]} ({len(closed)} files) is closed to uid {os.geteuid()}; "
            f"chmod -R a+rX {folder}"
        )
    try:
        found = look(folder)
    except OSError as error:
        raise EngineError(f"cannot start the engine: {folder}: {error.strerror}; see to the model's folder") from None
    bad = (*found.missing, *found.cut)
    if bad:
        raise EngineError(
            f"cannot start the engine: {folder / bad[0]} ({len(bad)} files) is missing or cut short; "
            "copy the checkpoint again"
        )


def _named(folder: Path) -> list[str]:
    """Shards that the index names; [] without an index."""
    for index in sorted(folder.glob("*.index.json")):
        try:
            shards: Any = parse_json(index.read_bytes())["weight_map"].values()
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        return sorted({Path(str(name)).name for name in shards})
    return []


def _least(path: Path) -> int:
    """Bytes that a safetensors file must have, by its own header; one more than it has when that is damaged."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER, size):
                return size + 1
            tensors: Any = parse_json(file.read(length))
        ends = [info["data_offsets"][1] for name, info in tensors.items() if name != "__metadata__"]
        return 8 + int(length) + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        return size + 1
