"""make chaos MINUTES=30: random faults against the whole product in a box, with a real SGLang on the CPU.

Supervisor, engine, proof and worker run on a real systemd and extract; faults of many kinds happen to them in a random
order, each followed by a wait until the manifest advances again. One in five comes with a SIGKILL of the supervisor. At
the end every sample must be there once, be the file that was called done, and equal transformers. Needs root.
A seed replays order, kinds and durations.
Last line: chaos: faults= kinds= recovered= lost=0 corrupt=0 twice=0 median_s= worst_s=
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import fake_nvml
from hosts import ROOT, VLLM
from sdbox import BoxError

from bench import incident
from bench.chaos_faults import CONFIG_FILE, FAULTS, LIBEXEC, MOUNT, SQUAT, Check, Scene, Seen, clean_up
from bench.incident import JOB, LOOK_S, OUTPUT, Watched
from hsdaemon.core.model import ENGINE_UNIT, WORKER_UNIT

ROWS_A_MINUTE = 900  # more than one request at a time can do between the faults
STORED = 30  # samples that lie there without a manifest at the start
FIRST_S, LAST_S, LAST_ROW_S = 400.0, 300.0, 0.1  # patience for the first sample and for the rest, on busy cores
TOO, RESCUED_S = 0.2, 300.0
# A box that comes up kills it anyway; NVML tells an Xid to who listens then, and a box has no kernel log that keeps it.
ALONE = ("reboot", "power-cut", "gpu-xid")
PRELOADED = ("hs-extract.service", "hs-proof.service", "hs-scan.service", "hs-worker.service")
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>
/* The wall clock of a program moves by the seconds that /run/clock-offset names. */
int clock_gettime(clockid_t which, struct timespec *out) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int rc = real(which, out);
  if (which != CLOCK_REALTIME) return rc;
  FILE *f = fopen("/run/clock-offset", "re");
  long moved = 0;
  if (f) { if (fscanf(f, "%ld", &moved) != 1) moved = 0; fclose(f); }
  out->tv_sec += moved;
  return rc;
}
"""
# Waits that a campaign of minutes can sit out; the ways are the same ones.
SHORTER = """
[supervisor]
tick_s = 1
backoff_s = 2
stall_s = 15
"""
WORKER = "concurrency = 1\nstall_s = 60\nrequest_timeout_s = 40\ndrain_s = 10"
DROP_INS = {
    "hs-extract.service": "WatchdogSec=20",
    ENGINE_UNIT: "TimeoutStopSec=20",  # a hung rank of the real engine is given 90 s
    WORKER_UNIT: "TimeoutStopSec=30",
}
# Every file that the manifest calls done after a row, as a person could tell it from another one.
DONE = f"""
import json, os, sys
from pathlib import Path
from hsdaemon.data.manifest import every_stored
from hsdaemon.data.sqlite import open_reader
root = Path("{OUTPUT}")
files = {{}}
manifest = open_reader(root / "manifest.db")
for kept in every_stored(manifest, int(sys.argv[1])):
    seen = os.stat(root / kept.path)
    files[kept.row] = [kept.path, seen.st_size, seen.st_ino, seen.st_mtime_ns]
print(json.dumps([files, manifest.claims(), manifest.counts().failed]))
"""


class Campaign:
    """One box, what the manifest has called done so far, and how each fault went."""

    def __init__(self, box: Watched, facts: dict[str, Any], seed: int) -> None:
        self.box, self.facts, self.seed = box, facts, seed
        self.done: dict[str, list[Any]] = {}  # row -> the file at the first look that saw it done
        self.changed: set[str] = set()
        self.claims = 0
        self.took: dict[str, list[float]] = defaultdict(list)  # fault -> seconds; inf: it did not recover

    def install(self, nvml: Path) -> None:
        """The incident's host, its engine with the patch, the work spread out over the campaign."""
        box = self.box
        incident.install(box, nvml, "patch", lost=False)
        box.sh(f"rm /etc/systemd/system/multi-user.target.wants/{VLLM}; systemctl daemon-reload")
        box.sh(f"sed -i 's/^concurrency = .*/{WORKER.replace(chr(10), chr(92) + 'n')}/' {CONFIG_FILE}")
        box.put(CONFIG_FILE, box.sh(f"cat {CONFIG_FILE}") + "\n" + SHORTER)
        box.put(f"{LIBEXEC}/attach", incident.ATTACH.replace("mount -o loop", MOUNT), 0o755)
        box.put(f"{LIBEXEC}/squat", SQUAT, 0o755)
        box.put("/opt/clock.c", CLOCK)
        box.sh("gcc -shared -fPIC -O1 -o /opt/clock.so /opt/clock.c")
        for unit in PRELOADED:
            box.put(f"/etc/systemd/system/{unit}.d/clock.conf", "[Service]\nEnvironment=LD_PRELOAD=/opt/clock.so\n")
        for unit, text in DROP_INS.items():
            box.put(f"/etc/systemd/system/{unit}.d/shorter.conf", f"[Service]\n{text}\n")
        box.sh("sync")

    def wait(self, seconds: float, check: Check | None = None, *, done: bool = False) -> bool:
        """Until looks of now see the work go on (or all of it done), and `check` hold. False: not in time."""
        begun, first = time.monotonic(), None
        while time.monotonic() < begun + seconds:
            time.sleep(LOOK_S)
            seen = self.box.status()
            if seen.get("mono_s", 0.0) <= begun:
                continue
            if seen["reason"] == "done":
                return True
            settled = _settled(seen)
            if done or seen["reason"] != "extracting" or settled is None:
                continue
            first = settled if first is None else first
            if settled > first and (check is None or check(seen)):
                return True
        return False

    def strike(self, number: int, kind: str) -> bool:
        """One fault, to its end. Its draws depend on seed and number alone."""
        draw = random.Random(f"{self.seed}:{number}")  # moments, no secret
        time.sleep(draw.uniform(0.0, 2.0))
        self.remember()
        scene = Scene(self.box, number, self.box.status(), draw)
        too = draw.random() < TOO and kind not in ALONE
        patience_s = FAULTS[kind].patience_s
        print(f"{number:>3} {kind}{' + supervisor-killed' if too else ''}: ", end="", flush=True)
        try:
            check = FAULTS[kind].inject(scene)
            if too:
                self.box.exec("systemctl", "kill", "-s", "KILL", "hs-extract.service", check=False)  # or it is down
            healed = time.monotonic()
            back = self.wait(patience_s, check)
        except (BoxError, subprocess.SubprocessError, OSError) as error:
            print(f"  {kind}: {error}", flush=True)
            healed, back = time.monotonic(), False
        seconds = time.monotonic() - healed
        self.took[kind].append(seconds if back else float("inf"))
        seen = self.box.status()
        how = f"back after {seconds:.1f} s" if back else f"NOT BACK: {seen.get('sentence')}"
        print(f"{how}; {_settled(seen)} settled", flush=True)
        if not back:
            print(self.box.journal("-b", "-n", "40"), flush=True)
        for script in scene.later:
            self.box.sh(script, check=False)
        return back or self.rescue()

    def rescue(self) -> bool:
        """What a person would do, so that the other kinds get their turn."""
        with contextlib.suppress(BoxError, subprocess.SubprocessError):
            self.box.exec("hs-extract", "reset", check=False)
        if self.wait(30):
            return True
        try:
            self.box.power_cut()
            self.box.boot()
            self.box.exec("hs-extract", "reset", check=False)
        except (BoxError, subprocess.SubprocessError) as error:
            print(f"  {error}", flush=True)
            return False
        return self.wait(RESCUED_S)

    def remember(self, *, everything: bool = False) -> None:
        """What is done by now; a file that was done before must be the same one still."""
        after = -1 if everything else max((int(row) for row in self.done), default=99) - 100
        python = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", DONE, after)
        files, self.claims, failed = json.loads(self.box.exec(*python, timeout=300).stdout)
        if failed:
            print(f"  {failed} samples failed", flush=True)
        self.changed |= {row for row, file in files.items() if self.done.setdefault(row, file) != file}
        if everything:
            self.changed |= self.done.keys() - files.keys()

    def finish(self) -> dict[str, int] | None:
        """No more faults: to the last row, many at a time; then every file is judged. None: it did not come to that."""
        self.box.sh(f"sed -i 's/^concurrency = .*/concurrency = 128/' {CONFIG_FILE}")
        self.box.exec("systemctl", "kill", "-s", "KILL", "hs-worker.service", check=False)
        if not self.wait(LAST_S + LAST_ROW_S * self.facts["rows"], done=True):
            print(f"not done: {self.box.status().get('sentence')}", self.box.journal("-b", "-n", "60"), sep="\n")
            return None
        self.remember(everything=True)
        found = incident.judge(Path(self.facts["folder"]), self.box)
        print(
            f"judged {found['files']} files: max_abs_err={found['max_abs_err']:.1e} adopted={found['kept']} "
            f"claimed_again={self.claims + found['kept'] - found['files']}"
        )
        for name in ("lost", "twice", "changed", "corrupt"):
            if found[name]:
                print(f"  {name}: {found[name][:5]}")
        return {
            "lost": len(found["lost"]),
            "corrupt": len(found["corrupt"]) + len(found["changed"]),
            "twice": len(found["twice"]) + len(self.changed),
        }


def _settled(seen: Seen) -> int | None:
    progress = seen.get("progress") or {}
    return progress["done"] + progress["failed"] + progress["skipped"] if "failed" in progress else None


def order(kinds: list[str], seed: int) -> Iterator[str]:
    """Every kind once, in a random order, then again in another one."""
    draw = random.Random(seed)  # moments, no secret
    while True:
        yield from draw.sample(kinds, len(kinds))


def table(took: dict[str, list[float]]) -> str:
    """Fault, times, recovered, seconds to recover."""
    lines = [f"{'fault':<20} {'times':>5} {'recovered':>9} {'median_s':>8} {'worst_s':>8}"]
    for kind, seconds in sorted(took.items()):
        back = [s for s in seconds if s != float("inf")]
        figures = f"{statistics.median(back):>8.1f} {max(back):>8.1f}" if back else f"{'-':>8} {'-':>8}"
        lines.append(f"{kind:<20} {len(seconds):>5} {len(back):>9} {figures}")
    return "\n".join(lines)


def verdict(campaign: Campaign, found: dict[str, int] | None) -> bool:
    every = [s for seconds in campaign.took.values() for s in seconds]
    back = [s for s in every if s != float("inf")]
    print(table(campaign.took))
    bad = found or {"lost": -1, "corrupt": -1, "twice": -1}  # -1: not known
    figures = " ".join(f"{name}={number}" for name, number in bad.items())
    print(
        f"chaos: faults={len(every)} kinds={len(campaign.took)} recovered={len(back)} {figures} "
        f"median_s={statistics.median(back or [0.0]):.1f} worst_s={max(back, default=0.0):.1f}",
        flush=True,
    )
    return len(back) == len(every) > 0 and not any(bad.values())


def play(facts: dict[str, Any], kinds: list[str], args: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as made:
        nvml = fake_nvml.build(made)
        box = Watched(disk=4096, raw=["/var/lib/volume"], bind=[str(nvml), f"{facts['folder']}:{JOB}"])
        try:
            with box:
                campaign = Campaign(box, facts, args.seed)
                campaign.install(nvml)
                box.power_cut()
                box.boot()
                if not campaign.wait(FIRST_S):
                    print(f"no first sample: {box.status().get('sentence')}", box.journal("-b", "-n", "60"), sep="\n")
                    return False
                end = time.monotonic() + args.minutes * 60
                for number, kind in enumerate(order(kinds, args.seed), 1):
                    if time.monotonic() > end or number > args.faults or box.status().get("reason") == "done":
                        break
                    if not campaign.strike(number, kind):
                        verdict(campaign, None)
                        return False
                return verdict(campaign, campaign.finish())
        finally:
            clean_up(box)


def prepared(folder: Path, rows: int) -> dict[str, Any]:
    """Model and data set of so many rows, made once."""
    here = (folder / f"{rows}").resolve()
    argv = (sys.executable, "-m", "bench.incident_set", "make", str(here), str(rows), str(STORED))
    subprocess.run(argv, cwd=ROOT, stderr=subprocess.DEVNULL, check=True, timeout=1200)
    facts: dict[str, Any] = json.loads((here / "facts.json").read_text())
    return facts | {"folder": str(here)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults; what is left to do comes on top")
    parser.add_argument("--faults", type=int, default=10**6, help="at most so many")
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="KIND")
    parser.add_argument("--rows", type=int, default=0, help="samples; default: enough for the minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/chaos"))
    args = parser.parse_args(argv)
    print(f"chaos: seed={args.seed} kinds={len(args.kinds)} minutes={args.minutes:g}", flush=True)
    facts = prepared(args.folder, args.rows or max(1_500, round(ROWS_A_MINUTE * args.minutes)))
    return 0 if play(facts, args.kinds, args) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the box ends with us
    sys.exit(main())
