"""From the engine to the spool without holding it: a pool of buffers, one copy a forward, a writing thread.

The pool of buffers is the back-pressure. An engine that finds none waits a bounded time, then gives up the samples of
that forward and lives.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from hsdaemon.capture.device import Coming, Device, Fill
from hsdaemon.capture.gather import Piece, Shape
from hsdaemon.capture.store import SampleFailed, Store

IDLE_S = 5.0  # without work, parts of dead requests are looked for this often


class Slot:
    """One buffer on the host, grown to the largest forward that was seen."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.data = device.buffer(0)

    def room(self, size: int) -> torch.Tensor:
        if self.data.numel() < size:
            self.data = self._device.buffer(size)
        return self.data[:size]


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Rows of one forward on their way."""

    slot: Slot
    rows: int
    pieces: tuple[Piece, ...]
    coming: Coming


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Samples that failed before they had rows to write."""

    pieces: tuple[Piece, ...]
    code: str
    reason: str


class Writer:
    """Owns the pool and the thread. failed: told of each error."""

    def __init__(
        self,
        store: Store,
        shape: Shape,
        device: Device,
        buffers: int,
        wait_s: float,
        failed: Callable[[str], None],
    ) -> None:
        self._store, self._shape, self._device = store, shape, device
        self._wait_s, self._failed = wait_s, failed
        self._free: queue.Queue[Slot] = queue.Queue()
        for _ in range(buffers):
            self._free.put(Slot(device))
        self._jobs: queue.Queue[Job | Failure | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="hsdaemon-writer", daemon=True)

    def start(self, rows: int) -> None:
        """Allocate buffers for forwards of `rows` rows, before any is due, and start the thread."""
        slots = [self._free.get() for _ in range(self._free.qsize())]
        for slot in slots:
            slot.room(self._shape.bytes(rows))
            self._free.put(slot)
        self._thread.start()

    def stop(self) -> None:
        """Write what is queued, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def take(self, pieces: Sequence[Piece], fill: Fill) -> None:
        """Queue one forward. fill: puts its rows into a flat buffer. Raises SampleFailed: no buffer."""
        try:
            slot = self._free.get(timeout=self._wait_s)
        except queue.Empty:
            reason = f"no buffer in {self._wait_s:g} s: the spool's reader is too slow or has stopped"
            raise SampleFailed("stalled", reason) from None
        try:
            rows = sum(piece.count for piece in pieces)
            coming = self._device.bring(slot.room(self._shape.bytes(rows)), fill)
            self._jobs.put(Job(slot, rows, tuple(pieces), coming))
        except BaseException:
            self._free.put(slot)
            raise

    def give_up(self, pieces: Sequence[Piece], code: str, reason: str) -> None:
        """Have error files written for `pieces`, in order with what is queued."""
        self._jobs.put(Failure(tuple(pieces), code, reason))

    def _run(self) -> None:
        self._device.enter()
        while True:
            try:
                if not self._next():
                    return
            except Exception as error:  # noqa: BLE001  # a dead writer would fail every later sample without a word
                self._failed(f"the writer failed: {type(error).__name__}: {error}")

    def _next(self) -> bool:
        """One job, or one look at what is left over when none comes; False at the end."""
        try:
            job = self._jobs.get(timeout=IDLE_S)
        except queue.Empty:
            self._store.sweep()
            return True
        if job is None:
            return False
        self._work(job)
        return True

    def _work(self, job: Job | Failure) -> None:
        if isinstance(job, Failure):
            for piece in job.pieces:
                self._store.fail(piece.rid, job.code, job.reason)
            return
        try:
            job.coming.wait()
            self._store.turn()  # after the wait: a slow forward leaves its samples their whole wait for room
            for piece in job.pieces:
                self._piece(job, piece)
        finally:
            self._free.put(job.slot)

    def _piece(self, job: Job, piece: Piece) -> None:
        raw = job.slot.data.numpy().data
        first, last = piece.place, piece.place + piece.count
        planes = [raw[at + row * first : at + row * last] for at, row in self._shape.planes(job.rows)]
        try:
            self._store.write(piece.rid, piece.start, raw[8 * first : 8 * last], planes)
        except SampleFailed as failed:
            self._failed(f"{piece.rid}: {failed.reason}")
        except Exception as error:  # noqa: BLE001  # one sample's trouble must not cost the others of this forward
            self._store.fail(piece.rid, "capture", f"{type(error).__name__}: {error}")
            self._failed(f"{piece.rid}: {type(error).__name__}: {error}")
