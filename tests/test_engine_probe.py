"""What the supervisor sees of an engine: by its files, its port and its processes, never by its word alone."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rig import Rig

from hsdaemon.cli import main
from hsdaemon.config import Config, parse
from hsdaemon.core import model as m
from hsdaemon.engine import endpoint, leftovers
from hsdaemon.engine.probe import EngineProbe, ordered_port
from hsdaemon.machine.identity import boot_id

UP = m.Unit(m.ENGINE_UNIT, active="active", invocation="e1", main_pid=os.getpid(), pids=(os.getpid(),))
DOWN = m.Unit(m.ENGINE_UNIT)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    (tmp_path / "log").mkdir()
    return Rig(tmp_path, [[1, 2, 3]], {"engine": {"device": "cpu", "port": 31400, "port_span": 3}})


@pytest.fixture
def probe(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProbe]:
    monkeypatch.setattr(leftovers, "find", lambda _folders: [])  # of others on this machine
    made = EngineProbe(lambda: rig.config, 10.0)
    yield made
    made.close()


def seen(probe: EngineProbe, unit: m.Unit) -> m.Engine:
    found = probe.read(unit)
    assert isinstance(found, m.Engine), found
    return found


def log(rig: Rig, name: str, text: str, age_s: float) -> None:
    path = rig.root / "log" / f"engine-hs-{name}.log"
    path.write_text(text)
    os.utime(path, (time.time() - age_s,) * 2)


def test_without_an_engine_all_that_the_next_start_needs_is_known(probe: EngineProbe) -> None:
    engine = seen(probe, DOWN)
    assert (engine.endpoint, engine.attest, engine.health, engine.last_lines) == (None, "none", "refused", ())
    assert isinstance(engine.capture, m.Capture)
    assert engine.capture.state == "plugin"
    assert len(engine.wanted) >= 16


def test_a_running_engine_is_told_by_its_files_and_answers_once(rig: Rig, probe: EngineProbe) -> None:
    with rig.engine() as fake:
        engine = seen(probe, UP)
        assert (engine.attest, engine.health) == ("seen", "ok")
        assert isinstance(engine.endpoint, m.Endpoint)
        assert (engine.endpoint.port, engine.endpoint.pid) == (fake.port, os.getpid())
        assert engine.cpu_s > 0
        for _ in range(3):
            assert seen(probe, UP).health == "ok"
        assert fake.probes == 1, "after that only progress counts as life"


@pytest.mark.parametrize(
    ("options", "health"), [({"health_status": 503}, "loading"), ({"health_s": 30.0}, "silent")], ids=str
)
def test_en_07_an_engine_that_is_not_ready_is_asked_again(
    rig: Rig, probe: EngineProbe, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], health: str
) -> None:
    monkeypatch.setattr("hsdaemon.engine.probe.HEALTH_S", 0.2)
    with rig.engine(**options):
        assert seen(probe, UP).health == health


def test_an_endpoint_of_an_earlier_boot_is_none(rig: Rig, probe: EngineProbe) -> None:
    with rig.engine():
        path = rig.root / "run/engine.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))
        engine = seen(probe, UP)
    assert (engine.endpoint, engine.health, engine.attest) == (None, "refused", "none")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"launch": 3}', "\xff"])
def test_a_damaged_endpoint_is_none(rig: Rig, probe: EngineProbe, text: str) -> None:
    (rig.root / "run/engine.json").write_text(text, encoding="latin-1")
    assert seen(probe, UP).endpoint is None


def test_en_11_the_last_lines_of_the_newest_log_are_quoted(rig: Rig, probe: EngineProbe) -> None:
    log(rig, "a", "old\n", 100)
    log(rig, "b", "".join(f"line {n}\n" for n in range(5000)) + "\n\nRuntimeError: out of memory\n\n", 10)
    lines = seen(probe, DOWN).last_lines
    assert lines[-1] == "RuntimeError: out of memory"
    assert len(lines) == 8
    assert seen(probe, UP).last_lines == (), "of a running engine they are noise"


def test_en_11_a_start_that_ends_before_there_is_an_engine_is_quoted_too(rig: Rig, probe: EngineProbe) -> None:
    """The lines of the start before would name the wrong cause."""
    log(rig, "a", "CUDA error of last week\n", 100)
    (rig.root / "model/model.safetensors").write_bytes(b"cut")
    (rig.root / "c.toml").write_text(rig.toml())
    assert main(["serve", "-c", str(rig.root / "c.toml")]) == 69
    assert "cut short" in seen(probe, DOWN).last_lines[-1]


def test_a_folder_that_serve_cannot_make_is_one_line(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    (rig.root / "model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    blocked = rig.toml().replace(f'run = "{rig.root}/run"', f'run = "{rig.root}/data.jsonl/run"')
    (rig.root / "c.toml").write_text(blocked)
    assert main(["serve", "-c", str(rig.root / "c.toml")]) == 73
    assert f"cannot use {rig.root}/data.jsonl/run: Not a directory; " in capsys.readouterr().err


def test_en_03_ports_that_are_taken_are_named_with_their_owner(rig: Rig, probe: EngineProbe) -> None:
    with socket.create_server(("127.0.0.1", 31401)):
        busy = dict(seen(probe, DOWN).busy_ports)
        assert str(os.getpid()) in busy[31401]
    assert 31401 not in dict(seen(probe, DOWN).busy_ports)


def test_a_changed_argument_line_is_another_fingerprint_and_other_settings_are_not(rig: Rig) -> None:
    def wanted(**change: object) -> str:
        config: Config = parse(Rig(rig.root, rig.data, {"engine": {"device": "cpu", **change}}).toml(), "c")
        made = EngineProbe(lambda: config, 10.0)
        try:
            return seen(made, UP).wanted
        finally:
            made.close()

    same = wanted()
    assert wanted() == same
    assert wanted(port=31999) == same, "the port is chosen anew at each start"
    assert wanted(start_patience_s=77.0) == same
    assert wanted(max_running=3) != same
    assert wanted(extra_args=["--log-level", "info"]) != same


def test_a_start_order_is_taken_once(rig: Rig, probe: EngineProbe) -> None:
    assert probe.prepare(31402, "w").result == "done"
    assert ordered_port(str(rig.root / "run")) == 31402
    assert ordered_port(str(rig.root / "run")) is None
    (rig.root / "run/start.json").write_text("{")
    assert ordered_port(str(rig.root / "run")) is None


def test_a_run_folder_that_cannot_be_written_is_an_outcome(rig: Rig) -> None:
    blocked = parse(rig.toml().replace(f'run = "{rig.root}/run"', f'run = "{rig.root}/data.jsonl/run"'), "c")
    made = EngineProbe(lambda: blocked, 10.0)
    assert made.prepare(1, "w").result == "failed"
    made.close()


def test_a_rank_that_attests_broken_is_the_worst_word(rig: Rig, probe: EngineProbe) -> None:
    with rig.engine():
        (path,) = (rig.root / "run/attest").glob("*.json")
        broken = {**json.loads(path.read_text()), "stage": "broken"}
        path.with_name(path.name.replace("tp0", "tp1")).write_text(json.dumps(broken))
        assert seen(probe, UP).attest == "broken"


def test_a_gone_unit_that_kept_processes_is_not_down(rig: Rig, probe: EngineProbe) -> None:
    left = replace(DOWN, pids=(os.getpid(),))
    assert seen(probe, left).busy_ports == ()


@pytest.mark.parametrize(
    "wrong", [{"log": "a\0b"}, {"host": "x" * 300}, {"host": "10.0.0.1"}, {"port": 10**30}], ids=str
)
def test_an_engine_json_with_values_that_cannot_be_is_none(
    rig: Rig, probe: EngineProbe, wrong: dict[str, object]
) -> None:
    right = endpoint.Endpoint("l", 1, 2, boot_id(), "127.0.0.1", 31400, "r", "plugin", "f", (), "/l")
    Path(rig.config.paths.run).mkdir(exist_ok=True)
    endpoint.write(rig.config.paths.run, right)
    assert seen(probe, UP).endpoint is not None
    endpoint.path(rig.config.paths.run).write_text(json.dumps(msgspec.to_builtins(right) | wrong))
    assert seen(probe, UP).endpoint is None
