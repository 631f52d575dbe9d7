"""The whole supervisor under a real systemd: boot, eviction, adoption, stop, with GPUs and engine as stand-ins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import ROOT, STATE, VLLM, VLLM_UNIT, nvml_says, prepare
from sdbox import Box, until

from hsdaemon.core.model import ENGINE_UNIT

pytestmark = pytest.mark.root
pytest.importorskip("pydbus")


@pytest.fixture
def host(nvml: Path) -> Iterator[Box]:
    """The incident's host before the boot after which a rogue owns the GPUs."""
    with Box(disk=128, raw=["/var/lib/hs"], bind=[nvml]) as box:
        prepare(box, nvml)
        yield box
        print(box.journal("-u", "hs-extract", "-n", "60") if box.pid1 else box.console())


def told(box: Box) -> str:
    return box.journal("-u", "hs-extract", "-b")


def test_ev_01_sy_12_sy_13_after_a_boot_the_rogue_is_evicted_and_the_engine_started_without_a_human(host: Box) -> None:
    host.reboot()
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "active", 40)
    assert host.show(VLLM, "ActiveState") == "inactive"
    assert host.show(VLLM, "UnitFileState") == "disabled"
    said = told(host)
    assert VLLM in said
    host.reboot()  # and it stays so
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "active", 40)
    assert host.show(VLLM, "ActiveState") == "inactive"
    engine = host.show(ENGINE_UNIT, "MainPID")

    supervisor = host.show("hs-extract", "MainPID")  # SY-12: killed, back, and the engine is the same
    host.exec("systemctl", "kill", "-s", "KILL", "hs-extract")
    start = time.monotonic()
    until(
        lambda: (
            host.show("hs-extract", "MainPID") not in ("0", supervisor)
            and host.show("hs-extract", "ActiveState") == "active"
        ),
        15,
    )
    print(f"adopted after {time.monotonic() - start:.1f} s")
    time.sleep(3)
    assert host.show(ENGINE_UNIT, "MainPID") == engine

    host.exec("hs-extract", "stop", check=False)  # SY-13: all three, and then everything is given back as it was
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "inactive" and host.show("hs-extract", "MainPID") == "0", 20)
    host.exec("env", f"PYTHONPATH={ROOT}", "hs-extract", "release")
    until(lambda: host.show(VLLM, "ActiveState") == "active")
    assert host.show(VLLM, "UnitFileState") == "enabled"


def quiet(box: Box) -> None:
    """No rogue this time."""
    box.exec("systemctl", "disable", VLLM)
    box.exec("systemctl", "start", "driver")


def test_ev_10_ev_16_whom_no_policy_names_is_reported_by_name_waited_for_and_left_alone(host: Box) -> None:
    quiet(host)
    host.put("/etc/systemd/system/jupyter.service", VLLM_UNIT)
    host.exec("systemctl", "daemon-reload")
    host.exec("systemctl", "start", "jupyter")
    until(lambda: "proc" in host.sh(f"cat {STATE}"))
    host.exec("systemctl", "start", "hs-extract")
    until(lambda: "jupyter.service" in host.show("hs-extract", "StatusText"), 20)
    pid = host.show("jupyter", "MainPID")
    time.sleep(4)
    assert (host.show("jupyter", "MainPID"), host.show(ENGINE_UNIT, "ActiveState")) == (pid, "inactive")
    host.exec("systemctl", "stop", "jupyter")

    scope = f"docker-{'ab' * 32}.scope"
    host.start_unit("docker", "systemd-run", "--scope", f"--unit={scope}", "/usr/local/libexec/holder")
    until(lambda: "container" in host.show("hs-extract", "StatusText"), 20)
    time.sleep(3)
    assert host.show(scope, "ActiveState") == "active"
    host.exec("systemctl", "stop", scope)
    host.exec("/usr/local/libexec/driver")
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "active", 20)


def test_st_09_gp_14_a_volume_and_a_driver_that_come_late_are_waited_for(host: Box) -> None:
    quiet(host)
    host.sh(f"mv /var/lib/hs/.hs-extract-volume /root/; rm {STATE}")
    host.exec("systemctl", "start", "hs-extract")
    until(lambda: "marker" in host.show("hs-extract", "StatusText"), 20)
    host.exec("mv", "/root/.hs-extract-volume", "/var/lib/hs/")
    until(lambda: "driver" in host.show("hs-extract", "StatusText"), 20)
    assert host.sh("ls /var/lib/hs") == "lost+found" or "states" not in host.sh("ls /var/lib/hs")
    host.exec("/usr/local/libexec/driver")
    ready = time.monotonic()
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "active", 20)
    print(f"engine started {time.monotonic() - ready:.1f} s after the driver was there")


def test_gp_05_gp_06_a_running_engine_is_left_alone_while_nvml_fails_or_hangs(host: Box) -> None:
    quiet(host)
    host.exec("systemctl", "start", "hs-extract")
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "active", 20)
    engine = host.show(ENGINE_UNIT, "MainPID")
    nvml_says(host, "fail * 18")
    time.sleep(4)
    assert host.show(ENGINE_UNIT, "MainPID") == engine
    nvml_says(host, "delay nvmlDeviceGetCount 600000")
    before = host.show("hs-extract", "StatusText")
    until(lambda: host.show("hs-extract", "StatusText") != before, 25)  # ticks go on
    assert (host.show(ENGINE_UNIT, "MainPID"), host.show("hs-extract", "NRestarts")) == (engine, "0")


def test_what_the_supervisors_reading_makes_beside_the_manifest_is_the_workers(host: Box) -> None:
    quiet(host)
    host.sh("chmod o+x /root; chown -R hs-extract /var/lib/hs")  # the interpreter may be in root's home
    scan = f"env PYTHONPATH={ROOT} hs-extract scan"
    host.sh(f"systemd-run --quiet --wait --collect --uid=hs-extract {scan}")
    host.exec("systemctl", "start", "hs-extract")
    until(lambda: host.sh("ls /var/lib/hs/states").count("manifest.db-") == 2, 20)
    assert host.sh("stat -c %U /var/lib/hs/states/manifest.db-*").split() == ["hs-extract"] * 2
