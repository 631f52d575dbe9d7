"""What every file of one output must have in common, and what the model folder says of itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import xxhash

from hsdaemon.config import Config
from hsdaemon.data.rows import RESERVE_TOKENS, Limits
from hsdaemon.errors import ConfigError, StoreError


@dataclasses.dataclass(frozen=True, slots=True)
class RunIdentity:
    """Pinned in the manifest at its creation. release "" = not known yet: pinned when the first worker knows it."""

    dataset: str  # digest of the first rows, in hex
    model: str  # revision
    layers: tuple[int, ...]  # physical, ascending
    norm: str  # "post" | "pre"
    dtype: str  # of the stored states
    format: str
    hidden: int  # columns of one state
    release: str = ""  # of the engine

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def digest(self) -> str:
        """xxh3-128 in hex of model, layers, norm, dtype, format and width: what a file says of its run. The row has
        a digest of its own beside it; the release is known later."""
        return xxhash.xxh3_128_hexdigest(dataclasses.replace(self, dataset="", release="").to_json().encode())


class IdentityMismatch(StoreError):
    """A run that would mix states of two kinds in one output. field: the first that differs."""

    def __init__(self, field: str, pinned: object, offered: object) -> None:
        super().__init__(
            f"cannot go on in this output: {field} is {_show(pinned)} here and {_show(offered)} now; "
            "set it back, or use another output.path"
        )
        self.field, self.pinned, self.offered = field, pinned, offered


def _show(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def identity_from_json(text: str) -> RunIdentity:
    """Raises StoreError when `text` is not an identity."""
    try:
        fields = json.loads(text)
        return RunIdentity(**{**fields, "layers": tuple(fields["layers"])})
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"cannot read the manifest's run identity: {error}; run hs-extract scan") from None


def require_same(pinned: RunIdentity, offered: RunIdentity) -> None:
    """Raises IdentityMismatch naming the first field that differs; an unknown release differs from none."""
    for field in dataclasses.fields(RunIdentity):
        here, now = getattr(pinned, field.name), getattr(offered, field.name)
        if here != now and not (field.name == "release" and "" in (here, now)):
            raise IdentityMismatch(field.name, here, now)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the model folder's config.json says, its text_config included. context: tokens."""

    layers: int
    hidden: int
    vocab: int
    context: int
    kind: str  # model_type
    revision: str  # digest of config.json and of the weight files' names and sizes


def read_model(path: Path) -> ModelFacts:
    """Raises ConfigError when there is no usable config.json."""
    file = path / "config.json"
    try:
        raw = file.read_bytes()
        fields: Any = json.loads(raw)
        text = fields.get("text_config") or fields
        return ModelFacts(
            layers=_positive(text, "num_hidden_layers"),
            hidden=_positive(text, "hidden_size"),
            vocab=_positive(text, "vocab_size"),
            context=_positive(text, "max_position_embeddings"),
            kind=str(fields.get("model_type", "")),
            revision=_revision(path, raw),
        )
    except OSError as error:
        raise ConfigError(f"cannot read the model: {file}: {error.strerror}; set model.path") from None
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read the model: {file}: {error}; set model.path") from None


def _positive(fields: Any, key: str) -> int:
    value = fields.get(key)
    if type(value) is not int or value <= 0:
        raise ValueError(f"{key} is {value!r}, not a whole number above 0")
    return value


def _revision(path: Path, config: bytes) -> str:
    hasher = xxhash.xxh3_128(config)
    for file in sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".pt")):
        hasher.update(f"{file.name}:{file.stat().st_size};".encode())
    return hasher.hexdigest()


def physical_layers(config: Config, facts: ModelFacts) -> tuple[int, ...]:
    """The three aux layers. Raises ConfigError for layers that the model does not have."""
    n = facts.layers
    layers = config.model.layers or (1, n // 2 - 1, n - 4)
    if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= n:
        raise ConfigError(
            f"cannot use model.layers = {list(layers)}: the model has {n} layers; write three of them, ascending"
        )
    return layers


def context_tokens(config: Config, facts: ModelFacts) -> int:
    return config.model.context_tokens or facts.context


def row_limits(config: Config, facts: ModelFacts) -> Limits:
    """What a row of the data set may hold with this model."""
    return Limits(facts.vocab, context_tokens(config, facts) - RESERVE_TOKENS)


def run_identity(config: Config, facts: ModelFacts, dataset: str, release: str = "") -> RunIdentity:
    """The identity that this config asks for. dataset: ingest.anchor of the data set."""
    return RunIdentity(
        dataset=dataset,
        model=config.model.revision or facts.revision,
        layers=physical_layers(config, facts),
        norm=config.model.norm,
        dtype=config.output.dtype,
        format=config.output.format,
        hidden=facts.hidden,
        release=release,
    )
