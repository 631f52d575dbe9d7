"""Durable writes: replace, append, read tolerantly, and what a failing fsync means."""

from __future__ import annotations

import contextlib
import errno
import mmap
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


def test_replace_by_root_needs_no_right_to_give_files_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without CAP_CHOWN, a network file system that has one owner for all."""
    path = tmp_path / "state.json"
    disk.replace(path, b"one")

    def refuse(*_args: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", refuse)
    disk.replace(path, b"two")
    assert path.read_bytes() == b"two"


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


def test_ballast_is_allocated_kept_and_given_up(tmp_path: Path) -> None:
    path, size = tmp_path / "ballast", 1 << 20
    disk.make_ballast(path, size)
    assert path.stat().st_blocks * 512 >= size
    inode = path.stat().st_ino
    disk.make_ballast(path, size)
    assert path.stat().st_ino == inode
    assert disk.drop_ballast(path)
    assert not disk.drop_ballast(path)


def test_ballast_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        os.ftruncate(fd, size // 2)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull):
        disk.make_ballast(tmp_path / "ballast", 1 << 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("way", ["linkat", "renameat2", "link"])
def test_a_draft_has_no_final_name_until_it_is_named_and_takes_no_others(
    way: str, direct: bool, tmp_path: Path
) -> None:
    for number, expected in ((0, None), (1, FileExistsError)):
        block = memoryview(mmap.mmap(-1, disk.BLOCK))
        block[:2] = b"%d!" % number
        with contextlib.closing(disk.Draft(tmp_path, "x", 2, disk.Abilities(way, direct), "0" * 16)) as draft:
            draft.write(block)
            draft.truncate(2)
            draft.sync()
            assert (tmp_path / "x").exists() == (number == 1)
            if expected is None:
                draft.name("x")
            else:
                with pytest.raises(expected):
                    draft.name("x")
    assert (tmp_path / "x").read_bytes() == b"0!"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_swept_folder_keeps_all_but_our_drafts(tmp_path: Path) -> None:
    kept = ["data_0.ckpt", ".hidden", ".x.tmp", "x.0123456789abcdef.tmp", ".x.0123456789abcdeg.tmp"]
    swept = [
        ".data_1.ckpt.0123456789abcdef.tmp",
        ".probe.0123456789abcdef.tmp",
        ".hs-probe.7.tmp",
        ".hs-extract-probe-7",
    ]
    for name in [*kept, *swept]:
        (tmp_path / name).touch()
    assert disk.sweep_drafts(tmp_path) == len(swept)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)


def test_what_is_set_aside_is_kept_under_another_suffix(tmp_path: Path) -> None:
    for content in (b"one", b"two"):
        (tmp_path / "x.pt").write_bytes(content)
        aside = disk.set_aside(tmp_path / "x.pt", tmp_path / "quarantine")
        assert (aside.read_bytes(), aside.suffix) == (content, ".bad")
    assert len(list((tmp_path / "quarantine").iterdir())) == 2


@pytest.mark.parametrize(
    ("number", "free", "kind"),
    [
        (errno.ENOSPC, 1 << 30, DiskFull),
        (errno.EDQUOT, 1 << 30, DiskFull),
        (None, 10, DiskFull),  # a library's own error without an errno: statvfs tells
        (errno.EIO, 10, disk.BadVolume),
        (errno.EROFS, 10, disk.BadVolume),
        (errno.EACCES, 1 << 30, disk.BadVolume),
    ],
)
def test_failures_are_told_by_errno_and_statvfs_not_by_their_text(
    number: int | None, free: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "is_full", lambda folder, needed: needed > free)
    error = OSError(number, "unexpected pos 576 vs 470") if number else OSError("unexpected pos 576 vs 470")
    assert isinstance(disk.explain(error, tmp_path, 4096), kind)
