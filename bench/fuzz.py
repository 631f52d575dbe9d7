"""Broken files for every reader of the product, at random, for as long as you like: the targets of tests/fuzz.py.

A fault is an exception that the reader does not promise, or a change outside its folder; the file that caused it
is kept in build/fuzz. Last line: fuzz: targets= runs= faults=
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import fuzz  # noqa: E402  # the path is set above
import structlog  # noqa: E402

KEPT = Path("build/fuzz")


def damage(choose: random.Random) -> list[fuzz.Edit]:
    """Up to four edits, most of them one."""
    count = choose.choice((1, 1, 1, 2, 3, 4))
    return [fuzz.Edit(choose.choice(fuzz.HOWS), choose.randrange(1 << 20), _word(choose)) for _ in range(count)]


def _word(choose: random.Random) -> bytes:
    return choose.choice(fuzz.WORDS) if choose.random() < 0.8 else choose.randbytes(choose.randrange(9))


def fault(name: str, data: bytes, folder: Path) -> str | None:
    """Where and what, one line; None when the reader keeps its promise."""
    try:
        fuzz.attempt(name, data, folder)
    except Exception as error:  # noqa: BLE001  # whatever comes out is the finding
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "hsdaemon" in f.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "the check"
        return f"{name}: {where}: {type(error).__name__}: {str(error)[:120]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    parser.add_argument("--targets", nargs="+", default=sorted(fuzz.TARGETS), choices=sorted(fuzz.TARGETS))
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    choose, found, runs, end = random.Random(args.seed), set[str](), 0, time.monotonic() + args.seconds
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="hs-fuzz-", dir="/dev/shm") as folder:
        while time.monotonic() < end:
            for name in args.targets:
                data = fuzz.broken(choose.choice(fuzz.TARGETS[name].seeds()), damage(choose))
                said = fault(name, data, Path(folder) / "one")
                runs += 1
                if said is not None and said.rpartition(": ")[0] not in found:
                    found.add(said.rpartition(": ")[0])
                    KEPT.mkdir(parents=True, exist_ok=True)
                    (KEPT / f"{name.replace(' ', '-')}-{runs}").write_bytes(data)
                    print(said, flush=True)
    print(f"fuzz: targets={len(args.targets)} runs={runs} faults={len(found)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
