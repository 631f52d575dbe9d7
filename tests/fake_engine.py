"""A small server that speaks SGLang's HTTP and the spool protocol, and misbehaves on request. numpy only.

In a test:      with FakeEngine(spool, run, script=Script({"3": Fault("nan")})) as engine: ...
As a process:   python tests/fake_engine.py OPTIONS.json     (see Options; for units, kills and slow starts)

Row t of layer k holds values that follow from (token id, t, k, column) alone, so whoever reads a stored file can tell
whether it is the right row, layer and position: `states`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsdaemon import wire

RELEASE = "0.5.23"


@dataclasses.dataclass(frozen=True)
class Fault:
    """How to misbehave. kind: see `Answer` below; times: for the first so many tries (-1: always)."""

    kind: str
    times: int = -1
    seconds: float = 0.0
    status: int = 400
    text: str = ""
    code: str = "capture"
    layer: int = 1
    position: int = 0
    value: float = float("nan")
    count: int = 1
    path: str = ""
    other: int = -1


@dataclasses.dataclass
class Options:
    """One fake engine. faults: row number as text, or "*", to Fault; `phase` options concern the start."""

    spool: str
    run: str  # folder of engine.json and attest/
    hidden: int = 8
    layers: tuple[int, ...] = (1, 3, 4)
    num_layers: int = 6
    norm: str = "post"
    dtype: str = "bfloat16"
    interleaved: bool = False
    launch: str = "hs-fake"
    release: str = RELEASE
    model: str = ""  # revision that engine.json names
    host: str = "127.0.0.1"
    port: int = 0
    context: int = 1 << 20  # longer prompts get 400
    budget: int = 1 << 40  # bytes of the spool, enforced as the capture does
    wait_s: float = 5.0
    latency_s: float = 0.0  # of each request
    tokens_s: float = 0.0  # speed of the whole engine; 0 = at once
    hang_after: int = -1  # generate hangs after so many requests while health stays good
    faults: dict[str, Fault] = dataclasses.field(default_factory=dict)
    attest: bool = True  # write the attest file
    attest_spool: str = ""  # attest another folder than the one in `spool`
    announce: bool = True  # write engine.json (normally `hs-extract serve` has done so)
    readiness_line: bool = True
    load_s: float = 0.0  # before the port is bound; a log line every log_s
    log_s: float = 0.2
    load_silent: bool = False
    exit_rc: int = -1  # exit with this code after load_s instead of serving
    children: int = 0  # ranks; they outlive a killed parent when children_survive
    children_survive: bool = False
    allocate_mib: int = 0  # memory held after the start
    grow_mib_s: float = 0.0  # memory that grows until something kills us
    health_status: int = 200
    health_s: float = 0.0  # each probe takes this long


def states(ids: npt.NDArray[np.int64], layers: int, hidden: int) -> npt.NDArray[np.float32]:
    """[S, layers, hidden] float32, exact in bfloat16: multiples of 1/32 below 8, none zero."""
    t = np.arange(len(ids), dtype=np.int64)[:, None, None]
    k = np.arange(layers, dtype=np.int64)[None, :, None]
    h = np.arange(hidden, dtype=np.int64)[None, None, :]
    mixed = ids[:, None, None] * 31 + t * 7 + k * 67 + h * 13
    return ((mixed % 251 + 1) / 32).astype(np.float32)


def to_bits(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """The stored bytes: bfloat16 as uint16, rounded to nearest even."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    raw = np.ascontiguousarray(values).view(np.uint32)
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def dump_bytes(header: wire.DumpHeader, ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> bytes:
    """A whole dump file. values: [S, aux + 1, hidden]."""
    layout = header.layout()
    out = bytearray(layout.total)
    out[: wire.HEADER_BYTES] = wire.pack_header(header)
    out[layout.ids_offset : layout.ids_offset + 8 * len(ids)] = ids.astype("<i8").tobytes()
    bits = to_bits(values, header.dtype)
    planes = (bits,) if header.interleaved else (bits[:, :-1], bits[:, -1])
    for offset, plane in zip(layout.plane_offsets, planes, strict=True):
        raw = np.ascontiguousarray(plane).tobytes()
        out[offset : offset + len(raw)] = raw
    return bytes(out)


class FakeEngine:
    """The server, in threads of this process. Counts what it sees; `faults` may be changed while it runs."""

    def __init__(self, spool: Path | str, run: Path | str, **options: Any) -> None:
        self.options = Options(spool=str(spool), run=str(run), **options)
        self.requests: Counter[int] = Counter()  # row -> number of requests
        self.rids: list[str] = []  # in order of arrival
        self.live: set[str] = set()
        self.duplicates = 0  # of live ids
        self.unfinished = 0  # connections that the client gave up
        self.peak_live = 0
        self.peak_spool = 0  # bytes of dumps and parts
        self.probes = 0
        self.live_probes = 0
        self.peak_probes = 0
        self.bodies: dict[str, dict[str, Any]] = {}
        self.parked: dict[int, tuple[Answer, threading.Event]] = {}  # for "swap"
        self.lock = threading.Lock()
        self.gpu = threading.Lock()
        self.stopped = threading.Event()
        self.died = threading.Event()
        self.on_die = self._drop_everything
        self.sockets: set[socket.socket] = set()
        self.server: _Server | None = None

    def __enter__(self) -> FakeEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        assert self.server is not None
        return int(self.server.server_address[1])

    def start(self) -> None:
        """Bind, attest, announce, serve."""
        o = self.options
        self.stopped.clear()
        self.died.clear()
        Path(o.spool).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.server = _Server((o.host, o.port), _Handler)
        self.server.engine = self
        if o.attest:
            self._attest()
        if o.announce:
            self._announce()
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        if o.readiness_line:
            print(f"{wire.ENABLED_LINE} layers={o.layers}\nThe server is fired up and ready to roll!", flush=True)

    def stop(self) -> None:
        """Close the port and every connection."""
        self.stopped.set()
        server, self.server = self.server, None  # a dying engine and its test may both stop it
        if server is not None:
            server.shutdown()
            server.server_close()
            self._drop_connections()

    def restart(self, launch: str) -> None:
        """Another start of the engine: other launch, other port."""
        self.stop()
        self.options.launch, self.options.port = launch, 0
        with self.lock:
            self.live.clear()
        self.start()

    def stats(self) -> dict[str, Any]:
        return {
            "requests": {str(k): v for k, v in self.requests.items()},
            "duplicates": self.duplicates,
            "peak_live": self.peak_live,
            "peak_spool": self.peak_spool,
            "peak_probes": self.peak_probes,
        }

    def spool_bytes(self) -> int:
        total = 0
        for name in os.listdir(self.options.spool):
            if wire.spool_rid(name) is not None:
                with contextlib.suppress(FileNotFoundError):
                    total += (Path(self.options.spool) / name).stat().st_size
        return total

    def _drop_connections(self) -> None:
        for connection in list(self.sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _drop_everything(self) -> None:
        """What a crash looks like from outside: the port closes, every reply is cut."""
        if not self.died.is_set():
            self.died.set()
            threading.Thread(target=self.stop, daemon=True).start()

    def _announce(self) -> None:
        o = self.options
        fields = {
            "launch": o.launch,
            "pid": os.getpid(),
            "start_ticks": start_ticks(os.getpid()),
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "host": o.host,
            "port": self.port,
            "release": o.release,
            "way": "plugin",
            "fingerprint": "fake",
            "argv": ["fake"],
            "log": "",
            "model": o.model,
        }
        _replace(Path(o.run) / "engine.json", json.dumps(fields))

    def _attest(self) -> None:
        o = self.options
        attest = wire.Attest(
            launch=o.launch,
            stage="seen",
            pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()),
            release=o.release,
            capture=wire.CAPTURE_VERSION,
            way="plugin",
            model="FakeForCausalLM",
            num_layers=o.num_layers,
            hidden=o.hidden,
            layers=o.layers,
            loop_ids=o.layers,
            norm=o.norm,
            dtype=o.dtype,
            interleaved=o.interleaved,
            tp_rank=0,
            tp_size=1,
            dp_rank=0,
            spool=o.attest_spool or o.spool,
            errors=0,
            last_error="",
        )
        _replace(Path(o.run) / "attest" / wire.attest_name(attest), wire.to_json(attest))


def start_ticks(pid: int) -> int:
    """Field 22 of /proc/pid/stat."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


class Answer:
    """What one request gets: dumps for the spool, and a reply. Each fault is one method that changes it."""

    def __init__(self, engine: FakeEngine, rid: str, ids: list[int]) -> None:
        o = engine.options
        self.engine, self.rid, self.ids = engine, rid, np.asarray(ids, np.int64)
        self.values = states(self.ids, len(o.layers) + 1, o.hidden)
        self.shown_ids = self.ids
        self.layers = o.layers
        self.norm, self.dtype, self.interleaved = o.norm, o.dtype, o.interleaved
        self.rows = len(ids)
        self.launch = o.launch
        self.folder = Path(o.spool)
        self.visible_after = 0.0
        self.tail = b""
        self.cut = 0
        self.dump = True
        self.error: wire.DumpError | None = None
        self.meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "cached_tokens": 0,
        }
        self.extra: dict[str, Any] = {}

    def bend(self, f: Fault) -> None:
        """Apply one fault to the data. Faults of the connection itself are the handler's."""
        bend = getattr(self, f"_{f.kind}", None)
        if bend is not None:
            bend(f)

    def _resize(self, rows: int) -> None:
        keep = min(rows, len(self.ids))
        self.values = np.resize(self.values, (rows, *self.values.shape[1:]))
        self.shown_ids = np.resize(self.ids, rows) if rows > keep else self.ids[:rows]
        self.rows = rows

    def _rows(self, f: Fault) -> None:
        self._resize(len(self.ids) + f.count)

    def _last_chunk(self, f: Fault) -> None:
        """Only the last `count` rows were captured; the ids plane says so."""
        missing = len(self.ids) - f.count
        self.shown_ids = np.where(np.arange(len(self.ids)) < missing, -1, self.ids)
        self.values[:missing] = 0
        self.rows = f.count

    def _last_chunk_only(self, f: Fault) -> None:
        self.values, self.shown_ids, self.rows = self.values[-f.count :], self.ids[-f.count :], f.count

    def _prefix(self, f: Fault) -> None:
        """A cached prefix of `count` tokens: not computed, so not captured."""
        self.values, self.shown_ids = self.values[f.count :], self.ids[f.count :]
        self.rows = len(self.shown_ids)

    def _cached(self, f: Fault) -> None:
        self.meta["cached_tokens"] = f.count

    def _late(self, f: Fault) -> None:
        self.visible_after = f.seconds

    def _never(self, _: Fault) -> None:
        self.visible_after = float("inf")

    def _no_dump(self, _: Fault) -> None:
        self.dump = False

    def _poison(self, f: Fault) -> None:
        """`value` (NaN, Inf) at (position, layer)."""
        self.values[f.position, f.layer, 0] = f.value

    def _zero_row(self, f: Fault) -> None:
        self.values[f.position] = 0

    def _zero_layer(self, f: Fault) -> None:
        self.values[:, f.layer] = 0

    def _two_layers(self, _: Fault) -> None:
        self.values, self.layers = self.values[:, 1:], self.layers[1:]

    def _other_layers(self, _: Fault) -> None:
        self.layers = tuple(k + 1 for k in self.layers)

    def _other_norm(self, _: Fault) -> None:
        self.norm = "pre" if self.norm == "post" else "post"

    def _other_dtype(self, _: Fault) -> None:
        self.dtype = "float32" if self.dtype != "float32" else "bfloat16"

    def _other_hidden(self, _: Fault) -> None:
        self.values = np.repeat(self.values, 2, axis=2)

    def _other_launch(self, _: Fault) -> None:
        self.launch = "hs-somebody-else"

    def _other_spool(self, f: Fault) -> None:
        self.folder = Path(f.path)

    def _other_ids(self, _: Fault) -> None:
        self.shown_ids = self.ids[::-1]

    def _wrong_rid(self, _: Fault) -> None:
        self.meta["id"] = self.rid[:-1] + ("0" if self.rid[-1] != "0" else "1")

    def _wrong_count(self, f: Fault) -> None:
        self.meta["prompt_tokens"] = len(self.ids) + f.count

    def _states_in_reply(self, _: Fault) -> None:
        self.meta["hidden_states"] = self.values[:, 0].tolist()

    def _longer(self, f: Fault) -> None:
        """`count` bytes more than the formula: logits, say."""
        self.tail = b"\1" * f.count

    def _shorter(self, f: Fault) -> None:
        self.cut = f.count

    def _error(self, f: Fault) -> None:
        self.dump, self.error = False, wire.DumpError(self.rid, f.code, f.text or "refused on request")

    def header(self) -> wire.DumpHeader:
        o = self.engine.options
        return wire.DumpHeader(
            rid=self.rid,
            tokens=len(self.values),
            rows=self.rows,
            hidden=self.values.shape[2],
            layers=self.layers,
            norm=self.norm,
            dtype=self.dtype,
            interleaved=self.interleaved,
            release=o.release,
            capture=wire.CAPTURE_VERSION,
            launch=self.launch,
            tp_rank=0,
            dp_rank=0,
        )

    def write(self) -> None:
        """Dump or error file, by rename; late ones in a thread of their own."""
        rid = wire.parse_rid(self.rid)
        if rid is None or not self._ours(rid):
            return
        if self.error is not None:
            _replace(self.folder / wire.error_name(rid), wire.to_json(self.error))
        elif self.dump:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._put(rid, dump_bytes(self.header(), self.shown_ids, self.values) + self.tail)

    def _ours(self, rid: wire.RequestId) -> bool:
        """Dumps of another epoch than the living worker's are not written."""
        try:
            return (Path(self.engine.options.spool) / wire.EPOCH_FILE).read_text().strip() == rid.epoch
        except FileNotFoundError:
            return False

    def _put(self, rid: wire.RequestId, raw: bytes) -> None:
        engine = self.engine
        raw = raw[: len(raw) - self.cut]
        deadline = time.monotonic() + engine.options.wait_s
        while True:
            with engine.lock:
                used = engine.spool_bytes()
                if used + len(raw) <= engine.options.budget:
                    (self.folder / wire.part_name(rid)).write_bytes(raw)
                    engine.peak_spool = max(engine.peak_spool, used + len(raw))
                    break
            if time.monotonic() > deadline:
                error = wire.DumpError(self.rid, "spool-full", f"no room for {len(raw)} bytes")
                _replace(self.folder / wire.error_name(rid), wire.to_json(error))
                return
            engine.stopped.wait(0.01)
        if self.visible_after == 0:
            self._show(rid)
        elif self.visible_after < float("inf"):
            threading.Timer(self.visible_after, self._show, (rid,)).start()

    def _show(self, rid: wire.RequestId) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.folder / wire.part_name(rid)).rename(self.folder / wire.dump_name(rid))

    def reply(self) -> bytes:
        return json.dumps({"text": "", "output_ids": [], "meta_info": self.meta, **self.extra}).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512
    engine: FakeEngine

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        pass

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.engine.sockets.add(self.connection)

    def finish(self) -> None:
        self.server.engine.sockets.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def _send(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def do_GET(self) -> None:
        engine, o = self.server.engine, self.server.engine.options
        path = self.path.partition("?")[0]
        if path in ("/health", "/health_generate"):
            self._probe()
        elif path in ("/server_info", "/get_server_info"):
            info = {"version": o.release, "served_model_name": o.launch, "disable_radix_cache": True}
            self._send(200, json.dumps(info).encode())
        elif path in ("/model_info", "/get_model_info"):
            self._send(200, b'{"model_path": "fake"}')
        elif path == "/stats":
            self._send(200, json.dumps(engine.stats()).encode())
        else:
            self._send(404, b'{"error": "no such path"}')

    def _probe(self) -> None:
        engine = self.server.engine
        with engine.lock:
            engine.probes += 1
            engine.live_probes += 1
            engine.peak_probes = max(engine.peak_probes, engine.live_probes)
        engine.stopped.wait(engine.options.health_s)
        with engine.lock:
            engine.live_probes -= 1
        self._send(engine.options.health_status, b"")

    def do_POST(self) -> None:
        engine = self.server.engine
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        if self.path == "/generate":
            self._generate(body)
        elif self.path == "/faults":
            engine.options.faults = {k: Fault(**v) for k, v in body.items()}
            self._send(200, b"{}")
        else:
            self._send(200, b"{}")

    def _generate(self, body: dict[str, Any]) -> None:
        engine, o = self.server.engine, self.server.engine.options
        rid, ids = str(body.get("rid", "")), list(body.get("input_ids", []))
        ours = wire.parse_rid(rid)
        row = ours.row if ours else -1
        with engine.lock:
            twice = rid in engine.live
            engine.duplicates += twice
            engine.live.add(rid)
            engine.requests[row] += 1
            engine.rids.append(rid)
            engine.bodies[rid] = body
            engine.peak_live = max(engine.peak_live, len(engine.live))
            tries = engine.requests[row]
        try:
            if twice:
                self._send(400, b'{"error": {"message": "Duplicate request ID detected"}}')
            elif not 0 < len(ids) <= o.context - 7:
                self._send(400, b'{"error": {"message": "The input is longer than the model\'s context length"}}')
            else:
                fault = o.faults.get(str(row), o.faults.get("*")) if ours else None
                self._answer(rid, ids, fault if fault and (fault.times < 0 or tries <= fault.times) else Fault("ok"))
        except OSError:
            engine.unfinished += 1
            self.close_connection = True
        finally:
            with engine.lock:
                engine.live.discard(rid)

    def _answer(self, rid: str, ids: list[int], fault: Fault) -> None:
        engine, o = self.server.engine, self.server.engine.options
        if fault.kind == "hang" or 0 <= o.hang_after < sum(engine.requests.values()):
            engine.stopped.wait(fault.seconds or 3600)
            self.close_connection = True
            return
        self._compute(len(ids))
        if fault.kind == "slow":
            engine.stopped.wait(fault.seconds)
        if fault.kind == "status":
            self._send(fault.status, json.dumps({"error": {"message": fault.text}}).encode())
        elif fault.kind == "redirect":
            self.send_response(307)
            self.send_header("Location", fault.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif fault.kind == "die":
            engine.on_die()
            self.close_connection = True
        elif fault.kind == "reset":
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        else:
            self._deliver(Answer(engine, rid, ids), fault)

    def _deliver(self, answer: Answer, fault: Fault) -> None:
        engine = self.server.engine
        answer.bend(fault)
        if fault.kind == "swap":
            self._swap(answer, fault)
        answer.write()
        if engine.died.is_set():
            self.close_connection = True
            return
        bodies = {"garbage": b"<html>proxy error</html>", "nested": b"[" * 60_000}
        body = bodies.get(fault.kind) or answer.reply()
        if fault.kind == "half":
            self.close_connection = True
            self._send(200, body[: len(body) // 2], len(body))
        else:
            self._send(200, body)

    def _compute(self, tokens: int) -> None:
        engine, o = self.server.engine, self.server.engine.options
        if o.latency_s:
            engine.stopped.wait(o.latency_s)
        if o.tokens_s:
            with engine.gpu:
                engine.stopped.wait(tokens / o.tokens_s)

    def _swap(self, answer: Answer, fault: Fault) -> None:
        """Two requests get each other's states; the first waits for the second."""
        engine = self.server.engine
        mine = wire.parse_rid(answer.rid)
        assert mine is not None
        with engine.lock:
            other = engine.parked.pop(fault.other, None)
            if other is None:
                event = threading.Event()
                engine.parked[mine.row] = (answer, event)
        if other is None:
            event.wait(5)
            engine.parked.pop(mine.row, None)
            return
        theirs, event = other
        for name in ("values", "shown_ids", "rows"):
            a, b = getattr(answer, name), getattr(theirs, name)
            setattr(answer, name, b)
            setattr(theirs, name, a)
        event.set()


def _load(o: Options) -> None:
    """The phases before the port is bound."""
    deadline = time.monotonic() + o.load_s
    step = 0
    while time.monotonic() < deadline:
        # the load itself is what is imitated: it takes load_s and logs every log_s
        time.sleep(min(o.log_s, max(0.0, deadline - time.monotonic())))
        if not o.load_silent:
            step += 1
            print(f"Loading safetensors checkpoint shards: {step}", flush=True)
    if o.exit_rc >= 0:
        print("RuntimeError: asked to fail", file=sys.stderr, flush=True)
        sys.exit(o.exit_rc)


def _children(o: Options) -> list[subprocess.Popen[bytes]]:
    code = "import ctypes,signal,time\n"
    code += "" if o.children_survive else "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    code += (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)" if o.children_survive else "time.sleep(3600)"
    )
    return [subprocess.Popen([sys.executable, "-c", code, "sglang::scheduler"]) for _ in range(o.children)]


def main(argv: list[str]) -> int:
    """Serve as a process of its own until SIGTERM. argv: the options' JSON file."""
    raw = json.loads(Path(argv[0]).read_text())
    raw["faults"] = {k: Fault(**v) for k, v in raw.get("faults", {}).items()}
    raw["layers"] = tuple(raw.get("layers", (1, 3, 4)))
    engine = FakeEngine(**raw)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    _load(engine.options)
    children = _children(engine.options)
    held = bytearray(engine.options.allocate_mib << 20)
    engine.on_die = lambda: os.kill(os.getpid(), signal.SIGSEGV)
    with engine:
        while not stop.wait(0.1):
            held += bytes(int(engine.options.grow_mib_s * 0.1 * (1 << 20)))
    for child in children:
        child.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
