"""What people, systemd and `status` hear of the worker: one value, told in every place."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import structlog
from rich.console import Console
from rich.live import Live
from rich.table import Table

from hsdaemon.machine.notify import Notify
from hsdaemon.work.progress import span

FILE = "worker.json"
LINE_S = 60.0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Report:
    """The worker now. phase: starting, working, paused, waiting, draining, stopped, done; waits_for: a sentence."""

    epoch: str
    pid: int
    phase: str
    waits_for: str
    total: int
    done: int
    failed: int
    skipped: int
    pending: int
    ingest_complete: bool
    in_flight: int
    samples_s: float
    tokens_s: float
    mb_s: float
    eta_s: float | None
    retries: int  # tries of this run that gave nothing
    redone: int
    stopped_by: str = ""  # the cause, once it has stopped

    def sentence(self) -> str:
        """One line for systemd and the log."""
        settled = self.done + self.failed + self.skipped
        of = f"{settled}/{self.total}{'' if self.ingest_complete else '+'}"
        bad = f", {self.failed} failed" if self.failed else ""
        if self.stopped_by:
            return f"stopped at {of}{bad}: {self.stopped_by}"
        if self.phase in ("paused", "waiting"):
            return f"{self.phase} at {of}{bad}: {self.waits_for}"
        speed = f"{self.samples_s:.2f} samples/s, {self.tokens_s:.0f} tok/s, {self.mb_s:.0f} MB/s"
        return f"{self.phase} {of}{bad}, {speed}, {span(self.eta_s)} left"


def last_line(report: Report) -> str:
    return (
        f"extract: done={report.done} failed={report.failed} skipped={report.skipped} pending={report.pending} "
        f"redone={report.redone}"
    )


class Reporter:
    """Tells: the status file each time, systemd each time, a table on a terminal or a log line a minute."""

    def __init__(self, run: str, notify: Notify, out: TextIO | None = None) -> None:
        self._path = Path(run) / FILE
        self._notify = notify
        stream = sys.stderr if out is None else out
        self._live = Live(console=Console(file=stream), refresh_per_second=2) if stream.isatty() else None
        self._said = ("", "")
        self._said_at = float("-inf")

    def open(self) -> None:
        if self._live is not None:
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, report: Report, now: float) -> None:
        """now: seconds of the monotonic clock."""
        self._write(report)
        self._notify.status(report.sentence())
        if self._live is not None:
            self._live.update(_table(report))
        said = (report.phase, report.waits_for if report.phase == "waiting" else "")  # the figures of a pause change
        if self._live is None and (said != self._said or now - self._said_at >= LINE_S):
            self._said, self._said_at = said, now
            _log.info(report.sentence())

    def _write(self, report: Report) -> None:
        """A crash leaves the old file, or a draft that nobody reads; a folder that is not there costs the file only."""
        draft = self._path.with_name(f".{FILE}.{os.getpid()}")
        try:
            draft.write_text(json.dumps({**asdict(report), "sentence": report.sentence()}))
            draft.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()


def _table(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("phase", report.phase + (f": {report.waits_for}" if report.waits_for else ""))
    counts = f"{report.done} done, {report.failed} failed, {report.skipped} skipped, {report.pending} pending"
    table.add_row("rows", f"{counts}, {report.in_flight} in flight")
    table.add_row("speed", f"{report.samples_s:.2f} samples/s  {report.tokens_s:.0f} tok/s  {report.mb_s:.1f} MB/s")
    table.add_row("left", span(report.eta_s))
    return table
