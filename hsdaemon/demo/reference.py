"""The states that transformers computes, to compare captured ones against. Text models only."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

hf: Any = transformers  # its classes are untyped


def load(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model of `folder`. Kimi-K2.5's text part is DeepSeek-V3 under another name and prefix."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "kimi_k25":
        model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        return model.eval()
    text = config["text_config"] | {"model_type": "deepseek_v3"}
    rope = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta")}
    rope["rope_type"] = rope.pop("type")
    model = hf.DeepseekV3ForCausalLM.from_pretrained(
        folder,
        config=hf.DeepseekV3Config(**text, rope_parameters=rope),
        dtype=dtype,
        attn_implementation="eager",
        key_mapping={r"^language_model\.": ""},
    )
    return model.eval()


def states(model: Any, ids: Sequence[int], layers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give aux [tokens, len(layers) * hidden], pre-norm and post-norm final state [tokens, hidden], unshifted.

    layers: physical, 0-based; aux holds the output of each, before any later norm.
    """
    aux, pre, post = batch_states(model, [ids], layers)
    return aux[0], pre[0], post[0]


def batch_states(
    model: Any, rows: Sequence[Sequence[int]], layers: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of rows of one length: a dimension in front."""
    kept: dict[object, torch.Tensor] = {}
    body = model.model

    def keep(k: object) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, result: Any) -> None:
            kept[k] = (result[0] if isinstance(result, tuple) else result).detach().clone()

        return hook

    def final(_module: Any, args: Any, result: Any) -> None:
        kept["pre"], kept["post"] = args[0].detach().clone(), result.detach().clone()

    hooks = [body.layers[k].register_forward_hook(keep(k)) for k in layers]
    hooks.append(body.norm.register_forward_hook(final))
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([list(ids) for ids in rows], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([kept[k] for k in layers], dim=-1), kept["pre"], kept["post"]
