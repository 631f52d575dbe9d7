"""The demonstration can fail: every defect that it promises to find is planted here."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]  # ships no types
import pytest
import torch

from hsdaemon.demo import compare, inputs, run, stage
from hsdaemon.demo.actor import Actor
from hsdaemon.demo.verdict import Story, Verdict
from hsdaemon.errors import StoreError

GOOD = Verdict(compared=3, lost=[], twice=[], corrupt=[], max_abs_err=4e-6, max_rel_err=2e-7)
STORY = Story(name="demo", relative=False, done=3, redone=2, in_flight=5, moved=[])


def test_a_good_run_is_ok_in_the_promised_words() -> None:
    assert STORY.problems(GOOD) == []
    assert STORY.line(GOOD) == "demo: ok done=3 redone=2 lost=0 corrupt=0 max_abs_err=4.0e-06"


@pytest.mark.parametrize(
    ("story", "verdict"),
    [
        (STORY, msgspec.structs.replace(GOOD, lost=[1])),
        (STORY, msgspec.structs.replace(GOOD, twice=[1])),
        (STORY, msgspec.structs.replace(GOOD, corrupt=["data_1.ckpt: torn"])),
        (STORY, msgspec.structs.replace(GOOD, compared=2)),
        (STORY, msgspec.structs.replace(GOOD, max_abs_err=1.1e-5)),
        (STORY, msgspec.structs.replace(GOOD, max_abs_err=float("nan"))),
        (msgspec.structs.replace(STORY, relative=True), msgspec.structs.replace(GOOD, max_rel_err=1.1e-5)),
        (msgspec.structs.replace(STORY, moved=[2]), GOOD),
        (msgspec.structs.replace(STORY, redone=6), GOOD),
    ],
    ids=["lost", "twice", "corrupt", "uncounted", "wrong", "not a number", "relatively wrong", "moved", "redone"],
)
def test_a_defect_fails_the_run(story: Story, verdict: Verdict) -> None:
    assert story.problems(verdict)
    assert " FAILED " in story.line(verdict)


ROWS = [{"input_ids": [5, 6], "loss_mask": [0, 1]}, {"input_ids": [7], "loss_mask": [1]}]
HIDDEN = 4


def expected() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [len(row["input_ids"]) for row in ROWS]
    return [
        (torch.randn(n, 3 * HIDDEN, generator=generator), torch.randn(n, HIDDEN, generator=generator)) for n in sizes
    ]


def store(output: Path, row: int, **changes: Any) -> Path:
    aux, final = expected()[row]
    fields = {
        "input_ids": torch.tensor(ROWS[row]["input_ids"]),
        "loss_mask": torch.tensor(ROWS[row]["loss_mask"]),
        "hidden_state": final[None],
        "aux_hidden_state": aux[None],
    }
    path = output / f"data_{row}.ckpt"
    output.mkdir(exist_ok=True)
    torch.save(fields | changes, path)
    return path


def test_what_is_equal_is_found_equal(tmp_path: Path) -> None:
    store(tmp_path, 0)
    store(tmp_path, 1)
    verdict = compare.judge(ROWS, expected(), tmp_path)
    assert verdict == Verdict(compared=2, lost=[], twice=[], corrupt=[], max_abs_err=0.0, max_rel_err=0.0)


def bump(value: float) -> Callable[[Path], object]:
    def plant(out: Path) -> None:
        states = expected()[0][1].clone()
        states[1, 2] += value
        store(out, 0, hidden_state=states[None])

    return plant


PLANTED: dict[str, tuple[Callable[[Path], object], Callable[[Verdict], bool]]] = {
    "another value": (bump(0.5), lambda v: v.max_abs_err > 0.4 and v.max_rel_err > 0.01),
    "not a number": (bump(float("nan")), lambda v: len(v.corrupt) == 1),
    "other ids": (lambda o: store(o, 0, input_ids=torch.tensor([5, 7])), lambda v: len(v.corrupt) == 1),
    "another mask": (lambda o: store(o, 0, loss_mask=torch.tensor([1, 1])), lambda v: len(v.corrupt) == 1),
    "a row too few": (lambda o: store(o, 0, hidden_state=torch.zeros(1, 1, HIDDEN)), lambda v: len(v.corrupt) == 1),
    "torn": (lambda o: os.truncate(store(o, 0), 900), lambda v: len(v.corrupt) == 1),
    "missing": (lambda o: (o / "data_0.ckpt").unlink(), lambda v: v.lost == [0]),
    "twice": (lambda o: store(o / "again", 0), lambda v: v.twice == [0]),
}


@pytest.mark.parametrize(("plant", "found"), PLANTED.values(), ids=PLANTED)
def test_a_planted_defect_is_found(
    tmp_path: Path, plant: Callable[[Path], object], found: Callable[[Verdict], bool]
) -> None:
    store(tmp_path, 0)
    store(tmp_path, 1)
    plant(tmp_path)
    assert found(compare.judge(ROWS, expected(), tmp_path))


def test_only_a_folder_of_ours_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match="has content that is not a demonstration's"):
        stage.build(stage.TINY, tmp_path, 0)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("seed", range(20))
def test_each_is_killed_twice_while_there_is_work(seed: int) -> None:
    kills = run.schedule(256, 2, 2, seed)
    assert sorted(k.who for k in kills) == ["engine", "engine", "worker", "worker"]
    assert [k.stored for k in kills] == sorted({k.stored for k in kills})
    assert all(16 <= k.stored < 192 for k in kills)
    assert run.schedule(256, 2, 2, seed) == kills


def test_the_token_data_set_has_the_promised_lengths(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    inputs.write_tokens(path, 256, 512, (8, 1500), 256, 0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    sizes = {len(row["input_ids"]) for row in rows}
    assert len(rows) == 256
    assert (min(sizes), max(sizes)) == (8, 1500)
    assert {255, 256, 257, 512} <= sizes
    assert all(any(row["loss_mask"]) and len(row["loss_mask"]) == len(row["input_ids"]) for row in rows)
    assert all(4 <= i < 510 for row in rows for i in row["input_ids"])


def test_the_documents_are_english_that_is_here_already(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    inputs.write_chats(path, 64, 0)
    answers = [json.loads(line)["messages"][1]["content"] for line in path.read_text().splitlines()]
    assert len(set(answers)) == 64
    assert all(inputs.WORDS[0] <= len(a.split()) <= inputs.WORDS[1] and a.isascii() for a in answers)
    assert sum(" the " in a for a in answers) > 48


def test_a_kill_takes_the_children_along(tmp_path: Path) -> None:
    child = "import time; print('up', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    actor = Actor("engine", (sys.executable, "-c", parent), tmp_path / "log")
    before = {p.pid for p in psutil.Process().children()}  # of other tests
    actor.start()
    try:
        deadline = time.monotonic() + 30
        while "up" not in actor.log.read_text() and time.monotonic() < deadline:
            assert actor.ended(0.05) is None
        (session,) = {p.pid for p in psutil.Process().children()} - before
        family = [psutil.Process(session), *psutil.Process(session).children(recursive=True)]
        assert len(family) == 2
    finally:
        actor.kill()
    assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def test_no_torch_in_what_only_watches() -> None:
    code = "import sys, hsdaemon.demo.run; sys.exit(bool({'torch', 'transformers', 'sglang'} & sys.modules.keys()))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], timeout=60, check=False, cwd=Path(__file__).parent.parent
        ).returncode
        == 0
    )
