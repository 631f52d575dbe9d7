"""The targets of tests/fuzz.py under atheris: broken files that are bred by the code that they reach.

Each target runs in a process of its own, for its share of the seconds; what breaks one is kept in build/fuzz. Last
line: guided: targets= runs= faults=
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-untyped]  # ships no types
import structlog

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
with atheris.instrument_imports(include=["hsdaemon"]) if "--breed" in sys.argv else contextlib.nullcontext():
    import fuzz

KEPT = Path("build/fuzz")
MOST_BYTES = 64 << 10  # of one file: the largest seed is a manifest of 45,056


def breed(name: str, seconds: int) -> None:
    """Runs until the time is over, then ends the process; with a traceback and code 77 at the first fault."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    folder = Path(tempfile.mkdtemp(prefix="one-", dir=fuzz.scratch()))
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(fuzz.TARGETS[name].seeds()):
        (corpus / str(number)).write_bytes(seed)
    words = [
        f"-max_total_time={seconds}",
        f"-max_len={MOST_BYTES}",
        f"-artifact_prefix={KEPT}/{name.replace(' ', '-')}-",
    ]
    atheris.Setup([sys.argv[0], *words, str(corpus)], lambda data: fuzz.attempt(name, data, folder / "one"))
    atheris.Fuzz()


def child(name: str, seconds: int) -> tuple[int, str]:
    """Runs of one target, and what broke it ("" when nothing did)."""
    words = [sys.executable, __file__, "--breed", name, "--seconds", str(seconds)]
    with tempfile.TemporaryDirectory(prefix="hs-fuzz-", dir="/dev/shm") as folder:  # atheris ends without cleaning up
        env = os.environ | {"FUZZ_SCRATCH": folder}
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds + 300, env=env)
    runs = re.findall(r"^(?:Done |#)(\d+)", done.stderr, re.MULTILINE)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
    return int(runs[-1]) if runs else 0, "" if done.returncode == 0 else f"code {done.returncode}: {' '.join(said[:1])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--targets", nargs="+", default=sorted(fuzz.TARGETS), choices=sorted(fuzz.TARGETS))
    parser.add_argument("--breed", help=argparse.SUPPRESS)
    args = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    if args.breed:
        breed(args.breed, args.seconds)
        return 0
    runs = faults = 0
    for name in args.targets:
        count, fault = child(name, max(1, args.seconds // len(args.targets)))
        runs, faults = runs + count, faults + bool(fault)
        print(f"{name}: {count} runs{': ' if fault else ''}{fault}", flush=True)
    print(f"guided: targets={len(args.targets)} runs={runs} faults={faults}")
    return int(bool(faults) or not runs)


if __name__ == "__main__":
    sys.exit(main())
