"""The one file that knows how a release of SGLang spells things. Chosen by what is there, not by version."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One prefill forward: the rows of request i are `counts[i]` long and continue after `starts[i]` earlier ones."""

    rids: tuple[object, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    input_ids: Any  # torch [rows or more]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What the logits processor was handed. final: torch [rows or more, hidden]; aux: one tensor per layer, or one."""

    final: Any
    aux: Any
    metadata: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    tp_rank: int
    tp_size: int
    dp_rank: int  # attention data-parallel group
    attn_tp_rank: int  # within that group; 0 writes


class Renamed(Exception):
    """Something that the capture needs is not where any known release has it."""


def release() -> str:
    """The version of the engine in this process."""
    return str(importlib.import_module("sglang.version").__version__)


def logits_processor() -> type[Any]:
    return _find("sglang.srt.layers.logits_processor", "LogitsProcessor", needs=("forward",))


def model_runner() -> type[Any]:
    return _find("sglang.srt.model_executor.model_runner", "ModelRunner", needs=("load_model",))


def _find(module: str, name: str, needs: Sequence[str]) -> type[Any]:
    found = getattr(importlib.import_module(module), name, None)
    missing = [name] if found is None else [f"{name}.{part}" for part in needs if not hasattr(found, part)]
    if missing:
        raise Renamed(f"{module} has no {missing[0]}")
    return found  # type: ignore[return-value]  # found by name: nothing knows its type


def reader(forward: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Call]:
    """Give a function that picks a Call from the arguments of `forward`. Raises Renamed when one has another name."""
    names = list(inspect.signature(forward).parameters)
    wanted = ("hidden_states", "aux_hidden_states", "logits_metadata")
    lost = [name for name in wanted if name not in names]
    if lost:
        raise Renamed(f"LogitsProcessor.forward has no argument {lost[0]}")
    places = [names.index(name) for name in wanted]

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        found = [
            args[place] if place < len(args) else kwargs.get(name) for name, place in zip(wanted, places, strict=True)
        ]
        return Call(*found)

    return read


def batch(metadata: Any) -> Batch | None:
    """The prefill batch behind a call, or None for decode steps, dry runs and batches without request ids."""
    mode, rids = getattr(metadata, "forward_mode", None), getattr(metadata, "rids", None)
    if mode is None or not rids or not mode.is_extend():
        return None
    counts, starts = metadata.extend_seq_lens_cpu, metadata.extend_prefix_lens_cpu
    return Batch(tuple(rids), tuple(map(int, starts)), tuple(map(int, counts)), metadata.input_ids)


def ranks() -> Ranks:
    """Where this process stands. Called after the groups are made."""
    try:
        seen = importlib.import_module("sglang.srt.runtime_context").get_parallel()
        return Ranks(seen.tp_rank, seen.tp_size, seen.attn_dp_rank, seen.attn_tp_rank)
    except (ImportError, AttributeError):
        groups = importlib.import_module("sglang.srt.distributed")
        attention = importlib.import_module("sglang.srt.layers.dp_attention")
        return Ranks(
            groups.get_tensor_model_parallel_rank(),
            groups.get_tensor_model_parallel_world_size(),
            attention.get_attention_dp_rank(),
            attention.get_attention_tp_rank(),
        )


def body(model: Any) -> Any:
    """The decoder body: has `layers_to_capture` and the final `norm`."""
    for path in ("language_model.model", "model", "language_model"):
        found = model
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not None and hasattr(found, "norm") and hasattr(found, "layers"):
            return found
    raise Renamed(f"{type(model).__name__} has no decoder body with a final norm")


def loop_ids(model: Any) -> tuple[int, ...]:
    """The engine's own list in effect: i stands for the input of layer i, which is the output of layer i - 1."""
    return tuple(int(i) for i in getattr(body(model), "layers_to_capture", None) or ())


def set_layers(model: Any, layers: Sequence[int]) -> tuple[int, ...]:
    """Have physical `layers` captured and give the loop ids that are then in effect. Raises Renamed when no setter
    of this release leads there: some add 1 to every id, some only where the first one is 1."""
    wanted = tuple(k + 1 for k in layers)
    inner = getattr(model, "language_model", None)  # a multimodal wrapper may have no setter of its own (0.5.9)
    names = ("set_dflash_layers_to_capture", "set_eagle3_layers_to_capture")
    setters = [getattr(owner, name, None) for owner in (model, inner) for name in names]
    for setter in filter(None, setters):
        for ids in (list(layers), list(wanted)):
            setter(ids)
            if loop_ids(model) == wanted:
                return wanted
    raise Renamed(f"{type(model).__name__} does not take {list(layers)} as layers to capture")


def gpu(runner: Any) -> int | None:
    """The number of the GPU that this rank computes on, None on the CPU."""
    return int(runner.gpu_id) if str(runner.device).startswith("cuda") else None


def sizes(runner: Any) -> tuple[int, int, int]:
    """Decoder layers, columns of a state, and rows of the largest prefill that is to be expected."""
    config, args = runner.model_config, runner.server_args
    chunk = int(getattr(args, "chunked_prefill_size", 0) or 0)
    rows = chunk if chunk > 0 else int(getattr(args, "max_prefill_tokens", 0) or 0)
    return int(config.num_hidden_layers), int(config.hidden_size), rows
