"""What the model folder's config.json says, without loading a weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from hsdaemon.errors import ConfigError


class ModelFacts(Struct, frozen=True):
    """Sizes of the text model. `context`: longest position; `layers`: decoder layers, MTP layers not counted."""

    kind: str  # model_type
    architecture: str
    layers: int
    hidden: int
    vocab: int
    context: int


def read_model(folder: str) -> ModelFacts:
    """Read `folder`/config.json. Raises ConfigError when it is missing or says too little."""
    path = Path(folder) / "config.json"
    try:
        top = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model: {path}: {error}; set model.path to a checkpoint folder") from None
    if not isinstance(top, dict):
        raise ConfigError(f"cannot read the model: {path} is no JSON object; set model.path to a checkpoint folder")
    text = top.get("text_config")
    fields = {**top, **text} if isinstance(text, dict) else top
    names = top.get("architectures")
    return ModelFacts(
        kind=str(top.get("model_type", "")),
        architecture=str(names[0]) if isinstance(names, list) and names else "",
        layers=_count(fields, "num_hidden_layers", path),
        hidden=_count(fields, "hidden_size", path),
        vocab=_count(fields, "vocab_size", path),
        context=_count(fields, "max_position_embeddings", path),
    )


def eagle3_layers(layers: int) -> tuple[int, int, int]:
    """The EAGLE-3 default, physical: 1, n//2 - 1, n - 4. Raises ConfigError where two of them are one layer."""
    chosen = (1, layers // 2 - 1, layers - 4)
    if not 1 < chosen[1] < chosen[2]:
        raise ConfigError(f"cannot choose layers: {layers} layers are too few for the default; set model.layers")
    return chosen


def _count(fields: dict[str, Any], name: str, path: Path) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"cannot read the model: {path} has no usable {name} ({value!r}); mend it or choose another")
    return value
