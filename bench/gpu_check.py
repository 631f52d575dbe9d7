"""`make gpu-check`: the capture on one CUDA GPU, in less than eight minutes; without a GPU it says so and ends well.

Two models with random weights, Qwen3-8B's shape and a slice of Kimi-K2.5's, each served three times at once on the
one GPU: `captured` as `hs-extract serve` starts it, `graph` the same with prefill CUDA graphs left on (which
`hs-extract serve` refuses: replayed forwards have no request ids), `bare` with no capture at all.

- cost: rounds on `captured` under request ids that are captured and under others, and on `bare`, in turns. Prefill
  tokens/s to the last reply; the medians of the pairs' ratios must be 0.98 or more.
- content: prompts of awkward lengths, cut by the chunks; each dump against what transformers computes in float32: the
  ids that the aux states carry must be exact at every position, the median relative error of a token at most 0.03. From
  `captured` every dump must come; from `graph` what comes must be right.
- GB/s from device to pinned memory and on into the spool, and what the capture's writer makes of it.

The engine comes from this Python's environment. --rehearse runs all of it on the CPU with small models.
Last line: gpu-check: ok|FAILED card= ... ; on a GPU the figures go to docs/bench/gpu.json as well.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import all as bench
from bench import page
from bench.gpu_models import SHAPES, Shape, decoded, prompts
from bench.load import EPOCH, Load, answers
from hsdaemon import wire
from hsdaemon.config import Config, parse
from hsdaemon.demo.actor import HS, Actor, environment
from hsdaemon.engine import argline, endpoint, releases
from hsdaemon.engine import environment as variables
from hsdaemon.machine.checkpoint import read_model

LEAST, MOST_ERROR = 0.98, 0.03
CONCURRENCY, PROMPT = 32, 4  # requests in flight; prompts of a forward
MAKE_S, START_S, PROBE_S = 240.0, 300.0, 120.0
DUMP_S, GRAPH_DUMP_S = 30.0, 5.0  # a replayed forward leaves no dump: no use in waiting long
ROOM = 60 << 30  # bytes of two checkpoints, their reference states and the dumps
GRAPH_OFF = ("--disable-prefill-cuda-graph", "--disable-piecewise-cuda-graph")
PORTS = {"captured": 31800, "graph": 31820, "bare": 31840}
CONFIG = """\
[data]
path = "{work}/none.jsonl"
[model]
path = "{model}"
[output]
path = "{work}/out"
[spool]
path = "{spool}"
budget_mib = 8192
[engine]
device = "{device}"
dtype = "bfloat16"
port = {port}
chunk_tokens = {chunk}
max_total_tokens = {pool}
mem_fraction = {fraction}
extra_args = {extra}
[paths]
run = "{work}/run"
state = "{work}/state"
log = "{work}/log"
"""


class Server(Struct, frozen=True):
    """A running engine."""

    url: str
    pid: int
    spool: Path


class Content(Struct, frozen=True):
    """What came of the prompts. errors: the median relative error of a token, by state, the worst of the prompts'."""

    dumps: int
    prompts: int
    exact: bool
    errors: tuple[float, ...]

    @property
    def good(self) -> bool:
        return self.exact and all(error <= MOST_ERROR for error in self.errors)


class Rig(Struct, frozen=True):
    """Where and on what everything runs."""

    folder: Path
    device: str
    extra: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small models")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help="default: both")
    parser.add_argument("--engine-args", type=shlex.split, default=[], help="more of them, as one word")
    parser.add_argument(
        "--folder", type=Path, help="where a folder of its own is made; default: the first of /dev/shm, /tmp with room"
    )
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped too
    if not args.rehearse and (reason := no_gpu()):
        print(f"gpu-check: skipped: {reason}")
        return 0
    shapes = args.shapes or (["qwen3-small", "kimi-small"] if args.rehearse else ["qwen3-8b", "kimi-slice"])
    folder = Path(tempfile.mkdtemp(prefix="hs-gpu-check-", dir=args.folder or roomy()))
    rig = Rig(folder, "cpu" if args.rehearse else "cuda", tuple(args.engine_args))
    begun, date, load = time.monotonic(), dt.datetime.now(dt.UTC), bench.load_now()
    try:
        found, good = checked(rig, shapes)
    finally:
        shutil.rmtree(rig.folder, ignore_errors=True)
    card = torch.cuda.get_device_name().replace(" ", "-") if rig.device == "cuda" else "none"
    found = {"card": card, **found, "seconds": round(time.monotonic() - begun)}
    if rig.device == "cuda":
        bench.keep("gpu", "make gpu-check", found, 0 if good else 1, date, found["seconds"], load)
        page.write()
    print(f"gpu-check: {'ok' if good else 'FAILED'} {' '.join(f'{k}={v}' for k, v in found.items())}")
    return 0 if good else 1


def no_gpu() -> str:
    """Why there is nothing to check, "" where there is."""
    if torch.cuda.is_available():
        return ""
    build = f"torch {torch.__version__} of {sys.executable} sees no GPU"
    if shutil.which("nvidia-smi") is None:
        return f"{build}, and there is no NVIDIA driver"
    return f"{build}; name a Python with SGLang for CUDA: make gpu-check GPU_PYTHON=/path/to/python"


def roomy() -> Path:
    for parent in map(Path, ("/dev/shm", "/tmp")):
        if parent.is_dir() and shutil.disk_usage(parent).free > ROOM:
            return parent
    return Path("/tmp")


def checked(rig: Rig, names: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """All figures, and whether every goal was met."""
    makers = {name: make(rig, name) for name in names}  # side by side: most of it is one core's work
    found: dict[str, Any] = copied(rig, SHAPES[names[-1]])
    print(f"copies: {found}", flush=True)
    good = True
    for name in names:
        if makers[name].wait(MAKE_S):
            raise SystemExit(f"cannot make {name}: see above")
        figures, fine = judged(rig, name)
        found |= {f"{name.partition('-')[0]}_{key}": value for key, value in figures.items()}
        good = good and fine
        shutil.rmtree(rig.folder / name)
    return found, good


def make(rig: Rig, name: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "bench.gpu_models", name, str(rig.folder / name)]
    return subprocess.Popen(words, env=environment(), cwd=bench.ROOT)


def copied(rig: Rig, shape: Shape) -> dict[str, float]:
    forwards = 20 if rig.device == "cuda" else 4
    words = [shape.sizes["hidden_size"], shape.chunk, forwards, rig.folder / "copy"]
    argv = [sys.executable, "-m", "bench.gpu_copy", *map(str, words)]
    done = subprocess.run(
        argv, env=environment(), cwd=bench.ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=PROBE_S
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def judged(rig: Rig, name: str) -> tuple[dict[str, Any], bool]:
    shape = SHAPES[name]
    with contextlib.ExitStack() as stack:
        starts = {way: stack.enter_context(started(rig, name, way)) for way in PORTS}
        servers = {way: ready(*start) for way, start in starts.items()}
        print(f"{name}: three servers are up", flush=True)
        figures = cost(shape, servers)
        content = {
            way: compare(rig.folder / name, load(prompts(shape), servers[way]).dumps(limit_s))
            for way, limit_s in (("captured", DUMP_S), ("graph", GRAPH_DUMP_S))
        }
    for way, seen in content.items():
        print(f"{name} {way}: {seen}", flush=True)
        figures |= {
            f"{way}_dumps": f"{seen.dumps}/{seen.prompts}",
            f"{way}_ids": "exact" if seen.exact else "WRONG",
            f"{way}_rel_err": round(max(seen.errors, default=0.0), 4),
        }
    whole = content["captured"].dumps == content["captured"].prompts
    cheap = min(figures["on_off"], figures["on_bare"]) >= LEAST or rig.device == "cpu"
    return figures, whole and cheap and all(seen.good for seen in content.values())


# --- servers ----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def started(rig: Rig, name: str, way: str) -> Iterator[tuple[Actor, Config, Path]]:
    """The engine on its way up."""
    work = rig.folder / name / way
    spool = work / "spool"
    spool.mkdir(parents=True)
    (spool / wire.EPOCH_FILE).write_text(EPOCH)
    shape = SHAPES[name]
    text = CONFIG.format(
        work=work,
        model=rig.folder / name / "model",
        spool=spool,
        device=rig.device,
        port=PORTS[way],
        chunk=shape.chunk,
        pool=shape.pool,
        fraction=0.8 if rig.device == "cuda" else 0.2,
        extra=json.dumps(rig.extra),
    )
    file = work / "hs-extract.toml"
    file.write_text(text)
    config = parse(text, str(file))
    argv = (*HS, "serve", "-c", str(file)) if way == "captured" else command(config, way)
    actor = Actor(f"{way} engine", argv, work / "engine.log")
    actor.start()
    try:
        yield actor, config, file
    finally:
        actor.stop()


def command(config: Config, way: str) -> tuple[str, ...]:
    """What `hs-extract serve` runs, without the capture or with prefill graphs."""
    known, launch = releases.release(releases.installed()), f"hs-{way}"
    env = variables.environment(
        config, known, launch, os.environ, sorted(os.sched_getaffinity(0)), read_model(config.model.path).kind
    )
    if way == "bare":
        del env[wire.CAPTURE_ENV]
    told = [f"{key}={value}" for key, value in env.items() if os.environ.get(key) != value]
    argv = argline.command(config, known, launch, config.engine.port)
    return ("/usr/bin/env", *told, *(word for word in argv if way == "bare" or word not in GRAPH_OFF))


def ready(actor: Actor, config: Config, file: Path) -> Server:
    deadline = time.monotonic() + START_S
    url, run = f"http://{config.engine.host}:{config.engine.port}", Path(config.paths.run)
    while time.monotonic() < deadline and actor.ended(0.5) is None:
        here = endpoint.read(str(run))
        if answers(here.url if here else url):
            return Server(here.url if here else url, here.pid if here else actor.pid, Path(config.spool.path))
    logs = sorted(Path(config.paths.log).glob("engine-*.log"))
    words = "\n".join(logs[-1].read_text(errors="replace").splitlines()[-15:]) if logs else actor.last_words()
    raise SystemExit(f"cannot start the {actor.name} of {file}:\n{words}")


def load(prompts: Sequence[npt.NDArray[np.int64]], at: Server) -> Load:
    return Load(prompts, at.spool, at.url, at.pid, CONCURRENCY)


# --- cost -------------------------------------------------------------------------------------------------------------
def cost(shape: Shape, servers: dict[str, Server]) -> dict[str, Any]:
    """Rounds in turns: captured, under other ids on the same server, and on the server without a capture."""
    draw = np.random.default_rng(1)
    ids = [draw.integers(4, shape.vocab, shape.chunk // PROMPT) for _ in range(PROMPT * shape.forwards)]
    captured, bare = load(ids, servers["captured"]), load(ids, servers["bare"])
    arms = {"on": (captured, True), "off": (captured, False), "bare": (bare, False)}
    for at, taken in arms.values():  # the first rounds compile and warm up
        at.round(captured=taken)
    rounds: dict[str, list[Any]] = {arm: [] for arm in arms}
    for number in range(shape.pairs):
        order = sorted(arms) if number % 2 else sorted(arms, reverse=True)
        for arm in order:
            at, taken = arms[arm]
            rounds[arm].append(at.round(captured=taken))
        shown = " ".join(f"{arm}={rounds[arm][-1].prefill_tok_s:.0f}" for arm in ("on", "off", "bare"))
        print(f"pair {number}: {shown}", flush=True)
    rate = {arm: [seen.prefill_tok_s for seen in rounds[arm]] for arm in arms}
    figures: dict[str, Any] = {f"{arm}_tok_s": round(statistics.median(rate[arm])) for arm in ("on", "off", "bare")}
    for other in ("off", "bare"):
        ratio = statistics.median(a / b for a, b in zip(rate["on"], rate[other], strict=True))
        figures[f"on_{other}"] = round(ratio, 3)
    states = 8 * shape.sizes["hidden_size"] * figures["on_tok_s"]  # three aux states and the final one, bfloat16
    figures["tail_s"] = round(statistics.median(seen.ended_s - seen.replied_s for seen in rounds["on"]), 2)
    return figures | {"states_gb_s": round(states / 1e9, 2)}


# --- content ----------------------------------------------------------------------------------------------------------
def compare(folder: Path, dumps: Sequence[Path | None]) -> Content:
    """Every dump that came against the states in `folder`; it is removed."""
    exact, worst = True, [0.0] * 4
    for number, dump in enumerate(dumps):
        if dump is None:
            continue
        ids, aux, final = read(dump)
        dump.unlink()
        sent, expected = np.load(folder / f"prompt-{number}.npy"), np.load(folder / f"states-{number}.npy")
        got = [*np.split(aux, aux.shape[1] // final.shape[1], axis=1), final]
        wanted = np.split(expected, len(got), axis=1)
        exact = exact and np.array_equal(ids, sent) and all(np.array_equal(decoded(a), sent) for a in got[:-1])
        worst = [max(w, off(a, b)) for w, a, b in zip(worst, got, wanted, strict=True)]
    return Content(sum(d is not None for d in dumps), len(dumps), exact, tuple(round(w, 5) for w in worst))


def off(got: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> float:
    """The median of the tokens' relative errors; infinite where something is no number."""
    error = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    return float(np.median(error)) if np.isfinite(error).all() else float("inf")


def read(dump: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """ids, aux [tokens, 3 * hidden], final [tokens, hidden] of a planar bfloat16 dump."""
    raw = dump.read_bytes()
    layout = wire.unpack_header(raw).layout()
    aux, final = (
        (np.frombuffer(raw, np.uint16, layout.tokens * row // 2, at).astype(np.uint32) << 16)
        .view(np.float32)
        .reshape(layout.tokens, -1)
        for at, row in zip(layout.plane_offsets, layout.row_bytes, strict=True)
    )
    return np.frombuffer(raw, np.int64, layout.tokens, layout.ids_offset), aux, final


if __name__ == "__main__":
    sys.exit(main())
