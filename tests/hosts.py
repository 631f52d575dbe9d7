"""The incident's host as a box: eight scripted GPUs, an enabled service that holds them, the product installed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from outputs import write_jsonl, write_model
from sdbox import Box

from hsdaemon.core.model import ENGINE_UNIT

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


def prepare(box: Box, nvml: Path) -> None:
    """Install it all, enabled, not yet rebooted. nvml: folder of the scripted library, shown in the box."""
    box.sh(f"make -s -C {ROOT} ENGINE_VENV={ROOT}/.venv install")
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "model"))
        data = write_jsonl(Path(folder, "data.jsonl"), [{"input_ids": [1, 2, 3]}] * 4)
        box.put("/opt/job/model/config.json", (model / "config.json").read_text())
        box.put("/opt/job/data.jsonl", data.read_text())
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


def nvml_says(box: Box, *lines: str) -> None:
    """All GPUs idle, and these statements."""
    box.put(f"{STATE}.new", "\n".join((GPUS.format(used=4), *lines)) + "\n")
    box.exec("mv", f"{STATE}.new", STATE)
