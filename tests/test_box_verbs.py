"""The verbs about the supervisor in a real systemd: a broken configuration, a reload, a person without rights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import CONFIG, ROOT, VLLM, prepare
from sdbox import Box, until

from hsdaemon.core.model import ENGINE_UNIT, SUPERVISOR_UNIT
from hsdaemon.core.reasons import CATALOGUE

pytestmark = pytest.mark.root
pytest.importorskip("pydbus")
FILE = "/etc/hs-extract.toml"
INVENTORY = "find /etc /run/hs-extract /var /dev/shm -xdev -not -path '*/journal/*' -printf '%p %s %m %u %C@\\n' | sort"


@pytest.fixture
def host(nvml: Path) -> Iterator[Box]:
    """No rogue, GPUs idle, the supervisor enabled and not started."""
    with Box(disk=128, raw=["/var/lib/hs"], bind=[nvml]) as box:
        prepare(box, nvml)
        box.exec("systemctl", "disable", VLLM)
        box.sh("systemctl start driver; chmod 755 /root")  # the interpreter may lie there
        yield box
        print(box.journal("-u", "hs-extract", "-n", "60") if box.pid1 else box.console())


def say(box: Box, nvml: Path, *words: str, user: str = "root") -> tuple[int, str]:
    """Exit code of `hs-extract WORDS` as this user, and all that it said."""
    env = ("env", f"PYTHONPATH={ROOT}", f"LD_LIBRARY_PATH={nvml}", "PATH=/usr/local/bin:/usr/bin:/bin")
    who = () if user == "root" else ("setpriv", "--reuid", user, "--regid", "nogroup", "--clear-groups")
    done = box.exec(*who, *env, "timeout", "60", "hs-extract", *words, check=False)
    return done.returncode, done.stdout + done.stderr


def status(box: Box) -> str:
    return box.show(SUPERVISOR_UNIT, "StatusText")


def test_a_broken_configuration_is_said_in_one_line_waited_for_and_mended_without_a_restart(host: Box) -> None:
    host.put(FILE, CONFIG.replace("tp = 8", "tpp = 8"))
    host.exec("systemctl", "start", SUPERVISOR_UNIT)
    until(lambda: "engine.tpp: no such setting" in status(host), 20)
    time.sleep(3)
    assert (host.show(SUPERVISOR_UNIT, "ActiveState"), host.show(SUPERVISOR_UNIT, "NRestarts")) == ("active", "0")
    kept = host.journal(f"MESSAGE_ID={CATALOGUE['not-started'].message_id}", "-o", "cat")
    assert kept.count("engine.tpp") == 1
    host.put(FILE, CONFIG)
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "active", 20)
    assert host.show(SUPERVISOR_UNIT, "NRestarts") == "0"
    host.exec("rm", FILE)
    host.exec("systemctl", "restart", SUPERVISOR_UNIT)
    until(lambda: "hs-extract init" in status(host), 20)
    host.exec("systemctl", "stop", SUPERVISOR_UNIT)
    assert host.show(SUPERVISOR_UNIT, "Result") == "success"
    assert host.show(ENGINE_UNIT, "ActiveState") == "active"


def test_whoever_has_no_rights_is_told_what_he_does_not_see_and_touches_nothing(host: Box, nvml: Path) -> None:
    host.exec("systemctl", "start", SUPERVISOR_UNIT)
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "active", 20)
    engine = host.show(ENGINE_UNIT, "MainPID")
    for verb, code, words in (
        ("plan", 0, "+ volume_ready"),
        ("assess", 0, "looked at without root"),
        ("reload", 70, "run this as root"),
        ("stop", 75, "run this as root"),
        ("reset", 73, "Permission denied"),
        ("release", 75, "the supervisor runs"),
        ("run", 73, "run it as root"),
    ):
        got, said = say(host, nvml, verb, user="nobody")
        assert (verb, got) == (verb, code), said
        assert words in said
        assert "Traceback" not in said
    assert host.show(ENGINE_UNIT, "MainPID") == engine
    host.exec("systemctl", "stop", SUPERVISOR_UNIT)
    before = host.sh(INVENTORY)
    assert say(host, nvml, "assess", user="nobody")[0] == 0
    assert host.sh(INVENTORY) == before


def test_gp_01_plan_of_a_person_says_what_the_supervisor_would_do_next(host: Box, nvml: Path) -> None:
    code, said = say(host, nvml, "plan")
    assert code == 0
    assert "would do: StartEngine(after='', port=30000" in said
    assert host.show(ENGINE_UNIT, "ActiveState") == "inactive"
    host.exec("systemctl", "start", VLLM)
    until(lambda: "proc" in host.sh("cat /run/fake-nvml.state"))
    code, said = say(host, nvml, "plan")
    assert "would do: LeaseUnit(name='vllm-kimi-k25-int4.service'" in said
    assert "would do: StopUnit(name='vllm-kimi-k25-int4.service'" in said
    code, said = say(host, nvml, "assess")
    assert "held by vllm-kimi-k25-int4.service" in said
    assert host.show(VLLM, "ActiveState") == "active"
