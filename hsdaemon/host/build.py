"""Wire the ports: systemd where it is the init of this host, processes of our own elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from hsdaemon.config import Config
from hsdaemon.core import model as m
from hsdaemon.data.probes import ManifestProbe, SpoolProbe, VolumeProbe
from hsdaemon.engine.probe import EngineProbe
from hsdaemon.host import solo
from hsdaemon.host.clock import HostClock
from hsdaemon.host.wishes import WishFiles
from hsdaemon.machine import cgroup
from hsdaemon.machine.dbus import Systemd
from hsdaemon.machine.kmsg import KernelLog
from hsdaemon.machine.notify import Notify
from hsdaemon.machine.nvml import Nvml
from hsdaemon.machine.ports import Ports, Units
from hsdaemon.machine.process_units import Processes
from hsdaemon.machine.procfs import Procfs
from hsdaemon.machine.proof import ProofFiles
from hsdaemon.work.probe import WorkerProbe

VERBS = {m.ENGINE_UNIT: "serve", m.WORKER_UNIT: "extract", m.PROOF_UNIT: "prove", m.SCAN_UNIT: "scan"}
SYSTEMD = Path("/run/systemd/system")  # sd_booted(3): this folder exists when systemd is the init


def booted_by_systemd() -> bool:
    return SYSTEMD.is_dir()


def foreground(config: Config) -> bool:
    """Whether engine and worker of this configuration are processes of a supervisor that no unit runs: always so
    without systemd; with it, as long as one runs by hand or has left some behind."""
    if not booted_by_systemd():
        return True
    pid = solo.holder(config.paths.run)
    if pid:
        with contextlib.suppress(OSError):
            path = cgroup.below(cgroup.own_root(), cgroup.path_of(pid))
            return cgroup.unit_of(path) != m.SUPERVISOR_UNIT
    found = units(config, "", foreground=True).read(tuple(VERBS))
    return not isinstance(found, m.Unreadable) and not all(unit.gone for unit in found)


def units(config: Config, file: str, foreground: bool) -> Units:
    """The port Units. file: the configuration's path, handed to processes that are started without systemd."""
    if not foreground:
        return Systemd(config.supervisor.probe_deadline_s, Path(config.paths.state))
    ours = (sys.executable, "-m", "hsdaemon")
    commands = {unit: (*ours, verb, "-c", file) for unit, verb in VERBS.items()}
    return Processes(commands, Path(config.paths.run))


def ports(
    config: Callable[[], Config],
    file: str,
    foreground: bool,
    clock: HostClock,
    notifier: Notify,
    *,
    writes: bool = True,
) -> Ports:
    """All ports of this host. What is decided at the start (paths, deadlines) needs a restart to change. writes: probe
    the volume by a small file, too."""
    now = config()
    deadline_s = now.supervisor.probe_deadline_s
    manifest = ManifestProbe(now.output, deadline_s)
    return Ports(
        clock=clock,
        gpus=Nvml(deadline_s, KernelLog()),
        procs=Procfs(),
        units=units(now, file, foreground),
        engine=EngineProbe(config, deadline_s),
        proof=ProofFiles(now.paths.run),
        worker=WorkerProbe(now.paths.run),
        volume=VolumeProbe(now.output, deadline_s, lambda: manifest.volume, writes=writes),
        manifest=manifest,
        spool=SpoolProbe(now.spool.path, deadline_s),
        wishes=WishFiles(now.paths.run),
        notifier=notifier,
    )
