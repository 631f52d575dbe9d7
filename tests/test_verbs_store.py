"""The verbs of an output: init writes and marks, check tells what is wrong, status tells how far it is."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from loops import tmpfs
from outputs import CONTEXT, VOCAB, apart, config_for, extract, lines, ready, write_jsonl, write_model
from test_cases_manifest import config_file, outcome

from hsdaemon.cli import main
from hsdaemon.config import parse
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.lock import LOCK_NAME
from hsdaemon.data.volume import MARKER


def init(folder: Path, *words: str) -> int:
    where = ["--data", str(folder / "data.jsonl"), "--model", str(folder / "model"), "--output", f"{folder}/vol/states"]
    return main(["init", "-c", str(folder / "hs.toml"), *where, *words])


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A folder with a model, a data set and an unmarked volume."""
    write_model(tmp_path / "model")
    write_jsonl(tmp_path / "data.jsonl", lines(8))
    (tmp_path / "vol").mkdir()
    return tmp_path


def test_init_writes_a_config_that_is_usable_as_it_is(fresh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(fresh) == 0
    config = parse((fresh / "hs.toml").read_text(), "hs.toml")
    assert config.output.path == f"{fresh}/vol/states"
    assert {p.name for p in (fresh / "vol/states").iterdir()} == {LOCK_NAME, "ballast"}
    assert main(["check", "-c", str(fresh / "hs.toml")]) == 0
    assert outcome(capsys)[-1] == "check: rows=8 usable=8 bad=0 tokens=96 longest=12 problems=0"


def test_init_again_keeps_the_config_and_the_volumes_identity(fresh: Path) -> None:
    init(fresh)
    text, marker = (fresh / "hs.toml").read_text() + "# mine\n", (fresh / "vol" / MARKER).read_text()
    (fresh / "hs.toml").write_text(text)
    assert init(fresh, "--format", "modelopt") == 0
    assert (fresh / "hs.toml").read_text() == text
    assert (fresh / "vol" / MARKER).read_text() == marker


@pytest.mark.parametrize(
    ("lacks", "code", "says"),
    [("vol", 73, "mount the volume, or make the folder"), ("model", 78, "set model.path")],
)
def test_init_says_what_is_missing(
    fresh: Path, lacks: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(fresh / lacks)
    assert init(fresh) == code
    assert says in capsys.readouterr().err


def test_init_without_its_options_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "-c", str(tmp_path / "hs.toml"), "--data", "x.jsonl"]) == 78
    assert "--model, --output not given" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[", None], ids=["not UTF-8", "not TOML", "a folder"])
def test_init_with_a_broken_configuration_is_one_line(
    fresh: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = fresh / "hs.toml"
    file.mkdir() if content is None else file.write_bytes(content)
    assert init(fresh) == 78
    assert capsys.readouterr().err.startswith(f"hs-extract: cannot use {file}: ")
    assert not (fresh / "vol" / MARKER).exists()


@pytest.mark.parametrize("row", ["99999999999999999999", "-1", "x", "1.5"])
def test_retry_of_what_is_no_row_number_is_a_wrong_command_line(
    tmp_path: Path, row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["retry", "-c", str(tmp_path / "hs.toml"), "--", row])
    assert (ended.value.code, f"no row has the number {row}" in capsys.readouterr().err) == (2, True)


def test_check_names_every_bad_row_and_what_to_do(fresh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*lines(3), {"input_ids": []}, {"input_ids": [VOCAB]}, {"input_ids": [1] * CONTEXT}]
    twice = [{"input_ids": [1], "id": "x"}, {"input_ids": [2], "id": "x"}]
    write_jsonl(fresh / "data.jsonl", [*rows, *twice])
    init(fresh)
    assert main(["check", "-c", str(fresh / "hs.toml")]) == 1
    out = outcome(capsys)
    for line in (
        "row 3: empty: input_ids has no entries (refuse)",
        f"row 4: ids-range: id {VOCAB} is not within 0 to {VOCAB - 1} (refuse)",
        f"row 5: too-long: {CONTEXT} tokens, at most {CONTEXT - 7} fit the context (skip)",
        "row 7: name-twice: row 6 has the id 'x' too (refuse)",
    ):
        assert line in out
    assert out[-1] == "check: rows=8 usable=4 bad=4 tokens=37 longest=12 problems=1"


def test_sp_09_check_tells_of_rows_that_no_spool_can_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_for(tmp_path, [*lines(2), {"input_ids": [1] * 100_000}])
    facts = json.loads((tmp_path / "model/config.json").read_text())
    facts["text_config"]["max_position_embeddings"] = 200_000
    (tmp_path / "model/config.json").write_text(json.dumps(facts))
    file = config_file(tmp_path)
    file.write_text(file.read_text() + "[spool]\nbudget_mib = 32\nwait_s = 1\n")
    assert main(["check", "-c", str(file)]) == 1
    assert any(line.startswith("cannot take 1 rows (2)") for line in outcome(capsys))


@pytest.mark.root
def test_sp_03_check_tells_of_a_tmpfs_that_cannot_hold_the_longest_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_for(tmp_path, [*lines(2), {"input_ids": [1] * 2000}])
    facts = json.loads((tmp_path / "model/config.json").read_text())
    facts["text_config"]["max_position_embeddings"] = 4000
    (tmp_path / "model/config.json").write_text(json.dumps(facts))
    file = config_file(tmp_path)
    with tmpfs(tmp_path / "shm", 1) as shm:
        file.write_text(file.read_text() + f'[spool]\npath = "{shm}/spool"\n')
        assert main(["check", "-c", str(file)]) == 1
        assert any(line.startswith(f"cannot hold the longest sample in {shm}/spool") for line in outcome(capsys))
        subprocess.run(["mount", "-o", "remount,size=64m", shm], check=True)
        assert main(["check", "-c", str(file)]) == 0


@pytest.mark.parametrize("fault", ["marker", "data", "layers", "damage"])
def test_check_finds_what_would_stop_the_work(tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(tmp_path, lines(3))
    ready(config).close()
    file = config_file(tmp_path)
    assert main(["check", "-c", str(file)]) == 0
    if fault == "marker":
        (tmp_path / "volume" / MARKER).unlink()
    elif fault == "data":
        (tmp_path / "data.jsonl").write_text("\n\n")
    elif fault == "layers":
        file.write_text(file.read_text().replace("[output]", "layers = [1, 2, 99]\n[output]"))
    else:
        manifest_path(config.output).write_bytes(b"x" * 5000)
    assert main(["check", "-c", str(file)]) not in (0, 2)
    assert "cannot " in "".join(capsys.readouterr())


def test_status_is_a_screen_a_json_and_an_exit_code(tmp_path: Path) -> None:
    config = config_for(tmp_path, lines(4))
    store = ready(config)
    extract(store, tmp_path, 2)
    claim = store.manifest.claim(1)[0]
    file = str(config_file(tmp_path))
    code, screen = apart("status", "-c", file)
    assert code == 0
    for text in ("2 of 4, 50.0 %", "1, in flight 1", "not started"):
        assert text in screen
    store.manifest.fail(claim.row, claim.lease, "nonfinite", "NaN in layer 1")
    code, told = apart("status", "-c", file, "--json")
    facts = json.loads(told)
    assert code == 1
    assert facts["failed"] == 1
    assert facts["reasons"] == {"nonfinite": 1}
    assert facts["worker"]["pid"] is not None
    assert facts["rates"]["hour"]["samples_s"] > 0
    store.close()


def test_status_watch_ends_when_all_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ready(config_for(tmp_path, lines(2)))
    extract(store, tmp_path)
    store.close()
    outcome(capsys)
    assert main(["status", "--watch", "--json", "-c", str(config_file(tmp_path))]) == 0
    assert all(json.loads(line)["finished"] for line in outcome(capsys))
