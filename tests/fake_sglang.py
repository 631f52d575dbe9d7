"""Just enough of SGLang's names, in this process, to hand the capture any forward that one can think of."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hsdaemon import wire
from hsdaemon.capture import hooks
from hsdaemon.capture.rank import Rank

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other on busy cores

HIDDEN, LAYERS, EPOCH = 8, 8, "00000000000000e1"
AUX = (1, 3, 4)


class Mode:
    def is_extend(self) -> bool:
        return True


@dataclasses.dataclass
class ForwardBatch:
    rids: list[str]
    extend_seq_lens_cpu: list[int]
    extend_prefix_lens_cpu: list[int]
    input_ids: torch.Tensor
    forward_mode: Mode = dataclasses.field(default_factory=Mode)

    @classmethod
    def init_new(cls, source: Any) -> ForwardBatch:
        raise NotImplementedError


class Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers_to_capture: list[int] = []
        self.layers = torch.nn.ModuleList()
        self.norm = Norm()


class Norm(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (hidden + residual) * 2, hidden + residual


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Body()

    def set_dflash_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = [k + 1 for k in ids]


def expected(ids: Sequence[int], layer: int) -> torch.Tensor:
    """The fake's state: row t says its token, its layer and its position."""
    column = torch.tensor(ids, dtype=torch.float32) * 100 + layer
    return column[:, None] + torch.arange(HIDDEN) / 16


@dataclasses.dataclass
class Part:
    """Rows `start` to `start + count` of a prompt, as one piece of a forward."""

    rid: object
    ids: Sequence[int]
    start: int = 0
    count: int | None = None

    def rows(self) -> Sequence[int]:
        end = len(self.ids) if self.count is None else self.start + self.count
        return self.ids[self.start : end]


class Sglang:
    """The fake: `forward` is one prefill of the engine; `answered` counts those that came through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answered = 0
        answer = self._answer

        class LogitsProcessor:
            def forward(
                self,
                input_ids: Any,
                hidden_states: Any,
                lm_head: Any,
                logits_metadata: Any,
                aux_hidden_states: Any = None,
            ) -> str:
                return answer()

        class ModelRunner:
            is_draft_worker = False
            device, gpu_id = "cpu", 0

            def __init__(self) -> None:
                self.model: Any = None
                self.model_config = types.SimpleNamespace(num_hidden_layers=LAYERS, hidden_size=HIDDEN)
                self.server_args = types.SimpleNamespace(chunked_prefill_size=64)

            def load_model(self) -> None:
                self.model = Model()

        parallel = types.SimpleNamespace(tp_rank=0, tp_size=1, attn_dp_rank=0, attn_tp_rank=0)
        self.parallel, self.processor, self.runner_class = parallel, LogitsProcessor, ModelRunner
        modules: dict[str, dict[str, Any]] = {
            "sglang.version": {"__version__": "0.5.23"},
            "sglang.srt.layers.logits_processor": {"LogitsProcessor": LogitsProcessor},
            "sglang.srt.model_executor.model_runner": {"ModelRunner": ModelRunner},
            "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": ForwardBatch},
            "sglang.srt.runtime_context": {"get_parallel": lambda: parallel},
        }
        for name, fields in modules.items():
            module = types.ModuleType(name)
            module.__dict__.update(fields)
            monkeypatch.setitem(sys.modules, name, module)

    def _answer(self) -> str:
        self.answered += 1
        return "logits"

    def load(self) -> Any:
        runner = self.runner_class()
        runner.load_model()
        return runner

    def rank(self) -> Rank:
        found = getattr(self.runner_class, hooks.MARK)
        assert isinstance(found, Rank)
        return found

    def forward(self, parts: Sequence[Part], padding: int = 0, **states: Any) -> None:
        """states: `final` or `aux` in place of the right ones."""
        tokens = [token for part in parts for token in part.rows()] + [0] * padding
        right = {
            "final": expected(tokens, LAYERS),
            "aux": torch.cat([expected(tokens, k) for k in AUX], dim=1),
        } | states
        batch = ForwardBatch(
            rids=[str(part.rid) for part in parts],
            extend_seq_lens_cpu=[len(part.rows()) for part in parts],
            extend_prefix_lens_cpu=[part.start for part in parts],
            input_ids=torch.tensor(tokens),
        )
        reply = self.processor().forward(None, right["final"], None, batch, aux_hidden_states=right["aux"])
        assert reply == "logits"


def config(folder: Path, **changes: Any) -> wire.CaptureConfig:
    """A capture configuration below `folder`, whose spool has a living epoch."""
    spool = folder / "spool"
    spool.mkdir(exist_ok=True)
    (spool / wire.EPOCH_FILE).write_text(EPOCH, encoding="ascii")
    plain = wire.CaptureConfig(
        spool=str(spool),
        attest=str(folder / "attest"),
        launch="hs-test",
        way="plugin",
        layers=(),
        norm="post",
        dtype="float32",
        interleaved=False,
        budget=1 << 20,
        wait_s=0.3,
        buffers=2,
    )
    return dataclasses.replace(plain, **changes)
