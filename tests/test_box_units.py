"""The shipped units under a real systemd: stand-ins run in place of the programs, everything else is as installed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sdbox import Box, until

pytestmark = pytest.mark.root
ROOT = Path(__file__).parents[1]
PROGRAMS = {
    # says READY, then lives; what it is told goes to a file
    "hs-extract": "systemd-notify --ready; while :; do systemd-notify WATCHDOG=1; sleep 0.2; done",
    # an engine whose rank records a TERM of its own
    "hs-sglang": "sh -c 'trap \"echo rank >> /tmp/terms\" TERM; while :; do sleep 0.1; done' & "
    "trap 'echo main >> /tmp/terms; exit 0' TERM; while :; do sleep 0.1; done",
    "hs-worker": "systemd-notify --ready; exec sleep infinity",
    "hs-proof": "true",
    "hs-scan": "true",
}


@pytest.fixture(scope="module")
def host() -> Iterator[Box]:
    """One box with the product installed, for the tests of this file that leave it as it was."""
    with Box(disk=128, raw=["/var/lib/hs"]) as box:
        box.sh(f"make -s -C {ROOT} ENGINE_VENV={ROOT}/.venv install")
        for name, program in PROGRAMS.items():
            box.put(f"/usr/local/libexec/{name}", f"#!/bin/bash\n{program}\n", 0o755)
            drop_in = f"[Service]\nExecStart=\nExecStart=/usr/local/libexec/{name}\nNotifyAccess=all\n"
            box.put(f"/etc/systemd/system/{name}.service.d/stand-in.conf", drop_in)
        box.exec("systemctl", "daemon-reload")
        box.exec("systemctl", "enable", "hs-extract")
        yield box
        print(box.journal("-n", "100"))


@pytest.fixture
def up(host: Box) -> Iterator[Box]:
    """Supervisor, engine and worker run."""
    host.exec("systemctl", "start", "hs-extract", "hs-sglang", "hs-worker")
    yield host
    host.exec("systemctl", "stop", "hs-extract", "hs-sglang", "hs-worker")


def pid(box: Box, unit: str) -> str:
    return box.show(unit, "MainPID")


def test_sy_03_twenty_deaths_in_a_row_and_it_is_back(up: Box) -> None:
    drop_in = "/etc/systemd/system/hs-extract.service.d/fast.conf"
    up.put(drop_in, "[Service]\nRestartSec=50ms\n")
    up.exec("systemctl", "daemon-reload")
    before = int(up.show("hs-extract", "NRestarts"))
    for death in range(1, 21):
        up.exec("systemctl", "kill", "-s", "KILL", "hs-extract")
        until(lambda: int(up.show("hs-extract", "NRestarts")) >= before + death)  # noqa: B023  # called at once
        until(lambda: up.show("hs-extract", "ActiveState") == "active")
    up.sh(f"rm {drop_in}; systemctl daemon-reload")


def test_sy_07_sy_12_a_death_of_the_supervisor_leaves_engine_and_worker_alone(up: Box) -> None:
    before = [pid(up, unit) for unit in ("hs-sglang", "hs-worker")]
    old = pid(up, "hs-extract")
    up.exec("systemctl", "kill", "-s", "KILL", "hs-extract")
    until(lambda: pid(up, "hs-extract") not in ("0", old) and up.show("hs-extract", "ActiveState") == "active")
    assert [pid(up, unit) for unit in ("hs-sglang", "hs-worker")] == before


def test_sy_13_a_stop_of_the_supervisor_leaves_engine_and_worker_running(up: Box) -> None:
    up.exec("systemctl", "stop", "hs-extract")
    assert [up.show(unit, "ActiveState") for unit in ("hs-extract", "hs-sglang", "hs-worker")] == [
        "inactive", "active", "active",
    ]  # fmt: skip


def test_sy_09_a_tick_that_hangs_is_found_by_the_watchdog(up: Box) -> None:
    drop_in = "/etc/systemd/system/hs-extract.service.d/watchdog.conf"
    up.put(drop_in, "[Service]\nWatchdogSec=1\nTimeoutAbortSec=1\n")
    up.exec("systemctl", "daemon-reload")
    up.exec("systemctl", "restart", "hs-extract")
    before = int(up.show("hs-extract", "NRestarts"))
    up.exec("systemctl", "kill", "-s", "STOP", "hs-extract")
    until(lambda: int(up.show("hs-extract", "NRestarts")) > before and up.show("hs-extract", "ActiveState") == "active")
    up.sh(f"rm {drop_in}; systemctl daemon-reload")


def test_sy_10_the_engine_s_main_process_alone_gets_the_term(up: Box) -> None:
    up.sh("rm -f /tmp/terms")
    group = f"/sys/fs/cgroup{up.show('hs-sglang', 'ControlGroup')}/cgroup.procs"
    until(lambda: len(up.sh(f"cat {group}").split()) > 1)
    up.exec("systemctl", "stop", "hs-sglang")
    assert up.sh("cat /tmp/terms") == "main"
    assert up.show("hs-sglang", "Result") == "success"


def test_sy_04_the_engine_may_call_the_driver_s_helper_and_nobody_else_gains_rights(up: Box) -> None:
    flags = [
        up.sh(f"grep NoNewPrivs /proc/{pid(up, unit)}/status").split()[1]
        for unit in ("hs-sglang", "hs-worker", "hs-extract")
    ]
    assert flags == ["0", "1", "1"]


def test_sy_01_a_child_cannot_speak_for_the_service(host: Box) -> None:
    """NotifyAccess=main, as all shipped units have it; the stand-ins' drop-ins open it to their shells' helpers."""
    code = (
        "import os, socket, time\n"
        "def say(text):\n"
        "    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(text, os.environ['NOTIFY_SOCKET'])\n"
        "say(b'READY=1')\n"
        "if os.fork() == 0:\n"
        "    say(b'STOPPING=1\\nSTATUS=I am the child')\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "time.sleep(60)\n"
    )
    host.put("/usr/local/libexec/mute.py", code)
    host.put(
        "/etc/systemd/system/mute.service",
        "[Service]\nType=notify\nNotifyAccess=main\nExecStart=/usr/bin/python3 /usr/local/libexec/mute.py\n",
    )
    host.exec("systemctl", "daemon-reload")
    host.exec("systemctl", "start", "mute")
    time.sleep(0.3)
    assert (host.show("mute", "ActiveState"), host.show("mute", "StatusText")) == ("active", "")
    host.exec("systemctl", "stop", "mute")


def test_sy_02_our_sentences_stay_while_an_engine_prints_60000_lines(up: Box) -> None:
    up.sh("rm -f /etc/systemd/journald.conf.d/50-sdbox.conf; systemctl restart systemd-journald")  # Debian's rate limit
    up.put(
        "/etc/systemd/system/hs-extract.service.d/talk.conf",
        "[Service]\nExecStart=\nExecStart=/bin/bash -c 'systemd-notify --ready; "
        "for i in {1..5000}; do echo sentence $i; done; exec sleep infinity'\n",
    )
    up.exec("systemctl", "daemon-reload")
    up.start_unit("noise", "/bin/bash", "-c", "for i in {1..60000}; do echo noise $i; done")
    up.exec("systemctl", "restart", "hs-extract")
    until(lambda: "sentence 5000" in up.journal("-u", "hs-extract", "-n", "50"), 20)
    assert up.journal("-u", "hs-extract", "-g", "^sentence").count("sentence") == 5000
    up.sh("rm /etc/systemd/system/hs-extract.service.d/talk.conf; systemctl daemon-reload")


def test_sy_11_what_is_needed_is_made_anew_by_a_reboot(host: Box) -> None:
    host.sh("echo x > /var/lib/hs-extract/history; sync")
    host.reboot()
    assert host.show("hs-extract", "ActiveState") == "active"
    assert host.sh(
        "stat -c '%U %a' /run/hs-extract /run/hs-extract/attest /dev/shm/hs-extract /var/log/hs-extract"
    ).split("\n") == ["root 1775", "hs-extract 755", "hs-extract 700", "hs-extract 755"]
    assert host.sh("cat /var/lib/hs-extract/history") == "x"
    assert [host.show(unit, "ActiveState") for unit in ("hs-sglang", "hs-worker")] == ["inactive", "inactive"]


def test_sy_05_a_supervisor_started_before_device_and_volume_is_there_all_the_same(host: Box) -> None:
    host.sh("rm -f /dev/nvidia0; systemctl stop hs-extract; systemctl start hs-extract; touch /dev/nvidia0")
    assert host.show("hs-extract", "ActiveState") == "active"
    assert host.show("hs-extract", "ConditionResult") == "yes"


def test_sy_06_the_sandbox_shows_a_volume_that_is_mounted_later(up: Box) -> None:
    up.sh("mkdir -p /mnt/late; truncate -s 8M /var/lib/hs/late.img; mkfs.ext4 -q /var/lib/hs/late.img")
    up.sh("mount -o loop /var/lib/hs/late.img /mnt/late; touch /mnt/late/marker")
    inside = f"/proc/{pid(up, 'hs-extract')}/root/mnt/late/marker"
    assert up.exec("test", "-e", inside, check=False).returncode == 0
    up.sh("umount /mnt/late")
    assert up.exec("test", "-e", inside, check=False).returncode == 1


def test_rs_01_rs_02_a_kill_for_memory_is_read_from_systemd_as_its_cause(up: Box) -> None:
    pytest.importorskip("pydbus")
    from hsdaemon.core.model import Unreadable
    from hsdaemon.machine.dbus import Systemd

    limit = Path(f"/sys/fs/cgroup/memory/{up.name}")
    if not limit.parent.is_dir():
        pytest.skip("no memory cgroup on this host")
    limit.mkdir()
    (limit / "memory.limit_in_bytes").write_text("32M")
    try:
        greedy = "import os, time\nwhile not os.path.exists('/tmp/go'):\n    time.sleep(0.05)\nx = b'x' * (256 << 20)\n"
        up.put("/usr/local/libexec/greedy.py", greedy)
        up.put(
            "/etc/systemd/system/hs-sglang.service.d/zz-greedy.conf",
            "[Service]\nExecStart=\nExecStart=/usr/bin/python3 /usr/local/libexec/greedy.py\n",
        )
        up.sh("rm -f /tmp/go; systemctl daemon-reload; systemctl restart hs-sglang")
        (limit / "cgroup.procs").write_text(str(up.host_pid(pid(up, "hs-sglang"))))
        up.sh("touch /tmp/go")
        until(lambda: up.show("hs-sglang", "ActiveState") == "failed")
        units = Systemd(5, up.dir, up.bus_address, cgroups=up.cgroup)
        seen = units.read(["hs-sglang.service"])
        units.close()
        assert not isinstance(seen, Unreadable)
        assert (seen[0].active, seen[0].result, seen[0].status) == ("failed", "signal", 9)
    finally:
        up.sh("rm /etc/systemd/system/hs-sglang.service.d/zz-greedy.conf")
        up.sh("systemctl daemon-reload; systemctl stop hs-sglang")
        until(lambda: not (limit / "cgroup.procs").read_text())
        limit.rmdir()


def test_sy_10_at_a_shutdown_the_engine_answers_until_the_worker_has_drained(host: Box) -> None:
    drop_in = "/etc/systemd/system/hs-worker.service.d/zz-drain.conf"
    engine = "/sys/fs/cgroup/system.slice/hs-sglang.service/cgroup.procs"
    host.put(
        "/usr/local/libexec/drain",
        f"#!/bin/bash\ntrap 'sleep 1; cat {engine} > /var/tmp/engine; exit 0' TERM\n"
        "systemd-notify --ready; while :; do sleep 0.1; done\n",
        0o755,
    )
    host.put(drop_in, "[Service]\nExecStart=\nExecStart=/usr/local/libexec/drain\nNotifyAccess=all\n")
    host.sh("systemctl daemon-reload; systemctl start hs-sglang hs-worker")
    host.reboot()
    assert host.sh("cat /var/tmp/engine") != "", "the engine's processes, a second after the worker was told to stop"
    host.sh(f"rm {drop_in}; systemctl daemon-reload")


def test_install_says_when_the_units_account_cannot_reach_the_environment(host: Box) -> None:
    """As when it lies in root's home."""
    host.sh(f"mkdir -p /opt/closed/bin; ln -sfn {ROOT}/.venv/bin/hs-extract /opt/closed/bin/; chmod 700 /opt/closed")
    assert "cannot run /opt/closed/bin/hs-extract" in host.sh(f"make -s -C {ROOT} ENGINE_VENV=/opt/closed install")
    host.sh("chmod o+x /root; chmod 755 /opt/closed")
    assert "cannot run" not in host.sh(f"make -s -C {ROOT} ENGINE_VENV=/opt/closed install")
    host.sh(f"make -s -C {ROOT} ENGINE_VENV={ROOT}/.venv install")
