"""From a device to the spool: what the writer asks of a device, and when."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import fake_sglang
import pytest
import torch

from hsdaemon import wire
from hsdaemon.capture import device, hooks
from hsdaemon.capture.device import Coming, Cpu, Cuda, Fill
from hsdaemon.capture.gather import Piece, Shape
from hsdaemon.capture.store import Store
from hsdaemon.capture.writer import Writer

HEADER = wire.DumpHeader("", 0, 0, 1, (1, 3, 4), "post", "float32", False, "0.5.23", 1, "hs-test", 0, 0)
SHAPE = Shape(1, 3, "float32", interleaved=False)
TOKENS = 7
SIZE = wire.Layout(TOKENS, 1, 3, "float32", False).total


class Far(Cpu):
    """A device whose rows come when the writer waits for them, as a GPU's do. `waits`: run in each wait."""

    def __init__(self, waits: Callable[[], None] = lambda: None) -> None:
        self.waits = waits
        self.entered: list[str] = []

    def enter(self) -> None:
        self.entered.append(threading.current_thread().name)

    def bring(self, host: torch.Tensor, fill: Fill) -> Coming:
        flat = torch.empty(host.numel(), dtype=torch.uint8)
        fill(flat)
        return Copy(self, flat, host)


class Copy:
    def __init__(self, device: Far, flat: torch.Tensor, host: torch.Tensor) -> None:
        self.device, self.flat, self.host = device, flat, host

    def wait(self) -> None:
        self.device.waits()
        self.host.copy_(self.flat)


class Host:
    """A writer, its spool, and a clock of its own."""

    def __init__(self, folder: Path, device: Far, **changes: object) -> None:
        self.now = 0.0
        self.failures: list[str] = []
        self.spool = folder / "spool"
        told = fake_sglang.config(folder, **changes)
        self.store = Store(told, HEADER, lambda: self.now)
        self.writer = Writer(self.store, SHAPE, device, told.buffers, told.wait_s, self.failures.append)
        self.writer.start(TOKENS)

    def take(self, row: int) -> wire.RequestId:
        rid = wire.RequestId(fake_sglang.EPOCH, row, 1, TOKENS)

        def fill(flat: torch.Tensor) -> None:
            flat.fill_(row)

        self.writer.take([Piece(rid, 0, TOKENS, 0, 0)], fill)
        return rid


def test_the_thread_that_waits_for_a_device_stands_on_it(tmp_path: Path) -> None:
    far = Far()
    host = Host(tmp_path, far)
    rid = host.take(5)
    host.writer.stop()
    assert far.entered == ["hsdaemon-writer"]
    assert set((host.spool / wire.dump_name(rid)).read_bytes()[wire.HEADER_BYTES :][: 8 * TOKENS]) == {5}


def test_a_slow_forward_leaves_its_samples_their_wait_for_room(tmp_path: Path) -> None:
    """The first is written while there is room; the second finds none until somebody takes the first away."""

    def late() -> None:
        host.now += 100.0

    host = Host(tmp_path, Far(late), budget=SIZE, wait_s=60.0)
    first, second = host.take(1), host.take(2)
    timer = threading.Timer(0.3, (host.spool / wire.dump_name(first)).unlink)
    timer.start()
    host.writer.stop()
    timer.join()
    assert host.failures == []
    assert (host.spool / wire.dump_name(second)).exists()


def test_a_gpu_of_the_host_is_not_touched_for_an_engine_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a context on the GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("Stream", "Event", "set_device", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, touched)
    told = fake_sglang.config(tmp_path)
    engine = fake_sglang.Sglang(monkeypatch)
    hooks.install(wire.to_json(told), told.way)
    engine.load()
    rid = wire.RequestId(fake_sglang.EPOCH, 1, 1, 3)
    engine.forward([fake_sglang.Part(str(rid), [5, 6, 7])])
    writer = engine.rank()._writer
    assert writer
    writer.stop()
    assert (tmp_path / "spool" / wire.dump_name(rid)).exists()


class Driver:
    """torch.cuda on a machine without a GPU: streams have names, and what is done to them is written down."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.now = "forward"

    def Stream(self, gpu: torch.device) -> SimpleNamespace:  # noqa: N802  # its name there
        return SimpleNamespace(
            name="ours", wait_stream=lambda other: self.said.append(f"{gpu}: ours waits for {other}")
        )

    def current_stream(self, gpu: torch.device) -> str:
        return f"{self.now} on {gpu}"

    @contextlib.contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self.now = stream.name
        yield
        self.now = "forward"

    def Event(self, blocking: bool) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(
            record=lambda stream: self.said.append(f"recorded on {stream.name}"),
            synchronize=lambda: self.said.append("slept" if blocking else "spun"),
        )

    def set_device(self, gpu: torch.device) -> None:
        self.said.append(f"stands on {gpu}")


def test_a_gpu_s_rows_are_kept_until_they_are_copied_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, made = Driver(), []

    def empty(size: int, device: object, pin_memory: bool = False, **_: object) -> torch.Tensor:
        assert pin_memory == (device == "cpu")
        made.append(torch.zeros(size, dtype=torch.uint8))
        return made[-1]

    parts = {"device": torch.device, "uint8": torch.uint8, "Tensor": torch.Tensor, "empty": empty, "cuda": driver}
    monkeypatch.setattr(device, "torch", SimpleNamespace(**parts))
    gpu = Cuda(3)
    gpu.enter()
    host = gpu.buffer(8)[:4]
    coming = gpu.bring(host, lambda flat: driver.said.append(f"gathered on {driver.now}"))
    _, flat = made
    kept = weakref.ref(flat)
    del flat
    made.clear()
    assert kept() is not None
    coming.wait()
    assert kept() is None
    assert driver.said == [
        "stands on cuda:3",
        "gathered on forward",
        "cuda:3: ours waits for forward on cuda:3",
        "recorded on ours",
        "slept",
    ]
