"""What this machine can carry from the GPU into the spool, and what the capture's own writer carries.

    python -m bench.gpu_copy HIDDEN ROWS FORWARDS SPOOL

Copies of one forward's states (ROWS tokens, bfloat16, three aux layers and the final one): device to pinned memory
alone, pinned memory to a file of the spool alone, then both through the capture's writer, whose dumps are taken away.
Without a GPU the first figure is a copy in memory. Last line: JSON, GB/s.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hsdaemon import wire
from hsdaemon.capture import gather
from hsdaemon.capture.device import Cpu, Cuda
from hsdaemon.capture.store import Store
from hsdaemon.capture.writer import Writer

EPOCH = "00c0b1e500c0b1e5"
AUX, PIECES, WAIT_S = 3, 4, 60.0


def main(hidden: int, rows: int, forwards: int, spool: Path) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = gather.Shape(hidden, AUX, "bfloat16", interleaved=False)
    size = shape.bytes(rows)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host.fill_(7)
    spool.mkdir(parents=True, exist_ok=True)
    try:
        found = {
            "d2h_gb_s": rate(size, forwards, copier(device, host)),
            "spool_gb_s": rate(size, forwards, lambda: put(spool / "raw", host)),
            "writer_gb_s": written(shape, rows, forwards, spool, device),
        }
    finally:
        shutil.rmtree(spool)
    print(json.dumps({"mb": round(size / 1e6), **found}))
    return 0


def rate(size: int, times: int, once: Callable[[], None]) -> float:
    once()  # warms up
    begun = time.perf_counter()
    for _ in range(times):
        once()
    return round(size * times / (time.perf_counter() - begun) / 1e9, 2)


def copier(device: torch.device, host: torch.Tensor) -> Callable[[], None]:
    flat = torch.zeros(host.numel(), dtype=torch.uint8, device=device)

    def copy() -> None:
        host.copy_(flat, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return copy


def put(path: Path, host: torch.Tensor) -> None:
    """As the store does: allocated, written, here removed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(fd, 0, host.numel())
        data = host.numpy().data
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], done)
    finally:
        os.close(fd)
        path.unlink()


def written(shape: gather.Shape, rows: int, forwards: int, spool: Path, device: torch.device) -> float:
    """GB/s of forwards that go through gather, the copy stream, the pinned buffers and the store."""
    (spool / wire.EPOCH_FILE).write_text(EPOCH)
    layers = tuple(range(1, AUX + 1))
    header = wire.DumpHeader("", 0, 0, shape.hidden, layers, "post", shape.dtype, False, "", 1, "", 0, 0)
    budget = 8 * (shape.bytes(rows) + PIECES * 8 * wire.ALIGN)
    told = wire.CaptureConfig(
        str(spool), str(spool), "", "plugin", layers, "post", shape.dtype, False, budget, WAIT_S, 3
    )
    failed: list[str] = []
    ours = Cuda(torch.cuda.current_device()) if device.type == "cuda" else Cpu()
    writer = Writer(Store(told, header), shape, ours, told.buffers, WAIT_S, failed.append)
    writer.start(rows)
    states = [torch.zeros(rows, shape.hidden, dtype=torch.bfloat16, device=device) for _ in range(AUX + 1)]
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    ended = threading.Event()
    taker = threading.Thread(target=take, args=(spool, ended))
    taker.start()
    try:
        forward(writer, shape, rows, 0, states, ids)  # warms up
        begun = time.perf_counter()
        for number in range(1, forwards + 1):
            forward(writer, shape, rows, number, states, ids)
        writer.stop()
        took = time.perf_counter() - begun
    finally:
        ended.set()
        taker.join()
    if failed:
        raise SystemExit(f"cannot measure: {failed[0]}")
    return round(shape.bytes(rows) * forwards / took / 1e9, 2)


def forward(writer: Writer, shape: gather.Shape, rows: int, number: int, states: list[Any], ids: Any) -> None:
    count = rows // PIECES
    pieces = [
        gather.Piece(wire.RequestId(EPOCH, number * PIECES + k, 0, count), 0, count, k * count, k * count)
        for k in range(PIECES)
    ]
    *layers, final = states
    writer.take(pieces, lambda flat: gather.fill(flat, shape, pieces, ids, layers, final))


def take(spool: Path, ended: threading.Event) -> None:
    """Remove dumps, as a worker does."""
    while not ended.wait(0.002):
        for path in spool.glob(f"*{wire.DUMP_SUFFIX}"):
            path.unlink()


if __name__ == "__main__":
    columns, tokens, times, folder = sys.argv[1:]
    sys.exit(main(int(columns), int(tokens), int(times), Path(folder)))
