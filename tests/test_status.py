"""`hs-extract status`: manifest and board together, and what it shows when one, the other or both are not there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from outputs import config_for, extract, lines, ready
from scenes import acted, busy, crashes, died, gpus, holder, loading, past_of, plan_of, rest
from test_cases_manifest import config_file, outcome

from hsdaemon.cli import main, status
from hsdaemon.core import budget
from hsdaemon.core import model as m
from hsdaemon.data.backup import manifest_path
from hsdaemon.history import Tick
from hsdaemon.host import screen, solo
from hsdaemon.host.board import Board
from hsdaemon.machine.child import Child, NoAnswer

Screen = Callable[..., str]
STRANGER = "jupyter[red].service"


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Screen:
    """The screen of a verb, its white space single, after checking the exit code."""
    config_for(tmp_path, lines(4))
    monkeypatch.setenv("COLUMNS", "100")

    def look(*words: str, code: int = 0) -> str:
        outcome(capsys)
        assert main([*(words or ("status",)), "-c", str(config_file(tmp_path))]) == code
        return " ".join("\n".join(outcome(capsys)).split())

    return look


def put_board(folder: Path, seen: m.Observation, *, ago_s: float = 0, events: tuple[budget.Event, ...] = ()) -> None:
    """What a supervisor leaves after a tick that looked like `seen`, `ago_s` seconds ago."""
    (folder / "run").mkdir(exist_ok=True)
    seen = replace(seen, now=replace(seen.now, wall_s=time.time() - ago_s))
    Board(str(folder / "run")).show(Tick(seen, past_of(seen), plan_of(seen)), events)


def test_with_nothing_there_it_says_so(shown: Screen) -> None:
    text = shown()
    assert "done no manifest: nothing was extracted yet, or the volume is not there" in text
    assert "engine not started" in text
    assert "supervisor not running" in text


def test_a_running_supervisor_shows_ladder_holder_and_what_a_person_can_do(tmp_path: Path, shown: Screen) -> None:
    with solo.only_one(str(tmp_path / "run")):
        put_board(tmp_path, rest(holders=(holder(7, STRANGER),)))
        text = shown()
    assert "looked 0 s ago" in text
    assert "+gpus_visible >gpus_ours ·engine_patched" in text
    assert f"now {STRANGER} (pid 7, compute) holds GPU 0, 1 and no policy lets us stop it" in text
    assert "to do Stop it yourself, or name it in evict.units" in text
    assert "GPU 0-1 fake 0.0 of 93.8 GiB" in text
    assert f"held by {STRANGER} (pid 7, compute) on GPU 0, 1" in text
    assert "proof none yet" in text


def test_the_board_of_a_supervisor_that_is_down_is_shown_with_its_age(tmp_path: Path, shown: Screen) -> None:
    put_board(tmp_path, busy(), ago_s=7260)
    text = shown()
    assert "supervisor not running; what follows is what it saw 2 h 01 m ago" in text
    assert "held by hs-sglang.service (pid 50, compute) on GPU 0, 1 (ours)" in text
    assert "proof this start of the engine is proved" in text


def test_gpus_that_differ_have_a_line_each(tmp_path: Path, shown: Screen) -> None:
    first, second = gpus()
    put_board(tmp_path, rest(gpus=(first, replace(second, used_mib=None, lost=True))))
    assert "GPU 0 fake 0.0 of 93.8 GiB GPU 1 fake ? of 93.8 GiB, lost" in shown()


def test_events_are_told_with_their_age(tmp_path: Path, shown: Screen) -> None:
    late = m.Now(4000.0, time.time() - 130, "boot-1")
    events = (
        budget.Acted(late, m.StartEngine("e0", 30000, "wanted"), 42),
        budget.Ended(late, m.StopUnit("vllm-kimi.service", "v1"), m.Outcome("failed", "no answer")),
        budget.Died(late, m.ENGINE_UNIT, "e1", "signal 11", 42),
        budget.Ended(late, m.RunProof("e1", "p0"), m.Outcome("done")),
        budget.Reset(late),
    )
    put_board(tmp_path, busy(), events=events)
    text = shown()
    for words in (
        "2 m ago: StartEngine",
        "2 m ago: StopUnit: failed no answer",
        "2 m ago: hs-sglang.service ended: signal 11",
        "2 m ago: a person cleared budgets and breakers",
    ):
        assert f"event {words}" in text
    assert "RunProof" not in text


@pytest.mark.parametrize(
    ("proof", "says"),
    [
        (m.Proof("e0", True), "an earlier start of the engine was proved, not this one"),
        (m.Proof("e1", False, "content", "row 3 differs"), "failed: content row 3 differs"),
        (m.Unreadable("proof", "Permission denied"), "cannot be read: Permission denied"),
    ],
)
def test_a_proof_is_told_for_what_it_is(
    proof: m.Proof | m.Unreadable, says: str, tmp_path: Path, shown: Screen
) -> None:
    put_board(tmp_path, busy(proof=proof))
    assert f"proof {says}" in shown()


BLIND = m.Unreadable("nvml", "no library", "no-library")


@pytest.mark.parametrize(
    "seen",
    [
        rest(),
        busy(),
        loading(),
        rest(gpus=BLIND, holders=BLIND, units=BLIND, engine=BLIND, proof=BLIND, worker=BLIND, progress=BLIND),
        rest(volume=m.Volume("no-marker", "empty folder"), progress=m.Unadopted()),
        rest(gpus=(m.Gpu("GPU-0", 0, lost=True, recovery="reboot"),), holders=(holder(kind="invisible"),)),
    ],
)
def test_every_board_is_understood_when_it_is_read_back(seen: m.Observation, tmp_path: Path) -> None:
    put_board(tmp_path, seen, events=(acted(m.StartScan("")), died("exit 1"), *crashes(2)))
    board = Board(str(tmp_path / "run")).read()
    assert board is not None
    read = screen.understood(board)
    assert read is not None
    assert list(screen.lines(read, None, 0.0))


@pytest.mark.parametrize("content", [b"", b"\xff{", b"[1]", b'{"wall_s": "now", "pid": []}', b'{"ladder": 3}'])
def test_a_board_that_is_none_costs_only_itself(content: bytes, tmp_path: Path, shown: Screen) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/status.json").write_bytes(content)
    assert "supervisor not running" in shown()


def test_a_damaged_manifest_is_an_exit_code_and_hides_no_board(tmp_path: Path, shown: Screen) -> None:
    put_board(tmp_path, busy())
    config = config_for(tmp_path)
    ready(config).close()
    manifest_path(config.output).write_bytes(b"x" * 5000)
    text = shown(code=73)
    assert "done cannot " in text
    assert "proof this start of the engine is proved" in text


def test_a_volume_that_hangs_costs_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "VOLUME_S", 0.2)
    put_board(tmp_path, busy())
    hangs = Child("output", lambda _question: time.sleep(60))
    facts = status.look(config_for(tmp_path, lines(1)), hangs)
    hangs.close()
    assert facts["manifest"] == NoAnswer("hung", "output did not answer within 0.2 s").detail
    assert facts["supervisor"]["board"]["reason"] == "extracting"


def test_watch_is_the_status_screen_until_all_is_done(tmp_path: Path, shown: Screen) -> None:
    store = ready(config_for(tmp_path))
    extract(store, tmp_path)
    store.close()
    assert json.loads(shown("watch", "--json"))["finished"]
    assert "4 of 4, 100.0 %" in shown("watch")
