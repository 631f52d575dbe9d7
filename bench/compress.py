"""Lossless compression of stored samples on one core: how much smaller, how fast there and back.

The payload is bfloat16 states of a model that transformers runs here (a tiny random one, or SmolLM2-135M-Instruct with
--model smollm2, over its own English text): three layers and the final state, side by side in the planes of a stored
file. Rates are MB of payload a CPU second, with reading from memory, both digests and the split.

Last line: bench-compress: mb= ratio= pack_mb_s= unpack_mb_s=
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import xxhash
from msgspec import structs

from hsdaemon.data.compress import Header, pack, unpack
from hsdaemon.demo import reference, stage

ROUNDS = 3
LEAST_MB = 64  # the states are repeated to it: zstd looks back 128 KiB only, far less than what is repeated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "smollm2"], default="tiny")
    parser.add_argument("--folder", type=Path, default=Path("build/bench-compress"))
    args = parser.parse_args()
    payload = states(args.model, args.folder.resolve())
    header = Header(len(payload), 2, xxhash.xxh3_128(payload).hexdigest())
    packing, unpacking = [], []
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        for _ in range(ROUNDS):
            begun = time.process_time()
            packed = b"".join(pack(io.BytesIO(payload), header))
            packing.append(time.process_time() - begun)
            Path(file.name).write_bytes(packed)
            begun = time.process_time()
            back = b"".join(unpack(Path(file.name)))
            unpacking.append(time.process_time() - begun)
            assert back == payload, "it did not come back"
    there, again = (len(payload) / 1e6 / min(times) for times in (packing, unpacking))
    print(
        f"bench-compress: mb={len(payload) / 1e6:.0f} ratio={len(payload) / len(packed):.3f} "
        f"pack_mb_s={there:.0f} unpack_mb_s={again:.0f}"
    )
    return 0


def states(model: str, folder: Path) -> bytes:
    """bfloat16 planes of a few samples, repeated to LEAST_MB."""
    kind = stage.REAL if model == "smollm2" else structs.replace(stage.TINY, rows=16, lengths=(400, 1200))
    made = stage.build(kind, folder, seed=0)
    computed = reference.load(str(made.model))
    planes = []
    for line in made.data.read_text().splitlines()[:16]:
        aux, _, post = reference.states(computed, json.loads(line)["input_ids"], made.layers)
        planes += [np.frombuffer(part.to(torch.bfloat16).view(torch.int16).numpy(), np.uint8) for part in (aux, post)]
    once = np.concatenate(planes).tobytes()
    return once * -(-LEAST_MB * 10**6 // len(once))


if __name__ == "__main__":
    sys.exit(main())
