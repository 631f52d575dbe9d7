"""`make engines-check`: real servers of several releases on the CPU, captured through the source patch.

RELEASE means its patch, RELEASE:plugin the plugin with the patch taken out. Each release gets a folder of its own with
the released wheel and the pins it needs; the rest comes from this environment. The server is started with `hs-extract
serve`, prompts of awkward lengths are sent with chunked prefill on, and every dumped state is compared with
transformers and with the other releases.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.load import answers
from hsdaemon import wire
from hsdaemon.demo import models, reference
from hsdaemon.engine import endpoint, patch

Array = npt.NDArray[np.float32]

CHUNK = 64  # tokens
LENGTHS = (1, 2, 5, 63, 64, 65, 127, 128, 129, 200, 300, 1000)
LIMIT = 1e-5  # of the largest absolute difference, float32
START_S, REPLY_S = 240.0, 60.0  # generous: the cores may be shared
EPOCH = "00e0c4ec000e0c4e"

# What a release needs instead of this environment's packages; installed without dependencies.
OLD = ("transformers==4.57.1", "tokenizers==0.22.1", "huggingface-hub==0.36.0")
TOKENIZERS = "tokenizers==0.22.2"
PINS = {
    range(5, 10): OLD,
    range(10, 11): ("transformers==5.3.0", TOKENIZERS),
    range(11, 13): ("transformers==5.6.0", TOKENIZERS),
    range(13, 15): ("transformers==5.8.1", TOKENIZERS),
    range(15, 22): ("transformers==5.12.1", TOKENIZERS),
}
# 0.5.9 is the first release with Kimi-K2.5; that of 0.5.15 imports cutlass, which is for GPUs alone.
KIMI = {*range(9, 24)} - {15}
CONFIG = """\
[data]
path = "{work}/none.jsonl"
[model]
path = "{model}"
[output]
path = "{work}/out"
dtype = "float32"
[spool]
path = "{work}/spool"
budget_mib = 64
[engine]
device = "cpu"
dtype = "float32"
capture = "{way}"
port = {port}
chunk_tokens = {chunk}
max_total_tokens = 4096
mem_fraction = 0.3
[paths]
run = "{work}/run"
state = "{work}/state"
log = "{work}/log"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=["0.5.23:plugin", "0.5.23", "0.5.10", "0.5.9", "0.5.8"])
    parser.add_argument("--port", type=int, default=31700)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped too
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsdaemon"
    seen: dict[tuple[str, str], list[Array]] = {}
    worst = between = 0.0
    for n, named in enumerate(args.releases):
        release, _, way = named.partition(":")
        arch = "kimi_k25" if minor(release) in KIMI else "llama"
        got, expected = check(home, release, way or "patch", arch, args.port + 20 * n)
        error = largest(got, expected)
        print(f"{release} {way or 'patch'} {arch}: {len(got)} samples, largest error {error:.3g}", flush=True)
        worst = max(worst, error)
        between = max([between, *(largest(got, other) for (_, a), other in seen.items() if a == arch)])
        seen[named, arch] = got
    good = worst <= LIMIT and between <= LIMIT
    print(
        f"engines-check: {'ok' if good else 'FAILED'} releases={','.join(args.releases)}"
        f" samples={len(seen) * len(LENGTHS)} max_abs_err={worst:.3g} max_abs_between={between:.3g}"
    )
    return 0 if good else 1


def minor(release: str) -> int:
    return patch.release_key(release)[2]


def check(home: Path, release: str, way: str, arch: str, port: int) -> tuple[list[Array], list[Array]]:
    """Captured and expected states, one array per prompt: aux and post-norm final state side by side."""
    site = installed(home, release)
    model = tiny(home, arch)
    (patch.apply if way == "patch" else patch.revert)(patch.find(site))
    work = home / "engines-check" / f"{release}-{way}"
    with served(site, model, work, way, port) as engine:
        attests = [wire.attest(path.read_text()) for path in (work / "run" / "attest").glob("attest-*.json")]
        if [(a.way, a.release, a.stage) for a in attests] != [(way, release, "armed")]:
            raise SystemExit(f"cannot check {release}: its ranks attest {attests}")
        got = [ask(engine, work / "spool", row, ids) for row, ids in enumerate(prompts())]
    computed = reference.load(str(model))
    expected = []
    for ids in prompts():
        aux, _, post = reference.states(computed, ids, attests[0].layers)
        expected.append(np.concatenate([aux.numpy(), post.numpy()], axis=1))
    return got, expected


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(7)
    return [draw.integers(4, 500, n).tolist() for n in LENGTHS]


def largest(got: list[Array], expected: list[Array]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(got, expected, strict=True))


def installed(home: Path, release: str) -> Path:
    """A folder with the release and its pins, nothing else."""
    site = home / "engines" / release
    if not (site / "sglang").is_dir():
        pins = next((pins for minors, pins in PINS.items() if minor(release) in minors), ())
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        draft = site.with_name(f".{release}.making")
        subprocess.run([*pip, "--upgrade", "--target", str(draft), f"sglang=={release}", *pins], check=True)
        draft.rename(site)
    return site


def tiny(home: Path, arch: str) -> Path:
    model = home / "engines-check" / f"model-{arch}"
    if not model.is_dir():
        model.parent.mkdir(parents=True, exist_ok=True)
        models.make(str(model), models.Tiny(arch=arch))
    return model


@contextlib.contextmanager
def served(site: Path, model: Path, work: Path, way: str, port: int) -> Iterator[endpoint.Endpoint]:
    """A server of the release in `site`, ready; stopped by SIGTERM to its main process."""
    (work / "spool").mkdir(parents=True, exist_ok=True)
    (work / "spool" / wire.EPOCH_FILE).write_text(EPOCH)
    config = work / "hs-extract.toml"
    config.write_text(CONFIG.format(work=work, model=model, way=way, port=port, chunk=CHUNK))
    env = os.environ | {"PYTHONPATH": f"{site}:{Path(__file__).parent.parent}"}
    started = time.monotonic()
    server = subprocess.Popen([sys.executable, "-m", "hsdaemon", "serve", "-c", str(config)], env=env)
    try:
        yield ready(server, work, started + START_S)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def ready(server: subprocess.Popen[bytes], work: Path, deadline: float) -> endpoint.Endpoint:
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        found = endpoint.read(str(work / "run"))
        if found is not None and found.pid == server.pid and answers(found.url):
            return found
        time.sleep(0.5)
    raise SystemExit(f"cannot start the server: see the last file of {work / 'log'}")


def ask(engine: endpoint.Endpoint, spool: Path, row: int, ids: list[int]) -> Array:
    """Send one prompt and read its dump: [tokens, (aux + 1) * hidden], after a look at the ids in it."""
    rid = wire.RequestId(EPOCH, row, 0, len(ids))
    body = {"rid": str(rid), "input_ids": ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
    request = urllib.request.Request(
        f"{engine.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REPLY_S) as reply:
        reply.read()
    dump, failed = spool / wire.dump_name(rid), spool / wire.error_name(rid)
    deadline = time.monotonic() + REPLY_S
    while not dump.exists():
        if failed.exists() or time.monotonic() > deadline:
            raise SystemExit(f"no dump of {rid}: {failed.read_text() if failed.exists() else 'nothing came'}")
        time.sleep(0.01)
    raw = dump.read_bytes()
    dump.unlink()
    layout = wire.unpack_header(raw).layout()
    if np.frombuffer(raw, np.int64, layout.tokens, layout.ids_offset).tolist() != ids:
        raise SystemExit(f"the dump of {rid} holds other ids than were sent")
    planes = [
        np.frombuffer(raw, np.float32, layout.tokens * size // 4, at).reshape(layout.tokens, -1)
        for at, size in zip(layout.plane_offsets, layout.row_bytes, strict=True)
    ]
    return np.concatenate(planes, axis=1)


if __name__ == "__main__":
    sys.exit(main())
