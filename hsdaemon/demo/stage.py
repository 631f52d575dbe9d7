"""The folder of a demonstration: its model, its data set, its configuration. Only a folder of ours is ever emptied."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

from msgspec import Struct

from hsdaemon.data.volume import init_volume
from hsdaemon.demo import inputs
from hsdaemon.demo.actor import HS, environment
from hsdaemon.engine.ports import free
from hsdaemon.errors import DataError, EngineError, StoreError
from hsdaemon.machine.checkpoint import eagle3_layers, read_model

MARKER = ".hs-extract-demo"  # a folder without it is somebody's and stays as it is
MAKE_S = 400.0  # the real model: 40 s quiet
PORTS = range(20000, 32000)  # below those that the kernel gives to clients
HOST = "127.0.0.1"


class Kind(Struct, frozen=True):
    """A demonstration. `relative`: judged by relative error; chunk: tokens of a prefill chunk; about: said first."""

    name: str
    model: str  # what hsdaemon.demo.make makes
    rows: int
    chunk: int
    concurrency: int  # requests in flight: what a kill costs
    relative: bool
    about: str
    lengths: tuple[int, int] = (8, 1500)  # tokens of a sample of the tiny model


TINY = Kind(
    name="demo",
    model="tiny",
    rows=256,
    chunk=256,
    concurrency=12,
    relative=False,
    about="a tiny Kimi-K2.5 (8 layers, random weights) and 256 samples of 8 to 1,500 tokens",
)
REAL = Kind(
    name="demo-real",
    model="smollm2",
    rows=64,
    chunk=128,
    concurrency=4,
    relative=True,
    about="SmolLM2-135M-Instruct as float32 and 64 English documents as chats",
)
VOCAB = 512


class Stage(Struct, frozen=True):
    """Everything that a run needs. layers: physical."""

    kind: Kind
    folder: Path
    model: Path
    data: Path
    output: Path
    config: Path
    spool: Path
    layers: tuple[int, ...]


def build(kind: Kind, folder: Path, seed: int) -> Stage:
    """Empty `folder` and set it up; a model that an earlier run made is kept. Raises StoreError, DataError,
    EngineError."""
    _claim(folder)
    model, data, output = folder / f"model-{kind.model}", folder / "train.jsonl", folder / "out"
    for old in folder.iterdir():
        if old.name not in (MARKER, model.name):
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    if not model.is_dir():
        _child(folder / "make.log", sys.executable, "-m", "hsdaemon.demo.make", kind.model, str(model))
    if kind.model == "tiny":
        inputs.write_tokens(data, kind.rows, VOCAB, kind.lengths, kind.chunk, seed)
    else:
        inputs.write_chats(folder / "chats.jsonl", kind.rows, seed)
        chats = str(folder / "chats.jsonl")
        _child(folder / "prepare.log", *HS, "prepare", chats, "--model", str(model), "--out", str(data))
    output.mkdir()
    init_volume(folder)
    spool = _spool(folder)
    stage = Stage(
        kind=kind,
        folder=folder,
        model=model,
        data=data,
        output=output,
        config=folder / "hs.toml",
        spool=spool,
        layers=eagle3_layers(read_model(str(model)).layers),
    )
    stage.config.write_text(_toml(stage), encoding="utf-8")
    return stage


def _claim(folder: Path) -> None:
    """Raises StoreError for a folder with content that no demonstration left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MARKER).exists() and any(folder.iterdir()):
            raise StoreError(
                f"cannot use {folder}: it has content that is not a demonstration's; name another --folder"
            )
        (folder / MARKER).touch()
    except OSError as error:
        raise StoreError(f"cannot use {folder}: {error.strerror}; name another --folder") from None


def _spool(folder: Path) -> Path:
    """On a tmpfs where there is one that we may write to."""
    shared = Path("/dev/shm")  # noqa: S108  # a folder of our own in it
    name = f"hs-demo-{os.getpid()}-{secrets.token_hex(4)}"
    return shared / name if os.access(shared, os.W_OK) else folder / "spool"


def _port() -> int:
    for port in random.sample(PORTS, 50):
        if free(HOST, port):
            return port
    raise EngineError("cannot find a free port: 50 of 50 are taken; see ss -ltn")


def _child(log: Path, *argv: str) -> None:
    """Run to the end. Raises DataError with its last words."""
    with log.open("wb") as out:
        try:
            done = subprocess.run(argv, stdout=out, stderr=out, env=environment(), timeout=MAKE_S, check=False)
        except subprocess.TimeoutExpired:
            raise DataError(f"cannot set up: {' '.join(argv[1:4])} took more than {MAKE_S:g} s; see {log}") from None
    if done.returncode:
        words = log.read_text(errors="replace").splitlines()[-1:]
        raise DataError(f"cannot set up: {' '.join(words)}; see {log}")


def _toml(stage: Stage) -> str:
    """The same configuration as on eight GPUs, with other values."""
    tables: dict[str, dict[str, object]] = {
        "data": {"path": str(stage.data)},
        "model": {"path": str(stage.model), "layers": list(stage.layers)},
        "output": {
            "path": str(stage.output),
            "dtype": "float32",
            "volume": str(stage.folder),
            "reserve_mib": 64,
            "ballast_mib": 1,
        },
        "spool": {"path": str(stage.spool), "budget_mib": 128, "wait_s": 30.0},
        "engine": {
            "device": "cpu",
            "host": HOST,
            "port": _port(),
            "dtype": "float32",
            "chunk_tokens": stage.kind.chunk,
            "max_running": 16,
            "max_total_tokens": 8192,
            "mem_fraction": 0.3,
            "watchdog_s": 300.0,
        },
        "worker": {"concurrency": stage.kind.concurrency, "request_timeout_s": 120.0, "dump_timeout_s": 20.0},
        "paths": {name: str(stage.folder / name) for name in ("run", "state", "log")},
    }
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)
