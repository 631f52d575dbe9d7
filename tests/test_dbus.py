"""What is remembered of a unit, without a systemd: races that a real one shows once in a thousand looks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hsdaemon.core.model import Unit
from hsdaemon.machine.dbus import Session, Systemd
from hsdaemon.machine.lease import Leases

NAME = "hs-worker.service"


class Bus(Session):
    """A manager with one unit, whose state changes right after its properties were read."""

    def __init__(self, folder: Path) -> None:
        super().__init__("", Leases(folder, folder), 1.0, folder)
        self.states = ["active", "failed"]
        self.changed = 7

    def _path(self, name: str) -> str | None:
        return f"/{name}"

    def _unit(self, name: str) -> Unit:
        unit = Unit(name, active=self.states[0], since_s=self.changed / 1e6)
        if len(self.states) > 1:
            self.states.pop(0)
            self.changed += 1
        return unit

    def _call(self, *_args: Any) -> Any:
        bus = self

        class Reply:
            def unpack(self) -> tuple[int]:
                return (bus.changed,)

        return Reply()


def test_a_state_that_changes_while_it_is_read_is_seen_at_the_next_look(tmp_path: Path) -> None:
    bus = Bus(tmp_path)
    assert [bus._read((NAME,), ())[0].active for _ in range(3)] == ["active", "failed", "failed"]


def test_an_environment_without_pydbus_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gi")
    monkeypatch.setitem(sys.modules, "pydbus", None)
    units = Systemd(5, tmp_path, "unix:path=/nowhere")
    seen = units.read([NAME])
    units.close()
    assert "install pydbus" in seen.cause  # type: ignore[union-attr]  # what is asserted
