"""Processes as units: whoever belongs to a start is found, whatever it does to its own words."""

import sys
import time
from pathlib import Path

from hsdaemon.core.model import Unit
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
