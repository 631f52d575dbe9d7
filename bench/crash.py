"""Power cuts at every point of publication and commit, on three file systems; then the product starts from each state.

The disk's writes are logged; a state is a prefix of them, or all up to a flush and a random half of those since. On
each file system the manifest lies beside the samples, then on another one; then once more elsewhere and without the
fsync of folders, a control that must fail. Kills between any two steps are test_st_18, an fsync that fails once is
test_st_08, a damaged database is test_mf_05. Needs root and the tools of `make system`. Last line:
crash: ext4_bad=0/N xfs_bad=0/N btrfs_bad=0/N control_bad=M/N
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import crash  # noqa: E402  # the path is set above
import structlog  # noqa: E402

from hsdaemon.machine import disk  # noqa: E402

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS


def own_mounts() -> None:
    """Mount where nobody else looks: a box that boots meanwhile would copy our mounts and keep them, and xfs and btrfs
    refuse a second file system with the same id. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "cannot unshare mounts; run it as root")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def states(kind: str, most: int, every: int, *, elsewhere: bool, control: bool = False) -> tuple[int, int]:
    """States that are bad, and all, of one run; each finding is printed unless it is wanted."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hs-crash-", dir="/dev/shm") as folder:  # memory
        with patch.object(disk, "sync_folder", _nothing if control else disk.sync_folder):
            story = crash.record(Path(folder) / "run", kind, elsewhere=elsewhere)
        count, wrong = crash.enumerate_states(story, most, every)
    where = "elsewhere" if elsewhere else "beside the samples"
    what = f"{kind}, manifest {where}{', control without the fsync of folders' if control else ''}"
    print(f"{what}: {len(wrong)} of {count} states bad, {time.monotonic() - began:.0f} s", flush=True)
    print(*(f"  {line}" for line in (wrong[:1] if control else wrong)), sep="\n", end="\n" if wrong else "", flush=True)
    return len(wrong), count


def _nothing(folder: Path) -> None:
    """A folder's fsync left out."""


def total(runs: list[tuple[int, int]]) -> tuple[int, int]:
    return sum(bad for bad, _ in runs), sum(count for _, count in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=60, help="prefixes of the write order in each run (default: 60)")
    parser.add_argument("--every", type=int, default=1, help="judge one state in so many (default: each)")
    parser.add_argument("--systems", nargs="+", default=list(crash.SYSTEMS), choices=list(crash.SYSTEMS))
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    own_mounts()
    began = time.monotonic()
    found = {
        kind: total([states(kind, args.states, args.every, elsewhere=elsewhere) for elsewhere in (False, True)])
        for kind in args.systems
    }
    control = total([states(kind, args.states, args.every, elsewhere=True, control=True) for kind in args.systems])
    print(f"{time.monotonic() - began:.0f} s")
    words = [f"{kind}_bad={bad}/{count}" for kind, (bad, count) in found.items()]
    print("crash:", *words, f"control_bad={control[0]}/{control[1]}")
    return int(not control[0] or any(bad or not count for bad, count in found.values()))


if __name__ == "__main__":
    sys.exit(main())
