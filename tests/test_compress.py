"""`hs-extract export compressed` and `restored`: every bit comes back, and no changed bit goes unnoticed."""

from __future__ import annotations

import io
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from outputs import config_for, extract, lines, ready
from test_cases_manifest import config_file, outcome

from hsdaemon.cli import main
from hsdaemon.config import Config
from hsdaemon.data import compress
from hsdaemon.data.compress import Header, pack, read_header, unpack
from hsdaemon.errors import DataError


def packed(payload: bytes, item: int = 2) -> bytes:
    header = Header(len(payload), item, xxhash.xxh3_128(payload).hexdigest())
    return b"".join(pack(io.BytesIO(payload), header))


def states(tokens: int = 300, seed: int = 0) -> bytes:
    """bfloat16 with the spread of a residual stream."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((tokens, 64), np.float32) * np.exp(rng.standard_normal(64, np.float32))
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


@given(payload=st.binary(max_size=300), item=st.sampled_from([2, 4]), block=st.sampled_from([7, 16, 64]))
def test_any_bytes_come_back(payload: bytes, item: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(compress, "BLOCK", block)
        path = Path(folder) / "x.hsz"
        path.write_bytes(packed(payload, item))
        assert b"".join(unpack(path)) == payload


def test_states_shrink_by_a_quarter_at_least() -> None:
    payload = states()
    assert len(packed(payload)) < 0.75 * len(payload)


def test_a_changed_bit_or_a_cut_is_never_restored(tmp_path: Path) -> None:
    payload = states(20)
    whole = packed(payload)
    path, draw = tmp_path / "x.hsz", random.Random(1)
    for at in [*range(120), *draw.sample(range(len(whole)), 200), *range(len(whole) - 20, len(whole))]:
        changed = bytearray(whole)
        changed[at] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(DataError, match="cannot restore"):
            list(unpack(path))
    for size in (0, 5, 12, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="cannot restore"):
            list(unpack(path))
    path.write_bytes(whole + b"x")
    with pytest.raises(DataError):
        list(unpack(path))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """An output with 5 of 7 rows done."""
    made = config_for(tmp_path, lines(7))
    store = ready(made)
    extract(store, tmp_path, 5)
    store.close()
    return made


def test_the_verbs_give_the_very_files_back(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, small, back = str(config_file(tmp_path)), tmp_path / "small", tmp_path / "back"
    outcome(capsys)
    assert main(["export", "compressed", "-c", file, "--to", str(small)]) == 0
    assert outcome(capsys)[-1].startswith("export: ok files=5 skipped=0 ")
    assert main(["export", "restored", "--from", str(small), "--to", str(back)]) == 0
    stored = sorted(Path(config.output.path).rglob("data_*.ckpt"))
    assert [path.read_bytes() for path in sorted(back.rglob("*.ckpt"))] == [path.read_bytes() for path in stored]
    outcome(capsys)
    victim = small / "rows_0-2000/data_3.ckpt.hsz"
    victim.unlink()
    assert main(["export", "compressed", "-c", file, "--to", str(small)]) == 0
    assert outcome(capsys)[-1].startswith("export: ok files=1 skipped=4 "), "goes on where it was interrupted"
    assert read_header(victim).size == stored[3].stat().st_size


def test_a_damaged_sample_is_not_compressed(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(config.output.path) / "rows_0-2000/data_2.ckpt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert main(["export", "compressed", "-c", str(config_file(tmp_path)), "--to", str(tmp_path / "small")]) == 65
    assert "data_2.ckpt: its content is not what was stored" in capsys.readouterr().err
    assert not (tmp_path / "small/rows_0-2000/data_2.ckpt.hsz").exists()


def test_a_sample_that_is_gone_is_one_line(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(config.output.path) / "rows_0-2000/data_2.ckpt").unlink()
    assert main(["export", "compressed", "-c", str(config_file(tmp_path)), "--to", str(tmp_path / "small")]) == 65
    assert "data_2.ckpt: No such file or directory; run hs-extract verify" in capsys.readouterr().err


def test_a_damaged_file_is_made_again_once_it_is_removed(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the message says is what helps."""
    file, small = str(config_file(tmp_path)), tmp_path / "small"
    compressed = ["export", "compressed", "-c", file, "--to", str(small)]
    restored = ["export", "restored", "--from", str(small), "--to", str(tmp_path / "back")]
    assert main(compressed) == 0
    victim = small / "rows_0-2000/data_3.ckpt.hsz"
    for at in (9, victim.stat().st_size // 2):  # the header, the content
        content = bytearray(victim.read_bytes())
        content[at] ^= 0xFF
        victim.write_bytes(content)
        capsys.readouterr()
        assert main(restored) == 65
        assert "data_3.ckpt.hsz" in (said := capsys.readouterr().err)
        assert said.endswith("; remove it and compress that sample again\n")
        victim.unlink()
        assert main(compressed) == 0
    assert main(restored) == 0


@pytest.mark.parametrize(
    "words", [["compressed"], ["restored", "--to", "x"], ["compressed", "--to", "volume/states/z"]]
)
def test_a_folder_is_needed_and_not_one_of_the_output(
    words: list[str], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *words, "-c", str(config_file(tmp_path))]) == 78
