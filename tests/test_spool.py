"""The worker's side of the spool."""

import contextlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

import numpy as np
import pytest
from fake_engine import dump_bytes, states
from loops import tmpfs

from hsdaemon import wire
from hsdaemon.data import spool
from hsdaemon.data.spool import Broken, Budget, Dump, Spool, SpoolTaken
from hsdaemon.errors import StoreError

MINE, DEAD = "0123456789abcdef", "fedcba9876543210"
MIB = 1 << 20


def rid(row: int, epoch: str = MINE) -> wire.RequestId:
    return wire.RequestId(epoch, row, 1, 4)


def put_dump(root: Path, which: wire.RequestId) -> None:
    header = wire.DumpHeader(
        str(which), 4, 4, 8, (1, 3, 4), "post", "bfloat16", False, "0.5.23", wire.CAPTURE_VERSION, "hs-1", 0, 0
    )
    ids = np.arange(4, dtype=np.int64)
    (root / wire.dump_name(which)).write_bytes(dump_bytes(header, ids, states(ids, 4, 8)))


def test_sp_02_leftovers_of_dead_epochs_go_before_work_and_foreign_names_stay(tmp_path: Path) -> None:
    for row in range(20):
        put_dump(tmp_path, rid(row, DEAD))
    (tmp_path / wire.part_name(rid(30, DEAD))).touch()
    (tmp_path / wire.error_name(rid(31, DEAD))).touch()
    foreign = ["nccl-1", "hs1-short.hs", ".hidden", f"{rid(1, DEAD)}.hs.bak", "data_1.ckpt"]
    for name in foreign:
        (tmp_path / name).touch()
    mine = Spool.open(tmp_path, MINE, 64 * MIB)
    assert sorted(os.listdir(tmp_path)) == sorted([*foreign, wire.EPOCH_FILE])
    assert mine.budget.free == mine.budget.total


def test_sp_04_a_missing_folder_is_made_anew_with_its_mode(tmp_path: Path) -> None:
    root = tmp_path / "a" / "spool"
    old = os.umask(0)
    try:
        Spool.open(root, MINE, MIB)
    finally:
        os.umask(old)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert (root / wire.EPOCH_FILE).read_text() == MINE


def test_an_open_folder_is_closed_to_others(tmp_path: Path) -> None:
    root = tmp_path / "spool"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    Spool.open(root, MINE, MIB)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_link_or_a_file_is_no_spool(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(StoreError, match="cannot use the spool"):
            Spool.open(tmp_path / name, MINE, MIB)


def test_sp_03_the_budget_is_the_smallest_of_setting_tmpfs_and_memory() -> None:
    reserve, large = spool.RESERVE_BYTES, 20_000 * MIB
    assert spool.capacity(100 * MIB, 10_000 * MIB, large, 1 << 62) == 100 * MIB
    assert spool.capacity(100 * MIB, reserve + 30 * MIB, large, 1 << 62) == 30 * MIB
    assert spool.capacity(100 * MIB, 10_000 * MIB, large, 60 * MIB) == 30 * MIB
    assert spool.capacity(100 * MIB, 0, large, 1 << 62) == 0
    assert spool.capacity(64 * MIB, 64 * MIB, 64 * MIB, 1 << 62) == 60 * MIB, "a small one is for dumps"


def test_rs_03_the_tightest_memory_limit_above_us_counts(tmp_path: Path) -> None:
    group = tmp_path / "cg" / "a.slice" / "b.service"
    group.mkdir(parents=True)
    (tmp_path / "cg" / "a.slice" / "memory.max").write_text("67108864\n")
    (group / "memory.max").write_text("max\n")
    member = tmp_path / "cgroup"
    member.write_text("0::/a.slice/b.service\n")
    assert spool.memory_limit(tmp_path / "cg", member) == 64 * MIB
    assert spool.memory_limit(tmp_path / "cg", tmp_path / "absent") > 1 << 60


def test_claims_never_exceed_the_budget() -> None:
    budget = Budget(10)
    assert budget.claim(6)
    assert not budget.claim(5)
    assert budget.free == 4
    budget.release(6)
    assert budget.claim(10)


def test_a_dump_counts_once_it_has_its_final_name(tmp_path: Path) -> None:
    mine = Spool.open(tmp_path, MINE, 64 * MIB)
    put_dump(tmp_path, rid(1))
    (tmp_path / wire.dump_name(rid(1))).rename(tmp_path / wire.part_name(rid(1)))
    assert mine.look(rid(1)) is None
    (tmp_path / wire.part_name(rid(1))).rename(tmp_path / wire.dump_name(rid(1)))
    found = mine.look(rid(1))
    assert isinstance(found, Dump)
    assert found.header.rid == str(rid(1))
    assert found.size == found.header.layout().total


@pytest.mark.parametrize("content", [b"", b"HSDUMP1\n", b"\0" * 8192, wire.MAGIC + b"\xff" * 5000])
def test_a_damaged_dump_is_said_so(tmp_path: Path, content: bytes) -> None:
    mine = Spool.open(tmp_path, MINE, 64 * MIB)
    (tmp_path / wire.dump_name(rid(1))).write_bytes(content)
    assert isinstance(mine.look(rid(1)), Broken)


def test_an_error_file_says_why_and_a_damaged_one_too(tmp_path: Path) -> None:
    mine = Spool.open(tmp_path, MINE, 64 * MIB)
    error = wire.DumpError(str(rid(2)), "capture", "out of memory")
    (tmp_path / wire.error_name(rid(2))).write_text(wire.to_json(error))
    assert mine.look(rid(2)) == error
    (tmp_path / wire.error_name(rid(2))).write_bytes(b"\xff{")
    assert isinstance(mine.look(rid(2)), Broken)
    mine.discard(rid(2))
    assert mine.look(rid(2)) is None


def test_sp_05_what_comes_late_for_a_request_given_up_is_removed_but_not_what_is_being_written(tmp_path: Path) -> None:
    mine = Spool.open(tmp_path, MINE, 64 * MIB)
    for row in (1, 2):
        put_dump(tmp_path, rid(row))
    (tmp_path / wire.part_name(rid(3))).touch()
    (tmp_path / "stranger").touch()
    assert mine.discard_others({rid(1)}) == 1
    left = {wire.dump_name(rid(1)), wire.part_name(rid(3)), "stranger", wire.EPOCH_FILE}
    assert set(os.listdir(tmp_path)) == left


def test_epochs_are_never_the_same() -> None:
    names = {spool.new_epoch() for _ in range(1000)}
    assert len(names) == 1000
    assert all(wire.parse_rid(str(wire.RequestId(name, 1, 1, 1))) for name in names)


def test_what_is_no_file_under_a_name_of_ours_holds_up_nobody(tmp_path: Path) -> None:
    (tmp_path / wire.dump_name(rid(1, DEAD))).mkdir()
    os.mkfifo(tmp_path / wire.dump_name(rid(2, DEAD)))
    (tmp_path / wire.dump_name(rid(3, DEAD))).symlink_to("/etc/hostname")
    mine = Spool.open(tmp_path, MINE, 64 * MIB)
    assert sorted(os.listdir(tmp_path)) == sorted([wire.EPOCH_FILE, wire.dump_name(rid(1, DEAD))])
    os.mkfifo(tmp_path / wire.dump_name(rid(4)))
    (tmp_path / wire.dump_name(rid(5))).mkdir()
    (tmp_path / wire.dump_name(rid(6))).symlink_to("/dev/zero")
    for row in (4, 5, 6):
        assert isinstance(mine.look(rid(row)), Broken)
        mine.discard(rid(row))
    os.mkfifo(tmp_path / wire.error_name(rid(7)))
    (tmp_path / wire.error_name(rid(8))).symlink_to("/dev/zero")
    for row in (7, 8):
        assert isinstance(mine.look(rid(row)), Broken)
        mine.discard(rid(row))
    mine.discard_others(set())
    assert sorted(os.listdir(tmp_path)) == sorted(
        [wire.EPOCH_FILE, wire.dump_name(rid(1, DEAD)), wire.dump_name(rid(5))]
    )
    assert Path("/etc/hostname").exists()


def test_one_living_worker_a_spool(tmp_path: Path) -> None:
    first = Spool.open(tmp_path, MINE, MIB)
    with pytest.raises(SpoolTaken, match="another output"):
        Spool.open(tmp_path, DEAD, MIB)
    assert (tmp_path / wire.EPOCH_FILE).read_text() == MINE
    first.close()
    Spool.open(tmp_path, DEAD, MIB).close()


def test_sp_04_a_folder_that_is_removed_under_the_worker_is_made_anew(tmp_path: Path) -> None:
    mine = Spool.open(tmp_path / "spool", MINE, MIB)
    mine.keep()
    assert mine.losses == 0
    shutil.rmtree(mine.root)
    mine.keep()
    assert mine.losses == 1
    assert (mine.root / wire.EPOCH_FILE).read_text() == MINE
    (mine.root / wire.EPOCH_FILE).unlink()
    (mine.root / wire.EPOCH_FILE).write_text(DEAD)
    with pytest.raises(SpoolTaken, match="another worker"):
        mine.keep()


def test_sp_04_a_folder_that_cannot_be_made_anew_is_one_error_and_no_other(tmp_path: Path) -> None:
    mine = Spool.open(tmp_path / "spool", MINE, MIB)
    shutil.rmtree(mine.root)
    mine.root.touch()
    for _ in range(2):
        with pytest.raises(StoreError, match="cannot use the spool"):
            mine.keep()
    mine.close()
    mine.root.unlink()


@pytest.mark.root
def test_sp_02_a_tmpfs_that_a_dead_worker_filled_to_the_last_byte_is_swept(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", 4) as root:
        (root / wire.EPOCH_FILE).write_text(DEAD)
        fill_up(root / wire.dump_name(rid(1, DEAD)))
        mine = Spool.open(root, MINE, 64 * MIB)
        assert os.listdir(root) == [wire.EPOCH_FILE]
        assert mine.budget.free > 3 * MIB
        mine.close()


@pytest.mark.root
def test_sp_03_the_budget_follows_what_others_leave_of_the_tmpfs(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", 32) as root:
        (root / "foreign").write_bytes(bytes(20 * MIB))
        mine = Spool.open(root, MINE, 64 * MIB)
        small = mine.budget.total
        assert small <= 10 * MIB
        (root / wire.dump_name(rid(1))).write_bytes(bytes(5 * MIB))
        mine.measure()
        assert abs(mine.budget.total - small) < MIB, "our own dumps are claimed, not taken"
        (root / "foreign").unlink()
        mine.measure()
        assert 29 * MIB < mine.budget.total < 31 * MIB
        mine.close()


@pytest.mark.root
def test_sp_03_a_tmpfs_that_is_small_for_a_while_is_waited_for_and_refuses_no_row(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", 1) as root:
        mine = Spool.open(root, MINE, 64 * MIB)
        for size, least in ((1, 0), (32, 29), (1, 0), (100, 64)):
            subprocess.run(["mount", "-o", f"remount,size={size}m", root], check=True)
            mine.measure()
            assert least * MIB <= mine.budget.total < max(least + 2, size) * MIB, "nothing larger is sent"
            assert mine.budget.most == 64 * MIB, "nor given up"
        mine.close()


def fill_up(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
