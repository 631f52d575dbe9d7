"""make reboots N=20: a host that extracts is rebooted N times and loses its power N times, at random moments.

A box with the installed product: supervisor, proof and worker are the real ones, the engine is a stand-in that loads in
no time and whose states tell row, layer and position. A power cut loses whatever was not synced to the box's disk. What
the manifest called done before must be the very same file at the end. Needs root.
Last line: reboots: ok reboots= power_cuts= back= done= claimed_again= lost= corrupt= duplicated=
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from fake_engine import states
from hosts import ROOT
from outputs import write_jsonl
from sdbox import Box

from hsdaemon.core.model import ENGINE_UNIT, PROOF_UNIT, SCAN_UNIT, WORKER_UNIT
from hsdaemon.data.adopt import QUARANTINE
from hsdaemon.data.formats import open_sample

PER_CYCLE = 120  # rows: about two seconds of work
TOKENS_S = 480.0  # of the stand-in engine, so that no campaign runs out of rows
LAYERS, HIDDEN, VOCAB = 6, 8, 200
AUX = (1, 3, 4)
BACK_S, DONE_S = 120.0, 900.0  # on busy cores
JOB, OUTPUT = "/opt/job", "/data/states"
CONFIG = f"""
[data]
path = "{JOB}/data.jsonl"
[model]
path = "{JOB}/model"
layers = {list(AUX)}
[output]
path = "{OUTPUT}"
volume = "/data"
dtype = "float32"
reserve_mib = 4
ballast_mib = 1
[spool]
budget_mib = 64
[engine]
device = "cpu"
[worker]
concurrency = 16
"""
QUICK = "[supervisor]\ntick_s = 1\n"
ENGINE = {
    "spool": "/dev/shm/hs-extract", "run": "/run/hs-extract", "hidden": HIDDEN, "layers": AUX, "num_layers": LAYERS,
    "dtype": "float32", "port": 30000,
}  # fmt: skip
# Every file that the manifest calls done, as a person could tell it from another one: row, path, size, inode, time.
DONE = f"""
import json, os
from pathlib import Path
from hsdaemon.data.manifest import every_stored
from hsdaemon.data.sqlite import exists, open_reader
path, files, claims = Path("{OUTPUT}/manifest.db"), [], 0
if exists(path):
    manifest = open_reader(path)
    for kept in every_stored(manifest):
        seen = os.stat(path.parent / kept.path)
        files.append([kept.row, kept.path, seen.st_size, seen.st_ino, seen.st_mtime_ns])
    claims = manifest.claims()
print(json.dumps([files, claims]))
"""


class Campaign:
    """One box, its rows, and what the manifest has called done so far."""

    def __init__(self, box: Box, rows: list[list[int]], seed: int) -> None:
        self.box, self.rows = box, rows
        self.draw = random.Random(seed)  # moments, no secret
        self.done: dict[int, list[Any]] = {}  # row -> the file at the first look that saw it done
        self.changed: set[int] = set()
        self.claims = self.back = 0

    def install(self, more: str = QUICK) -> None:
        self.box.sh(f"make -s -C {ROOT} ENGINE_VENV={ROOT}/.venv install")
        self.box.put("/etc/hs-extract.toml", CONFIG + more)
        for unit in ("hs-extract.service", ENGINE_UNIT, PROOF_UNIT, SCAN_UNIT, WORKER_UNIT):
            text = f"[Service]\nEnvironment=PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1\n"
            if unit == ENGINE_UNIT:
                text += f"ExecStart=\nExecStart={ROOT}/.venv/bin/python {ROOT}/tests/fake_engine.py {JOB}/engine.json\n"
            self.box.put(f"/etc/systemd/system/{unit}.d/here.conf", text)
        # The interpreter may be in root's home, which is closed to the units' account.
        self.box.sh(f"chmod o+x /root; cd /; PYTHONPATH={ROOT} hs-extract init; chown -R hs-extract:hs-extract /data")
        self.box.sh("systemctl daemon-reload; systemctl enable --now hs-extract; sync")

    def status(self) -> dict[str, Any]:
        try:
            return dict(json.loads(Path(f"/proc/{self.box.pid1}/root/run/hs-extract/status.json").read_bytes()))
        except (OSError, ValueError):
            return {}

    def wait(self, *reasons: str, seconds: float) -> None:
        """Raises TimeoutError with the supervisor's last sentence."""
        end = time.monotonic() + seconds
        while self.status().get("reason") not in reasons:
            if time.monotonic() > end:
                raise TimeoutError(f"not {reasons[0]} after {seconds:g} s: {self.status().get('sentence')}")
            time.sleep(0.05)

    def cycle(self, *, cut: bool) -> None:
        """Half of the deaths come while it extracts, the others wherever a boot has got to."""
        if self.draw.random() < 0.5:
            self.wait("extracting", "done", seconds=BACK_S)
            self.back += 1
            time.sleep(self.draw.uniform(0.0, 2.0))
        else:
            time.sleep(self.draw.uniform(0.0, 5.0))
        self.remember()
        if cut:
            self.box.power_cut()
            self.box.boot()
        else:
            self.box.reboot(timeout=60)

    def remember(self) -> None:
        """What is done by now; a file that was done before must be the same one still."""
        python = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", DONE)
        files, self.claims = json.loads(self.box.exec(*python).stdout)
        for row, *file in files:
            if self.done.setdefault(row, file) != file:
                self.changed.add(row)

    def finish(self) -> dict[str, int]:
        """To the last row; then every file is judged."""
        self.wait("done", seconds=DONE_S)
        self.back += 1
        before = set(self.done)
        self.remember()
        root = Path(f"/proc/{self.box.pid1}/root{OUTPUT}")
        files = [(int(path.stem.removeprefix("data_")), path) for path in root.glob("rows_*/data_*.ckpt")]
        names = Counter(row for row, _ in files)
        aside = list((root / QUARANTINE).iterdir()) if (root / QUARANTINE).is_dir() else []
        lost = [row for row in range(len(self.rows)) if row not in self.done or not names[row]]
        return {
            "done": len(self.done),
            "claimed_again": self.claims - len(self.done),
            "lost": len(lost) + len(before - names.keys()),
            "corrupt": sum(not self.right(row, path) for row, path in files) + len(aside),
            "duplicated": len(self.changed) + sum(n > 1 for n in names.values()),
        }

    def right(self, row: int, path: Path) -> bool:
        """The stand-in's own states, at every layer and position."""
        ids = np.asarray(self.rows[row], np.int64)
        kept, want = open_sample(path), states(ids, len(AUX) + 1, HIDDEN)
        same_ids = np.array_equal(kept.ids, ids)
        aux = np.asarray(kept.aux).reshape(len(ids), len(AUX), HIDDEN)
        return same_ids and np.array_equal(aux, want[:, :-1]) and np.array_equal(kept.final, want[:, -1])


def make(folder: Path, count: int, seed: int, tokens_s: float = TOKENS_S) -> list[list[int]]:
    """The job's files below `folder`; gives the rows' ids. tokens_s: of the stand-in engine."""
    draw = np.random.default_rng(seed)
    rows: list[list[int]] = [draw.integers(0, VOCAB, draw.integers(4, 13)).tolist() for _ in range(count)]
    write_jsonl(folder / "data.jsonl", [{"input_ids": ids} for ids in rows])
    (folder / "model").mkdir()
    facts = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB, "max_position_embeddings": 4096}
    names = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "model/config.json").write_text(json.dumps(facts | names))
    (folder / "engine.json").write_text(json.dumps(ENGINE | {"tokens_s": tokens_s}))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="reboots, and as many power cuts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    deaths = [True, False] * args.count
    random.Random(args.seed).shuffle(deaths)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        rows = make(folder, PER_CYCLE * (len(deaths) + 1), args.seed)
        with Box(disk=1024, raw=["/data"], bind=[f"{folder}:{JOB}"]) as box:
            campaign = Campaign(box, rows, args.seed)
            try:
                campaign.install()
                for number, cut in enumerate(deaths, 1):
                    campaign.cycle(cut=cut)
                    death = "power cut" if cut else "reboot"
                    print(f"{number:>3} {death}: {len(campaign.done)} of {len(rows)} were done", flush=True)
                found = campaign.finish()
            except TimeoutError as error:
                print(box.journal("-b", "-n", "60"), f"reboots: FAILED {error}", sep="\n")
                return 1
    ok = found["done"] == len(rows) and not any(found[name] for name in ("lost", "corrupt", "duplicated"))
    figures = " ".join(f"{name}={number}" for name, number in found.items())
    word = "ok" if ok else "FAILED"
    print(f"reboots: {word} reboots={args.count} power_cuts={args.count} back={campaign.back} {figures}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
