"""A real SGLang on the CPU, started as a user starts it: hs-extract serve with a configuration file."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hsdaemon import wire
from hsdaemon.engine import endpoint

REPOSITORY = Path(__file__).resolve().parents[1]
START_S = 180.0  # on busy cores; 20 s on quiet ones
EPOCH = "00000000000000e1"


@dataclasses.dataclass(frozen=True)
class Dump:
    """A dump as arrays: ids [tokens], aux [tokens, 3 * hidden], final [tokens, hidden]."""

    header: wire.DumpHeader
    ids: np.ndarray
    aux: np.ndarray
    final: np.ndarray


def read_dump(path: Path) -> Dump:
    """Read a float32 dump whose size is exactly what its header says."""
    raw = path.read_bytes()
    header = wire.unpack_header(raw)
    layout = header.layout()
    assert len(raw) == layout.total
    ids = np.frombuffer(raw, np.int64, layout.tokens, layout.ids_offset)
    planes = [
        np.frombuffer(raw, np.float32, layout.tokens * row // 4, at).reshape(layout.tokens, -1)
        for at, row in zip(layout.plane_offsets, layout.row_bytes, strict=True)
    ]
    both = np.concatenate(planes, axis=1)
    return Dump(header, ids, both[:, : -layout.hidden], both[:, -layout.hidden :])


def write_config(folder: Path, model: str, port: int, spool: Path, **engine: object) -> Path:
    """A configuration for one CPU engine below `folder`. engine: more keys of [engine]; output and model likewise
    under the names output_<key> and model_<key>."""
    tables: dict[str, dict[str, object]] = {
        "data": {"path": str(folder / "data.jsonl")},
        "model": {"path": model},
        "output": {"path": str(folder / "out"), "dtype": "float32"},
        "spool": {"path": str(spool), "budget_mib": 64, "wait_s": 5.0},
        "engine": {"device": "cpu", "dtype": "float32", "port": port, "max_total_tokens": 4096, "mem_fraction": 0.3},
        "paths": {name: str(folder / name) for name in ("run", "state", "log")},
    }
    for key, value in engine.items():
        table, _, rest = key.partition("_")
        if table in ("output", "model", "spool"):
            tables[table][rest] = value
        else:
            tables["engine"][key] = value
    lines: list[str] = []
    for name, keys in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    path = folder / "hs-extract.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@dataclasses.dataclass
class Engine:
    """A running server. `config`: its configuration file; `here`: what engine.json says."""

    config: Path
    spool: Path
    run: Path
    here: endpoint.Endpoint
    process: subprocess.Popen[bytes]
    rows: int = 0

    def post(self, path: str, body: object, timeout: float = 60.0) -> tuple[int, Any]:
        """POST JSON; gives the status and the decoded reply."""
        connection = http.client.HTTPConnection(self.here.host, self.here.port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read() or b"null")
        finally:
            connection.close()

    def health(self) -> int:
        connection = http.client.HTTPConnection(self.here.host, self.here.port, timeout=30)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def rid(self, ids: Sequence[int], epoch: str = EPOCH) -> wire.RequestId:
        """A request id that was never used."""
        self.rows += 1
        return wire.RequestId(epoch, self.rows, 1, len(ids))

    def ask(self, ids: Sequence[int], rid: object) -> tuple[int, Any]:
        sampling = {"max_new_tokens": 0, "temperature": 0}
        return self.post("/generate", {"rid": str(rid), "input_ids": list(ids), "sampling_params": sampling})

    def capture(self, ids: Sequence[int]) -> Dump:
        """Send one prompt, wait for its dump, read it, delete it."""
        rid = self.rid(ids)
        status, reply = self.ask(ids, rid)
        assert status == 200, reply
        return self.take(rid)

    def take(self, rid: wire.RequestId) -> Dump:
        path = self.spool / wire.dump_name(rid)
        self.wait(rid, path)
        dump = read_dump(path)
        path.unlink()
        return dump

    def failure(self, rid: wire.RequestId) -> wire.DumpError:
        path = self.spool / wire.error_name(rid)
        self.wait(rid, path)
        error = wire.dump_error(path.read_text(encoding="utf-8"))
        path.unlink()
        return error

    def wait(self, rid: wire.RequestId, path: Path) -> None:
        until = time.monotonic() + 30
        while not path.exists():
            left = sorted(p.name for p in self.spool.iterdir() if str(rid) in p.name)
            assert time.monotonic() < until, f"no {path.name}; there is {left}; attests {self.attests()}"
            time.sleep(0.01)  # the capture renames; nothing tells us

    def attests(self) -> list[wire.Attest]:
        found = sorted((self.run / "attest").glob("attest-*.json"))
        return [wire.attest(path.read_text(encoding="utf-8")) for path in found]

    def log(self) -> str:
        return Path(self.here.log).read_text(encoding="utf-8", errors="replace")


def free_port() -> int:
    """A port that nobody held a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_command(config: Path) -> list[str]:
    return [sys.executable, "-m", "hsdaemon", "serve", "-c", str(config)]


def child_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY)}


@contextmanager
def running(config: Path, spool: Path, epoch: str = EPOCH) -> Iterator[Engine]:
    """Serve `config` until it answers; stop it by its pid at the end."""
    spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    (spool / wire.EPOCH_FILE).write_text(epoch, encoding="ascii")
    process = subprocess.Popen(serve_command(config), env=child_environment(), stdout=subprocess.DEVNULL)
    try:
        yield _ready(config, spool, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(config: Path, spool: Path, process: subprocess.Popen[bytes]) -> Engine:
    run = config.parent / "run"
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        here = endpoint.read(str(run))
        if here and here.pid == process.pid:
            engine = Engine(config, spool, run, here, process)
            if engine.health() == 200:
                return engine
        if process.poll() is not None:
            tail = Path(here.log).read_text(errors="replace")[-3000:] if here else ""
            raise AssertionError(f"the engine ended with {process.returncode}: {tail}")
        time.sleep(0.25)  # until START_S; a port that opens tells nobody
    raise AssertionError(f"the engine is not ready after {START_S:g} s")


def tiny(folder: Path, arch: str, steps: bool = False) -> str:
    """A tiny checkpoint below `folder`, made once: float32, 8 layers, hidden 128, 512 tokens, context 2048."""
    from hsdaemon.demo import models  # costs seconds, and most tests need no model

    path = folder / f"{arch}-{'steps' if steps else 'random'}"
    return str(path) if path.exists() else models.make(str(path), models.Tiny(arch=arch, steps=steps))
