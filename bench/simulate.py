"""The campaign: many seeds of the simulated host, then planted bugs that it must catch.

simulate.py --seeds 10000          last line: simulate: seeds=10000 violations=0 planted=N caught=N
simulate.py --replay SEED          tells the story of one seed
simulate.py --replay SEED --bug N  the same with a planted bug
simulate.py --rate                 how fast one core is: bench-simulate: hosts= hosts_s=
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from campaign import Result, simulate  # noqa: E402  # the path is set above
from mutations import MUTATIONS  # noqa: E402

CHUNK = 50
BUG_SEEDS = 2000  # a planted bug must show within this many


def clean(start: int) -> list[Result]:
    """Violations of a chunk of seeds."""
    return [r for seed in range(start, start + CHUNK) if (r := simulate(seed, keep=0)).violations]


def planted(number: int) -> tuple[int, int | None, str]:
    """Number of the bug, the first seed that catches it, and what it saw."""
    with MUTATIONS[number].planted():
        for seed in range(BUG_SEEDS):
            try:
                result = simulate(seed, keep=0)
            except Exception as error:  # noqa: BLE001  # a bug may crash the loop: that is caught, too
                return number, seed, repr(error)
            if result.violations:
                return number, seed, result.violations[0]
    return number, None, ""


def replay(seed: int, bug: int | None) -> int:
    if bug is None:
        result = simulate(seed, keep=100_000)
    else:
        print(f"planted: {MUTATIONS[bug].name}")
        with MUTATIONS[bug].planted():
            result = simulate(seed, keep=100_000)
    print("\n".join(result.story))
    print("\n".join(f"VIOLATION {v}" for v in result.violations) or "no violation")
    return 1 if result.violations else 0


def rate(chunks: int = 6) -> int:
    begun = time.monotonic()
    bad = sum(len(clean(chunk * CHUNK)) for chunk in range(chunks))
    print(f"bench-simulate: hosts={chunks * CHUNK} hosts_s={chunks * CHUNK / (time.monotonic() - begun):.1f}")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--replay", type=int)
    parser.add_argument("--bug", type=int)
    parser.add_argument("--rate", action="store_true")
    args = parser.parse_args()
    if args.replay is not None:
        return replay(args.replay, args.bug)
    if args.rate:
        return rate()
    begun = time.monotonic()
    caught = violations = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for number, seed, what in pool.map(planted, range(len(MUTATIONS))):
            caught += seed is not None
            shown = "NOT CAUGHT" if seed is None else f"seed {seed}: {what}"
            print(f"planted {number:2} {MUTATIONS[number].name:32} {shown}")
        for bad in pool.map(clean, range(0, args.seeds, CHUNK)):
            for result in bad:
                violations += 1
                print(f"seed {result.seed}: {result.violations[0]}; replay: make simulate REPLAY={result.seed}")
    print(f"{time.monotonic() - begun:.0f} s")
    print(f"simulate: seeds={args.seeds} violations={violations} planted={len(MUTATIONS)} caught={caught}")
    return 0 if not violations and caught == len(MUTATIONS) else 1


if __name__ == "__main__":
    sys.exit(main())
