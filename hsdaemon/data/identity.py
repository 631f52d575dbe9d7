"""What every file of one output must have in common, and what the model folder says of itself."""

from __future__ import annotations

import dataclasses
import json

import xxhash

from hsdaemon.config import Config
from hsdaemon.data.rows import Limits
from hsdaemon.errors import StoreError
from hsdaemon.machine.checkpoint import RESERVE_TOKENS, ModelFacts, physical_layers
from hsdaemon.wire import parse_json


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
    """Raises ValueError when `text` is not an identity."""
    try:
        fields = parse_json(text)
        return RunIdentity(**{**fields, "layers": tuple(fields["layers"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"its run identity is none: {error}") from None


def require_same(pinned: RunIdentity, offered: RunIdentity) -> None:
    """Raises IdentityMismatch naming the first field that differs; an unknown release differs from none."""
    for field in dataclasses.fields(RunIdentity):
        here, now = getattr(pinned, field.name), getattr(offered, field.name)
        if here != now and not (field.name == "release" and "" in (here, now)):
            raise IdentityMismatch(field.name, here, now)


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
        layers=physical_layers(config.model.layers, facts),
        norm=config.model.norm,
        dtype=config.output.dtype,
        format=config.output.format,
        hidden=facts.hidden,
        release=release,
    )
