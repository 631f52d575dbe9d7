"""A data set, a model folder and an output with everything around them, for tests that open a store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from samples import EPOCH, dump_of, states_of

from hsdaemon.config import Config, parse
from hsdaemon.data.adopt import QUARANTINE
from hsdaemon.data.formats import get_format
from hsdaemon.data.manifest import Claim, Done
from hsdaemon.data.publish import Published, Publisher
from hsdaemon.data.sample import Sample
from hsdaemon.data.store import Store, open_store
from hsdaemon.data.volume import init_volume

VOCAB, HIDDEN, CONTEXT = 1000, 64, 128


def lines(rows: int, tokens: int = 12) -> list[dict[str, Any]]:
    """Rows of a data set, all different, the first token has mask 0."""
    rng = np.random.default_rng(7)
    return [
        {"input_ids": [i % VOCAB, *rng.integers(0, VOCAB, tokens - 1).tolist()], "loss_mask": [0] + [1] * (tokens - 1)}
        for i in range(rows)
    ]


def write_jsonl(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_model(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    text = {"num_hidden_layers": 12, "hidden_size": HIDDEN, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    (path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    return path


def config_for(folder: Path, rows: Sequence[object] | None = None, *, text: str = "", **output: object) -> Config:
    """A config whose volume is `folder`/volume, marked, with the data set written. text: more TOML."""
    volume = folder / "volume"
    volume.mkdir(exist_ok=True)
    init_volume(volume)
    data = folder / "data.jsonl"
    if rows is not None:
        write_jsonl(data, rows)
    config = parse(
        f'[data]\npath = "{data}"\n[model]\npath = "{write_model(folder / "model")}"\n'
        f'[output]\npath = "{volume / "states"}"\nreserve_mib = 1\nballast_mib = 1\n'
        f'[paths]\nrun = "{folder}/run"\nstate = "{folder}/state"\nlog = "{folder}/log"\n{text}',
        "test.toml",
    )
    return msgspec.structs.replace(config, output=msgspec.structs.replace(config.output, **output))


def ready(config: Config, epoch: str = EPOCH) -> Store:
    """An open store whose data set is read to its end; what the background raises is raised here, the store closed."""
    store = open_store(config, epoch)
    store.background.start()
    try:
        while not store.background.check():
            store.background.join(0.05)
    except BaseException:
        store.close()
        raise
    return store


def publisher(store: Store) -> Publisher:
    fmt = get_format(store.identity.format)
    holds = store.manifest.holds
    return Publisher(store.root, store.root / QUARANTINE, fmt, store.identity, EPOCH, store.guard.check, holds=holds)


def publish(store: Store, claim: Claim, folder: Path, writer: Publisher | None = None) -> Done:
    """The sample of a claim, durable, with made-up states; what is left is the commit."""
    sample = store.dataset.read(claim.row, claim.hint)
    assert isinstance(sample, Sample)
    assert sample.digest == claim.digest
    states = states_of(sample.tokens, store.identity.hidden, claim.row)
    dump = dump_of(folder, sample, store.identity, states)
    outcome = (writer or publisher(store)).publish(sample, dump)
    assert isinstance(outcome, Published), outcome
    dump.unlink()
    return Done(claim.row, claim.lease, outcome.path, outcome.size, outcome.digest)


def extract(store: Store, folder: Path, rows: int = 10**9) -> int:
    """What a worker does, without an engine: claim, publish, commit."""
    writer, done = publisher(store), 0
    while done < rows and (claims := store.manifest.claim(min(16, rows - done))):
        store.manifest.commit([publish(store, claim, folder, writer) for claim in claims])
        done += len(claims)
    return done


def apart(*words: str) -> tuple[int, str]:
    """Exit code and output of a verb in a process of its own: SQLite may not be open on both sides of a fork."""
    done = subprocess.run(
        [sys.executable, "-m", "hsdaemon", *words], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    return done.returncode, done.stdout
