"""Hostile input for everything that the product reads: whole files are broken in small ways, and the readers judged.

A target has seeds (files as they should be) and a reader, which gets a broken one in a folder of its own. The reader
may give a value or raise what the target names; anything else is a fault, as is a file outside that folder.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import outputs
import pyarrow as pa
import pyarrow.parquet as pq
import scenes
import tokenizers
import xxhash
from hypothesis import strategies as st
from samples import EPOCH, dump_of, publisher_of, run_of, sample_of, states_of
from tokenizers import models, pre_tokenizers

from hsdaemon import wire
from hsdaemon.config import Config, Data, parse
from hsdaemon.core import budget
from hsdaemon.core import model as m
from hsdaemon.core.decide import decide
from hsdaemon.data import compress
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.chat import Template
from hsdaemon.data.dataset import open_dataset
from hsdaemon.data.formats import FORMATS, check_content, open_sample, read_stamp
from hsdaemon.data.identity import identity_from_json
from hsdaemon.data.lock import LOCK_NAME, living_holder
from hsdaemon.data.prepare import prepare
from hsdaemon.data.publish import Published
from hsdaemon.data.rows import Limits
from hsdaemon.data.sample import BadRow
from hsdaemon.data.spool import Spool
from hsdaemon.data.sqlite import open_reader
from hsdaemon.data.tokenizer import FastTokenizer
from hsdaemon.data.volume import MARKER, read_marker
from hsdaemon.engine import diff, endpoint, probe, swap, weights
from hsdaemon.errors import ConfigError, DataError, DiskFull, EngineError, HsError, StoreError
from hsdaemon.history import History, Tick, line, read_tick
from hsdaemon.host.board import Board, facts
from hsdaemon.host.screen import understood
from hsdaemon.host.wishes import WishFiles
from hsdaemon.machine.checkpoint import read_model
from hsdaemon.machine.identity import boot_id
from hsdaemon.machine.lease import Leases, Record
from hsdaemon.machine.process_units import Processes, Started
from hsdaemon.machine.proof import ProofFiles
from hsdaemon.work import checks, client
from hsdaemon.work.decide import Failure
from hsdaemon.work.probe import WorkerProbe

Reader = Callable[[bytes, Path], object]


@cache
def scratch() -> Path:
    """A folder in memory until this process ends, for making seeds."""
    folder = Path(tempfile.mkdtemp(prefix="hs-fuzz-", dir=os.environ.get("FUZZ_SCRATCH", "/dev/shm")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


ROOT = Path(__file__).resolve().parents[1]
_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|true|false|null')
# What has hurt a reader somewhere before.
WORDS = (
    *(b"null", b"true", b"{}", b"[]", b'""', b"0", b"-1", b"1.5", b"1e999", b"-1e999", b"NaN", b"Infinity", b"inf"),
    *(b"9" * 30, b"9" * 5000, b"18446744073709551615", b"9223372036854775808", b'"9"', b"[[]]", b'{"_":"Past"}'),
    *(b"[" * 3000, b'{"a":' * 3000, b"[" * 3000 + b"]" * 3000, b'"\\ud800"', b'"\\u0000"', b'"../../x"'),
    *(b'"/etc/passwd"', b'"x\\ny"', b"\xff\xfe", b"\0", b"\n", b'"', b",", b"}", b"\x80\x02}", b"cos\nsystem\n"),
    *(b"PK\5\6", b"\xff" * 8),
)


@dataclass(frozen=True)
class Edit:
    """One small damage. how: flip, cut, drop, put, value (the n-th JSON or TOML value becomes `word`)."""

    how: str
    at: int
    word: bytes

    def __call__(self, data: bytes) -> bytes:
        at = self.at % (len(data) + 1)
        if self.how == "value":
            found = list(_VALUE.finditer(data))
            if found:
                chosen = found[self.at % len(found)]
                return data[: chosen.start()] + self.word + data[chosen.end() :]
        if self.how == "cut":
            return data[:at]
        if self.how == "drop":
            return data[:at] + data[at + 1 + self.at % 13 :]
        if self.how == "flip" and data:
            at %= len(data)
            return data[:at] + bytes([data[at] ^ 1 << self.at % 8]) + data[at + 1 :]
        return data[:at] + self.word + (data[at + len(self.word) :] if self.how == "over" else data[at:])


HOWS = ("flip", "cut", "drop", "put", "over", "value", "value", "value")
edits = st.lists(
    st.builds(
        Edit,
        st.sampled_from(HOWS),
        st.integers(0, 1 << 20),
        st.one_of(st.sampled_from(WORDS), st.binary(max_size=9)),
    ),
    max_size=4,
)


def broken(seed: bytes, damage: list[Edit]) -> bytes:
    for edit in damage:
        seed = edit(seed)
    return seed


@dataclass(frozen=True)
class Target:
    """seeds are made once; allowed: what the reader may raise."""

    seeds: Callable[[], list[bytes]]
    read: Reader
    allowed: tuple[type[Exception], ...] = ()


TARGETS: dict[str, Target] = {}


def target(name: str, seeds: Callable[[], list[bytes]], *allowed: type[Exception]) -> Callable[[Reader], Reader]:
    def add(read: Reader) -> Reader:
        TARGETS[name] = Target(cache(seeds), read, allowed)
        return read

    return add


def attempt(name: str, data: bytes, folder: Path) -> None:
    """Read it in `folder`/in; a sentinel beside it must not change. Raises whatever is a fault."""
    inside, sentinel = folder / "in", folder / "sentinel"
    shutil.rmtree(folder, ignore_errors=True)
    inside.mkdir(parents=True)
    sentinel.write_bytes(b"untouched")
    with contextlib.suppress(*TARGETS[name].allowed):
        TARGETS[name].read(data, inside)
    assert sorted(path.name for path in folder.iterdir()) == ["in", "sentinel"]
    assert sentinel.read_bytes() == b"untouched"


# --- configuration, model, data set ---------------------------------------------------------------------------------


@target("config", lambda: [(ROOT / "etc/hs-extract.toml").read_bytes(), _config()], ConfigError)
def _read_config(data: bytes, folder: Path) -> object:
    config = parse(data.decode(errors="replace"), "hs.toml")
    for path in (config.data.path, config.output.path, config.paths.run):
        Path(path).exists()  # no name may be one that the kernel cannot take
    return config


def _config() -> bytes:
    text = '[data]\npath="/a.jsonl"\n[model]\npath="/m"\nlayers=[1,2,3]\n[output]\npath="/o"\nmanifest="/x"\n'
    more = '[engine]\nextra_args=["--a","b"]\nenvironment={A="b"}\nwatchdog_s=600.5\n[gpus]\nuuids=["GPU-1"]\n'
    return (text + more + '[evict]\nunits=[{pattern="vllm*",how="stop"}]\n').encode()


def _model() -> list[bytes]:
    text = {"num_hidden_layers": 12, "hidden_size": 64, "vocab_size": 1000, "max_position_embeddings": 128}
    return [json.dumps({"model_type": "kimi_k25", "architectures": ["K"], "text_config": text}).encode()]


@target("model", _model, ConfigError)
def _read_model(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    read_model(str(folder))


@target("weights", lambda: [b'{"weight_map":{"a":"x.safetensors"}}', _safetensors_head()], OSError)
def _read_weights(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_bytes(data)
    (folder / "x.safetensors").write_bytes(data)
    weights.look(folder)


def _safetensors_head() -> bytes:
    head = json.dumps({"t": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(8)


def _lines() -> list[bytes]:
    rows = [*outputs.lines(3, 4), {"input_ids": [1, 2], "id": "x", "messages": [{"role": "user", "content": "é"}]}]
    return [b"".join(json.dumps(row).encode() + b"\n" for row in rows)]


def _all_rows(path: Path) -> None:
    """Every row is a Sample or a BadRow, the same when it is read again, and its name stays in its folder."""
    dataset = open_dataset(Data(path=str(path)), Limits(1000, 64))
    try:
        for entry in dataset.rows():
            again = dataset.read(entry.row, entry.hint)
            assert type(again) is type(entry)
            if not isinstance(entry, BadRow):
                assert not isinstance(again, BadRow)
                assert again.digest == entry.digest
                name = Path("/rows") / f"{entry.name}.ckpt"
                assert name.parent == Path("/rows")
                assert not entry.name.startswith(".")
                assert len(entry.name.encode()) < 250
                assert entry.ids.min() >= 0
                assert entry.ids.max() < 1000
    finally:
        dataset.close()


@target("jsonl", _lines, DataError)
def _read_jsonl(data: bytes, folder: Path) -> None:
    path = folder / "d.jsonl"
    path.write_bytes(data)
    _all_rows(path)


def _parquet() -> list[bytes]:
    table = pa.table({"input_ids": [[1, 2, 3], [4, 5]] * 3, "id": list("abcdef"), "loss_mask": [[0, 1, 1], [1, 1]] * 3})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=2, compression="none")
    return [sink.getvalue().to_pybytes()]


@target("parquet", _parquet, DataError)
def _read_parquet(data: bytes, folder: Path) -> None:
    path = folder / "d.parquet"
    path.write_bytes(data)
    _all_rows(path)


CHAT = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Yes."}]
TEMPLATE = """{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}
{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}{{ tools | tojson }}"""


@cache
def _chat_model() -> tuple[Template, FastTokenizer]:
    """A template with marks, and a tokenizer with a token for each byte."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = scratch() / "tokenizer.json"
    tokenizer.save(str(path))
    return Template(TEMPLATE, {}), FastTokenizer(path)


def _prepare(source: Path) -> None:
    """What is written has a mask for each id, and there is nothing else."""
    target = source.with_name("out.jsonl")
    try:
        counts = prepare(source, target, *_chat_model(), "skip", lambda _: None)
        rows = [json.loads(row) for row in target.read_text().splitlines()]
        assert len(rows) == counts.written > 0
        assert all(len(row["input_ids"]) == len(row["loss_mask"]) and any(row["loss_mask"]) for row in rows)
    finally:
        assert {path.name for path in source.parent.iterdir()} <= {source.name, target.name}


def _chats() -> list[bytes]:
    talk = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    rows = [
        {"messages": CHAT, "id": "a"},
        {"conversations": talk, "id": 7},
        {"messages": CHAT, "tools": [{"name": "t"}]},
    ]
    return [b"".join(json.dumps(row).encode() + b"\n" for row in rows)]


@target("chats", _chats, DataError)
def _read_chats(data: bytes, folder: Path) -> None:
    path = folder / "chats.jsonl"
    path.write_bytes(data)
    _prepare(path)


def _chat_table() -> list[bytes]:
    when = pa.array([1, 2, 3, 4], pa.timestamp("us", tz="UTC"))
    columns = {"messages": [CHAT] * 4, "tools": ['[{"name": "t"}]', None] * 2}
    seeds = []
    for ids in (pa.array(list("abcd")), when):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({**columns, "id": ids}), sink, row_group_size=2, compression="none")
        seeds.append(sink.getvalue().to_pybytes())
    return seeds


@target("chats in parquet", _chat_table, DataError)
def _read_chat_table(data: bytes, folder: Path) -> None:
    path = folder / "chats.parquet"
    path.write_bytes(data)
    _prepare(path)


# --- spool and what comes from the engine ---------------------------------------------------------------------------


def _rid() -> wire.RequestId:
    return wire.RequestId(EPOCH, 0, 1, 9)


def _dump() -> list[bytes]:
    seeds = []
    folder = scratch() / "seed"
    folder.mkdir(exist_ok=True)
    for fmt in FORMATS:
        run = run_of(fmt, hidden=8)
        path = dump_of(folder, sample_of(0, 9), run, states_of(9, 8), rid=str(_rid()))
        seeds.append(path.read_bytes())
    shutil.rmtree(folder)
    return seeds


@target("dump", _dump)
def _read_dump(data: bytes, folder: Path) -> None:
    spool = Spool.open(folder / "spool", EPOCH, 1 << 20)
    (folder / "spool" / wire.dump_name(_rid())).write_bytes(data)
    spool.look(_rid())
    for fmt in FORMATS:
        run = run_of(fmt, hidden=8)
        wanted = checks.Wanted(run.layers, run.norm, run.dtype, run.hidden, FORMATS[fmt].interleaved)
        looked = spool.look(_rid())
        if hasattr(looked, "header"):
            checks.check_dump(cast(Any, looked), _rid(), wanted, "l", run.release)
        outcome = publisher_of(folder / fmt, run).publish(sample_of(0, 9), folder / "spool" / wire.dump_name(_rid()))
        names = [p for p in (folder / fmt).rglob("*") if p.is_file()]
        if isinstance(outcome, Published):
            assert names == [folder / fmt / outcome.path]
            check_content(names[0])
        else:
            assert names == []


def _said() -> list[bytes]:
    texts = ("launch", "stage", "release", "way", "model", "norm", "dtype", "spool", "last_error")
    fields: dict[str, Any] = dict.fromkeys(wire.Attest.__dataclass_fields__, 0) | dict.fromkeys(texts, "x")
    attest = wire.Attest(**(fields | {"layers": (1, 2, 3), "loop_ids": (2,), "interleaved": False}))
    error = wire.DumpError(**dict.fromkeys(wire.DumpError.__dataclass_fields__, "x"))
    return [wire.to_json(attest).encode(), wire.to_json(error).encode()]


@target("attest and error files", _said, ValueError)
def _read_said(data: bytes, folder: Path) -> None:
    spool = Spool.open(folder / "spool", EPOCH, 1 << 20)
    (folder / "spool" / wire.error_name(_rid())).write_bytes(data)
    spool.look(_rid())
    text = data.decode(errors="replace")
    for read in (wire.attest, wire.dump_error, wire.capture_config):
        with contextlib.suppress(ValueError):
            read(text)


class _Reply:
    """An aiohttp reply with this body."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.content = status, self
        self._body = body

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), size):
            yield self._body[at : at + size]


def _reply() -> list[bytes]:
    meta = {"id": str(_rid()), "prompt_tokens": 9, "cached_tokens": 0, "hidden_states": None}
    return [json.dumps({"text": "", "meta_info": meta}).encode(), b'{"error":{"message":"no"}}', b'{"error":"no"}']


@target("engine replies", _reply, client.Busy)
def _read_reply(data: bytes, folder: Path) -> None:
    for status in (200, 400, 500, 503):
        reply = asyncio.run(client._read(cast(Any, _Reply(status, data))))
        if status == 200 and not isinstance(reply, Failure):
            checks.check_reply(reply, _rid())


# --- stored files ---------------------------------------------------------------------------------------------------


def _stored() -> list[bytes]:
    seeds = []
    root = scratch() / "stored"
    for fmt in FORMATS:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        run = run_of(fmt, hidden=8)
        outcome = publisher_of(root / "o", run).publish(
            sample_of(0, 9), dump_of(root, sample_of(0, 9), run, states_of(9, 8))
        )
        assert isinstance(outcome, Published)
        seeds.append((root / "o" / outcome.path).read_bytes())
    shutil.rmtree(root)
    return seeds


@target("stored files", _stored, StoreError)
def _read_stored(data: bytes, folder: Path) -> None:
    path = folder / "data_0.ckpt"
    path.write_bytes(data)
    with contextlib.suppress(StoreError):
        found = open_sample(path)
        assert len(found.ids) == len(found.aux) == len(found.final)
        np.sum(found.ids)
    with contextlib.suppress(StoreError):
        read_stamp(path)
    check_content(path)


def _packed() -> list[bytes]:
    payload = states_of(9, 8).tobytes() + b"end"
    head = compress.Header(len(payload), 2, xxhash.xxh3_128_hexdigest(payload))
    return [b"".join(compress.pack(io.BytesIO(payload), head))]


@target("compressed files", _packed, DataError, DiskFull)
def _read_packed(data: bytes, folder: Path) -> None:
    """A restored file is the one that was packed, or there is none."""
    path = folder / "rows_0-2000" / "data_0.ckpt.hsz"
    path.parent.mkdir()
    path.write_bytes(data)
    payload = states_of(9, 8).tobytes() + b"end"
    try:
        compress.restore_all(folder, folder / "out")
    finally:
        for made in (folder / "out").rglob("*.ckpt"):
            assert made.read_bytes() == payload


def _output_config(folder: Path) -> Config:
    rows = [{**row, "id": f"chat {i}"} for i, row in enumerate(outputs.lines(4))]
    return outputs.config_for(folder, rows, format="modelopt")


@cache
def _output() -> tuple[Path, bytes]:
    """An output of four named rows, one of them in flight, and its manifest."""
    folder = scratch() / "output"
    folder.mkdir()
    opened = outputs.ready(_output_config(folder))
    outputs.extract(opened, folder, 3)
    outputs.publish(opened, opened.manifest.claim(1)[0], folder)
    config = opened.config
    opened.close()
    return folder, manifest_path(config.output).read_bytes()


@target("manifest", lambda: [_output()[1]], HsError)
def _read_manifest(data: bytes, folder: Path) -> None:
    """A worker's start goes on or refuses; whatever the file says, the samples are still there."""
    shutil.copytree(_output()[0], folder, dirs_exist_ok=True)
    config = _output_config(folder)
    path = manifest_path(config.output)
    path.write_bytes(data)
    with contextlib.suppress(HsError), contextlib.closing(open_reader(path)) as reader:
        if reader.integrity() is None:
            reader.counts()
            reader.identity()
            reader.stored()
    try:
        opened = outputs.ready(config)
        counts = opened.manifest.counts()
        opened.close()
        assert counts.done + counts.pending == counts.total == 4, counts
    finally:
        left = sorted(str(path) for path in (folder / "volume/states").glob("[rq]*/chat*.pt*"))
        assert len(left) == 4, left


@target("identity and marker", lambda: [run_of("specforge").to_json().encode(), _marker()], HsError)
def _read_identity(data: bytes, folder: Path) -> None:
    (folder / MARKER).write_bytes(data)
    with contextlib.suppress(HsError):
        read_marker(folder)
    with contextlib.suppress(ValueError):
        identity_from_json(data.decode(errors="replace"))


def _marker() -> bytes:
    return json.dumps({"version": 1, "uuid": "5c1a7b9e-5b5f-4a0e-9a70-0f2a6a1f0001"}).encode()


# --- the product's own small files ----------------------------------------------------------------------------------


def _run_files() -> list[bytes]:
    end = endpoint.Endpoint("l", 1, 2, "b", "127.0.0.1", 30000, "0.5.23", "plugin", "f", ("python",), "/log")
    tick = Tick(scenes.busy(), budget.Past(), scenes.plan_of(scenes.busy()))
    worker = {"sentence": "working 1/2", "stopped_by": "", "pid": 7}
    proof = {"invocation": "i", "ok": True, "code": "", "detail": "", "steps": ["x"]}
    lock = {"pid": 1, "start_ticks": 2, "boot_id": boot_id()}
    started = Started("i", 1, 2, 3.5)
    record = Record("vllm.service", "enabled", True, (("/etc/a", "/etc/b"),))
    plain = (facts(tick), worker, proof, lock, ["a.service"], {"port": 30000})
    return [
        *(json.dumps(value).encode() for value in plain),
        *(msgspec.json.encode(value) for value in (end, started, record)),
    ]


@target("run and state files", _run_files)
def _read_run(data: bytes, folder: Path) -> None:
    """Whatever a small file of ours says, its reader gives a value: the loop must not end by it."""
    for name in ("engine.json", "worker.json", "proof.json", "prove.json", "status.json", "start.json", LOCK_NAME):
        (folder / name).write_bytes(data)
    for name in ("wishes/release", "units/hs-worker.service.json", "leases/x.service.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    run = str(folder)
    found = endpoint.read(run)
    if found is not None:
        endpoint.alive(found)
        assert isinstance(found.url, str)
    WorkerProbe(run).read(m.Unit(m.WORKER_UNIT, pids=(7,)))
    files = ProofFiles(run)
    files.read()
    files.asked()
    board = Board(run).read()
    if board is not None:
        understood(board)
    probe.ordered_port(run)
    WishFiles(run).read()
    living_holder(folder)
    leases = Leases(folder / "etc", folder)
    leases.names()
    leases.record("x.service")
    Processes({m.WORKER_UNIT: ["true"]}, folder)._started(m.WORKER_UNIT)


def _history() -> list[bytes]:
    tick = Tick(scenes.busy(), budget.Past(), scenes.plan_of(scenes.busy()))
    events: list[object] = [
        scenes.acted(m.StartEngine("i", 30000, "f")),
        budget.Ended(scenes.NOW, m.StopEngine("i", "stall"), m.Outcome("done")),
        scenes.died("signal 11"),
        budget.Reset(scenes.NOW),
        scenes.past_of(scenes.busy()),
        tick,
    ]
    return [b"".join(line(event) + b"\n" for event in events), *(line(event) + b"\n" for event in events)]


@target("history", _history, DataError)
def _read_history(data: bytes, folder: Path) -> None:
    (folder / "history.jsonl").write_bytes(data)
    history = History.peek(folder)
    history.events()
    seen = scenes.busy()
    past = budget.look(history.past, seen, _plain_config())
    budget.news(past, seen)
    decide(_plain_config(), seen, past)
    read_tick(folder / "history.jsonl")


@cache
def _plain_config() -> Config:
    return parse('[data]\npath="/a.jsonl"\n[model]\npath="/m"\n[output]\npath="/o"\n', "x")


# --- patches --------------------------------------------------------------------------------------------------------


def _patches() -> list[bytes]:
    return [min((path.read_bytes() for path in (ROOT / "patches").glob("*.diff")), key=len)]


@target("patches", _patches, EngineError)
def _read_patch(data: bytes, folder: Path) -> None:
    for text in (diff.decode(data), _signed(data)):
        with contextlib.suppress(EngineError):
            patch = diff.parse(text, "x.patch")
            for one in patch.targets:
                assert not one.path.startswith("/")
                assert ".." not in Path(one.path).parts
                diff.judge("import os\n", one, patch.version)
                diff.judge(diff.decode(data), one, patch.version)


def _signed(data: bytes) -> str:
    """The same with a right digest: what whoever can write the patch can do."""
    head, _, body = diff.decode(data).partition("\n\n")
    return re.sub(r"digest: [0-9a-f]*", f"digest: {diff.sha256(body)}", head) + "\n\n" + body


@target("swap journal", lambda: [json.dumps({"a.py": ["0" * 64, "1" * 64]}).encode()], HsError, OSError)
def _read_swap(data: bytes, folder: Path) -> None:
    (folder / swap.JOURNAL).write_bytes(data)
    (folder / "a.py").write_bytes(b"old")
    swap.finish(folder)
    assert (folder / "a.py").read_bytes() == b"old"
