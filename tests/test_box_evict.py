"""Evictions on a real systemd: leases that hold, are durable, and are undone exactly."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sdbox import Box, until

from hsdaemon.machine.lease import DROP_IN, Leases, Record

pytestmark = pytest.mark.root
pytest.importorskip("pydbus")

UNIT = "vllm-kimi.service"
SERVICE = """[Service]
ExecStart=/bin/sleep infinity
Restart=always
RestartSec=100ms
[Install]
WantedBy=multi-user.target
"""
PRELUDE = """
import dataclasses, json, os, sys
from pathlib import Path
from hsdaemon.machine.dbus import Systemd
units = Systemd(10, Path("/var/lib/hs"))
def show(what):
    print(json.dumps(what, default=dataclasses.asdict))
def one(name):
    seen = units.read([name])
    return seen[0] if isinstance(seen, tuple) else seen
"""


@pytest.fixture
def do(box: Box) -> Callable[[str], Any]:
    """Run lines against the real adapter inside the box, in a process of its own; gives what they `show`."""

    def run(lines: str) -> Any:
        code = PRELUDE + lines
        path = f"PYTHONPATH={Path(__file__).parents[1]}"
        out = box.exec("env", path, sys.executable, "-c", code).stdout
        return json.loads(out.splitlines()[-1]) if out.strip() else None

    return run


def install(box: Box, name: str = UNIT, text: str = SERVICE) -> None:
    box.put(f"/etc/systemd/system/{name}", text)
    box.exec("systemctl", "daemon-reload")
    if "[Install]" in text:
        box.exec("systemctl", "enable", "--now", name)


EVICT = f"""
unit = one({UNIT!r})
for outcome in (units.lease(unit.name, unit.file_state, unit.up), units.disable(unit.name),
                units.stop(unit.name, unit.invocation)):
    assert outcome.result == "done", outcome
"""


def down(box: Box, name: str = UNIT) -> bool:
    return box.show(name, "ActiveState") in ("inactive", "failed")


def test_ev_02_a_unit_in_etc_is_kept_down_where_a_mask_fails(box: Box, do: Callable[[str], Any]) -> None:
    install(box)
    seen = do(f"show(one({UNIT!r}))")
    assert (seen["active"], seen["file_state"], seen["leased"]) == ("active", "enabled", False)
    do(EVICT)
    until(lambda: down(box))
    seen = do(f"show(one({UNIT!r}))")
    assert (seen["file_state"], seen["leased"], seen["pids"]) == ("disabled", True, [])
    box.exec("systemctl", "start", UNIT)  # says 0
    assert down(box)


REVIVERS = {
    "wants": ("other.service", f"[Unit]\nWants={UNIT}\n[Service]\nExecStart=/bin/sleep infinity\n"),
    "upholds": ("other.service", f"[Unit]\nUpholds={UNIT}\n[Service]\nExecStart=/bin/sleep infinity\n"),
    "timer": ("vllm-kimi.timer", "[Timer]\nOnActiveSec=100ms\nOnUnitActiveSec=200ms\nAccuracySec=10ms\n"),
    "socket": ("vllm-kimi.socket", "[Socket]\nListenStream=/run/vllm.sock\n"),
}


@pytest.mark.parametrize("way", REVIVERS)
def test_ev_03_it_stays_down_whoever_wants_it_back(box: Box, do: Callable[[str], Any], way: str) -> None:
    install(box)
    name, text = REVIVERS[way]
    do(EVICT)
    until(lambda: down(box))
    box.put(f"/etc/systemd/system/{name}", text)
    box.exec("systemctl", "daemon-reload")
    box.exec("systemctl", "start", name)
    if way == "socket":
        box.exec(
            "bash",
            "-c",
            "exec 3<>/dev/null; python3 -c \"import socket; socket.socket(1).connect('/run/vllm.sock')\"",
            check=False,
        )
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert down(box)
        time.sleep(0.1)
    assert box.sh(f"cat /sys/fs/cgroup/system.slice/{UNIT}/cgroup.procs 2>/dev/null || true") == ""


def test_ev_01_ev_03_it_stays_down_after_a_reboot(box: Box, do: Callable[[str], Any]) -> None:
    install(box)
    box.reboot()
    assert box.show(UNIT, "ActiveState") == "active"  # the incident: enabled, so it owns the GPUs after each boot
    do(EVICT)
    until(lambda: down(box))
    box.reboot()
    assert down(box)
    assert do(f"show(one({UNIT!r}))")["leased"]


def test_ev_13_an_eviction_survives_a_power_cut_right_after_it(box: Box, do: Callable[[str], Any]) -> None:
    install(box)
    box.sh("sync")
    do(EVICT)
    box.power_cut()
    box.boot()
    assert (box.show(UNIT, "ActiveState"), box.show(UNIT, "UnitFileState")) == ("inactive", "disabled")
    do(f"assert units.release({UNIT!r}).result == 'done'")
    box.power_cut()
    box.boot()
    assert (box.show(UNIT, "ActiveState"), box.show(UNIT, "UnitFileState")) == ("active", "enabled")


def links(box: Box) -> str:
    return box.sh(
        "cd /etc/systemd/system; find . -type l ! -lname /dev/null -printf '%p %l\\n' | sort; find . -name '*.d' | sort"
    )


def test_ev_12_release_gives_back_exactly_what_was_links_that_no_install_section_names_too(
    box: Box, do: Callable[[str], Any]
) -> None:
    install(box)
    box.exec("systemctl", "add-wants", "graphical.target", UNIT)
    before = links(box)
    do(EVICT)
    until(lambda: down(box))
    assert links(box) != before
    do(f"assert units.release({UNIT!r}).result == 'done'; assert units.release({UNIT!r}).result == 'done'")
    assert links(box) == before
    until(lambda: box.show(UNIT, "ActiveState") == "active")
    assert box.show(UNIT, "UnitFileState") == "enabled"
    assert box.show(UNIT, "NeedDaemonReload") == "no"
    assert box.sh("ls /var/lib/hs/leases") == ""


def test_ev_12_what_a_unit_installs_beside_itself_stays_and_so_does_a_linked_unit(
    box: Box, do: Callable[[str], Any]
) -> None:
    """`systemctl disable` takes along what Also= names, which the policy does not, and a link to the unit itself."""
    box.put("/etc/systemd/system/beside.socket", "[Socket]\nListenStream=/run/b\n[Install]\nWantedBy=sockets.target\n")
    box.put(f"/opt/{UNIT}", f"{SERVICE}Also=beside.socket\n")
    box.put("/etc/systemd/system/beside.service", "[Service]\nExecStart=/bin/true\n")
    box.exec("systemctl", "enable", "--now", f"/opt/{UNIT}")
    before = links(box)
    do(EVICT)
    until(lambda: down(box))
    assert box.show("beside.socket", "UnitFileState") == "enabled"
    assert (box.show(UNIT, "LoadState"), box.show(UNIT, "UnitFileState")) == ("loaded", "linked")
    do(f"assert units.release({UNIT!r}).result == 'done'")
    assert links(box) == before
    assert box.show(UNIT, "UnitFileState") == "enabled"


def test_ev_12_a_unit_that_was_neither_enabled_nor_up_is_given_back_so(box: Box, do: Callable[[str], Any]) -> None:
    install(box)
    box.exec("systemctl", "disable", "--now", UNIT)
    before = links(box)
    do(f"units.lease({UNIT!r}, 'disabled', False); units.release({UNIT!r})")
    assert links(box) == before
    assert down(box)


def test_ev_12_a_lost_state_folder_does_not_make_an_eviction_permanent(box: Box, do: Callable[[str], Any]) -> None:
    install(box)
    do(EVICT)
    box.sh("rm -r /var/lib/hs/leases; mkdir /var/lib/hs/leases")
    do(f"assert units.release({UNIT!r}).result == 'done'")
    until(lambda: box.show(UNIT, "ActiveState") == "active")
    assert box.show(UNIT, "UnitFileState") == "enabled"


@pytest.mark.parametrize("fate", ["uninstalled", "masked"])
def test_ev_12_a_unit_that_cannot_be_started_any_more_is_given_back_as_far_as_it_goes(
    box: Box, do: Callable[[str], Any], fate: str
) -> None:
    """Else the work would never be done: it would be tried again for ever, by the supervisor and by people."""
    install(box)
    do(EVICT)
    until(lambda: down(box))
    box.sh(f"rm /etc/systemd/system/{UNIT}")
    if fate == "masked":
        box.sh(f"ln -s /dev/null /etc/systemd/system/{UNIT}")
    box.exec("systemctl", "daemon-reload")
    outcome = do(f"show(units.release({UNIT!r}))")
    assert outcome["result"] == "done"
    assert "cannot be started" in outcome["cause"]
    assert box.sh("ls /var/lib/hs/leases") == ""
    assert not any(DROP_IN in line for line in box.sh("ls -R /etc/systemd/system").splitlines())


def test_ev_12_a_lease_that_systemd_was_not_told_of_is_said_again(box: Box, do: Callable[[str], Any]) -> None:
    """A death between the drop-in and the reload: until systemd knows it, whoever wants the unit back gets it."""
    install(box)
    do(f"from hsdaemon.machine.lease import Leases\n"
       f"Leases(Path('/etc/systemd/system'), Path('/var/lib/hs')).write({UNIT!r}, 'enabled', True)")  # fmt: skip
    assert do(f"show(one({UNIT!r}))")["leased"] is False
    do(EVICT)
    until(lambda: down(box))
    assert do(f"show(one({UNIT!r}))")["leased"] is True
    box.exec("systemctl", "start", UNIT)
    assert down(box)


STEPS = ("write", "reload", "disable", "stop", "restore_links", "lift", "reload-2", "start", "forget")


@pytest.mark.parametrize("died_after", range(9), ids=STEPS)
def test_ev_12_a_death_after_any_step_is_cured_by_saying_it_again(
    box: Box, do: Callable[[str], Any], died_after: int
) -> None:
    """The steps of an eviction and its release, cut short by a death of the process that does them."""
    install(box)
    box.exec("systemctl", "add-wants", "graphical.target", UNIT)
    before = links(box)
    do(
        f"""
from hsdaemon.machine import dbus, lease
count = [0]
def dying(owner, name):
    real = getattr(owner, name)
    def step(*args):
        got = real(*args)
        if name != "_manager" or args[1] in ("Reload", "StopUnit", "StartUnit"):
            count[0] += 1
            if count[0] > {died_after}:
                os._exit(9)
        return got
    setattr(owner, name, step)
for name in ("write", "remove_links", "restore_links", "lift", "forget"):
    dying(lease.Leases, name)
dying(dbus.Session, "_manager")
unit = one({UNIT!r})
for act in (lambda: units.lease(unit.name, unit.file_state, unit.up), lambda: units.disable(unit.name),
            lambda: units.stop(unit.name, unit.invocation), lambda: units.release(unit.name)):
    outcome = act()
    if outcome.result == "failed":
        break
"""
    )
    if died_after < 4:  # it was being evicted: the next supervisor sees the unit as it is now, and says all of it again
        do(EVICT)
        until(lambda: down(box))
    do(f"assert units.release({UNIT!r}).result == 'done'")
    until(lambda: box.show(UNIT, "ActiveState") == "active")
    assert links(box) == before
    assert box.sh("ls /var/lib/hs/leases") == ""


def test_ev_04_a_stop_that_is_done_is_not_gone_while_a_process_sits_in_the_kernel(
    box: Box, do: Callable[[str], Any]
) -> None:
    box.sh(
        "mkdir -p /mnt/v; truncate -s 16M /var/lib/hs/v.img; mkfs.ext4 -q /var/lib/hs/v.img; "
        "mount -o loop /var/lib/hs/v.img /mnt/v"
    )
    install(
        box,
        text="[Service]\nExecStart=/bin/sh -c 'sleep 0.2; fsfreeze -f /mnt/v; echo x > /mnt/v/x'\n"
        "TimeoutStopSec=200ms\n",
    )
    box.exec("systemctl", "start", UNIT)
    until(lambda: box.sh(f"ps -o stat= -p $(systemctl show --value -p MainPID {UNIT})", check=False).startswith("D"))
    do(f"unit = one({UNIT!r}); units.stop(unit.name, unit.invocation)")
    until(lambda: down(box), 15)
    seen = do(f"show(one({UNIT!r}))")
    assert len(seen["pids"]) == 1
    assert do(f"unit = one({UNIT!r}); show(units.start(unit.name, unit.invocation))")["result"] == "failed"
    box.sh("fsfreeze -u /mnt/v")
    until(lambda: do(f"show(one({UNIT!r}))")["pids"] == [])
    box.sh("umount /mnt/v")


def test_ev_09_one_reload_an_eviction(box: Box, do: Callable[[str], Any]) -> None:
    install(box)

    def reloads() -> int:
        return box.journal("_PID=1").count("Reloading")

    before = reloads()
    do(EVICT + f"units.lease({UNIT!r}, 'enabled', True)")
    assert reloads() == before + 1


def test_sy_08_a_restart_of_dbus_and_a_systemd_that_hangs_cost_no_action(box: Box, do: Callable[[str], Any]) -> None:
    import signal

    from hsdaemon.core.model import Unreadable
    from hsdaemon.machine.dbus import Systemd

    install(box)
    units = Systemd(2, box.dir, box.bus_address, Path(f"/proc/{box.pid1}/root/etc/systemd/system"), box.cgroup)
    assert not isinstance(units.read([UNIT]), Unreadable)
    box.exec("systemctl", "restart", "dbus")
    until(lambda: not isinstance(units.read([UNIT]), Unreadable))
    os.kill(box.pid1, signal.SIGSTOP)
    hung = units.read([UNIT])
    os.kill(box.pid1, signal.SIGCONT)
    assert isinstance(hung, Unreadable)
    until(lambda: not isinstance(units.read([UNIT]), Unreadable))
    box.exec("systemctl", "stop", "dbus.socket", "dbus")
    gone = units.read([UNIT])
    assert isinstance(gone, Unreadable)
    units.close()


def test_a_bus_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    from hsdaemon.core.model import Unreadable
    from hsdaemon.machine.dbus import Systemd

    units = Systemd(2, tmp_path, f"unix:path={tmp_path}/no-bus")
    seen = units.read([UNIT])
    assert isinstance(seen, Unreadable)
    assert "systemd" in seen.cause
    assert units.start(UNIT, "").result == "failed"
    units.close()


@pytest.mark.parametrize("text", [b"", b"{", b'{"name": 1}', b"\xff\xfe", b"[]"])
def test_a_damaged_record_is_read_from_the_drop_in(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "units").mkdir()
    leases = Leases(tmp_path / "units", tmp_path / "state")
    leases.write("a%b.service", "enabled", True)
    (tmp_path / "state/leases/a%b.service.json").write_bytes(text)
    assert leases.record("a%b.service") == Record("a%b.service", "enabled", True)
    drop_in = (tmp_path / "units/a%b.service.d" / DROP_IN).read_text()
    assert f"ConditionPathExists=!{tmp_path}/units/a%%b.service.d/{DROP_IN}" in drop_in
    leases.lift("a%b.service")
    leases.forget("a%b.service")
    assert leases.record("a%b.service") is None


def test_a_record_in_somebody_elses_folder_is_not_believed(tmp_path: Path) -> None:
    """The engine's account may write into the state folder; the links that a record names are root's to make."""
    if os.geteuid() != 0:
        pytest.skip("giving a folder away needs root")
    (tmp_path / "units").mkdir()
    leases = Leases(tmp_path / "units", tmp_path / "state")
    leases.write("a.service", "enabled", True)
    forged = Record("a.service", "enabled", True, (("/etc/systemd/system/x.service", "/dev/shm/x.service"),))
    (tmp_path / "state/leases/a.service.json").write_bytes(msgspec.json.encode(forged))
    os.chown(tmp_path / "state/leases", 65534, 65534)
    assert leases.record("a.service") == Record("a.service", "enabled", True)
    leases.lift("a.service")
    assert leases.record("a.service") is None


def test_ev_07_a_number_that_was_given_to_another_process_is_not_signalled(box: Box, do: Callable[[str], Any]) -> None:
    """The kernel is told which number comes next, so that a new process really has the old one's."""
    import subprocess

    box.start_unit("first", "/bin/sleep", "infinity")
    pid = box.show("first", "MainPID")
    before = do(
        f"from hsdaemon.machine.procfs import read_process\np = read_process({pid}); show([p.start_ticks, p.exe])"
    )
    box.put("/etc/systemd/system/second.service", "[Service]\nExecStart=/bin/sleep infinity\n")
    box.sh("systemctl stop first; systemctl daemon-reload")
    time.sleep(0.05)
    last = f"echo {int(pid) - 1} > /proc/sys/kernel/ns_last_pid"
    subprocess.run(["nsenter", "-t", str(box.pid1), "--pid", "sh", "-c", last], check=True)
    manager = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
    bus = f"--address={box.bus_address}"
    subprocess.run(["busctl", bus, "call", *manager, "StartUnit", "ss", "second.service", "replace"], check=True)
    until(lambda: box.show("second", "MainPID") == pid)
    outcome = do(
        f"from hsdaemon.machine.procfs import Procfs\nshow(Procfs().signal({pid}, {before[0]}, {before[1]!r}, 'KILL'))"
    )
    assert outcome["result"] == "moved-on"
    assert box.show("second", "ActiveState") == "active"
