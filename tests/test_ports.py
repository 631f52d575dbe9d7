"""One suite for every implementation of a port: what the loop relies on, whoever stands behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fakes import FakeUnits
from sdbox import Box, until
from world import World

from hsdaemon.core.model import ENGINE_UNIT, WORKER_UNIT, Unit, Unreadable
from hsdaemon.machine.ports import Units
from hsdaemon.machine.process_units import Processes

SLEEPER = ["/bin/sleep", "infinity"]
STUBBORN = ["/bin/sh", "-c", "trap '' TERM; sleep infinity & sleep infinity & wait; wait; wait"]


class Host:
    """A Units port, and the ways to see and disturb its processes from outside."""

    def __init__(
        self, units: Units, kill: Callable[[int], None], alive: Callable[[int], bool], family: int = 3
    ) -> None:
        self.units, self.kill, self.alive = units, kill, alive
        self.family = family  # processes of the stubborn unit

    def read(self, name: str) -> Unit:
        seen = self.units.read([name])
        assert not isinstance(seen, Unreadable), seen
        return seen[0]

    def up(self, name: str) -> Unit:
        assert self.units.start(name, self.read(name).invocation).result == "done"
        until(lambda: self.read(name).active == "active")
        return self.read(name)


@pytest.fixture(params=["fake", "processes", pytest.param("systemd", marks=pytest.mark.root)])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    if request.param == "fake":
        yield simulated()
    elif request.param == "processes":
        yield from processes(tmp_path)
    else:
        yield from systemd(tmp_path, request.getfixturevalue("box"))


class Passing(FakeUnits):
    """The fake, on a host where time passes between two looks."""

    def read(self, names: Sequence[str], patterns: Sequence[str] = ()) -> tuple[Unit, ...] | Unreadable:
        self.world.step(1.0)
        return super().read(names, patterns)


def simulated() -> Host:
    world = World()

    def kill(pid: int) -> None:
        (unit,) = [unit for unit in world.services.values() if pid in unit.pids]
        world.die(unit, "signal", 9)

    return Host(Passing(world), kill, lambda pid: pid in world.procs, family=1)


def processes(folder: Path) -> Iterator[Host]:
    units = Processes({ENGINE_UNIT: SLEEPER, WORKER_UNIT: STUBBORN}, folder, grace_s=0.3)
    host = Host(units, lambda pid: os.kill(pid, signal.SIGKILL), lambda pid: Path(f"/proc/{pid}").exists())
    yield host
    for name in (ENGINE_UNIT, WORKER_UNIT):
        unit = host.read(name)
        units.kill(name, unit.invocation, unit.pids)


def systemd(folder: Path, box: Box) -> Iterator[Host]:
    pytest.importorskip("pydbus")
    from hsdaemon.machine.dbus import Systemd

    for name, command, grace in ((ENGINE_UNIT, SLEEPER, "90"), (WORKER_UNIT, STUBBORN, "300ms")):
        script = f"/usr/local/bin/{name}.sh"
        box.put(script, f"#!/bin/sh\n{command[2] if len(command) == 3 else 'exec ' + ' '.join(command)}\n", 0o755)
        text = f"[Service]\nExecStart={script}\nTimeoutStopSec={grace}\nKillMode=mixed\n"
        box.put(f"/etc/systemd/system/{name}", text)
    box.exec("systemctl", "daemon-reload")
    root = Path(f"/proc/{box.pid1}/root")
    units = Systemd(10, folder, box.bus_address, root / "etc/systemd/system", box.cgroup)
    yield Host(
        units,
        lambda pid: os.kill(box.host_pid(pid), signal.SIGKILL),
        lambda pid: bool(box.exec("test", "-d", f"/proc/{pid}", check=False).returncode == 0),
    )
    units.close()


def test_a_unit_that_never_ran_has_no_invocation(host: Host) -> None:
    unit = host.read(ENGINE_UNIT)
    assert (unit.load, unit.active, unit.invocation, unit.pids, unit.gone) == ("loaded", "inactive", "", (), True)


def test_a_name_without_a_unit_is_not_found(host: Host) -> None:
    assert [host.read(name).load for name in ("no-such.service", "not a name", "../x.service")] == ["not-found"] * 3


def test_a_start_gives_an_invocation_and_a_main_process(host: Host) -> None:
    unit = host.up(ENGINE_UNIT)
    assert unit.up
    assert unit.invocation
    assert host.alive(unit.main_pid)


def test_a_start_decided_on_an_older_world_does_nothing(host: Host) -> None:
    unit = host.up(ENGINE_UNIT)
    assert host.units.start(ENGINE_UNIT, unit.invocation).result == "moved-on"  # it runs
    assert host.units.start(WORKER_UNIT, "0" * 32).result == "moved-on"  # another start came in between
    assert host.read(ENGINE_UNIT).main_pid == unit.main_pid


def test_a_stop_ends_all_of_it_and_only_the_invocation_it_was_decided_on(host: Host) -> None:
    unit = host.up(ENGINE_UNIT)
    assert host.units.stop(ENGINE_UNIT, "0" * 32).result == "moved-on"
    assert host.alive(unit.main_pid)
    assert host.units.stop(ENGINE_UNIT, unit.invocation).result == "done"
    until(lambda: host.read(ENGINE_UNIT).gone)
    assert host.read(ENGINE_UNIT).result == "success"


def test_ev_14_en_01_what_ignores_term_is_killed_with_its_children_after_the_grace(host: Host) -> None:
    unit = host.up(WORKER_UNIT)
    until(lambda: len(host.read(WORKER_UNIT).pids) == host.family)
    assert host.units.stop(WORKER_UNIT, unit.invocation).result == "done"
    until(lambda: host.read(WORKER_UNIT).gone)


def test_a_death_has_its_signal_and_the_next_start_another_invocation(host: Host) -> None:
    first = host.up(ENGINE_UNIT)
    host.kill(first.main_pid)
    until(lambda: host.read(ENGINE_UNIT).active == "failed")
    dead = host.read(ENGINE_UNIT)
    assert (dead.result, dead.status, dead.invocation) == ("signal", 9, first.invocation)
    second = host.up(ENGINE_UNIT)
    assert second.invocation != first.invocation


def test_a_kill_hits_members_of_that_invocation_alone(host: Host) -> None:
    unit = host.up(ENGINE_UNIT)
    pids = host.read(ENGINE_UNIT).pids
    assert host.units.kill(ENGINE_UNIT, "0" * 32, pids).result == "moved-on"
    assert host.units.kill(ENGINE_UNIT, unit.invocation, [os.getpid()]).result == "moved-on"
    assert host.alive(unit.main_pid)
    assert host.units.kill(ENGINE_UNIT, unit.invocation, pids).result == "done"
    until(lambda: host.read(ENGINE_UNIT).gone)


def test_release_of_what_was_never_leased_is_done(host: Host) -> None:
    assert host.units.release("vllm.service").result == "done"


def test_sy_12_a_new_supervisor_without_systemd_finds_what_the_old_one_started(tmp_path: Path) -> None:
    """The old supervisor is a process of its own, killed; the new one is this."""
    code = f"""if True:
        from pathlib import Path
        from hsdaemon.machine.process_units import Processes
        units = Processes({{{ENGINE_UNIT!r}: {SLEEPER!r}}}, Path({str(tmp_path)!r}))
        assert units.start({ENGINE_UNIT!r}, "").result == "done" """
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
    units = Processes({ENGINE_UNIT: SLEEPER}, tmp_path)
    seen = units.read([ENGINE_UNIT])
    assert not isinstance(seen, Unreadable)
    assert seen[0].active == "active"
    assert units.start(ENGINE_UNIT, "").result == "moved-on"
    assert units.kill(ENGINE_UNIT, seen[0].invocation, seen[0].pids).result == "done"
    until(lambda: not Path(f"/proc/{seen[0].main_pid}").exists())
