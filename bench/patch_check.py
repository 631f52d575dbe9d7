"""`make patch-check`: every shipped patch on the released files: applies, compiles, reverts byte for byte.

The wheels come from pip and stay in a cache folder outside the repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hsdaemon.engine import patch
from hsdaemon.engine.diff import State

FETCH_S = 120.0


def main() -> int:
    releases = sys.argv[1:] or list(patch.shipped())
    bad = []
    for release in releases:
        with tempfile.TemporaryDirectory() as folder:
            found = problem(release, unpacked(release, Path(folder)))
        print(f"{release}: {found or 'applies, compiles, reverts'}", flush=True)
        bad += [release] * bool(found)
    print(f"patch-check: {'FAILED' if bad else 'ok'} releases={len(releases)} failed={','.join(bad) or 'none'}")
    return 1 if bad else 0


def unpacked(release: str, folder: Path) -> Path:
    """The files of the release that its patch is about, and what names the release, below `folder`."""
    wanted = {target.path for target in patch.load(release).targets}
    with zipfile.ZipFile(wheel(release)) as archive:
        for name in archive.namelist():
            if name in wanted or name in ("sglang/version.py", "sglang/_version.py"):
                archive.extract(name, folder)
    return folder


def wheel(release: str) -> Path:
    """The released wheel, fetched once. Raises RuntimeError when pip does not get it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsdaemon" / "wheels"
    found = sorted(cache.glob(f"sglang-{release}-*.whl"))
    if not found:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*pip, f"sglang=={release}", "-d", str(cache)], capture_output=True, text=True, timeout=FETCH_S
        )
        found = sorted(cache.glob(f"sglang-{release}-*.whl"))
        if not found:
            raise RuntimeError(f"cannot fetch sglang=={release}: {done.stderr.strip()[-300:]}")
    return found[0]


def problem(release: str, folder: Path) -> str:
    """What is wrong with the patch on the files below `folder`; empty when nothing is."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    tree = patch.find(folder)
    if (tree.patch.release, patch.status(tree).state) != (release, State.PRISTINE):
        return f"is taken for {tree.patch.release}, {patch.status(tree).state.value}"
    if patch.apply(tree).state is not State.OURS:
        return "is not whole after apply"
    for target in tree.patch.targets:
        path = folder / target.path
        compile(path.read_bytes(), path, "exec")
    patch.revert(tree)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return "" if after == before else "does not revert byte for byte"


if __name__ == "__main__":
    sys.exit(main())
