"""A power cut at any instant of an eviction or a release: every state that the disk can be in."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from blklog import position, record, states

from hsdaemon.machine import disk
from hsdaemon.machine.lease import DROP_IN, Leases

pytestmark = pytest.mark.root
NAME = "vllm.service"


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


def torn(root: Path) -> str:
    """What no crash may leave; "" when all is well."""
    drop_in, kept = root / f"units/{NAME}.d" / DROP_IN, root / f"state/leases/{NAME}.json"
    leases = Leases(root / "units", root / "state")
    if drop_in.exists() and "ConditionPathExists=!" not in drop_in.read_text():
        return "half a drop-in under its name"
    if kept.exists() and leases.record(NAME) is None:
        return "half a record under its name"
    if drop_in.exists() and not kept.exists():
        return "kept down without a record"
    return ""


def crash(folder: Path, release: bool) -> tuple[int, list[str]]:
    """Number of states, and what was wrong in them, of a lease or of its release."""
    with record(folder) as mount:
        for name in ("units", "state"):
            (mount / name).mkdir()
        leases = Leases(mount / "units", mount / "state")
        if release:
            leases.write(NAME, "enabled", True)
        os.sync()
        begun = position(folder)
        if release:
            leases.lift(NAME)
        else:
            leases.write(NAME, "enabled", True)
        acknowledged = position(folder)
        if release:
            leases.forget(NAME)
    wrong, count = [], 0
    for place, image in states(folder, most=20):
        if place < begun:
            continue
        count += 1
        with mounted(image, folder / "look") as root:
            held = Leases(root / "units", root / "state").held(NAME)
            if fault := torn(root):
                wrong.append(f"{place}: {fault}")
            if place >= acknowledged and held == release:
                wrong.append(f"{place}: an acknowledged {'release' if release else 'lease'} is gone")
    return count, wrong


@pytest.fixture
def tools() -> None:
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    if shutil.which("qemu-storage-daemon") is None:
        pytest.skip("qemu-storage-daemon is not installed")


@pytest.mark.parametrize("release", [False, True], ids=["lease", "release"])
def test_ev_12_ev_13_no_power_cut_leaves_half_a_lease(tmp_path: Path, tools: None, release: bool) -> None:
    count, wrong = crash(tmp_path / "rec", release)
    assert count > 3
    assert wrong == []


@pytest.mark.parametrize("release", [False, True], ids=["lease", "release"])
def test_without_syncs_the_same_check_finds_something(
    tmp_path: Path, tools: None, monkeypatch: pytest.MonkeyPatch, release: bool
) -> None:
    monkeypatch.setattr(disk, "sync", lambda fd: None)
    _, wrong = crash(tmp_path / "rec", release)
    assert wrong
