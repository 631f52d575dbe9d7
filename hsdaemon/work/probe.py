"""The port WorkerPort: the worker's status file, read without the worker's own modules and their weight."""

from __future__ import annotations

import time
from pathlib import Path

from hsdaemon.core import model as m
from hsdaemon.machine import disk
from hsdaemon.wire import parse_json

FILE = "worker.json"
FRESH_S = 60.0  # the worker writes it each second: a pause that is older is the word of one that hangs


class WorkerProbe:
    """What the worker said last. A file of an earlier worker is recognised by its pid and says nothing."""

    def __init__(self, run: str) -> None:
        self._path = Path(run) / FILE

    def read(self, unit: m.Unit) -> m.Worker | m.Unreadable:
        try:
            said = parse_json(disk.read_own(self._path))
            sentence, cause = str(said["sentence"]), str(said["stopped_by"])
            mine = not unit.up or said["pid"] in unit.pids
            paused = str(said["waits_for"]) if unit.up and said["phase"] == "paused" and self._fresh() else ""
        except FileNotFoundError:
            return m.Worker(unit)
        except (OSError, ValueError, KeyError, TypeError) as error:
            return m.Worker(unit, said=f"its status file cannot be read: {error}")
        return m.Worker(unit, said=sentence, detail=cause, paused=paused) if mine else m.Worker(unit)

    def _fresh(self) -> bool:
        return abs(time.time() - self._path.stat().st_mtime) < FRESH_S
