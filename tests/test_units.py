"""The shipped units: verified by systemd itself, without the directives that were traps elsewhere, and installed."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from sdbox import Box

from hsdaemon.engine.probe import START_FILE, ordered_port
from hsdaemon.machine.child import Child

ROOT = Path(__file__).parents[1]
UNITS = sorted((ROOT / "systemd").glob("*.service"))
NAMES = [path.name for path in UNITS]


def directives(path: Path) -> dict[str, list[str]]:
    """Every setting of a unit, in order."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("path", UNITS, ids=NAMES)
def test_sy_05_sy_06_sy_07_no_unit_can_be_kept_off_or_carried_away(path: Path) -> None:
    keys = directives(path)
    traps = (
        r"Condition|Assert|Requires|Requisite|BindsTo|PartOf|RequiresMountsFor|Wants|Upholds|ExecCondition|ExecStartPre"
    )
    assert [key for key in keys if re.match(traps, key)] == []


@pytest.mark.parametrize("path", UNITS, ids=NAMES)
def test_sy_04_no_unit_hides_the_gpus_or_the_volume(path: Path) -> None:
    hiding = {
        "PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectProc", "ProcSubset", "PrivateUsers", "PrivateMounts",
        "PrivateNetwork", "PrivateIPC", "MemoryDenyWriteExecute", "InaccessiblePaths", "ProtectHome", "RootDirectory",
        "TemporaryFileSystem", "ProtectClock",
    }  # fmt: skip
    assert hiding & set(directives(path)) == set()


@pytest.mark.parametrize("path", UNITS, ids=NAMES)
def test_sy_06_no_unit_has_mounts_of_its_own(path: Path) -> None:
    """A namespace's copy keeps an unmounted volume busy, and may never show one that is mounted later."""
    own = r"ProtectSystem|PrivateTmp|ProtectKernel|ProtectControl|(ReadWrite|ReadOnly|Exec|NoExec|Bind\w*)Paths|Mount"
    assert [key for key in directives(path) if re.match(own, key)] == []


def test_sy_03_sy_09_the_supervisor_always_comes_back_and_is_watched() -> None:
    unit = directives(ROOT / "systemd/hs-extract.service")
    wanted = {"Type": "notify", "Restart": "always", "StartLimitIntervalSec": "0", "WatchdogSec": "120"}
    assert {key: unit[key] for key in wanted} == {key: [value] for key, value in wanted.items()}
    assert "WantedBy" in unit


@pytest.mark.parametrize("name", ["hs-sglang", "hs-proof", "hs-scan", "hs-worker"])
def test_only_the_supervisor_is_enabled_and_only_it_decides_on_starts(name: str) -> None:
    unit = directives(ROOT / f"systemd/{name}.service")
    assert unit["Restart"] == ["no"]
    assert "WantedBy" not in unit
    assert unit["User"] == ["hs-extract"]


@pytest.mark.parametrize("path", UNITS, ids=NAMES)
def test_sy_01_sy_10_only_main_processes_speak_and_only_they_get_the_term(path: Path) -> None:
    unit = directives(path)
    assert unit["KillMode"] == ["mixed"]
    assert unit.get("NotifyAccess", ["none"])[0] in ("main", "none")


@pytest.mark.parametrize("path", UNITS, ids=NAMES)
def test_sy_11_nothing_that_recovery_needs_lies_in_tmp(path: Path) -> None:
    assert "/tmp" not in "".join(value for values in directives(path).values() for value in values)


@pytest.mark.root
def test_make_install_twice_verify_enable_and_uninstall_leave_a_host_as_it_was_but_for_data(box: Box) -> None:
    make = f"make -s -C {ROOT} ENGINE_VENV={ROOT}/.venv"
    box.sh(f"{make} install")
    first = box.sh("cd /usr/local; find . -newer /etc/hostname -type f -o -name hs-extract | sort")
    out = box.sh(f"echo 'edited = 1' >> /etc/hs-extract.toml; {make} install")
    print(out)
    assert box.sh("cd /usr/local; find . -newer /etc/hostname -type f -o -name hs-extract | sort") == first
    assert "edited = 1" in box.sh("cat /etc/hs-extract.toml")
    assert len(re.findall(r"Overall exposure level for hs-\w+\.service", out)) == len(UNITS)
    verified = box.exec(
        "systemd-analyze", "verify", *(f"/usr/local/lib/systemd/system/{n}" for n in NAMES), check=False
    )
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    box.exec("systemctl", "enable", "hs-extract")
    assert box.sh("stat -c '%U %a' /run/hs-extract/attest /var/log/hs-extract /dev/shm/hs-extract") == "\n".join(
        ("hs-extract 755", "hs-extract 755", "hs-extract 700")
    )
    assert box.sh("stat -c '%U %G %a' /var/lib/hs-extract /var/lib/hs-extract/leases /run/hs-extract").split("\n") == [
        "root hs-extract 1775", "root root 755", "root hs-extract 1775",
    ]  # fmt: skip
    box.sh("echo kept > /var/lib/hs-extract/x")
    box.sh(f"{make} uninstall; {make} uninstall")
    assert box.sh("ls /usr/local/lib/systemd/system /usr/local/bin | grep -c hs- || true") == "0"
    assert box.show("hs-extract", "LoadState") == "not-found"
    assert box.sh("cat /var/lib/hs-extract/x; tail -1 /etc/hs-extract.toml") == "kept\nedited = 1"


@pytest.mark.root
def test_the_account_of_the_engine_takes_an_order_that_it_may_not_remove() -> None:
    """The run folder is sticky, and the order is root's."""

    def as_nobody(run: object) -> object:
        os.setresuid(65534, 65534, 65534)
        return ordered_port(str(run))

    if os.geteuid() != 0:
        pytest.skip("needs root")
    with tempfile.TemporaryDirectory(dir="/run") as folder:
        Path(folder).chmod(0o1777)
        Path(folder, START_FILE).write_text('{"port": 30007}')
        child = Child("account", as_nobody)
        assert child.ask(folder, 30) == 30007
        child.close()
        assert ordered_port(folder) == 30007  # root may, and does
        assert ordered_port(folder) is None


def test_install_honours_destdir(tmp_path: Path) -> None:
    for target in ("install", "install"):
        subprocess.run(["make", "-s", "-C", ROOT, target, f"DESTDIR={tmp_path}"], check=True, capture_output=True)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()}
    assert {"etc/hs-extract.toml", "usr/local/share/man/man8/hs-extract.8"} <= found
    assert {f"usr/local/lib/systemd/system/{name}" for name in NAMES} <= found
    subprocess.run(["make", "-s", "-C", ROOT, "uninstall", f"DESTDIR={tmp_path}"], check=True, capture_output=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()}
    assert left == {"etc/hs-extract.toml"}


def test_the_man_page_is_well_formed() -> None:
    page = ROOT / "docs/hs-extract.8"
    if subprocess.run(["which", "groff"], capture_output=True).returncode:
        pytest.skip("groff is not installed")
    done = subprocess.run(["groff", "-man", "-ww", "-z", page], capture_output=True, text=True)
    assert done.stderr == ""
