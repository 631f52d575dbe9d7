"""An output from its first open to its last row, and after whatever ended the worker before."""

from __future__ import annotations

from pathlib import Path

from outputs import config_for, extract, lines, publish, ready

from hsdaemon.data.adopt import Adoption
from hsdaemon.data.manifest import State


def test_an_output_is_finished_across_restarts(tmp_path: Path) -> None:
    config = config_for(tmp_path, lines(25))
    store = ready(config)
    assert extract(store, tmp_path, 10) == 10
    store.close()
    store = ready(config)
    assert store.manifest.counts().done == 10
    assert extract(store, tmp_path) == 15
    assert store.manifest.counts().finished
    store.close()


def test_a_named_file_whose_commit_is_missing_is_adopted_at_the_next_start(tmp_path: Path) -> None:
    config = config_for(tmp_path, lines(4))
    store = ready(config)
    claims = store.manifest.claim(2)
    publish(store, claims[0], tmp_path)
    store.manifest.close()
    store._lock.release()
    again = ready(config)
    counts = again.manifest.counts()
    assert (counts.done, counts.pending) == (1, 3)
    assert [s.row for s in again.manifest.stored()] == [0]
    again.close()


def test_a_walk_beside_the_work_leaves_leased_rows_and_their_files_alone(tmp_path: Path) -> None:
    """The file under a leased row's name may be the one that its worker has just published."""
    config = config_for(tmp_path, lines(4))
    store = ready(config)
    claims = store.manifest.claim(2)
    mine = publish(store, claims[0], tmp_path)
    (store.root / mine.path).with_name("data_1.ckpt").write_bytes(b"half a file")
    (store.root / mine.path).with_name("data_2.ckpt").write_bytes(b"half a file")
    (report,) = Adoption(store.root, store.manifest, store.dataset, store.identity, unstamped=False).walk()
    assert list(report.bad) == [2], "row 2 is nobody's"
    assert store.manifest.counts().leased == 2
    store.manifest.commit([mine])
    assert store.manifest.hold(claims[1].row) is None
    assert store.manifest.counts().pending == 2
    store.close()


def test_a_held_failed_row_stays_failed(tmp_path: Path) -> None:
    store = ready(config_for(tmp_path, lines(1)))
    claim = store.manifest.claim(1)[0]
    store.manifest.fail(claim.row, claim.lease, "x", "y")
    lease = store.manifest.hold(0)
    assert lease is not None
    store.manifest.let_go(0, lease, State.failed)
    assert store.manifest.counts().failed == 1
    store.close()
