"""A checkpoint of random weights in a real model's shape, and the states that transformers computes from it.

    python -m bench.gpu_models SHAPE FOLDER

FOLDER gets model/ (bfloat16, as SGLang loads it), prompt-N.npy (token ids) and states-N.npy ([tokens, 4 * hidden],
float32: aux, then the post-norm final state), computed in float32 from the bfloat16 weights. Three columns of every
embedding hold the token's id, six bits each, and no layer writes to them: a row that is shifted, swapped or another
token's is a wrong number in each aux layer, exactly.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from msgspec import Struct

from hsdaemon.demo import reference
from hsdaemon.machine.checkpoint import eagle3_layers

hf: Any = transformers  # its classes are untyped

DIGITS, BASE, UNIT = 3, 64, 1 / 8  # columns of the id, values of each, their step: all exact in bfloat16
LAST = ("o_proj", "down_proj")  # what adds to the residual stream
GAIN = 0.25  # of those, so that rounding is not multiplied from layer to layer


class Shape(Struct, frozen=True):
    """A model and the load for it. chunk, forwards: tokens of a forward, forwards of a round; content: prompts that are
    compared, and their lengths; pool: tokens of the KV pool."""

    arch: str
    sizes: dict[str, Any]
    chunk: int
    forwards: int
    pairs: int
    pool: int
    content: int
    lengths: tuple[int, int]

    @property
    def vocab(self) -> int:
        return int(self.sizes["vocab_size"])


QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
KIMI = {  # Kimi-K2.5's text model with 8 of 61 layers and 32 of 384 experts
    "vocab_size": 32768,
    "hidden_size": 7168,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "intermediate_size": 18432,
    "max_position_embeddings": 32768,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,  # read by SGLang, not written by transformers itself
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 8.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
# The same models, small enough for two CPU cores: what is rehearsed there is everything but CUDA itself.
SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
SMALL_QWEN3 = QWEN3 | SMALL | {"num_key_value_heads": 2, "head_dim": 32}
SMALL_KIMI = KIMI | SMALL
SMALL_KIMI |= {"num_key_value_heads": 4, "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2}
SMALL_KIMI |= {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}

SHAPES = {
    "qwen3-8b": Shape("qwen3", QWEN3, 16384, 8, 5, 65536, 12, (500, 6000)),
    "kimi-slice": Shape("deepseek_v3", KIMI, 16384, 6, 5, 65536, 12, (500, 6000)),
    "qwen3-small": Shape("qwen3", SMALL_QWEN3, 256, 4, 2, 4096, 6, (8, 600)),
    "kimi-small": Shape("deepseek_v3", SMALL_KIMI, 256, 4, 2, 4096, 6, (8, 600)),
}


def main(name: str, folder: str) -> int:
    shape, target = SHAPES[name], Path(folder)
    target.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = built(shape, device)
    model.save_pretrained(target / "model", max_shard_size="4GB")
    computed = model.float().eval()
    layers = eagle3_layers(shape.sizes["num_hidden_layers"])
    for number, ids in enumerate(prompts(shape)):
        aux, _, post = reference.states(computed, ids.tolist(), layers)
        np.save(target / f"prompt-{number}.npy", ids)
        np.save(target / f"states-{number}.npy", torch.cat([aux, post], dim=-1).cpu().numpy())
    return 0


def prompts(shape: Shape) -> list[npt.NDArray[np.int64]]:
    draw = np.random.default_rng(3)
    return [draw.integers(4, shape.vocab, size) for size in draw.integers(*shape.lengths, shape.content)]


def built(shape: Shape, device: str) -> Any:
    config = hf.AutoConfig.for_model(shape.arch, **shape.sizes, tie_word_embeddings=False)
    with torch.device(device):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    draw = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fill(name, weight, draw)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.05, generator=draw)
    return model


def fill(name: str, weight: torch.Tensor, draw: torch.Generator) -> None:
    """Variance is kept from layer to layer; what adds to the stream leaves the columns of the id alone."""
    if "norm" in name:
        weight.normal_(1, 0.1, generator=draw)
    elif "embed_tokens" in name:
        weight.normal_(0, 1, generator=draw)
        ids = torch.arange(weight.shape[0], device=weight.device)
        for digit in range(DIGITS):
            weight[:, digit] = ids // BASE**digit % BASE * UNIT
    elif any(part in name for part in LAST):
        weight.normal_(0, GAIN * weight.shape[-1] ** -0.5, generator=draw)
        weight[..., :DIGITS, :] = 0
    else:
        weight.normal_(0, weight.shape[-1] ** -0.5, generator=draw)


def decoded(states: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The ids that the rows of an aux state name; -1 where a value is no digit."""
    digits = states[:, :DIGITS] / UNIT
    whole = np.round(digits).astype(np.int64)
    found = (whole * BASE ** np.arange(DIGITS)).sum(axis=1)
    return np.where((whole == digits).all(axis=1), found, -1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
