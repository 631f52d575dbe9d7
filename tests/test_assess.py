"""What survived a crash, told by names and sizes: the incident's tree, odd trees, damaged weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from hsdaemon.data.survey import survey
from hsdaemon.engine import weights


def fill(root: Path, first: int, rows: list[int], size: int = 3, suffix: str = ".ckpt") -> None:
    folder = root / f"rows_{first}-{first + 2000}"
    folder.mkdir(exist_ok=True)
    for row in rows:
        (folder / f"data_{row}{suffix}").write_bytes(b"x" * size)


def test_st_22_the_incidents_tree_is_counted_by_folder_and_kind_of_gap(tmp_path: Path) -> None:
    gaps = {4321, 6789, 9001}
    for first in range(0, 18000, 2000):
        fill(tmp_path, first, [row for row in range(first, first + 2000) if row not in gaps])
    fill(tmp_path, 18000, list(range(18000, 18424)))
    found = survey(tmp_path, 37312)
    assert (found.files, found.bytes, found.old, found.named) == (18421, 3 * 18421, 3, True)
    odd = {folder.name: (folder.files, folder.old, folder.tail) for folder in found.folders if folder.files != 2000}
    assert odd == {
        "rows_4000-6000": (1999, 1, 0),
        "rows_6000-8000": (1999, 1, 0),
        "rows_8000-10000": (1999, 1, 0),
        "rows_18000-20000": (424, 0, 1576),
    }


def test_an_empty_or_missing_tree_is_counted_as_nothing(tmp_path: Path) -> None:
    assert survey(tmp_path / "none").files == 0
    assert survey(tmp_path).folders == ()


def test_st_06_empty_files_temporary_ones_and_strangers_are_no_samples(tmp_path: Path) -> None:
    fill(tmp_path, 0, [0, 1, 2])
    fill(tmp_path, 0, [3, 4], size=0)
    folder = tmp_path / "rows_0-2000"
    (folder / ".data_5.ckpt").write_bytes(b"x")
    (folder / "notes.txt").write_bytes(b"x")
    (folder / "data_6.ckpt").symlink_to(folder / "data_0.ckpt")
    (folder / "data_7.ckpt").mkdir()
    (tmp_path / "quarantine").mkdir()
    found = survey(tmp_path, 10)
    assert (found.files, found.folders[0].empty) == (3, 2)
    assert (found.old, found.tail) == (0, 7)


def shard(path: Path, size: int = 64) -> Path:
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"w" * size)
    return path


def index(folder: Path, *names: str) -> None:
    table = {f"tensor{n}": name for n, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def test_whole_weights_are_whole(tmp_path: Path) -> None:
    index(tmp_path, "a.safetensors", "b.safetensors", "a.safetensors")
    total = sum(shard(tmp_path / f"{name}.safetensors").stat().st_size for name in "ab")
    found = weights.look(tmp_path)
    assert (found.whole, found.shards, found.bytes) == (True, 2, total)


@pytest.mark.parametrize(
    ("harm", "missing", "cut"),
    [
        (lambda path: path.unlink(), ("b.safetensors",), ()),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), (), ("b.safetensors",)),
        (lambda path: path.write_bytes(b""), (), ("b.safetensors",)),
        (lambda path: path.write_bytes(b"\xff" * 200), (), ("b.safetensors",)),
    ],
    ids=["gone", "a byte short", "empty", "garbage"],
)
def test_a_damaged_shard_is_named(tmp_path: Path, harm: object, missing: tuple[str], cut: tuple[str]) -> None:
    index(tmp_path, "a.safetensors", "b.safetensors")
    shard(tmp_path / "a.safetensors")
    harm(shard(tmp_path / "b.safetensors"))  # type: ignore[operator]  # a table of callables
    found = weights.look(tmp_path)
    assert (found.whole, found.missing, found.cut) == (False, missing, cut)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}'])
def test_a_damaged_index_never_leaves_the_folder(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    shard(tmp_path / "a.safetensors")
    found = weights.look(tmp_path)
    assert not [name for name in found.missing if "/" in name]
    assert found.shards == 1
