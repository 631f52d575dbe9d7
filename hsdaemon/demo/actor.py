"""A program of the demonstration: started, killed with all its children, started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # ships no types

import hsdaemon
from hsdaemon.errors import EngineError

GONE_S = 30.0  # a killed process is gone within this, unless it hangs in the kernel
STOP_S = 30.0  # between TERM and KILL

HS = (sys.executable, "-m", "hsdaemon")


def environment() -> dict[str, str]:
    """Ours, with this very package first."""
    here = str(Path(hsdaemon.__file__).resolve().parent.parent)
    path = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    return os.environ | {"PYTHONPATH": ":".join(dict.fromkeys(path)), "PYTHONUNBUFFERED": "1"}


class Actor:
    """One program with a log of its own. `name` is what people read."""

    def __init__(self, name: str, argv: tuple[str, ...], log: Path) -> None:
        self.name, self._argv, self.log = name, argv, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ended(self, wait_s: float = 0.0) -> int | None:
        """The exit code, waiting at most `wait_s` for it; None while it runs."""
        assert self._process is not None
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL for it and all its children, without a warning; returns when they are gone."""
        self._end(signal.SIGKILL, GONE_S)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for whatever is left."""
        if self._process is None:
            return
        if self.ended() is None:
            self._process.terminate()
            self.ended(STOP_S)
        self._end(signal.SIGKILL, GONE_S)

    def _end(self, number: signal.Signals, patience_s: float) -> None:
        assert self._process is not None
        family = self._family()
        for member in family:
            try:
                member.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        self.ended(patience_s)
        _, alive = psutil.wait_procs(family, patience_s)
        if alive:
            raise EngineError(f"cannot kill the {self.name}: pid {alive[0].pid} hangs in the kernel; see dmesg")

    def _family(self) -> list[psutil.Process]:
        """The process, its descendants, and whoever else is left in its session."""
        session = self.pid
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def last_words(self, lines: int = 15) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])
