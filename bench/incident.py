"""make incident: the incident replayed on a real systemd with a real SGLang, and nobody at the keyboard.

A box boots after a power cut: an enabled vLLM service holds 75.8 GB on each of eight scripted GPUs, half of the samples
lie in a tree without a manifest on a volume that is attached late, the spool is empty, the capture's patch is present,
lost or not needed. From then on this program only looks, but for one SIGKILL of the supervisor, whose return is timed.
Needs root.
Last line: incident: ok done= extracted_now= redone= human_acts= evicted=
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import fake_nvml
from hosts import DRIVER, DRIVER_UNIT, HOLDER, ROOT, VLLM, VLLM_UNIT
from sdbox import Box

from hsdaemon.core.model import ENGINE_UNIT, PROOF_UNIT, SCAN_UNIT, WORKER_UNIT

WHOLE, STORED = 37_312, 18_421  # samples in all, and when the storage ran full
LATE_S = 5  # how long after the boot the volume is attached
SHORT = 0.02  # scale of the variant that is shown beside the main one
LOOK_S = 0.05
VOLUME_MIB = 2048
PATIENCE_S, PER_ROW_S = 300.0, 0.05  # for all of it, on busy cores
JOB = "/opt/job"
OUTPUT = "/data/hidden_states"
UNITS = ("hs-extract.service", ENGINE_UNIT, PROOF_UNIT, SCAN_UNIT, WORKER_UNIT)
STARTED, STARTING, STOPPED = (  # systemd's own MESSAGE_IDs, the first of "Finished" too
    "39f53479d3a045ac8e11786248231fbf", "7d4958e842da4a758f6c1cdc7b36dcc5", "9d1aaa27d60140bd96365438aad20286",
)  # fmt: skip

CONFIG = f"""
[data]
path = "{JOB}/train.jsonl"
[model]
path = "{JOB}/model"
[output]
path = "{OUTPUT}"
volume = "/data"
volume_is_mount = true
dtype = "float32"
reserve_mib = 16
ballast_mib = 1
[spool]
budget_mib = 128
[engine]
device = "cpu"
dtype = "float32"
capture = "{{capture}}"
chunk_tokens = 2048
max_running = 256
max_total_tokens = 16384
mem_fraction = 0.3
[worker]
concurrency = 128
[gpus]
uuids = [{", ".join(f'"GPU-{i:04d}"' for i in range(8))}]
[[evict.units]]
pattern = "vllm*.service"
how = "disable"
"""
ATTACH = f"""#!/bin/bash
sleep {LATE_S}; mount -o loop /var/lib/volume/data.img /data && echo attached
exec sleep infinity
"""
ATTACH_UNIT = """[Service]
ExecStart=/usr/local/libexec/attach
[Install]
WantedBy=multi-user.target
"""
# Says when the engine answers for the first time: the supervisor's own look may come up to two seconds later.
HEALTH = """#!/usr/bin/python3
import http.client, json, time
while True:
    try:
        here = json.load(open("/run/hs-extract/engine.json"))
        line = http.client.HTTPConnection(here["host"], here["port"], timeout=5)
        line.request("GET", "/health")
        if line.getresponse().status == 200:
            print("healthy", flush=True)
            break
    except (OSError, ValueError, http.client.HTTPException):
        pass
    time.sleep(0.1)
"""
HEALTH_UNIT = ATTACH_UNIT.replace("attach", "health")
# SQLite does not open a path that leads through another mount namespace.
COUNT = f"""
from pathlib import Path
from hsdaemon.data.sqlite import open_reader
manifest = open_reader(Path("{OUTPUT}/manifest.db"))
print(manifest.counts().done, manifest.claims())
"""


class Watched(Box):
    """A box that counts what is done in it by hand."""

    acts = 0

    def exec(self, *cmd: Any, **how: Any) -> subprocess.CompletedProcess[str]:
        self.acts += 1
        return super().exec(*cmd, **how)

    @property
    def root(self) -> Path:
        """The box's files as its processes see them, from outside."""
        return Path(f"/proc/{self.pid1}/root")

    def status(self) -> dict[str, Any]:
        """What the supervisor shows; {} before its first turn."""
        try:
            shown = json.loads((self.root / "run/hs-extract/status.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return shown if isinstance(shown, dict) else {}


def install(box: Box, nvml: Path, capture: str, *, lost: bool) -> None:
    """Everything that was there before the crash, made durable; the box goes on from a power cut after this."""
    box.sh(f"make -s -C {ROOT} ENGINE_VENV={ROOT}/.venv install")
    box.put("/etc/hs-extract.toml", CONFIG.format(capture=capture))
    for name, text in {"holder": HOLDER, "driver": DRIVER, "attach": ATTACH, "health": HEALTH}.items():
        box.put(f"/usr/local/libexec/{name}", text, 0o755)
    units = {VLLM: VLLM_UNIT, "driver.service": DRIVER_UNIT, "attach.service": ATTACH_UNIT}
    for name, text in (units | {"health.service": HEALTH_UNIT}).items():
        box.put(f"/etc/systemd/system/{name}", text)
    for unit in UNITS:
        library = f" LD_LIBRARY_PATH={nvml}" if unit == UNITS[0] else ""
        text = f"[Service]\nEnvironment=PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1{library}\n"
        box.put(f"/etc/systemd/system/{unit}.d/here.conf", text)
    # The interpreter may be in root's home, which is closed to the units' account.
    box.sh(f"chmod o+x /root; mkdir -p /data /var/lib/volume; cd /var/lib/volume; truncate -s {VOLUME_MIB}M data.img")
    box.sh("mkfs.ext4 -q /var/lib/volume/data.img; mount -o loop /var/lib/volume/data.img /data")
    box.sh(f"cp -r {JOB}/tree {OUTPUT}", timeout=300)
    box.sh(f"PYTHONPATH={ROOT} hs-extract init; chown -R hs-extract:hs-extract /data", timeout=300)
    if capture == "patch" and not lost:
        box.sh(f"PYTHONPATH={ROOT} hs-extract patch apply")
    box.sh(
        f"systemctl daemon-reload; systemctl enable driver attach health {VLLM} hs-extract; sync; umount /data; sync"
    )


class Story:
    """What happens after the boot, seen from outside."""

    def __init__(self, box: Watched, facts: dict[str, Any]) -> None:
        self.box, self.facts = box, facts
        self.first_s = 0.0  # monotonic: when the first sample of this boot had its name
        self.adopted_again_s = 0.0
        self.same_engine = False
        self._said = ""

    def watch(self, patience_s: float) -> None:
        """Until the supervisor says that all is done. Raises TimeoutError with its last sentence."""
        end = time.monotonic() + patience_s
        first = self.box.root / OUTPUT.lstrip("/") / self.facts["first"]
        killed = 0.0
        while (now := time.monotonic()) < end:
            seen = self.box.status()
            self._tell(seen)
            if seen.get("reason") == "done":
                return
            if not self.first_s and first.exists():
                self.first_s = now
            if self.first_s and not killed and seen.get("reason") == "extracting":
                killed = self._kill(seen)
            if killed and not self.adopted_again_s and self._adopted(seen, killed):
                self.adopted_again_s = time.monotonic() - killed
            time.sleep(LOOK_S)
        raise TimeoutError(f"not done after {patience_s:.0f} s: {self._said}")

    def _tell(self, seen: dict[str, Any]) -> None:
        said = seen.get("sentence", "")
        if said and said.split(" ")[0] != self._said.split(" ")[0]:
            print(f"  {said}", flush=True)
        self._said = said or self._said

    def _kill(self, seen: dict[str, Any]) -> float:
        self._before = seen
        os.kill(self.box.host_pid(seen["pid"]), signal.SIGKILL)
        return time.monotonic()

    def _adopted(self, seen: dict[str, Any], killed_s: float) -> bool:
        """Another supervisor has finished a turn: it sees the engine of before, and starts none."""
        if seen.get("pid") == self._before["pid"] or seen.get("mono_s", 0.0) < killed_s:
            return False
        engine = [look["engine"]["unit"]["main_pid"] for look in (self._before, seen)]
        self.same_engine = engine[0] == engine[1] and "StartEngine" not in seen["actions"]
        return True


def moments(box: Box) -> list[dict[str, Any]]:
    """This boot's journal; `at`: monotonic seconds, which box and host share."""
    lines = box.exec("journalctl", "-b", "-o", "json", "--no-pager", timeout=120).stdout.splitlines()
    return [entry | {"at": int(entry["__MONOTONIC_TIMESTAMP"]) / 1e6} for entry in map(json.loads, lines)]


def when(journal: list[dict[str, Any]], unit: str, kind: str) -> float:
    """When systemd said so of a unit for the first time; nan: never."""
    found = (e["at"] for e in journal if e.get("UNIT") == unit and e.get("MESSAGE_ID") == kind)
    return next(found, float("nan"))


def said(journal: list[dict[str, Any]], unit: str, message: str) -> float:
    found = (e["at"] for e in journal if e.get("_SYSTEMD_UNIT") == unit and e.get("MESSAGE") == message)
    return next(found, float("nan"))


def figures(journal: list[dict[str, Any]], story: Story) -> str:
    """The times that the product promises, in seconds."""
    ready = max(said(journal, "attach.service", "attached"), when(journal, "driver.service", STARTED))
    free, engine = when(journal, VLLM, STOPPED), when(journal, ENGINE_UNIT, STARTED)
    scan = (when(journal, SCAN_UNIT, STARTING), when(journal, SCAN_UNIT, STARTED))
    proof = (when(journal, PROOF_UNIT, STARTING), when(journal, PROOF_UNIT, STARTED))
    healthy = said(journal, "health.service", "healthy")
    canaries = proof[1] - proof[0]
    return (
        f"figures: ready_to_evicted_s={free - ready:.1f} ready_to_engine_started_s={engine - ready:.1f} "
        f"engine_load_s={healthy - engine:.1f} adoption_s={scan[1] - scan[0]:.1f} canaries_s={canaries:.1f} "
        f"healthy_to_first_sample_s={story.first_s - max(healthy, scan[1]) - canaries:.1f} "
        f"supervisor_killed_to_adopted_s={story.adopted_again_s:.1f} same_engine={story.same_engine}"
    )


def judge(folder: Path, box: Watched) -> dict[str, Any]:
    argv = (sys.executable, "-m", "bench.incident_set", "judge", str(folder), str(box.root / OUTPUT.lstrip("/")))
    out = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=600, check=True)
    found: dict[str, Any] = json.loads(out.stdout)
    return found


def play(folder: Path, patch: str) -> bool:
    """One replay; prints its story, its figures and its verdict. patch: lost, present, plugin (none is needed)."""
    facts = json.loads((folder / "facts.json").read_text())
    print(f"incident: {facts['rows']} rows, {facts['stored']} of them stored, patch {patch}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        nvml = fake_nvml.build(made)
        bind = [str(nvml), f"{folder}:{JOB}"]
        with Watched(disk=2 * VOLUME_MIB, raw=["/var/lib/volume"], bind=bind) as box:
            install(box, nvml, "plugin" if patch == "plugin" else "patch", lost=patch == "lost")
            box.power_cut()
            box.boot()
            box.acts = 0
            story = Story(box, facts)
            try:
                story.watch(PATIENCE_S + PER_ROW_S * facts["rows"])
            except TimeoutError as error:
                print(box.journal("-b", "-n", "80"), error, sep="\n")
                return False
            return verdict(folder, box, story)


def verdict(folder: Path, box: Watched, story: Story) -> bool:
    acts, facts = box.acts, story.facts
    journal = moments(box)
    print(figures(journal, story))
    evicted = sum(e.get("UNIT") == VLLM and e.get("MESSAGE_ID") == STOPPED for e in journal)
    done, claims = map(int, box.exec("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", COUNT).stdout.split())
    found = judge(folder, box)
    now = done - found["kept"]
    problems = {
        "not done": facts["rows"] - done,
        "not adopted": facts["stored"] - found["kept"],
        "not the engine of before": int(not story.same_engine),
        **{name: len(found[name]) for name in ("lost", "twice", "changed", "corrupt")},
    }
    redone = claims - now
    bad = {name: number for name, number in problems.items() if number}
    ok = not bad and (redone, acts, evicted) == (0, 0, 1)
    if bad:
        print(bad, {name: found[name][:5] for name in ("lost", "twice", "changed", "corrupt")})
    print(f"compared: kept={found['kept']} byte for byte, max_abs_err={found['max_abs_err']:.1e} of the new ones")
    print(
        f"incident: {'ok' if ok else 'FAILED'} done={done} extracted_now={now} redone={redone} "
        f"human_acts={acts} evicted={evicted}",
        flush=True,
    )
    return ok


def prepared(folder: Path, scale: float) -> Path:
    """Model, data set and old tree of this scale, made once."""
    rows, stored = round(WHOLE * scale), round(STORED * scale)
    here = (folder / f"{rows}").resolve()
    argv = (sys.executable, "-m", "bench.incident_set", "make", str(here), str(rows), str(stored))
    subprocess.run(argv, cwd=ROOT, stderr=subprocess.DEVNULL, check=True, timeout=1200)
    return here


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the 37,312 samples")
    parser.add_argument("--patch", choices=("lost", "present", "plugin"), action="append", help="again for more; all")
    parser.add_argument("--folder", type=Path, default=Path("build/incident"))
    args = parser.parse_args(argv)
    *others, last = args.patch or ("plugin", "present", "lost")
    for patch in others:  # short ones beside the main one
        if not play(prepared(args.folder, min(args.scale, SHORT)), patch):
            return 1
    return 0 if play(prepared(args.folder, args.scale), last) else 1


if __name__ == "__main__":
    sys.exit(main())
