"""The worker's side of the spool."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from fake_engine import dump_bytes, states

from hsdaemon import wire
from hsdaemon.data import spool
from hsdaemon.data.spool import Broken, Budget, Dump, Spool
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
    reserve = spool.RESERVE_BYTES
    assert spool.capacity(100 * MIB, 10_000 * MIB, 1 << 62) == 100 * MIB
    assert spool.capacity(100 * MIB, reserve + 30 * MIB, 1 << 62) == 30 * MIB
    assert spool.capacity(100 * MIB, 10_000 * MIB, 60 * MIB) == 30 * MIB
    assert spool.capacity(100 * MIB, 0, 1 << 62) == 0


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
