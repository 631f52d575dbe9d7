"""Where the rows of a forward are put together, and how they come to the host without holding the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Fill = Callable[[torch.Tensor], None]  # puts the rows of a forward into a flat buffer (uint8)


class Coming(Protocol):
    """Rows on their way."""

    def wait(self) -> None:
        """Until they are in the host's buffer."""


class Device(Protocol):
    """What the writer asks of the engine's device."""

    def enter(self) -> None:
        """The calling thread will wait for rows."""

    def buffer(self, size: int) -> torch.Tensor:
        """`size` bytes on the host that rows can come to."""

    def bring(self, host: torch.Tensor, fill: Fill) -> Coming:
        """Have `host`, a part of such a buffer, filled."""


class Cpu:
    """The host itself: rows are put together where they are written from."""

    def enter(self) -> None:
        return

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def bring(self, host: torch.Tensor, fill: Fill) -> Coming:
        fill(host)
        return self

    def wait(self) -> None:
        return


class Cuda:
    """One GPU: rows are put together on the stream of the forward and copied on one of our own."""

    def __init__(self, number: int) -> None:
        self._device = torch.device("cuda", number)
        self._stream = _cuda().Stream(self._device)

    def enter(self) -> None:
        """A new thread stands on GPU 0, and its first wait would make a context there, half a gigabyte of memory."""
        torch.cuda.set_device(self._device)

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def bring(self, host: torch.Tensor, fill: Fill) -> Coming:
        flat = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
        fill(flat)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done = _cuda().Event(blocking=True)  # the copy waits for the whole forward: no core may spin for so long
        with torch.cuda.stream(self._stream):
            host.copy_(flat, non_blocking=True)
            done.record(self._stream)
        return _Copy(flat, done)


class _Copy:
    """Holds what is copied from until it is copied: freed sooner, its memory would be the next forward's; held longer,
    while the writer waits for room in the spool, it would be memory that the engine lacks."""

    def __init__(self, source: torch.Tensor, done: Any) -> None:
        self._source: torch.Tensor | None = source
        self._done = done

    def wait(self) -> None:
        self._done.synchronize()
        self._source = None


def _cuda() -> Any:
    """torch.cuda, whose classes are untyped."""
    return torch.cuda
