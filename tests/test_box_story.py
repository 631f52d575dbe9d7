"""The whole product under a real systemd, as the accounts that its units name; the engine alone is a stand-in."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import ROOT, VLLM, prepare
from rig import rows
from sdbox import Box, until

from hsdaemon.core import story
from hsdaemon.core.model import ENGINE_UNIT, PROOF_UNIT, SCAN_UNIT, SUPERVISOR_UNIT, WORKER_UNIT

pytestmark = pytest.mark.root
pytest.importorskip("pydbus")
ROWS = 24
CONFIG = """
[data]
path = "/opt/job/data.jsonl"
[model]
path = "/opt/job/model"
layers = [1, 3, 4]
[output]
path = "/var/lib/hs/states"
volume = "/var/lib/hs"
reserve_mib = 1
ballast_mib = 1
[engine]
device = "cpu"
[gpus]
uuids = ["GPU-0000", "GPU-0001"]
[spool]
budget_mib = 64
[worker]
concurrency = 2
[[evict.units]]
pattern = "vllm*.service"
how = "disable"
"""
MODEL = {
    "num_hidden_layers": 6, "hidden_size": 8, "vocab_size": 200, "max_position_embeddings": 1 << 20,
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
ENGINE = {"spool": "/dev/shm/hs-extract", "run": "/run/hs-extract", "load_s": 1.0, "latency_s": 0.4}


@pytest.fixture
def host(nvml: Path) -> Iterator[Box]:
    """Installed and initialised as the manual says, with a rogue enabled; not rebooted yet."""
    with Box(disk=128, raw=["/var/lib/hs"], bind=[nvml]) as box:
        prepare(box, nvml)
        lines = (json.dumps({"input_ids": ids}) + "\n" for ids in rows([20 + i % 17 for i in range(ROWS)]))
        box.put("/opt/job/data.jsonl", "".join(lines))
        box.put("/opt/job/model/config.json", json.dumps(MODEL))
        box.put("/opt/job/engine.json", json.dumps(ENGINE))
        box.put("/etc/hs-extract.toml", CONFIG)
        engine = f"{ROOT}/.venv/bin/python {ROOT}/tests/fake_engine.py /opt/job/engine.json"
        path = f"[Service]\nEnvironment=PYTHONPATH={ROOT}\n"
        box.put(f"/etc/systemd/system/{ENGINE_UNIT}.d/stand-in.conf", f"{path}ExecStart=\nExecStart={engine}\n")
        for unit in (PROOF_UNIT, WORKER_UNIT, SCAN_UNIT):
            box.put(f"/etc/systemd/system/{unit}.d/stand-in.conf", path)
        box.sh(f"chmod 755 /root; PYTHONPATH={ROOT} hs-extract init")  # the interpreter may lie below /root
        yield box
        print(box.journal("-b", "-n", "120", "-o", "short-monotonic") if box.pid1 else box.console())


def told(box: Box) -> list[str]:
    """Events of the supervisor since the boot, by their MESSAGE_IDs."""
    ids = {kind.message_id: kind.code for kind in story.KINDS}
    found = box.journal("-b", "-o", "json", *(f"MESSAGE_ID={key}" for key in ids))
    return [ids[json.loads(line)["MESSAGE_ID"]] for line in found.splitlines()]


def test_ev_01_from_a_boot_with_a_rogue_to_done_as_the_units_own_accounts(host: Box) -> None:
    host.reboot()
    until(lambda: "extracting" in told(host), 60)
    first = host.show(ENGINE_UNIT, "InvocationID")
    notes = host.journal("-u", SUPERVISOR_UNIT, "-b", "-o", "cat")
    assert "`hs-extract reload --now`" in notes, "the stand-in's fingerprint is not today's"
    host.sh(f"PYTHONPATH={ROOT} hs-extract reload --now")
    until(lambda: host.show(ENGINE_UNIT, "InvocationID") not in (first, ""), 40)
    until(lambda: "done" in told(host), 60)
    once = ["engine-up", "proved", "extracting"]
    assert told(host) == ["started", "evicted", *once, *once, "done"]
    assert host.show(VLLM, "ActiveState") == "active", "given back"
    assert host.show(VLLM, "UnitFileState") == "enabled"
    assert int(host.sh("find /var/lib/hs/states -name 'data_*' | wc -l")) == ROWS
    assert host.sh("ls /run/hs-extract/wishes") == ""
    assert host.journal("RUNG=engine_up", "-b", "-o", "cat", "-n", "1")
    starts = host.journal("-u", WORKER_UNIT, "-b", "-o", "cat")
    assert f"done={ROWS} failed=0" in starts


def test_rs_07_a_full_volume_pauses_the_worker_and_is_told(host: Box) -> None:
    host.exec("systemctl", "disable", VLLM)
    host.reboot()
    until(lambda: "extracting" in told(host), 60)
    host.sh("fallocate -l $(($(df --output=avail -B1 /var/lib/hs | tail -1) - 600000)) /var/lib/hs/other")
    until(lambda: "paused" in told(host) or host.show(WORKER_UNIT, "ActiveState") != "active", 30)
    time.sleep(2)
    assert host.show(ENGINE_UNIT, "ActiveState") == "active", "the engine is kept"
    host.exec("rm", "/var/lib/hs/other")
    until(lambda: "done" in told(host), 90)
    assert int(host.sh("find /var/lib/hs/states -name 'data_*' | wc -l")) == ROWS
