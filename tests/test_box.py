"""The test-bed itself: what every other box test relies on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_nvml import write_state
from sdbox import Box

pytestmark = pytest.mark.root

SERVICE = """[Service]
ExecStart=/bin/sleep infinity
[Install]
WantedBy=multi-user.target
"""


def test_a_box_keeps_enabled_units_over_a_reboot_and_loses_unsynced_files_at_a_power_cut(box: Box) -> None:
    box.put("/etc/systemd/system/stand-in.service", SERVICE)
    box.exec("systemctl", "daemon-reload")
    box.exec("systemctl", "enable", "--now", "stand-in")
    before = box.sh("cat /proc/sys/kernel/random/boot_id")
    box.reboot()
    assert box.sh("cat /proc/sys/kernel/random/boot_id") != before
    assert box.show("stand-in", "ActiveState") == "active"
    box.sh("cd /var/lib/hs; echo kept > a; sync a .; echo lost > b")
    box.power_cut()
    box.boot()
    assert box.sh("ls /var/lib/hs") == "a"


def test_what_is_unmounted_goes_from_sandboxed_services_too(box: Box) -> None:
    box.sh("mkdir /mnt/lent; mount -t tmpfs lent /mnt/lent")
    box.start_unit("sandboxed", "sleep", "infinity", props=["ProtectSystem=strict"])
    mounts = f"cat /proc/{box.show('sandboxed', 'MainPID')}/mountinfo"
    assert "/mnt/lent" in box.sh(mounts)
    box.exec("umount", "/mnt/lent")
    assert "/mnt/lent" not in box.sh(mounts)


def test_the_real_pynvml_reads_the_fake_library_in_a_unit(box: Box, nvml: Path) -> None:
    code = """if True:
        import pynvml as n
        try:
            n.nvmlInit()
            gpu = n.nvmlDeviceGetHandleByIndex(0)
            print(n.nvmlDeviceGetName(gpu), [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(gpu)])
        except n.NVMLError as error:
            print(type(error).__name__)"""

    def seen(*state: str) -> str:
        write_state(nvml / "state", *state)
        env = {"LD_LIBRARY_PATH": str(nvml), "FAKE_NVML_STATE": str(nvml / "state")}
        return str(box.unit(sys.executable, "-c", code, env=env).stdout).strip()

    gpu = "gpu 0 GPU-aaaa 143771 2048 7 NVIDIA H200"
    assert seen(gpu, "proc 0 4242 1500") == "NVIDIA H200 [4242]"
    assert seen(gpu, "fail nvmlDeviceGetComputeRunningProcesses 15 0") == "NVMLError_GpuIsLost"
    assert seen(gpu, "fail nvmlInit 18") == "NVMLError_LibRmVersionMismatch"


def test_a_clean_up_ends_the_boxes_of_the_dead_alone(box: Box) -> None:
    """Others may be testing beside us."""
    import subprocess
    import sys

    import sdbox

    code = "import os, sdbox; b = sdbox.Box(); b.create(); b.boot(); print(b.name, flush=True); os._exit(0)"
    made = subprocess.run([sys.executable, "-c", code], cwd=Path(sdbox.__file__).parent, capture_output=True, text=True)
    left = sdbox.CGROUP2 / f"sdbox-{made.stdout.strip()}"
    assert left.is_dir()
    sdbox.clean()
    assert not left.is_dir()
    assert box.show("dbus", "ActiveState") == "active"
