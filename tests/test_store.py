"""An output from its first open to its last row, and after whatever ended the worker before."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from outputs import config_for, extract, lines, publish, ready
from samples import dump_of, publisher_of, run_of, sample_of, states_of

from hsdaemon.core.model import Unadopted
from hsdaemon.data import examine as examine_module
from hsdaemon.data.adopt import QUARANTINE, Adoption, FolderReport
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.examine import Unfit, Whole, examine
from hsdaemon.data.formats import FORMATS
from hsdaemon.data.manifest import State
from hsdaemon.data.probes import look_at_manifest
from hsdaemon.data.publish import Published, Rejected
from hsdaemon.data.store import Store, adopt_tree, open_for_scan
from hsdaemon.data.stream import StateCheck
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


def test_a_file_that_a_worker_has_just_named_is_no_other_name_of_itself(tmp_path: Path) -> None:
    """Row 0's own file is there, its commit is not, and a copy of it has a name that sorts before."""
    store = ready(config_for(tmp_path, [{**row, "id": f"a{i}"} for i, row in enumerate(lines(2))]))
    mine = publish(store, store.manifest.claim(1)[0], tmp_path)
    own = store.root / mine.path
    own.with_name("a0.pt").write_bytes(own.read_bytes())
    adopt(store)
    assert own.exists()
    store.manifest.commit([mine])
    assert list(
        Adoption(store.root, store.manifest, store.dataset, store.identity, unstamped=False).walk()[0].gaps
    ) == [1]
    store.close()


def test_a_done_row_whose_path_is_wrong_keeps_its_file(tmp_path: Path) -> None:
    store = ready(config_for(tmp_path, lines(3)))
    extract(store, tmp_path)
    own = store.root / "rows_0-2000/data_1.ckpt"
    store.manifest.db.execute("UPDATE rows SET path = 'rows_0-2000/data_1.ckpu' WHERE row = 1")
    adopt(store)
    assert own.exists()
    store.close()
    again = ready(store.config)
    assert again.manifest.counts().done == 3, "queued because its path is empty, adopted because the file is there"
    again.close()


@pytest.mark.parametrize("kind", ["folder", "link", "link to it", "pipe"])
def test_what_else_has_a_samples_name_is_put_aside(tmp_path: Path, kind: str) -> None:
    store = unknown_files(tmp_path, 2)
    old = store.root / "rows_0-2000/data_1.pt"
    own = old.with_suffix(".ckpt")
    make: dict[str, Callable[[], None]] = {
        "folder": own.mkdir,
        "link": lambda: own.symlink_to("/etc/hostname"),
        "link to it": lambda: own.symlink_to(old),
        "pipe": lambda: os.mkfifo(own),
    }
    make[kind]()
    assert adopt(store).adopted == 2
    assert own.is_file()
    assert not own.is_symlink()
    assert len(list((store.root / QUARANTINE).iterdir())) == 1
    store.close()


def test_both_names_of_a_file_in_two_folders_are_one_file(tmp_path: Path) -> None:
    """A walk that moved files into the folder of their trainer's size and died."""
    store = unknown_files(tmp_path, 2)
    other = store.root / "rows_0-1000"
    other.mkdir()
    for old in (store.root / "rows_0-2000").iterdir():
        old.rename(other / old.name)
    (store.root / "rows_0-2000/data_1.ckpt").hardlink_to(other / "data_1.pt")
    walk = Adoption(store.root, store.manifest, store.dataset, store.identity, unstamped=False)
    assert sum(report.adopted for report in walk.walk()) == 2
    assert sorted(path.name for path in (store.root / "rows_0-2000").iterdir()) == ["data_0.ckpt", "data_1.ckpt"]
    assert not (store.root / QUARANTINE).exists()
    store.close()


@pytest.mark.parametrize("fmt", sorted(FORMATS))
@pytest.mark.parametrize("plane", range(4))
@pytest.mark.parametrize("tokens", [slice(None), slice(3, 4)], ids=["every token", "one token"])
def test_adoption_refuses_what_publication_refuses(fmt: str, plane: int, tokens: slice, tmp_path: Path) -> None:
    """One state of one layer that is all zero, beside others that are not."""
    run, sample, states = run_of(fmt), sample_of(0, 9), states_of(9)
    publisher = publisher_of(tmp_path / "out", run)
    good = publisher.publish(sample, dump_of(tmp_path, sample, run, states))
    assert isinstance(good, Published)
    assert isinstance(examine(tmp_path / "out" / good.path, sample, run), Whole)
    states[tokens, plane] = 0
    refused = publisher.publish(sample, dump_of(tmp_path, sample, run, states))
    assert isinstance(refused, Rejected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateCheck, "finish", lambda _: None)  # another program's file, or one of before this check
        made = publisher_of(tmp_path / "other", run).publish(sample, dump_of(tmp_path, sample, run, states))
    assert isinstance(made, Published)
    found = examine(tmp_path / "other" / made.path, sample, run)
    assert isinstance(found, Unfit)
    assert found.code == "states"


def test_a_file_on_a_bad_sector_is_damaged_before_it_is_mapped_and_one_of_another_run_is_not_read_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped page that cannot be read ends the process; of a foreign tree nothing but heads is read at each start."""
    run, sample = run_of("specforge"), sample_of(0, 9)
    made = publisher_of(tmp_path / "out", run).publish(sample, dump_of(tmp_path, sample, run, states_of(9)))
    assert isinstance(made, Published)

    def unreadable(_: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    mapped: list[Path] = []
    monkeypatch.setattr(examine_module, "file_digest", unreadable)
    monkeypatch.setattr(examine_module, "check_content", mapped.append)
    found = examine(tmp_path / "out" / made.path, sample, run)
    assert isinstance(found, Unfit)
    assert (found.code, "Input/output error" in found.reason) == ("damaged", True)
    assert mapped == []
    other = examine(tmp_path / "out" / made.path, sample, run_of("specforge", dtype="float16"))
    assert isinstance(other, Unfit)
    assert other.code == "format"
