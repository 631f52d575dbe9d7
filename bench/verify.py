"""How fast `hs-extract verify --deep` reads stored samples, against what the same disk gives to dd (direct or buffered,
whichever is faster).

Samples of 126 MB with random content under a manifest. In each round every reader takes all of them, in an order drawn
anew, with the page cache emptied of them first. Medians over the rounds; verify runs without its bound on the rate.

Last line: bench-verify: files= mb= verify_mb_s= dd_mb_s= vs_dd= cpu_s_per_gb=
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hsdaemon.data.examine import file_digest
from hsdaemon.data.identity import RunIdentity
from hsdaemon.data.manifest import Done
from hsdaemon.data.sample import Sample, default_name, digest
from hsdaemon.data.sqlite import SqliteManifest, create
from hsdaemon.data.verify import verify

SIZE = 126_156_800  # bytes: 2,200 tokens of three layers and the final state, 7,168 wide, bfloat16
RUN = RunIdentity("bench", "bench", (1, 29, 57), "post", "bfloat16", "specforge", 7168)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--files", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=".bench-") as name:
        root = Path(name)
        with contextlib.closing(stored(root, args.files)) as manifest:
            return measure(root, manifest, args.files, args.rounds)


def stored(root: Path, files: int) -> SqliteManifest:
    """`files` samples and the manifest that vouches for them."""
    manifest = create(root / "manifest.db", RUN, "bench")
    ids = np.arange(8)
    rows = [Sample(row, default_name(row), ids, None, digest(ids, None, str(row)), 0) for row in range(files)]
    manifest.ingest(rows, files, 0)
    for row in range(files):
        path = root / f"{row}.ckpt"
        with path.open("wb") as file:
            file.write(np.random.default_rng(row).bytes(SIZE))
            os.fsync(file.fileno())
        manifest.adopt([Done(row, 0, path.name, SIZE, file_digest(path))])
    return manifest


def measure(root: Path, manifest: SqliteManifest, files: int, rounds: int) -> int:
    cpu: list[float] = []

    def deep() -> None:
        before = time.process_time()
        found = list(verify(root, manifest, lambda _: None, is_deep=True))
        cpu.append(time.process_time() - before)
        assert not found, found

    def dd(*flags: str) -> None:
        for row in range(files):
            words = ["dd", f"if={root / str(row)}.ckpt", "of=/dev/null", "bs=8M", "status=none", *flags]
            subprocess.run(words, check=True)

    readers: dict[str, Callable[[], None]] = {"verify": deep, "direct": lambda: dd("iflag=direct"), "buffered": dd}
    seen: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(rounds):
        for name in random.sample(list(readers), len(readers)):
            for row in range(files):
                forget(root / f"{row}.ckpt")
            start = time.perf_counter()
            readers[name]()
            seen[name].append(files * SIZE / 1e6 / (time.perf_counter() - start))
        print(f"round {turn}: " + " ".join(f"{name}={rates[-1]:.0f}" for name, rates in seen.items()), flush=True)
    mine, *others = (statistics.median(seen[name]) for name in readers)
    disk = max(others)
    print(
        f"bench-verify: files={files} mb={files * SIZE / 1e6:.0f} verify_mb_s={mine:.0f} dd_mb_s={disk:.0f} "
        f"vs_dd={mine / disk:.2f} cpu_s_per_gb={statistics.median(cpu) / (files * SIZE / 1e9):.2f}"
    )
    return 0


def forget(path: Path) -> None:
    """Out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
