"""The faults of bench/chaos.py: each one happens to a box, lasts, and is mended as the world or a person would."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hosts import GPUS, STATE
from msgspec import Struct

from bench.incident import Watched
from hsdaemon.core.model import ENGINE_UNIT, PROOF_UNIT, WORKER_UNIT

Seen = dict[str, Any]  # one look at the status board
Check = Callable[[Seen], bool]
SUPERVISOR = "hs-extract.service"
IMAGE, VOLUME, MOUNT = "/var/lib/volume/data.img", "/data", "mount -o loop,errors=remount-ro"
CONFIG_FILE = "/etc/hs-extract.toml"
BLKIO = Path("/sys/fs/cgroup/blkio")
SLOW_BPS = 65_536
LIBEXEC = "/usr/local/libexec"
IDLE = GPUS.format(used=4)
SQUAT = """#!/usr/bin/python3
import socket, sys, time
here = socket.socket()
here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
while True:
    try:
        here.bind(("127.0.0.1", int(sys.argv[1])))
        break
    except OSError:
        time.sleep(0.02)
here.listen()
time.sleep(3600)
"""


class Scene:
    """The box while a fault happens: what was seen just before it, and what is to be tidied up after it."""

    def __init__(self, box: Watched, number: int, before: Seen, draw: random.Random) -> None:
        self.box, self.number, self.before, self.draw = box, number, before, draw
        self.later: list[str] = []  # scripts, run when the work goes on again

    def lasts(self, least: float, most: float) -> None:
        time.sleep(self.draw.uniform(least, most))

    def kill(self, unit: str, name: str = "KILL", whom: str = "main") -> None:
        self.box.exec("systemctl", "kill", "-s", name, f"--kill-whom={whom}", unit)

    def ended(self, part: str) -> Check:
        """Another start of engine or worker than before."""
        was = self.before[part]["unit"]["invocation"]
        return lambda seen: bool(seen[part]["unit"]["invocation"] != was)

    def engine_too(self) -> Check:
        """The engine dies as well, so that the GPUs have to be there and free for the next one."""
        self.kill(ENGINE_UNIT)
        return self.ended("engine")

    def nvml(self, *lines: str, gpus: str = IDLE) -> None:
        self.box.put(f"{STATE}.new", "\n".join((gpus, *lines)) + "\n")
        self.box.exec("mv", f"{STATE}.new", STATE)


Inject = Callable[[Scene], Check | None]


class Fault(Struct, frozen=True):
    """patience_s: from the moment that the cause is gone, on busy cores."""

    inject: Inject
    patience_s: float = 240.0


FAULTS: dict[str, Fault] = {}


def fault(name: str, patience_s: float = 240.0) -> Callable[[Inject], Inject]:
    def note(inject: Inject) -> Inject:
        FAULTS[name] = Fault(inject, patience_s)
        return inject

    return note


# --- processes of ours ------------------------------------------------------------------------------------------------
def _other_supervisor(scene: Scene) -> Check:
    was = scene.before["pid"]
    return lambda seen: bool(seen["pid"] != was)


@fault("supervisor-killed")
def supervisor_killed(scene: Scene) -> Check:
    scene.kill(SUPERVISOR)
    return _other_supervisor(scene)


@fault("supervisor-stopped")
def supervisor_stopped(scene: Scene) -> Check:
    """SIGSTOP: systemd's watchdog ends it."""
    scene.kill(SUPERVISOR, "STOP")
    return _other_supervisor(scene)


@fault("engine-killed")
def engine_killed(scene: Scene) -> Check:
    return scene.engine_too()


@fault("rank-killed")
def rank_killed(scene: Scene) -> Check:
    pids = [scene.box.host_pid(pid) for pid in scene.before["engine"]["unit"]["pids"]]
    ranks = [pid for pid in pids if "sched" in Path(f"/proc/{pid}/comm").read_text()]
    os.kill(scene.draw.choice(ranks), signal.SIGKILL)
    return scene.ended("engine")


@fault("engine-stopped", 420.0)
def engine_stopped(scene: Scene) -> Check:
    """A hung engine: another worker is tried first, then another engine."""
    scene.kill(ENGINE_UNIT, "STOP", "all")
    return scene.ended("engine")


@fault("worker-killed")
def worker_killed(scene: Scene) -> Check:
    scene.kill(WORKER_UNIT)
    return scene.ended("worker")


@fault("worker-stopped")
def worker_stopped(scene: Scene) -> Check:
    scene.kill(WORKER_UNIT, "STOP")
    return scene.ended("worker")


@fault("proof-killed", 300.0)
def proof_killed(scene: Scene) -> Check:
    check = scene.engine_too()
    end = time.monotonic() + 150
    while scene.box.show(PROOF_UNIT, "ActiveState") != "activating" and time.monotonic() < end:
        time.sleep(0.1)
    scene.kill(PROOF_UNIT, whom="all")
    return check


# --- GPUs and who takes them ------------------------------------------------------------------------------------------
@fault("rogue-unit")
def rogue_unit(scene: Scene) -> Check:
    """A service that the policy names appears on all GPUs, and a timer starts it again and again."""
    name = f"vllm-rogue-{scene.number}"
    service = f"[Service]\nExecStart={LIBEXEC}/holder\nExecStopPost={LIBEXEC}/driver\n"
    timer = "[Timer]\nOnActiveSec=1\nOnUnitInactiveSec=1\nAccuracySec=100ms\n"
    scene.box.put(f"/etc/systemd/system/{name}.service", service)
    scene.box.put(f"/etc/systemd/system/{name}.timer", timer)
    scene.box.sh(f"systemctl daemon-reload; systemctl start {name}.service {name}.timer")
    scene.later.append(f"systemctl stop {name}.timer")

    def evicted(seen: Seen) -> bool:
        leased = any(lease["name"] == f"{name}.service" for lease in seen["leases"])
        return leased and scene.box.show(f"{name}.service", "ActiveState") != "active"

    return evicted


@fault("stranger-on-gpus")
def stranger_on_gpus(scene: Scene) -> Check:
    """Somebody whom no policy names computes for a while, and the engine dies meanwhile."""
    name = f"trainer-{scene.number}"
    scene.box.start_unit(name, f"{LIBEXEC}/holder", props=[f"ExecStopPost={LIBEXEC}/driver"])
    check = scene.engine_too()
    scene.lasts(3, 10)
    scene.box.exec("systemctl", "stop", name)
    return check


@fault("nvml-absent")
def nvml_absent(scene: Scene) -> Check:
    scene.box.exec("rm", "-f", STATE)
    check = scene.engine_too()
    scene.lasts(2, 8)
    scene.nvml()
    return check


@fault("nvml-mismatch")
def nvml_mismatch(scene: Scene) -> Check:
    scene.nvml("fail nvmlInit 18")
    check = scene.engine_too()
    scene.lasts(2, 8)
    scene.nvml()
    return check


@fault("nvml-hung")
def nvml_hung(scene: Scene) -> Check:
    scene.nvml("delay * 60000")
    check = scene.engine_too()
    scene.lasts(5, 15)
    scene.nvml()
    return check


@fault("gpu-lost")
def gpu_lost(scene: Scene) -> Check:
    lost = scene.draw.randrange(8)
    scene.nvml(gpus="\n".join(line for i, line in enumerate(IDLE.splitlines()) if i != lost))
    check = scene.engine_too()
    scene.lasts(2, 8)
    scene.nvml()
    return check


@fault("gpu-xid")
def gpu_xid(scene: Scene) -> Check:
    """An Xid that breaks the process and not the GPU."""
    scene.nvml(f"xid {scene.number} {scene.draw.randrange(8)} 31")
    return scene.ended("engine")


# --- systemd and its company ------------------------------------------------------------------------------------------
@fault("dbus-restarted")
def dbus_restarted(scene: Scene) -> None:
    scene.box.exec("systemctl", "restart", "dbus")


@fault("dbus-absent")
def dbus_absent(scene: Scene) -> None:
    scene.box.exec("systemctl", "stop", "dbus.socket", "dbus")
    scene.lasts(2, 10)
    scene.box.exec("systemctl", "start", "dbus.socket", "dbus")


@fault("journald-stopped")
def journald_stopped(scene: Scene) -> None:
    """Standard output of what runs is a broken pipe from then on."""
    sockets = [f"systemd-journald{kind}.socket" for kind in ("", "-dev-log", "-audit")]
    scene.box.exec("systemctl", "stop", *sockets, "systemd-journald", check=False)
    scene.lasts(2, 8)
    scene.box.exec("systemctl", "start", *sockets[:2], "systemd-journald")


@fault("journald-hung")
def journald_hung(scene: Scene) -> None:
    scene.kill("systemd-journald", "STOP")
    scene.lasts(2, 10)
    scene.kill("systemd-journald", "CONT")


@fault("systemd-hung")
def systemd_hung(scene: Scene) -> None:
    """The worker dies meanwhile, so that something is asked of PID 1."""
    pid = scene.box.host_pid(scene.before["worker"]["unit"]["main_pid"])
    os.kill(scene.box.pid1, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        scene.lasts(5, 20)
    finally:
        os.kill(scene.box.pid1, signal.SIGCONT)


@fault("clock-jump")
def clock_jump(scene: Scene) -> None:
    scene.box.put("/run/clock-offset", f"{scene.draw.choice((-1, 1)) * scene.draw.randint(3600, 90 * 86400)}\n")


@fault("reboot", 300.0)
def reboot(scene: Scene) -> Check:
    scene.box.reboot(timeout=200)
    return _booted(scene)


@fault("power-cut", 300.0)
def power_cut(scene: Scene) -> Check:
    scene.box.power_cut()
    scene.box.boot()
    return _booted(scene)


def _booted(scene: Scene) -> Check:
    was = scene.before["boot"]
    return lambda seen: bool(seen["boot"] != was)


# --- volume -----------------------------------------------------------------------------------------------------------
@fault("volume-full")
def volume_full(scene: Scene) -> None:
    scene.box.sh(f"fallocate -l $(df --output=avail -B1 {VOLUME} | tail -1) {VOLUME}/somebody-elses")
    scene.lasts(3, 12)
    scene.box.exec("rm", f"{VOLUME}/somebody-elses")


@fault("volume-error")
def volume_error(scene: Scene) -> None:
    """The file system ends writing after an error; then it is checked and mounted again."""
    device = scene.box.sh(f"findmnt -no SOURCE {VOLUME}").removeprefix("/dev/")
    Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("chaos")
    scene.lasts(3, 12)
    free = f"for i in {{1..600}}; do umount {VOLUME} 2>/dev/null && break; sleep 0.1; done; ! mountpoint -q {VOLUME}"
    scene.box.sh(f"{free}; e2fsck -fy {IMAGE} >&2 || test $? -le 2; {MOUNT} {IMAGE} {VOLUME}", timeout=120)


@fault("volume-gone")
def volume_gone(scene: Scene) -> None:
    scene.box.exec("umount", "-l", VOLUME)
    scene.lasts(3, 12)
    scene.box.sh(f"{MOUNT} {IMAGE} {VOLUME}")


@fault("volume-frozen")
def volume_frozen(scene: Scene) -> None:
    scene.box.exec("fsfreeze", "-f", VOLUME)
    try:
        time.sleep(20)
    finally:
        scene.box.exec("fsfreeze", "-u", VOLUME)


@fault("disk-slow")
def disk_slow(scene: Scene) -> None:
    """The worker writes 64 KiB/s."""
    group = BLKIO / f"chaos-{scene.box.name}"
    group.mkdir()
    try:
        device = scene.box.sh(f"mountpoint -d {VOLUME}")
        (group / "blkio.throttle.write_bps_device").write_text(f"{device} {SLOW_BPS}")
        worker = scene.box.host_pid(scene.before["worker"]["unit"]["main_pid"])
        (group / "cgroup.procs").write_text(str(worker))
        scene.lasts(5, 15)
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (BLKIO / "cgroup.procs").write_text(pid)
        group.rmdir()


@fault("fsync-fails")
def fsync_fails(scene: Scene) -> None:
    """Every fsync of the worker says EIO for a while."""
    worker, name = scene.before["worker"]["unit"]["main_pid"], f"tracer-{scene.number}"
    inject = ("-e", "trace=fsync,fdatasync", "-e", "inject=fsync,fdatasync:error=EIO")
    scene.box.start_unit(name, "strace", "-f", "-qq", "-o", "/dev/null", *inject, "-p", worker)
    scene.lasts(2, 6)
    scene.box.exec("systemctl", "stop", name, check=False)


# --- spool, port, installation, configuration -------------------------------------------------------------------------
@fault("spool-full")
def spool_full(scene: Scene) -> None:
    used = "$(( $(df --output=used -B1024 /dev/shm | tail -1) + 64 ))k"
    scene.box.sh(f"mount -o remount,size={used} /dev/shm")
    scene.lasts(3, 12)
    scene.box.exec("mount", "-o", "remount,size=2g", "/dev/shm")


@fault("spool-removed")
def spool_removed(scene: Scene) -> None:
    scene.box.exec("rm", "-rf", "/dev/shm/hs-extract")


@fault("port-squatted")
def port_squatted(scene: Scene) -> Check:
    name, port = f"squat-{scene.number}", scene.before["engine"]["endpoint"]["port"]
    scene.box.start_unit(name, f"{LIBEXEC}/squat", port)
    scene.later.append(f"systemctl stop {name}")
    return scene.engine_too()


@fault("patch-removed")
def patch_removed(scene: Scene) -> Check:
    """As an upgrade of the engine's package does."""
    scene.box.exec("hs-extract", "patch", "revert", timeout=120)
    return scene.engine_too()


@fault("arguments-changed")
def arguments_changed(scene: Scene) -> Check:
    """A person edits the engine's settings and wants them now."""
    chunk = 1024 if "chunk_tokens = 2048" in scene.box.sh(f"cat {CONFIG_FILE}") else 2048
    scene.box.sh(f"sed -i 's/^chunk_tokens = .*/chunk_tokens = {chunk}/' {CONFIG_FILE}; hs-extract reload --now")
    return scene.ended("engine")


@fault("config-broken")
def config_broken(scene: Scene) -> Check:
    """The supervisor dies while its file cannot be used."""
    scene.box.sh(f"cp {CONFIG_FILE} /run/kept.toml; echo '[[[' >> {CONFIG_FILE}")
    scene.kill(SUPERVISOR)
    scene.lasts(2, 8)
    scene.box.exec("cp", "/run/kept.toml", CONFIG_FILE)
    return _other_supervisor(scene)


def clean_up(box: Watched) -> None:
    """What a fault that was interrupted may have left on the host."""
    group = BLKIO / f"chaos-{box.name}"
    if group.exists():
        subprocess.run(["rmdir", str(group)], check=False)
