"""A worker with everything real but the engine, in one folder: for tests of the worker."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fake_engine import FakeEngine, Fault, states, to_bits

from hsdaemon.config import Config, parse
from hsdaemon.data import sqlite
from hsdaemon.data.dataset import open_dataset
from hsdaemon.data.formats import get_format, open_sample
from hsdaemon.data.identity import RunIdentity, run_identity
from hsdaemon.data.manifest import Counts, State, every_stored
from hsdaemon.data.publish import Publisher
from hsdaemon.data.rows import Limits
from hsdaemon.data.spool import Spool, new_epoch
from hsdaemon.data.volume import MARKER, init_volume
from hsdaemon.machine.checkpoint import read_model
from hsdaemon.work.checks import Wanted
from hsdaemon.work.worker import Parts, Worker

LAYERS = (1, 3, 4)
HIDDEN = 8
VOCAB = 200


def rows(lengths: Sequence[int], seed: int = 7) -> list[list[int]]:
    """Token ids of each row; the same seed gives the same rows."""
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, n).tolist() for n in lengths]


@dataclasses.dataclass
class Rig:
    """Folders and settings of one job. Sections of `settings` override the quick defaults of a test."""

    root: Path
    data: list[list[int]]
    settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    space: Callable[[int], None] = lambda _: None
    hidden: int = HIDDEN

    def __post_init__(self) -> None:
        for name in ("model", "out", "run", "spool"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.write_data()
        facts = {
            "num_hidden_layers": 6,
            "hidden_size": self.hidden,
            "vocab_size": VOCAB,
            "max_position_embeddings": 1 << 20,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        }
        (self.root / "model" / "config.json").write_text(json.dumps(facts))

    def write_data(self) -> None:
        lines = (json.dumps({"input_ids": ids}) for ids in self.data)
        (self.root / "data.jsonl").write_text("".join(line + "\n" for line in lines))

    def toml(self) -> str:
        """The configuration file's text."""
        sections: dict[str, dict[str, Any]] = {
            "data": {"path": str(self.root / "data.jsonl")},
            "model": {"path": str(self.root / "model"), "layers": list(LAYERS)},
            "output": {"path": str(self.root / "out"), "reserve_mib": 1, "ballast_mib": 1},
            "spool": {"path": str(self.root / "spool"), "budget_mib": 64},
            "engine": {"device": "cpu"},
            "worker": {
                "concurrency": 8,
                "request_timeout_s": 10.0,
                "dump_timeout_s": 3.0,
                "stall_s": 20.0,
                "backoff_s": 0.01,
                "drain_s": 10.0,
            },
            "paths": {name: str(self.root / name) for name in ("run", "state", "log")},
        }
        for name, values in self.settings.items():
            sections.setdefault(name, {}).update(values)
        lines = []  # TOML spells these values as JSON does
        for name, values in sections.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        return "\n".join(lines) + "\n"

    @property
    def config(self) -> Config:
        return parse(self.toml(), "test.toml")

    @property
    def identity(self) -> RunIdentity:
        return run_identity(self.config, read_model(self.config.model.path), "set")

    @property
    def manifest_path(self) -> Path:
        return self.root / "out" / "manifest.db"

    def engine(self, faults: Mapping[Any, Fault] | None = None, **options: Any) -> FakeEngine:
        named = {str(row): fault for row, fault in (faults or {}).items()}
        return FakeEngine(
            self.root / "spool", self.root / "run", hidden=self.hidden, layers=LAYERS, faults=named, **options
        )

    def start(self, *verb: str, **popen: Any) -> subprocess.Popen[str]:
        """`hs-extract VERB` (extract) on this job as a process of its own."""
        if not (self.root / MARKER).exists():
            init_volume(self.root)
        file = self.root / "config.toml"
        file.write_text(self.toml())
        words = [sys.executable, "-m", "hsdaemon", *(verb or ("extract",)), "-c", str(file)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        return subprocess.Popen(words, stdout=-1, stderr=-1, text=True, env=env, **popen)

    def extract(self, limit_s: float = 60.0) -> tuple[int, str, str]:
        """Run it to its end: exit code, stdout, stderr."""
        process = self.start()
        try:
            out, err = process.communicate(timeout=limit_s)
        finally:
            process.kill()
        return process.returncode, out, err

    def manifest(self) -> sqlite.SqliteManifest:
        """Opened, or made with every row of the data set in it."""
        if self.manifest_path.exists():
            return sqlite.open_manifest(self.manifest_path)
        made = sqlite.create(self.manifest_path, self.identity, "volume")
        dataset = open_dataset(self.config.data, Limits(VOCAB, None))
        made.begin_scan(dataset.fingerprint)
        batch = list(dataset.rows())
        made.ingest(batch, len(batch), dataset.end_hint())
        made.end_scan()
        dataset.close()
        return made

    def parts(self, manifest: sqlite.SqliteManifest, **change: Any) -> Parts:
        config, epoch = self.config, new_epoch()
        fmt = get_format(config.output.format)
        output = Path(config.output.path)
        manifest.begin_epoch(epoch)
        parts = Parts(
            config=config,
            wanted=Wanted(LAYERS, config.model.norm, config.output.dtype, self.hidden, fmt.interleaved),
            identity=self.identity,
            manifest=manifest,
            dataset=open_dataset(config.data, Limits(VOCAB, None)),
            publisher=Publisher(output, output / "quarantine", fmt, self.identity, epoch, self.space),
            spool=Spool.open(Path(config.spool.path), epoch, config.spool.budget_mib << 20),
            space=self.space,
        )
        return dataclasses.replace(parts, **change)

    def work(self, during: Callable[[Worker], Any] | None = None, limit_s: float = 60.0, **change: Any) -> Worker:
        """Run a worker to its end. during(worker): a coroutine function that runs beside it."""
        manifest = self.manifest()

        async def scene() -> Worker:
            worker = Worker(self.parts(manifest, **change), manifest.counts())
            beside = asyncio.create_task(during(worker)) if during else None
            try:
                await asyncio.wait_for(worker.run(), limit_s)
                if beside is not None:
                    await beside
            finally:
                if beside is not None:
                    beside.cancel()
                worker.shutdown()
            return worker

        try:
            return asyncio.run(scene())
        finally:
            manifest.close()

    def counts(self) -> Counts:
        manifest = sqlite.open_reader(self.manifest_path)
        try:
            return manifest.counts()
        finally:
            manifest.close()

    def reasons(self) -> dict[int, tuple[str, str]]:
        """Row -> (code, reason) of failed rows, and of pending ones that were tried."""
        manifest = sqlite.open_reader(self.manifest_path)
        try:
            found = manifest.faults([State.failed, State.pending])
        finally:
            manifest.close()
        return {fault.row: (fault.code, fault.reason) for fault in found}

    def check_files(self, missing: Sequence[int] = ()) -> None:
        """Every row but `missing` is done, and each file holds that row's states; there is no other file."""
        manifest = sqlite.open_reader(self.manifest_path)
        try:
            stored = list(every_stored(manifest))
        finally:
            manifest.close()
        assert [s.row for s in stored] == [r for r in range(len(self.data)) if r not in missing]
        root = self.root / "out"
        for entry in stored:
            self._check_file(root / entry.path, self.data[entry.row])
        names = {str(p.relative_to(root)) for p in root.glob("rows_*/*")}
        assert names == {s.path for s in stored}

    def _check_file(self, path: Path, ids: list[int]) -> None:
        opened = open_sample(path)
        token_ids = np.asarray(ids, np.int64)
        want = to_bits(states(token_ids, len(LAYERS) + 1, self.hidden), self.config.output.dtype)
        check_opened(opened, token_ids, want)


def check_opened(opened: Any, ids: Any, want: Any) -> None:
    np.testing.assert_array_equal(opened.ids, ids)
    np.testing.assert_array_equal(opened.aux, want[:, :-1].reshape(len(ids), -1))
    np.testing.assert_array_equal(opened.final, want[:, -1])
