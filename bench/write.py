"""How fast samples of 126 MB become durable: the whole publication against dd and against torch's own load and save.

Six dumps in a tmpfs; in each of the rounds every writer takes all six, in an order drawn anew. Medians over the rounds.
The publication is the product's own: judged, CRC32, xxh3-128, O_DIRECT, both fsyncs, linkat, and a FULL commit of a
SQLite row. Ends with exit code 1 when it misses 1.0 x dd or 3 x torch.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import numpy as np
import torch

from hsdaemon import wire
from hsdaemon.data.formats import get_format
from hsdaemon.data.identity import RunIdentity
from hsdaemon.data.publish import Published, Publisher
from hsdaemon.data.sample import Sample, default_name

TOKENS, HIDDEN, FILES = 2200, 7168, 6  # 126 MB each
LAYERS = (1, 29, 57)
EPOCH = "0123456789abcdef"
RUN = RunIdentity("bench", "bench", LAYERS, "post", "bfloat16", "specforge", HIDDEN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the file system to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="writer threads of the publication")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as spool,
        tempfile.TemporaryDirectory(dir=args.folder, prefix=".bench-") as out,
    ):
        return Bench(Path(spool), Path(out), args.threads).run(args.rounds)


class Bench:
    """The samples of one run, and the writers that are compared."""

    def __init__(self, spool: Path, out: Path, threads: int) -> None:
        self.out, self.threads = out, threads
        self.dumps = [make_dump(spool, row) for row in range(FILES)]
        self.bytes = sum(dump.stat().st_size for _, dump in self.dumps)
        self.torch_files = [spool / f"{row}.pt" for row in range(FILES)]
        for (sample, dump), path in zip(self.dumps, self.torch_files, strict=True):
            save_as_torch(sample, dump, path)
        self.cpu: list[float] = []

    def run(self, rounds: int) -> int:
        writers: dict[str, Callable[[Path], None]] = {"publish": self.publish, "dd": self.dd, "torch": self.torch}
        seen: dict[str, list[float]] = {name: [] for name in writers}
        for turn in range(rounds):
            for name in random.sample(list(writers), len(writers)):
                target = self.out / f"{name}-{turn}"
                target.mkdir()
                os.sync()
                start = time.perf_counter()
                writers[name](target)
                seen[name].append(self.bytes / 1e6 / (time.perf_counter() - start))
                subprocess.run(["rm", "-r", str(target)], check=True)
            print(f"round {turn}: " + " ".join(f"{name}={rates[-1]:.0f}" for name, rates in seen.items()), flush=True)
        publish, dd, load_save = (statistics.median(seen[name]) for name in writers)
        cpu = statistics.median(self.cpu) / (self.bytes / 1e9)
        print(
            f"bench-write: publish_mb_s={publish:.0f} dd_mb_s={dd:.0f} vs_dd={publish / dd:.2f} "
            f"torch_mb_s={load_save:.0f} vs_torch={publish / load_save:.2f} cpu_s_per_gb={cpu:.2f}"
        )
        return 0 if publish >= dd and publish >= 3 * load_save else 1

    def publish(self, target: Path) -> None:
        """The product's publication and a commit a sample."""
        before = time.process_time()
        publisher = Publisher(
            target, target / "quarantine", get_format("specforge"), RUN, EPOCH, volume_check=lambda _: None
        )
        db = apsw.Connection(str(target / "manifest.db"))
        for words in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "CREATE TABLE s(row INTEGER, digest BLOB)"):
            db.execute(words).fetchall()
        with ThreadPoolExecutor(self.threads) as pool:
            for outcome in pool.map(lambda item: publisher.publish(*item), self.dumps):
                assert isinstance(outcome, Published), outcome
                db.execute("INSERT INTO s VALUES(?, ?)", (outcome.row, outcome.digest))
        db.close()
        self.cpu.append(time.process_time() - before)

    def dd(self, target: Path) -> None:
        for i, (_, dump) in enumerate(self.dumps):
            words = ["dd", f"if={dump}", f"of={target / str(i)}", "bs=8M", "oflag=direct", "conv=fsync", "status=none"]
            subprocess.run(words, check=True)

    def torch(self, target: Path) -> None:
        """What a script does: load, save again, fsync."""
        for path in self.torch_files:
            values = torch.load(path, weights_only=True)
            with (target / path.name).open("wb") as file:
                torch.save(values, file)
                file.flush()
                os.fsync(file.fileno())


def make_dump(spool: Path, row: int) -> tuple[Sample, Path]:
    rng = np.random.default_rng(row)
    sample = Sample(row, default_name(row), rng.integers(0, 160000, TOKENS), None, bytes(16))
    rid = str(wire.RequestId(EPOCH, row, 0, TOKENS))
    facts = (LAYERS, "post", "bfloat16", False, "bench", wire.CAPTURE_VERSION, "bench", 0, 0)
    header = wire.DumpHeader(rid, TOKENS, TOKENS, HIDDEN, *facts)
    layout = header.layout()
    path = spool / wire.dump_name(wire.RequestId(EPOCH, row, 0, TOKENS))
    with path.open("wb") as file:
        file.write(wire.pack_header(header) + sample.ids.tobytes())
        for offset, width in zip(layout.plane_offsets, layout.row_bytes, strict=True):
            file.seek(offset)
            values = rng.standard_normal(TOKENS * width // 2, np.float32)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        file.truncate(layout.total)
    return sample, path


def save_as_torch(sample: Sample, dump: Path, path: Path) -> None:
    layout = wire.Layout(TOKENS, HIDDEN, len(LAYERS), "bfloat16", False)
    raw = torch.from_numpy(np.fromfile(dump, np.int16)).view(torch.bfloat16)
    aux, final = (
        raw[at // 2 : at // 2 + TOKENS * width // 2].reshape(1, TOKENS, -1)
        for at, width in zip(layout.plane_offsets, layout.row_bytes, strict=True)
    )
    ids = torch.from_numpy(sample.ids)
    values = {"input_ids": ids, "loss_mask": torch.ones_like(ids), "hidden_state": final.clone()}
    torch.save(values | {"aux_hidden_state": aux.clone()}, path)


if __name__ == "__main__":
    raise SystemExit(main())
