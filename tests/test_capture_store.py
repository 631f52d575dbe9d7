"""The spool as the capture sees it: whole dumps or none, a hard budget, no signal on a full tmpfs."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fake_sglang
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdaemon import wire
from hsdaemon.capture.store import STALE_S, STALE_TURNS, SampleFailed, Store

HIDDEN = 4
HEADER = wire.DumpHeader("", 0, 0, HIDDEN, (1, 3, 4), "post", "float32", False, "0.5.23", 1, "hs-test", 0, 0)
ROW = 4 * HIDDEN  # bytes of one state


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store(folder: Path, clock: Clock | None = None, **changes: object) -> Store:
    made = Store(fake_sglang.config(folder, **changes), HEADER, *([clock] if clock else []))
    made.start()
    return made


def rid(tokens: int, row: int = 1, epoch: str = fake_sglang.EPOCH) -> wire.RequestId:
    return wire.RequestId(epoch, row, 1, tokens)


def put(spool: Store, request: wire.RequestId, start: int, count: int) -> bool:
    """Write rows whose values are their positions."""
    ids = np.arange(start, start + count, dtype=np.int64)
    states = np.repeat(ids.astype(np.float32)[:, None], 4 * HIDDEN, axis=1)
    return spool.write(request, start, raw(ids), [raw(states[:, : 3 * HIDDEN]), raw(states[:, 3 * HIDDEN :])])


def raw(array: np.ndarray) -> memoryview:
    return memoryview(array.tobytes())


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "spool").iterdir()} - {wire.EPOCH_FILE}


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6), back=st.integers(0, 5))
def test_pieces_join_into_one_dump_whatever_their_sizes_and_after_a_retraction(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], back: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    request = rid(sum(cuts))
    spool = store(folder, budget=wire.Layout(sum(cuts), HIDDEN, 3, "float32", False).total)
    starts = [0, *itertools.accumulate(cuts)]
    for start, count in list(zip(starts, cuts, strict=False))[: min(back, len(cuts) - 1)]:
        put(spool, request, start, count)  # taken back by the engine: it starts again at row 0
    done = [put(spool, request, start, count) for start, count in zip(starts, cuts, strict=False)]
    assert done == [False] * (len(cuts) - 1) + [True]
    assert names(folder) == {wire.dump_name(request)}
    data = (folder / "spool" / wire.dump_name(request)).read_bytes()
    header = wire.unpack_header(data)
    layout = header.layout()
    assert (len(data), header.rows, header.tokens) == (layout.total, sum(cuts), sum(cuts))
    for at, row in zip(layout.plane_offsets, layout.row_bytes, strict=True):
        plane = np.frombuffer(data, np.float32, layout.tokens * row // 4, at).reshape(layout.tokens, -1)
        assert (plane == np.arange(layout.tokens)[:, None]).all()


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([(3, 4)], "row 3 came where nothing was next"),
        ([(0, 3), (4, 3)], "row 4 came where row 3 was next"),
        ([(0, 3), (2, 5)], "row 2 came where row 3 was next"),
        ([(0, 8)], "came of a prompt of 7 tokens"),
    ],
)
def test_a_hole_an_overlap_or_a_row_too_many_fails_the_sample(
    tmp_path: Path, pieces: list[tuple[int, int]], reason: str
) -> None:
    spool, request = store(tmp_path), rid(7)
    for start, count in pieces[:-1]:
        put(spool, request, start, count)
    with pytest.raises(SampleFailed, match=reason):
        put(spool, request, *pieces[-1])
    assert names(tmp_path) == {wire.error_name(request)}
    error = wire.dump_error((tmp_path / "spool" / wire.error_name(request)).read_text())
    assert error.code == "states"
    assert not put(spool, request, 5, 2), "later pieces of a failed sample are ignored"
    assert names(tmp_path) == {wire.error_name(request)}


def test_rows_never_captured_are_marked_in_the_part(tmp_path: Path) -> None:
    spool, request = store(tmp_path), rid(7)
    put(spool, request, 0, 3)
    data = (tmp_path / "spool" / wire.part_name(request)).read_bytes()
    assert np.frombuffer(data, np.int64, 7, wire.HEADER_BYTES).tolist() == [0, 1, 2, -1, -1, -1, -1]
    with pytest.raises(ValueError, match="no header"):
        wire.unpack_header(data)


def test_sp_05_partial_dumps_of_the_dead_are_swept(tmp_path: Path) -> None:
    clock = Clock()
    spool = store(tmp_path, clock)
    put(spool, rid(7, row=1), 0, 3)
    clock.now = STALE_S - 1
    put(spool, rid(7, row=2), 0, 3)
    spool.sweep()
    assert len(names(tmp_path)) == 2
    clock.now = STALE_S + 1
    spool.sweep()
    assert names(tmp_path) == {wire.part_name(rid(7, row=2))}
    (tmp_path / "spool" / wire.EPOCH_FILE).write_text("00000000000000e2")
    spool.sweep()
    assert names(tmp_path) == set()
    assert spool.used() == 0


def test_sp_05_a_part_that_forwards_pass_by_or_that_the_worker_gave_up_is_dropped(tmp_path: Path) -> None:
    spool = store(tmp_path)
    passed, given_up = rid(7, row=1), rid(7, row=2)
    put(spool, passed, 0, 3)
    for _ in range(STALE_TURNS):
        spool.turn()
    put(spool, given_up, 0, 3)
    assert names(tmp_path) == {wire.part_name(passed), wire.part_name(given_up)}
    (tmp_path / "spool" / wire.part_name(given_up)).unlink()
    spool.turn()
    assert names(tmp_path) == set()
    for request in (passed, given_up):
        with pytest.raises(SampleFailed, match="nothing was next"):
            put(spool, request, 3, 4)


def test_sp_02_parts_of_a_former_engine_go_at_start_and_foreign_names_stay(tmp_path: Path) -> None:
    put(store(tmp_path), rid(7), 0, 3)
    for name in ("theirs.part", ".theirs.part", f".{rid(7)}x.part"):
        (tmp_path / "spool" / name).write_text("not ours")
    assert wire.part_name(rid(7)) in names(tmp_path)
    store(tmp_path)
    assert names(tmp_path) == {"theirs.part", ".theirs.part", f".{rid(7)}x.part"}


def test_the_budget_is_hard_and_a_sample_waits_for_room(tmp_path: Path) -> None:
    size = wire.Layout(7, HIDDEN, 3, "float32", False).total
    spool = store(tmp_path, budget=2 * size, wait_s=20.0)
    for row in (1, 2):
        put(spool, rid(7, row), 0, 7)
    first = tmp_path / "spool" / wire.dump_name(rid(7, 1))
    seen: list[int] = []

    def reader() -> None:
        seen.append(spool.used())
        first.unlink()

    timer = threading.Timer(0.3, reader)
    timer.start()
    assert put(spool, rid(7, 3), 0, 7)
    timer.join()
    assert max(*seen, spool.used()) <= 2 * size
    assert names(tmp_path) == {wire.dump_name(rid(7, row)) for row in (2, 3)}


def test_a_full_spool_fails_the_sample_after_its_wait(tmp_path: Path) -> None:
    size = wire.Layout(7, HIDDEN, 3, "float32", False).total
    spool = store(tmp_path, budget=size, wait_s=0.1)
    put(spool, rid(7, 1), 0, 7)
    with pytest.raises(SampleFailed, match="no room") as caught:
        put(spool, rid(7, 2), 0, 7)
    assert caught.value.code == "spool-full"
    assert wire.error_name(rid(7, 2)) in names(tmp_path)


def test_samples_of_one_forward_share_one_wait_for_room(tmp_path: Path) -> None:
    clock = Clock()
    size = wire.Layout(7, HIDDEN, 3, "float32", False).total
    spool = store(tmp_path, clock, budget=size, wait_s=60.0)
    put(spool, rid(7, 1), 0, 7)
    spool.turn()
    clock.now = 60.0  # spent on the first sample of this forward
    for row in range(2, 40):
        with pytest.raises(SampleFailed, match="no room"):
            put(spool, rid(7, row), 0, 7)


def test_sp_09_a_sample_larger_than_the_budget_fails_at_once(tmp_path: Path) -> None:
    clock = Clock()
    spool = store(tmp_path, clock, budget=4096, wait_s=1e9)
    with pytest.raises(SampleFailed, match="more than the whole budget"):
        put(spool, rid(7), 0, 7)


def test_sp_04_a_spool_that_vanished_is_made_anew_with_its_mode(tmp_path: Path) -> None:
    spool = store(tmp_path)
    (tmp_path / "spool" / wire.EPOCH_FILE).unlink()
    (tmp_path / "spool").rmdir()
    assert put(spool, rid(7), 0, 7)
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700


def test_a_name_that_is_taken_by_a_folder_fails_one_sample_only(tmp_path: Path) -> None:
    spool = store(tmp_path)
    (tmp_path / "spool" / wire.part_name(rid(7))).mkdir()
    with pytest.raises(SampleFailed, match="cannot write"):
        put(spool, rid(7), 0, 7)
    assert put(spool, rid(7, 2), 0, 7)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("this machine mounts no tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


FULL = """
import sys, pathlib
sys.path.insert(0, sys.argv[2])
import test_capture_store as t
from hsdaemon import wire
folder = pathlib.Path(sys.argv[1])
spool = t.store(folder, budget=1 << 30, wait_s=float(sys.argv[3]))
try:
    print(t.put(spool, t.rid(120000), 0, 7))
except t.SampleFailed as error:
    print(error.code)
"""


@pytest.mark.root
def test_sp_01_a_tmpfs_too_small_is_an_error_of_the_sample_and_never_signal_7(tmpfs: Path) -> None:
    assert wire.Layout(120000, HIDDEN, 3, "float32", False).total > 8 << 20
    words = [sys.executable, "-c", FULL, str(tmpfs), str(Path(__file__).parent), "0.2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != -signal.SIGBUS
    assert done.stdout.split() == ["spool-full"], done.stderr


@pytest.mark.root
def test_sp_01_the_sample_waits_for_space_on_a_full_tmpfs(tmpfs: Path) -> None:
    foreign = tmpfs / "foreign"
    foreign.write_bytes(b"x" * (5 << 20))
    spool = store(tmpfs, budget=1 << 30, wait_s=20.0)
    started = threading.Timer(0.3, foreign.unlink)
    started.start()
    request = rid(60000)
    before = time.monotonic()
    put(spool, request, 0, 7)
    started.join()
    assert not foreign.exists()
    assert time.monotonic() > before
    size = (tmpfs / "spool" / wire.part_name(request)).stat().st_size
    assert size == wire.Layout(60000, HIDDEN, 3, "float32", False).total
