"""An output from its first open to its last row, and after whatever ended the worker before."""

from __future__ import annotations

from pathlib import Path

import pytest
from outputs import config_for, extract, lines, publish, ready

from hsdaemon.core.model import Unadopted
from hsdaemon.data.adopt import QUARANTINE, Adoption, FolderReport
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.manifest import State
from hsdaemon.data.probes import look_at_manifest
from hsdaemon.data.store import Store, adopt_tree, open_for_scan
from hsdaemon.machine import disk


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
    assert store.manifest.hold([claims[1].row]) == {}
    assert store.manifest.counts().pending == 2
    store.close()


def test_a_held_failed_row_stays_failed(tmp_path: Path) -> None:
    store = ready(config_for(tmp_path, lines(1)))
    claim = store.manifest.claim(1)[0]
    store.manifest.fail(claim.row, claim.lease, "x", "y")
    held = store.manifest.hold([0])
    store.manifest.let_go([(0, held[0], State.failed)])
    assert store.manifest.counts().failed == 1
    store.close()


def unknown_files(tmp_path: Path, rows: int) -> Store:
    """An output with whole, stamped samples of all rows under their old names, none of which the manifest knows."""
    store = ready(config_for(tmp_path, lines(rows)))
    for claim in store.manifest.claim(rows):
        path = store.root / publish(store, claim, tmp_path).path
        path.rename(path.with_suffix(".pt"))
    store.manifest.begin_epoch("later")
    return store


def adopt(store: Store) -> FolderReport:
    (report,) = Adoption(store.root, store.manifest, store.dataset, store.identity, unstamped=False).walk()
    return report


def test_many_small_files_are_adopted_with_few_syncs_each_before_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = unknown_files(tmp_path, 100)
    sync, done_at_sync = disk.sync_volume, []

    def watched(folder: Path) -> None:
        sync(folder)
        done_at_sync.append(store.manifest.counts().done)

    monkeypatch.setattr(disk, "sync_volume", watched)
    assert adopt(store).adopted == 100
    assert done_at_sync == [0, 64], "a group is durable before the manifest says so"
    assert store.manifest.counts().done == 100
    store.close()


def test_a_walk_that_died_between_two_names_of_a_file_is_finished_by_the_next(tmp_path: Path) -> None:
    store = unknown_files(tmp_path, 3)
    old = store.root / "rows_0-2000/data_1.pt"
    old.with_suffix(".ckpt").hardlink_to(old)
    assert adopt(store).adopted == 3
    assert sorted(path.name for path in old.parent.iterdir()) == ["data_0.ckpt", "data_1.ckpt", "data_2.ckpt"]
    assert not (store.root / QUARANTINE).exists()
    store.close()


def test_a_group_that_cannot_be_named_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = unknown_files(tmp_path, 3)

    def broken(folder: Path) -> None:
        raise OSError("no disk")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync_volume", broken)
        with pytest.raises(OSError, match="no disk"):
            adopt(store)
    assert store.manifest.counts().pending == 3
    assert adopt(store).adopted == 3
    store.close()


def test_a_scan_that_was_cut_short_shows_how_far_it_came(tmp_path: Path) -> None:
    store = unknown_files(tmp_path, 3)
    store.close()
    manifest_path(store.config.output).unlink()
    assert look_at_manifest(store.config.output) == Unadopted()
    scan = open_for_scan(store.config, "scan")
    adopt_tree(scan, unstamped=False)
    scan.close()
    assert look_at_manifest(store.config.output) == Unadopted(3, 3)
