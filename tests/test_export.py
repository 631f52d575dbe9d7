"""`hs-extract export speculators`: what it makes from a real manifest, and what it refuses."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import msgspec
import numpy as np
import outputs
import pyarrow as pa
import pytest
import torch

from hsdaemon import cli
from hsdaemon.cli import export
from hsdaemon.config import Config
from hsdaemon.data import sqlite
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.formats import open_sample


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """An output in speculators' format with 5 of 7 rows done; every verb finds this configuration."""
    made = outputs.config_for(tmp_path, outputs.lines(7), format="speculators")
    made = msgspec.structs.replace(made, model=msgspec.structs.replace(made.model, norm="pre"))
    monkeypatch.setattr(export, "load", lambda _: made)
    store = outputs.ready(made)
    outputs.extract(store, tmp_path, 5)
    store.close()
    return made


def test_the_table_and_the_links_are_the_done_rows_in_order(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "speculators"]) == 0
    target = Path(config.output.path) / "export"
    assert capsys.readouterr().out == f"export: ok rows=5 folder={target}\n"
    with pa.memory_map(str(target / "data-00000-of-00001.arrow")) as source:
        table = pa.ipc.open_stream(source).read_all()
    assert table.column_names == ["input_ids", "loss_mask", "seq_len"]
    rows = [json.loads(line) for line in Path(config.data.path).read_text().splitlines()][:5]
    assert table["input_ids"].to_pylist() == [row["input_ids"] for row in rows]
    assert table["loss_mask"].to_pylist() == [row["loss_mask"] for row in rows]
    for number, row in enumerate(rows):
        link = target / f"hidden_states/hs_{number}.safetensors"
        assert not link.readlink().is_absolute()
        assert open_sample(link).ids.tolist() == row["input_ids"]
    masked = np.concatenate([np.array(row["input_ids"])[np.array(row["loss_mask"]) == 1] for row in rows])
    assert torch.load(target / "token_freq.pt", weights_only=True) == {
        int(token): int(count) for token, count in zip(*np.unique(masked, return_counts=True), strict=True)
    }


def test_a_moved_output_keeps_its_links(config: Config, tmp_path: Path) -> None:
    assert cli.main(["export", "speculators"]) == 0
    moved = Path(config.output.path).rename(tmp_path / "volume/elsewhere")
    assert len(open_sample(moved / "export/hidden_states/hs_0.safetensors").ids) == 12


def test_a_stored_path_that_leads_out_of_the_output_is_linked_nowhere(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(sqlite.open_manifest(manifest_path(config.output))) as manifest, manifest.write():
        manifest.db.execute("UPDATE rows SET path = '../../data.jsonl' WHERE row = 2")
    assert cli.main(["export", "speculators"]) == 65
    assert "row 2: its path leads out of the output" in capsys.readouterr().err
    assert not (Path(config.output.path) / "export").exists()


def test_an_edited_row_is_refused_and_leaves_nothing(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(config.data.path).read_text().splitlines()
    rows = [json.loads(line) for line in text]
    rows[3]["input_ids"][5] = (rows[3]["input_ids"][5] + 1) % 10
    outputs.write_jsonl(Path(config.data.path), rows)
    assert cli.main(["export", "speculators"]) != 0
    assert "row" in capsys.readouterr().err
    assert not (Path(config.output.path) / "export").exists()
    assert [p.name for p in Path(config.output.path).iterdir() if p.name.startswith(".export")] == []


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "load", lambda _: outputs.config_for(tmp_path, outputs.lines(1)))
    assert cli.main(["export", "speculators"]) == 78
