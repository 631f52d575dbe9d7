"""Durable writes: replace, append, read tolerantly, and what a failing fsync means."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hsdaemon.errors import DiskFull, StoreError
from hsdaemon.machine import disk

Sync = Callable[..., list[int]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Sync:
    """Make the n-th fsyncs (counted from 1) fail with `number`; gives the inodes that were synced, in order."""

    def install(when: set[int], number: int = errno.EIO) -> list[int]:
        inodes: list[int] = []
        real = os.fsync

        def fsync(fd: int) -> None:
            inodes.append(os.fstat(fd).st_ino)
            if len(inodes) in when:
                raise OSError(number, os.strerror(number))
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        return inodes

    return install


def test_replace_puts_new_content_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    disk.replace(path, b"one")
    disk.replace(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_replace_writes_a_new_inode_after_a_failed_sync(tmp_path: Path, failing: Sync) -> None:
    path = tmp_path / "state.json"
    inodes = failing({1})
    disk.replace(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_ino == inodes[1]
    assert len(inodes) == 3  # lost file, new file, folder


def test_replace_holds_after_two_failed_syncs_and_keeps_the_old_content(tmp_path: Path, failing: Sync) -> None:
    path = tmp_path / "state.json"
    disk.replace(path, b"one")
    failing({1, 2})
    with pytest.raises(disk.BadVolume) as caught:
        disk.replace(path, b"two")
    assert caught.value.errno == errno.EIO
    assert path.read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_replace_on_a_full_disk_is_a_pause(tmp_path: Path, failing: Sync) -> None:
    failing({1}, errno.ENOSPC)
    with pytest.raises(DiskFull, match="disk full"):
        disk.replace(tmp_path / "x", b"two")
    assert list(tmp_path.iterdir()) == []


def test_append_keeps_a_torn_end_apart(tmp_path: Path) -> None:
    path = tmp_path / "history"
    disk.append(path, b"one")
    with path.open("ab") as file:
        file.write(b'{"torn')
    assert disk.read_lines(path) == [b"one"]
    disk.append(path, b"two")
    assert disk.read_lines(path) == [b"one", b'{"torn', b"two"]


def test_append_moves_to_a_new_inode_after_a_failed_sync(tmp_path: Path, failing: Sync) -> None:
    path = tmp_path / "history"
    disk.append(path, b"one")
    before = path.stat().st_ino
    failing({1})
    disk.append(path, b"two")
    assert disk.read_lines(path) == [b"one", b"two"]
    assert path.stat().st_ino != before


def test_append_takes_back_half_a_line_when_space_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history"
    disk.append(path, b"one")
    real = os.write
    state = {"calls": 0}

    def write(fd: int, data: memoryview) -> int:
        state["calls"] += 1
        if state["calls"] > 1:
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data[:2])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(DiskFull):
        disk.append(path, b"two")
    assert path.read_bytes() == b"one\n"


def test_read_is_tolerant_of_absence_and_refuses_a_huge_file(tmp_path: Path) -> None:
    assert disk.read(tmp_path / "absent") is None
    assert disk.read_lines(tmp_path / "absent") == []
    (tmp_path / "big").write_bytes(b"x" * 11)
    with pytest.raises(StoreError, match="larger than 10 bytes"):
        disk.read(tmp_path / "big", 10)


def test_read_lines_gives_the_whole_lines_at_the_end_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b"first\nsecond\nthird\n")
    assert disk.read_lines(path, 14) == [b"second", b"third"]
    assert disk.read_lines(path, 8) == [b"third"]


def test_make_folder_syncs_its_parent_and_never_makes_one(tmp_path: Path, failing: Sync) -> None:
    inodes = failing(set())
    disk.make_folder(tmp_path / "a")
    disk.make_folder(tmp_path / "a")
    assert inodes == [tmp_path.stat().st_ino] * 2  # one that is there may be younger than a crash
    with pytest.raises(FileNotFoundError):
        disk.make_folder(tmp_path / "gone" / "a")


def test_probe_write_tells_a_folder_that_takes_no_writes(tmp_path: Path) -> None:
    assert disk.probe_write(tmp_path) is None
    error = disk.probe_write(tmp_path / "absent")
    assert error is not None
    assert error.errno == errno.ENOENT
    assert list(tmp_path.iterdir()) == []
