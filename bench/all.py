"""`make bench`: every measurement, one after the other; results as JSON in docs/bench, then the page and plot of docs/.

python -m bench.all                    everything, about 20 minutes on a quiet machine
python -m bench.all write manifest     these; the others keep their last result
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import apsw

from bench import page

ROOT = Path(__file__).resolve().parents[1]
BENCHES: dict[str, tuple[str, ...]] = {
    "write": ("bench/write.py",),
    "manifest-10000": ("bench/manifest.py", "--samples", "10000"),
    "manifest-100000": ("bench/manifest.py", "--samples", "100000"),
    "manifest-1000000": ("bench/manifest.py", "--samples", "1000000"),
    "capture": ("bench/capture.py",),
    "capture-smollm2": ("bench/capture.py", "--model", "smollm2", "--prompts", "2", "--pairs", "6"),
    "verify": ("bench/verify.py",),
    "compress": ("bench/compress.py", "--model", "smollm2"),
    "simulate": ("bench/simulate.py", "--rate"),
    "idle": ("bench/idle.py",),
}
ROOT_ONLY = ("idle",)
PACKAGES = ("sglang", "torch", "apsw", "numpy", "zstandard")
LINE = re.compile(r"bench-[a-z]+: (\S+=\S+(?: \S+=\S+)*)")
MOST_S = 1800.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = sorted({name.partition("-")[0] for name in BENCHES})
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(kinds)} (default: all)")
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(kinds):
        parser.error(f"no such measurement: {', '.join(sorted(unknown))}")
    failed = []
    for name, words in BENCHES.items():
        if args.kinds and name.partition("-")[0] not in args.kinds:
            continue
        if name in ROOT_ONLY and os.geteuid() != 0:
            print(f"--- {name}: skipped, it boots a systemd and needs root")
        elif not measure(name, words):
            failed.append(name)
    page.write()
    print(
        f"bench: results={len(page.read(page.DOCS / 'bench'))} failed={','.join(failed) or 0} page=docs/benchmarks.md"
    )
    return 1 if failed else 0


def measure(name: str, words: tuple[str, ...]) -> bool:
    """Run one, keep its result. False when it gave none, or missed its goal."""
    shown = shlex.join(("python", *words))
    print(f"--- {shown}", flush=True)
    load, begun, date = load_now(), time.monotonic(), dt.datetime.now(dt.UTC)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = ["timeout", f"{MOST_S:.0f}", sys.executable, *words]  # TERM, so that servers and boxes are ended, too
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    found = LINE.findall(done.stdout)
    if not found:
        return False
    values = {key: number(value) for key, _, value in (pair.partition("=") for pair in found[-1].split())}
    keep(name, shown, values, done.returncode, date, time.monotonic() - begun, load)
    return done.returncode == 0


def keep(
    name: str, shown: str, values: dict[str, Any], code: int, date: dt.datetime, seconds: float, load: float
) -> None:
    """Write a result into docs/bench; the page is made of what lies there."""
    result = {
        "name": name,
        "command": shown,
        "values": values,
        "exit": code,
        "date": date.isoformat(timespec="seconds"),
        "seconds": round(seconds),
        "load": load,
        "machine": machine(),
        "versions": versions(),
    }
    folder = page.DOCS / "bench"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def load_now() -> float:
    return round(os.getloadavg()[0], 1)


def number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def machine() -> dict[str, str]:
    cpu = next(iter(re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    words = ("findmnt", "-no", "FSTYPE", "-T", str(ROOT))
    disk = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release(),
        "file system": disk,
    }


def versions() -> dict[str, str]:
    found = {"hsdaemon": importlib.metadata.version("hsdaemon"), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"sqlite": apsw.sqlite_lib_version()}


if __name__ == "__main__":
    sys.exit(main())
