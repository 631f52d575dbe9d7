"""What the supervisor costs at rest, in a box with a real systemd and eight scripted GPUs: while a stranger holds them,
or (--while extracting) while a worker extracts from a stand-in engine.

Resident memory is the main process's; CPU is that of its whole unit, probes too, in per cent of one core.
Needs root. Last line: bench-idle: rss_mb= cpu_pct=
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import fake_nvml
from hosts import DRIVER, VLLM, prepare
from sdbox import Box, until

from bench import reboots

TICKS_S = 0.01  # of a clock tick in /proc/pid/stat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--while", dest="state", choices=("waiting", "extracting"), default="waiting")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        nvml = fake_nvml.build(folder)
        return (waiting if args.state == "waiting" else extracting)(nvml, args.minutes * 60)


def waiting(nvml: Path, seconds: float) -> int:
    with Box(disk=128, raw=["/var/lib/hs"], bind=[nvml]) as box:
        prepare(box, nvml)
        box.sh(f"systemctl disable {VLLM}; cd /etc/systemd/system; cp {VLLM} jupyter.service")
        box.sh("sed -i s/tick_s.=.1/tick_s=5/ /etc/hs-extract.toml; systemctl enable jupyter")
        box.reboot()
        until(lambda: "jupyter" in box.show("hs-extract", "StatusText"), 60)
        return measure(box, seconds)


def extracting(nvml: Path, seconds: float) -> int:
    """About twelve samples a second, for as long as it is measured."""
    with tempfile.TemporaryDirectory() as job:
        Path(job).chmod(0o755)
        rows = reboots.make(Path(job), int(15 * (seconds + 60)), 0, tokens_s=100.0)
        with Box(disk=1024, raw=["/data"], bind=[nvml, f"{job}:{reboots.JOB}"]) as box:
            box.put("/usr/local/libexec/driver", DRIVER, 0o755)
            box.put(
                "/etc/systemd/system/hs-extract.service.d/nvml.conf", f"[Service]\nEnvironment=LD_LIBRARY_PATH={nvml}\n"
            )
            box.exec("/usr/local/libexec/driver")
            gpus = ", ".join(f'"GPU-{i:04d}"' for i in range(8))
            campaign = reboots.Campaign(box, rows, 0)
            campaign.install(f"[supervisor]\ntick_s = 5\n[gpus]\nuuids = [{gpus}]\n")
            campaign.wait("extracting", seconds=reboots.BACK_S)
            return measure(box, seconds)


def measure(box: Box, seconds: float) -> int:
    group = box.cgroup / "system.slice/hs-extract.service/cgroup.procs"
    main = box.host_pid(box.show("hs-extract", "MainPID"))
    time.sleep(10)
    pids = [int(pid) for pid in group.read_text().split()]
    before, start = {pid: cpu_s(pid) for pid in pids}, time.monotonic()
    time.sleep(seconds)
    if set(map(int, group.read_text().split())) != set(pids):
        print("processes came and went: their CPU is not counted")
    used = sum(cpu_s(pid) - before[pid] for pid in pids) / (time.monotonic() - start)
    print(f"unit: {len(pids)} processes, {sum(kib(pid, 'Pss') for pid in pids) // 1024} MB shared fairly")
    loaded = [name for name in ("libtorch", "sglang") if name in Path(f"/proc/{main}/maps").read_text()]
    print(f"torch or sglang loaded: {', '.join(loaded) or 'no'}")
    print(f"bench-idle: rss_mb={kib(main, 'Rss') / 1024:.1f} cpu_pct={100 * used:.2f}")
    return 1 if loaded else 0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICKS_S


def kib(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())
