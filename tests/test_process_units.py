"""Processes as units: whoever belongs to a start is found, whatever it does to its own words."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hsdaemon.core.model import Unit
from hsdaemon.errors import DiskFull
from hsdaemon.machine import disk
from hsdaemon.machine.identity import start_ticks
from hsdaemon.machine.process_units import Processes

UNIT = "hs-sglang.service"
# A parent, a child that overwrites its environment with a title (as ranks do), and one that leaves the session.
TREE = """
import os, sys, time, setproctitle
if os.fork() == 0:
    setproctitle.setproctitle("rank" + "x" * 20000)
elif os.fork() == 0:
    os.setsid()
open(sys.argv[1] + str(os.getpid()), "w").close()
time.sleep(60)
"""


def test_en_01_ranks_with_a_title_and_children_of_another_session_are_members(tmp_path: Path) -> None:
    pids, run = tmp_path / "pids", tmp_path / "run"
    pids.mkdir()
    units = Processes({UNIT: (sys.executable, "-c", TREE, f"{pids}/")}, run, grace_s=1.0)
    assert units.start(UNIT, "").result == "done"
    end = time.monotonic() + 20
    while len(list(pids.iterdir())) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    wanted = sorted(int(path.name) for path in pids.iterdir())
    assert len(wanted) == 3
    again = Processes({UNIT: ()}, run)  # a supervisor that starts anew finds them too
    assert seen(units).pids == seen(again).pids == tuple(wanted)
    assert units.kill(UNIT, seen(units).invocation, wanted).result == "done"
    end = time.monotonic() + 10
    while seen(units).pids and time.monotonic() < end:
        time.sleep(0.02)
    assert seen(units).pids == ()


def seen(port: Processes) -> Unit:
    found = port.read((UNIT,))
    assert isinstance(found, tuple)
    return found[0]


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether the disk below the run folder is full."""
    real = disk.replace
    state = [False]

    def replace(path: Path, data: bytes, mode: int = 0o666) -> None:
        if state[0]:
            raise DiskFull(f"cannot write below {path.parent}: disk full")
        real(path, data, mode)

    monkeypatch.setattr(disk, "replace", replace)
    return lambda now: state.__setitem__(0, now)


def test_a_start_that_cannot_be_written_down_leaves_no_process(tmp_path: Path, full: Callable[[bool], None]) -> None:
    note = tmp_path / "pid"
    code = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    units = Processes({UNIT: (sys.executable, "-c", code)}, tmp_path / "run")
    full(True)
    outcome = units.start(UNIT, "")
    assert (outcome.result, "disk full" in outcome.cause) == ("failed", True)
    assert not note.exists() or start_ticks(int(note.read_text())) is None
    full(False)
    assert units.start(UNIT, "").result == "done"
    assert units.kill(UNIT, seen(units).invocation, seen(units).pids).result == "done"


def test_an_end_on_a_full_disk_is_told_and_written_down_later(tmp_path: Path, full: Callable[[bool], None]) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    units = Processes({UNIT: ("/bin/sh", "-c", f"while [ ! -e {go} ]; do sleep 0.02; done; exit 3")}, run)
    assert units.start(UNIT, "").result == "done"
    invocation = seen(units).invocation
    full(True)
    go.touch()
    end = time.monotonic() + 10
    while (unit := seen(units)).active == "active" and time.monotonic() < end:
        time.sleep(0.02)
    assert (unit.active, unit.result, unit.status, unit.invocation) == ("failed", "exit-code", 3, invocation)
    assert (seen(units).since_s, seen(units).status) == (unit.since_s, 3)
    assert units.stop(UNIT, invocation).result == "done"
    full(False)
    seen(units)
    assert seen(Processes({UNIT: ()}, run)).status == 3
