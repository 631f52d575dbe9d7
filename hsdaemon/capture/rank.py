"""One rank of the engine: what it was told, what it found, and what it does with a forward."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hsdaemon import wire
from hsdaemon.capture import compat, gather
from hsdaemon.capture.attest import Attestor, blank
from hsdaemon.capture.device import Cpu, Cuda
from hsdaemon.capture.store import SampleFailed, Store, living_epoch
from hsdaemon.capture.writer import Writer

log = logging.getLogger("hsdaemon.capture")


class Rank:
    """Made when the hooks are set; armed when the model is loaded."""

    def __init__(self, config: wire.CaptureConfig, release: str) -> None:
        self.config = config
        self.attestor = Attestor(config.attest, blank(config, release))
        self.pre: Any = None  # torch: the state before the final norm, from the norm to the logits processor
        self._model: Any = None
        self._shape = gather.Shape(0, 0, config.dtype, config.interleaved)
        self._store: Store | None = None
        self._writer: Writer | None = None
        self._broken = ""  # the first cause, once there is one

    def arm(self, runner: Any) -> None:
        """The model is loaded: mark the layers, find the final norm, start the writer, attest. May raise anything."""
        model, config = runner.model, self.config
        count, hidden, rows = compat.sizes(runner)
        layers = config.layers or (1, count // 2 - 1, count - 4)
        ranks = compat.ranks()
        self._model = model
        self._shape = gather.Shape(hidden, len(layers), config.dtype, config.interleaved)
        facts = {
            "model": type(model).__name__,
            "num_layers": count,
            "hidden": hidden,
            "layers": layers,
            "tp_rank": ranks.tp_rank,
            "tp_size": ranks.tp_size,
            "dp_rank": ranks.dp_rank,
        }
        self.attestor.know(**facts)
        loop = compat.set_layers(model, layers)
        if config.norm == "pre":
            compat.body(model).norm.register_forward_hook(self._keep_pre)
        if ranks.attn_tp_rank == 0:
            self._start(rows, compat.gpu(runner))
        self.attestor.say(stage="armed", loop_ids=loop)
        shown = ",".join(map(str, layers))
        where = f"rank={ranks.tp_rank} spool={config.spool}"
        log.info("%s layers=%s norm=%s %s", wire.ENABLED_LINE, shown, config.norm, where)

    def _start(self, rows: int, gpu: int | None) -> None:
        said, config = self.attestor.said, self.config
        template = wire.DumpHeader(
            rid="",
            tokens=0,
            rows=0,
            hidden=said.hidden,
            layers=said.layers,
            norm=said.norm,
            dtype=said.dtype,
            interleaved=said.interleaved,
            release=said.release,
            capture=said.capture,
            launch=said.launch,
            tp_rank=said.tp_rank,
            dp_rank=said.dp_rank,
        )
        self._store = Store(config, template)
        self._store.start()
        device = Cpu() if gpu is None else Cuda(gpu)
        self._writer = Writer(self._store, self._shape, device, config.buffers, config.wait_s, self.attestor.failed)
        self._writer.start(rows)

    def _keep_pre(self, _module: Any, args: Any, result: Any) -> None:
        """norm(hidden, residual) gives (normed, hidden + residual); norm(hidden) alone leaves its argument."""
        self.pre = result[1] if isinstance(result, tuple) else args[0]

    def forward(self, call: compat.Call) -> None:
        """One forward of the engine, on its own thread. May raise anything but costs samples, never the engine."""
        pre, self.pre = self.pre, None
        batch = compat.batch(call.metadata) if self._model is not None else None
        pieces = self._ours(batch) if batch else []
        if not batch or not pieces:
            return
        final = call.final if self.config.norm == "post" else pre
        try:
            self._verify()
            layers = gather.check(final, call.aux, sum(batch.counts), self._shape)
            if self.attestor.said.stage == "armed":
                self.attestor.say(stage="seen")
            if self._writer:
                self._take(self._writer, pieces, batch, layers, final)
        except Exception as error:  # noqa: BLE001  # the engine must live: these samples fail, each with the reason
            self._give_up(pieces, error)

    def _ours(self, batch: compat.Batch) -> list[gather.Piece]:
        """Pieces of requests of the living worker; warm-ups, probes and strangers are not among them."""
        epoch, source, place = living_epoch(self.config.spool), 0, 0
        pieces: list[gather.Piece] = []
        for rid_text, start, count in zip(batch.rids, batch.starts, batch.counts, strict=False):
            rid = wire.parse_rid(rid_text)
            if rid is not None and rid.epoch == epoch and count:
                pieces.append(gather.Piece(rid, start, count, source, place))
                place += count
            source += count
        return pieces

    def _verify(self) -> None:
        """The layers in effect are still the ones that were set: something may have set others after the load."""
        said = self.attestor.said
        if said.stage == "broken":
            self._broken = self._broken or said.last_error or "the capture is broken"
            raise SampleFailed("layers", self._broken)
        loop = compat.loop_ids(self._model)
        if loop != tuple(k + 1 for k in said.layers):
            self._broken = f"the engine captures loop ids {list(loop)}, not layers {list(said.layers)}"
            self.attestor.say(stage="broken", loop_ids=loop)
            raise SampleFailed("layers", self._broken)

    def _take(
        self, writer: Writer, pieces: list[gather.Piece], batch: compat.Batch, layers: list[Any], final: Any
    ) -> None:
        def fill(flat: torch.Tensor) -> None:
            gather.fill(flat, self._shape, pieces, batch.input_ids, layers, final)

        writer.take(pieces, fill)

    def _give_up(self, pieces: list[gather.Piece], error: Exception) -> None:
        code = error.code if isinstance(error, SampleFailed) else "capture"
        reason = error.reason if isinstance(error, SampleFailed) else f"{type(error).__name__}: {error}"
        self.attestor.failed(f"{len(pieces)} samples from {pieces[0].rid} on: {reason}")
        if self._writer:
            self._writer.give_up(pieces, code, reason)
