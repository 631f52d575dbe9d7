"""An output from its first open to its last row, and after whatever ended the worker before."""

from __future__ import annotations

from pathlib import Path

from outputs import config_for, extract, lines, publish, ready


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
