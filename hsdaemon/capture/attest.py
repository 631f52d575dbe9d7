"""What a rank says of itself: one small file, replaced at each change, so that a proof can read it."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from pathlib import Path

from hsdaemon import wire

log = logging.getLogger("hsdaemon.capture")


def start_ticks() -> int:
    """Field 22 of our /proc/self/stat."""
    return int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])


def blank(config: wire.CaptureConfig, release: str) -> wire.Attest:
    """What is known before a model is loaded."""
    return wire.Attest(
        launch=config.launch,
        stage="broken",
        pid=os.getpid(),
        start_ticks=start_ticks(),
        release=release,
        capture=wire.CAPTURE_VERSION,
        way=config.way,
        model="",
        num_layers=0,
        hidden=0,
        layers=config.layers,
        loop_ids=(),
        norm=config.norm,
        dtype=config.dtype,
        interleaved=config.interleaved,
        tp_rank=0,
        tp_size=0,
        dp_rank=0,
        spool=config.spool,
        errors=0,
        last_error="",
    )


class Attestor:
    """Owns the file. Called by the engine's thread and by the writer."""

    def __init__(self, folder: str, first: wire.Attest) -> None:
        self._folder = Path(folder)
        self._said = first
        self._lock = threading.Lock()

    @property
    def said(self) -> wire.Attest:
        return self._said

    def know(self, **changes: object) -> None:
        """Change fields that the next word will carry."""
        with self._lock:
            self._said = dataclasses.replace(self._said, **changes)  # type: ignore[arg-type]  # names are the fields

    def say(self, **changes: object) -> None:
        """Change fields and write them down. A file that cannot be written is only logged: the proof then fails."""
        self.know(**changes)
        with self._lock:
            self._write()

    def failed(self, reason: str) -> None:
        """Count one error."""
        log.error("capture: %s", reason)
        with self._lock:
            self._said = dataclasses.replace(self._said, errors=self._said.errors + 1, last_error=reason[:2000])
            self._write()

    def _write(self) -> None:
        name = wire.attest_name(self._said)
        draft = self._folder / f".{name}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(wire.to_json(self._said), encoding="utf-8")
            draft.replace(self._folder / name)
        except OSError as error:
            log.error("capture: cannot write the attest file %s: %s", name, error)
