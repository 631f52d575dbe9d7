"""The verbs about the supervisor in a real systemd: a broken configuration, a reload, a person without rights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import CONFIG, ROOT, VLLM, VLLM_UNIT, prepare
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


def test_en_11_a_start_that_refuses_is_quoted_word_for_word(host: Box) -> None:
    host.sh(f"rm /etc/systemd/system/{ENGINE_UNIT}.d/stand-in.conf; echo cut > /opt/job/model/model.safetensors")
    host.put(f"/etc/systemd/system/{ENGINE_UNIT}.d/path.conf", f"[Service]\nEnvironment=PYTHONPATH={ROOT}\n")
    host.exec("systemctl", "daemon-reload")
    host.exec("systemctl", "start", SUPERVISOR_UNIT)
    until(lambda: "model.safetensors" in status(host) and "cut short" in status(host), 40)
    assert "the engine ended (exit-code 69: hs-extract serve: cannot start the engine" in status(host)


def test_what_cannot_be_recorded_on_a_full_state_folder_is_not_done_until_there_is_room(host: Box) -> None:
    host.sh(
        "mount -t tmpfs -o size=64k none /var/lib/hs-extract; "
        "dd if=/dev/zero of=/var/lib/hs-extract/other bs=4k 2>/dev/null || true"
    )
    host.exec("systemctl", "start", SUPERVISOR_UNIT)
    until(lambda: "cannot be recorded first" in status(host), 30)
    time.sleep(2)
    assert host.show(ENGINE_UNIT, "ActiveState") == "inactive"
    host.exec("rm", "/var/lib/hs-extract/other")
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "active", 30)
    assert host.show(SUPERVISOR_UNIT, "NRestarts") == "0"


def test_sy_09_a_supervisor_whose_turn_does_not_end_is_restarted_and_adopts(host: Box) -> None:
    host.put(f"/etc/systemd/system/{SUPERVISOR_UNIT}.d/dog.conf", "[Service]\nWatchdogSec=4\nTimeoutAbortSec=1\n")
    host.exec("systemctl", "daemon-reload")
    host.exec("systemctl", "start", SUPERVISOR_UNIT)
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "active", 30)
    engine, frozen = host.show(ENGINE_UNIT, "MainPID"), host.show(SUPERVISOR_UNIT, "MainPID")
    time.sleep(6)
    assert host.show(SUPERVISOR_UNIT, "MainPID") == frozen, "finished turns feed it"
    host.exec("kill", "-STOP", frozen)
    until(lambda: host.show(SUPERVISOR_UNIT, "MainPID") not in (frozen, "0"), 30)
    until(lambda: f"engine (pid {engine})" in host.journal("-u", SUPERVISOR_UNIT, "-b", "-o", "cat"), 30)
    assert host.show(ENGINE_UNIT, "MainPID") == engine


def test_a_second_supervisor_waits_and_a_dead_lock_holds_nobody_up(host: Box, nvml: Path) -> None:
    host.exec("systemctl", "start", SUPERVISOR_UNIT)
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "active", 30)
    first = host.show(SUPERVISOR_UNIT, "MainPID")
    code, said = say(host, nvml, "run", "--foreground")
    assert code == 75
    assert f"pid {first} is one already" in said
    host.exec("systemctl", "stop", SUPERVISOR_UNIT)
    host.put("/run/hs-extract/supervisor.lock", "1")
    assert say(host, nvml, "reload")[0] == 75, "a number in a file that nobody locks is nobody"
    host.exec("systemctl", "start", SUPERVISOR_UNIT)
    until(lambda: host.show(SUPERVISOR_UNIT, "ActiveState") == "active", 20)


@pytest.mark.parametrize(
    ("file", "name"),
    [("vllm@.service", "vllm@kimi.service"), ("vllm-a\\x20b.service", "vllm-a\\x20b.service")],
    ids=["an instance", "an escaped space"],
)
def test_ev_12_units_of_odd_names_are_kept_down_and_given_back_alike(
    host: Box, nvml: Path, file: str, name: str
) -> None:
    tree = "cd /etc/systemd/system; find . -printf '%p %l\\n' | sort"
    host.put(f"/etc/systemd/system/{file}", VLLM_UNIT)
    host.exec("systemctl", "daemon-reload")
    host.exec("systemctl", "enable", "--now", name)
    before = host.sh(tree)
    until(lambda: "proc" in host.sh("cat /run/fake-nvml.state"))
    host.exec("systemctl", "start", SUPERVISOR_UNIT)
    until(lambda: host.show(ENGINE_UNIT, "ActiveState") == "active", 30)
    host.exec("systemctl", "start", name)
    assert host.show(name, "ActiveState") == "inactive"
    assert say(host, nvml, "stop")[0] == 0
    assert say(host, nvml, "release")[0] == 0
    until(lambda: host.show(name, "ActiveState") == "active", 10)
    assert host.sh(tree) == before
