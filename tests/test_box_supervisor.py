"""The whole supervisor under a real systemd: boot, eviction, adoption, stop, with GPUs and engine as stand-ins."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from outputs import write_jsonl, write_model
from sdbox import Box, until

from hsdaemon.core.model import ENGINE_UNIT

pytestmark = pytest.mark.root
pytest.importorskip("pydbus")
ROOT = Path(__file__).parents[1]
VLLM = "vllm-kimi-k25-int4.service"
STATE = "/run/fake-nvml.state"
GPUS = "\n".join(f"gpu {i} GPU-{i:04d} 97887 {{used}} 0 NVIDIA H20" for i in range(8))
CONFIG = """
[data]
path = "/opt/job/data.jsonl"
[model]
path = "/opt/job/model"
[output]
path = "/var/lib/hs/states"
volume = "/var/lib/hs"
reserve_mib = 1
ballast_mib = 1
[engine]
tp = 8
[supervisor]
tick_s = 1
[[evict.units]]
pattern = "vllm*.service"
how = "disable"
"""
# Holds 75.8 GB on all GPUs while it runs, and opens their nodes as CUDA does.
HOLDER = f"""#!/bin/bash
for i in 0 1 2 3 4 5 6 7; do exec {{fd}}<>/dev/nvidia$i; done
printf '%s\\n' "{GPUS.format(used=77619)}" > {STATE}.new
for i in 0 1 2 3 4 5 6 7; do echo "proc $i $$ 77600" >> {STATE}.new; done
mv {STATE}.new {STATE}
exec sleep infinity
"""
DRIVER = f"""#!/bin/bash
touch /dev/nvidia{{0..7}}
printf '%s\\n' "{GPUS.format(used=4)}" > {STATE}.new; mv {STATE}.new {STATE}
"""
VLLM_UNIT = """[Unit]
After=driver.service
[Service]
ExecStart=/usr/local/libexec/holder
ExecStopPost=/usr/local/libexec/driver
Restart=always
[Install]
WantedBy=multi-user.target
"""
DRIVER_UNIT = """[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/libexec/driver
[Install]
WantedBy=multi-user.target
"""


@pytest.fixture
def host(nvml: Path, tmp_path: Path) -> Iterator[Box]:
    """The incident's host, installed and enabled, not yet rebooted: an enabled service owns the GPUs."""
    with Box(disk=128, raw=["/var/lib/hs"], bind=[nvml]) as box:
        box.sh(f"make -s -C {ROOT} ENGINE_VENV={ROOT}/.venv install")
        job = tmp_path / "job"
        job.mkdir()
        write_model(job / "model")
        write_jsonl(job / "data.jsonl", [{"input_ids": [1, 2, 3]}] * 4)
        box.put("/opt/job/model/config.json", (job / "model/config.json").read_text())
        box.put("/opt/job/data.jsonl", (job / "data.jsonl").read_text())
        box.put("/etc/hs-extract.toml", CONFIG)
        box.put("/usr/local/libexec/holder", HOLDER, 0o755)
        box.put("/usr/local/libexec/driver", DRIVER, 0o755)
        box.put(f"/etc/systemd/system/{VLLM}", VLLM_UNIT)
        box.put("/etc/systemd/system/driver.service", DRIVER_UNIT)
        environment = f"[Service]\nEnvironment=PYTHONPATH={ROOT} LD_LIBRARY_PATH={nvml}\n"
        box.put("/etc/systemd/system/hs-extract.service.d/stand-in.conf", environment)
        engine = "[Service]\nExecStart=\nExecStart=/bin/sleep infinity\n"
        box.put(f"/etc/systemd/system/{ENGINE_UNIT}.d/stand-in.conf", engine)
        box.put(
            "/var/lib/hs/.hs-extract-volume", json.dumps({"version": 1, "uuid": "1" * 8 + "-1111" * 3 + "-" + "1" * 12})
        )
        box.exec("systemctl", "daemon-reload")
        box.exec("systemctl", "enable", "driver", VLLM, "hs-extract")
        yield box
        print(box.journal("-u", "hs-extract", "-n", "60") if box.pid1 else box.console())


def told(box: Box) -> str:
    return box.journal("-u", "hs-extract", "-b")


def test_ev_01_after_a_boot_the_rogue_is_evicted_and_the_engine_started_without_a_human(host: Box) -> None:
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


def quiet(box: Box) -> None:
    """No rogue this time."""
    box.exec("systemctl", "disable", VLLM)
    box.exec("systemctl", "start", "driver")


def nvml_says(box: Box, *lines: str) -> None:
    box.put(f"{STATE}.new", "\n".join((GPUS.format(used=4), *lines)) + "\n")
    box.exec("mv", f"{STATE}.new", STATE)


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
