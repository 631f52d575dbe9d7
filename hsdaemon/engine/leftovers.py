"""What killed engines leave behind: shared memory and build locks, found and removed by proof of death only.

SGLang names its segments `sgl_shm_<kind>_<pid>_...` and `sglang_loads_<name>_<digest>.shm`; a torch extension that
was being built leaves an empty `lock` file in its cache folder, on which every later start waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SHM = Path("/dev/shm")  # noqa: S108  # the engine's own place, fixed by it
YOUNG_S = 60.0  # an engine that starts makes a segment some moments before it maps it
_LOADS = re.compile(r"sglang_loads_\w+_[0-9a-f]+\.shm", re.ASCII)
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
    """Segments whose maker does not exist (a number that was given out again keeps its segment: that is safe) or that
    carry no number and are not new. Either way no process may have them open or mapped: a number may be of another
    namespace, as of a container that shares this folder."""
    try:
        names = os.listdir(shm)
    except OSError:
        return
    found = []
    for name in names:
        match = _SEGMENT.fullmatch(name)
        gone = match and not Path(f"/proc/{match[1]}").exists()
        if gone or (_LOADS.fullmatch(name) and _age_s(shm / name) > YOUNG_S):
            found.append(str(shm / name))
    yield from _unused(found)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _locks(folders: Iterable[Path]) -> Iterator[str]:
    """Build locks that no process holds open: a builder keeps its file descriptor while it builds."""
    real = [folder.resolve() for folder in folders]
    found = [path for folder in real for path in folder.glob("**/lock") if path.is_file()]
    # The engine's account owns these folders: a link in them would name somebody else's file.
    return _unused([str(path) for path in found if path.resolve() == path])


def _unused(paths: list[str]) -> Iterator[str]:
    """Those of `paths` that no process has open or mapped."""
    if not paths:
        return
    held = set(_held())
    yield from (path for path in paths if path not in held)


def _held() -> Iterator[str]:
    """Every file that a process has open or mapped; processes and descriptors that go meanwhile have none."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(f"/proc/{pid}/fd/{fd}")
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                yield line[line.find("/") :] if "/" in line else ""
