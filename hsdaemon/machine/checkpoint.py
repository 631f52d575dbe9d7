"""The model's folder: what its config.json says, without loading a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash
from msgspec import Struct

from hsdaemon.errors import ConfigError
from hsdaemon.wire import parse_json

# The longest prompt that an engine accepts is its context less this, in every release that we know.
RESERVE_TOKENS = 7
WEIGHTS = (".safetensors", ".bin", ".pt")


class ModelFacts(Struct, frozen=True):
    """Sizes of the text model. `context`: longest position; `layers`: decoder layers, MTP layers not counted;
    `revision`: digest of config.json and of the weight files' names and sizes."""

    kind: str  # model_type
    architecture: str
    layers: int
    hidden: int
    vocab: int
    context: int
    revision: str


def read_model(folder: str) -> ModelFacts:
    """Read `folder`/config.json. Raises ConfigError when it is missing or says too little."""
    path = Path(folder) / "config.json"
    try:
        raw = path.read_bytes()
        top = parse_json(raw)
        revision = _revision(path.parent, raw)
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
        revision=revision,
    )


def physical_layers(chosen: tuple[int, ...], facts: ModelFacts) -> tuple[int, ...]:
    """The aux layers of a run: the chosen ones, or the default. Raises ConfigError for what cannot be captured."""
    layers = chosen or eagle3_layers(facts.layers)
    if list(layers) != sorted(set(layers)) or layers[0] < 0:
        raise ConfigError(f"cannot use model.layers = {list(layers)}: write three different layers, ascending")
    if layers[-1] > facts.layers - 2:
        raise ConfigError(
            f"cannot use model.layers: layer {layers[-1]} of {facts.layers} has no later layer to be read at; "
            f"write {facts.layers - 2} or less (the last layer's output is the final state, stored anyway)"
        )
    return layers


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


def _revision(folder: Path, config: bytes) -> str:
    hasher = xxhash.xxh3_128(config)
    for file in sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS):
        hasher.update(f"{file.name}:{file.stat().st_size};".encode())
    return hasher.hexdigest()
