"""Tiny random checkpoints that SGLang serves on a CPU and transformers loads. The same seed gives the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec import Struct
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

hf: Any = transformers  # its classes are untyped

UNK, BOS, EOS, PAD = 0, 1, 2, 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Tiny(Struct, frozen=True):
    """What to make. `arch`: llama, qwen3, deepseek_v3 or kimi_k25 (the weights of deepseek_v3 under Kimi's wrapper)."""

    arch: str = "kimi_k25"
    dtype: str = "float32"
    seed: int = 0
    layers: int = 8  # with fewer than 7 the EAGLE-3 default names a layer twice
    hidden: int = 128
    vocab: int = 512
    context: int = 2048
    steps: bool = False  # layer k adds k + 1 to columns 2 and up, column 1 is the token id: values name layer and row


def make(folder: str, tiny: Tiny) -> str:
    """Write the checkpoint into `folder`, which must not exist, and give its path."""
    target = Path(folder)
    fresh = target.with_name(f".{target.name}.making")
    shutil.rmtree(fresh, ignore_errors=True)
    model = _text_model(tiny).float()
    _fill(model, tiny.seed)
    if tiny.steps:
        _steps(model)
    model.to(DTYPES[tiny.dtype]).save_pretrained(fresh)
    _tokenizer(fresh, tiny.vocab)
    if tiny.arch == "kimi_k25":
        _wrap_kimi(fresh, tiny.hidden)
    fresh.rename(target)
    return str(target)


def _tokenizer(folder: Path, vocab: int) -> None:
    """Words t0, t1, ...: id i is the word "t<i>"."""
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab)}, unk_token=f"t{UNK}"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": UNK, "bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    words = {name: f"t{i}" for name, i in special.items()}
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **words).save_pretrained(folder)


def _fill(model: Any, seed: int) -> None:
    """Random weights, large enough that every layer changes the stream; norms differ from 1 so that pre-norm and
    post-norm cannot be mixed up, and the last one keeps the final state as small as the others: float32 rounds
    relatively, and one absolute bound serves all."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * noise if "norm" in name else 0.05 * noise
        if name == "model.norm.weight":
            parameter.data /= 2
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.data = _decided(len(buffer), generator).to(buffer.dtype)


def _decided(experts: int, generator: torch.Generator) -> torch.Tensor:
    """Router biases whose gaps, also those between sums of two, exceed any difference of scores (each in 0 to 1).

    Each layer then has two experts of its own for all tokens. With random biases one token in a million or so is a tie
    that the order of a sum decides: another batch sends it to another expert, and no two implementations agree on it.
    """
    ladder = torch.tensor([0.0, *(4.0 * 2**k for k in range(experts - 1))])
    return ladder[torch.randperm(experts, generator=generator)]


BEACON = 1e4  # column 0 of every embedding: so large that the norm before an MLP gives sqrt(hidden) there


def _steps(model: Any) -> None:
    """Let layer k add k + 1 to columns 2 and up of every row (to 1 %); column 1 stays the token id.

    Attention is silent; the MLP reads the beacon alone, whose normed value is known.
    """
    body = model.model
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1.0 if "norm" in name else 0.0)
    body.embed_tokens.weight.data[:, 0] = BEACON
    body.embed_tokens.weight.data[:, 1] = torch.arange(body.embed_tokens.weight.shape[0])
    beacon = float(model.config.hidden_size) ** 0.5
    for k, layer in enumerate(body.layers):
        layer.mlp.gate_proj.weight.data[0, 0] = 1.0
        layer.mlp.up_proj.weight.data[0, 0] = 1.0
        gain = torch.nn.functional.silu(torch.tensor(beacon)).item() * beacon
        layer.mlp.down_proj.weight.data[2:, 0] = (k + 1) / gain


def _text_model(tiny: Tiny) -> Any:
    common: dict[str, Any] = {
        "vocab_size": tiny.vocab,
        "hidden_size": tiny.hidden,
        "num_hidden_layers": tiny.layers,
        "intermediate_size": 2 * tiny.hidden,
        "num_attention_heads": 4,
        "max_position_embeddings": tiny.context,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if tiny.arch == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**common, num_key_value_heads=2, head_dim=32))
    if tiny.arch == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**common, num_key_value_heads=2, head_dim=32))
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**common, **_deepseek(tiny)))


def _deepseek(tiny: Tiny) -> dict[str, Any]:
    rope = {  # SGLang's CPU rope for MLA accepts yarn only
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": tiny.context // 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return {
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": 96,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "rope_parameters": rope,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": tiny.layers if tiny.steps else 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,  # read by SGLang, not written by transformers itself
    }


def _wrap_kimi(folder: Path, hidden: int) -> None:
    """Turn a tiny deepseek_v3 checkpoint into a tiny kimi_k25 one, in place. It has no vision weights."""
    weights = {f"language_model.{name}": w for name, w in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text.update(model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    rope = text.pop("rope_parameters")  # the published config has rope_scaling
    text["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    text["rope_scaling"] = rope
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": text["dtype"],
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "media_placeholder_token_id": text["vocab_size"] - 2,
        "text_config": text,
        "vision_config": _vision(hidden),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _vision(hidden: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "vt_num_hidden_layers": 1,
        "vt_hidden_size": 64,
        "vt_intermediate_size": 64,
        "vt_num_attention_heads": 2,
        "mm_hidden_size": 64,
        "text_hidden_size": hidden,
        "patch_size": 14,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        "merge_kernel_size": [2, 2],
    }
