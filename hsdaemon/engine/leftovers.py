"""What killed engines leave behind: shared memory and build locks, found and removed by proof of death only.

SGLang names its segments `sgl_shm_<kind>_<pid>_...` and `sglang_loads_...`; a torch extension that was being built
leaves an empty `lock` file in its cache folder, on which every later start waits for ever.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SHM = Path("/dev/shm")  # noqa: S108  # the engine's own place, fixed by it
_SEGMENT = re.compile(r"sgl_shm_[a-zA-Z0-9]+_(\d+)(?:_.*)?", re.ASCII)


def caches(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Folders in which an engine with this environment builds extensions."""
    home = Path(environ.get("HOME", "/root"))
    torch = environ.get("TORCH_EXTENSIONS_DIR")
    return (Path(torch) if torch else home / ".cache/torch_extensions", home / ".cache/flashinfer")


def find(folders: Iterable[Path], shm: Path = SHM) -> list[str]:
    """Paths whose owners are dead. Call it only while no engine of ours runs."""
    return sorted([*_segments(shm), *_locks(folders)])


def sweep(paths: Iterable[str], folders: Iterable[Path], shm: Path = SHM) -> list[str]:
    """Remove those of `paths` that are still dead now. Gives those that could not be removed."""
    dead, left = set(find(folders, shm)), []
    for path in paths:
        try:
            if path in dead:
                Path(path).unlink(missing_ok=True)
        except OSError:
            left.append(path)
    return left


def _segments(shm: Path) -> Iterator[str]:
    """Segments of processes that do not exist. A number that was given out again keeps its segment: that is safe."""
    try:
        names = os.listdir(shm)
    except OSError:
        return
    for name in names:
        match = _SEGMENT.fullmatch(name)
        if match and not Path(f"/proc/{match[1]}").exists():
            yield str(shm / name)


def _locks(folders: Iterable[Path]) -> Iterator[str]:
    """Build locks that no process holds open or locked: a builder keeps its file descriptor while it builds."""
    found = [path for folder in folders for path in folder.glob("**/lock") if path.is_file()]
    if not found:
        return
    held = set(_open_files())
    for path in found:
        if str(path.resolve()) not in held:
            yield str(path)


def _open_files() -> Iterator[str]:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                yield os.readlink(f"/proc/{pid}/fd/{fd}")  # a link into /proc, thousands of them
        except OSError:
            continue
