"""Power cuts at every point of publication and commit: the short form of `make crash`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import crash
import pytest

from hsdaemon.machine import disk

pytestmark = pytest.mark.root


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory: the disk's own syncs would cost five times the rest."""
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    if shutil.which("qemu-storage-daemon") is None:
        pytest.skip("qemu-storage-daemon is not installed")
    with tempfile.TemporaryDirectory(prefix="hs-crash-", dir="/dev/shm") as made:
        yield Path(made) / "run"


def need(kind: str) -> None:
    if shutil.which(f"mkfs.{kind}") is None or f"\t{kind}\n" not in Path("/proc/filesystems").read_text():
        pytest.skip(f"no {kind} here")


@pytest.mark.parametrize("kind", crash.SYSTEMS)
def test_no_power_cut_takes_a_done_row_or_leaves_half_a_file(folder: Path, kind: str) -> None:
    need(kind)
    count, wrong = crash.enumerate_states(crash.record(folder, kind, elsewhere=False), most=4)
    assert count > 20
    assert wrong == []


def test_st_07_with_the_manifest_elsewhere_each_done_row_has_its_file(folder: Path) -> None:
    count, wrong = crash.enumerate_states(crash.record(folder, "ext4", elsewhere=True), most=8)
    assert count > 20
    assert wrong == []


def test_st_07_control_without_the_folders_fsync_done_rows_lack_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync_folder", lambda _: None)
        story = crash.record(folder, "ext4", elsewhere=True)
    _, wrong = crash.enumerate_states(story, most=8)
    assert any("the file is gone" in problem for problem in wrong)
