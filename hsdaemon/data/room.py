"""How many bytes the work still needs, and whether they are there: said before anything runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from hsdaemon.config import Config
from hsdaemon.data.formats import file_bound, get_format
from hsdaemon.data.volume import MIB
from hsdaemon.machine.checkpoint import ModelFacts, physical_layers
from hsdaemon.wire import Layout


def layout(config: Config, facts: ModelFacts, tokens: int) -> Layout:
    """Of a sample's dump and file."""
    interleaved = get_format(config.output.format).interleaved
    return Layout(
        tokens, facts.hidden, len(physical_layers(config.model.layers, facts)), config.output.dtype, interleaved
    )


def stored_bytes(config: Config, facts: ModelFacts, rows: int, tokens: int) -> int:
    """Upper bound of the files of `rows` samples with `tokens` in all, names not counted."""
    fmt = get_format(config.output.format)
    one = file_bound(fmt, layout(config, facts, 1))
    per_token = file_bound(fmt, layout(config, facts, 2)) - one
    return rows * (one - per_token) + tokens * per_token


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """needed, free: bytes; reserve: bytes that stay free whatever happens."""

    needed: int
    free: int
    reserve: int

    @property
    def short(self) -> int:
        """Bytes that are missing; 0 = it fits."""
        return max(0, self.needed + self.reserve - self.free)


def room(config: Config, facts: ModelFacts, rows: int, tokens: int, free: int) -> Room:
    return Room(stored_bytes(config, facts, rows, tokens), free, config.output.reserve_mib * MIB)


def largest_in_spool(config: Config, facts: ModelFacts) -> int:
    """Tokens of the longest sample whose dump fits the whole spool as it is configured."""
    return most_tokens(functools.partial(layout, config, facts), config.spool.budget_mib * MIB)


def most_tokens(layout: Callable[[int], Layout], size: int) -> int:
    """Tokens of the longest sample whose dump takes at most `size` bytes. layout(tokens): of a dump."""
    low, high = 0, 1 + size // 8
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layout(middle).total <= size else (low, middle - 1)
    return low
