"""Which release of SGLang needs what, as data: each row names the releases it holds for and why it is there."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from hsdaemon.config import Config, Problem
from hsdaemon.errors import EngineError
from hsdaemon.machine.checkpoint import RESERVE_TOKENS

Way = Literal["plugin", "patch"]


class Row(Struct, frozen=True):
    """One fact: holds for 0.5.<first> to 0.5.<last>, both included, in the named situation."""

    first: int
    last: int
    value: str
    why: str
    when: Literal["always", "ranks share a sum"] = "always"


FIRST, LAST = 5, 23

WAYS = (
    Row(5, 10, "patch", "no plugin group yet: the source patch is the only way in"),
    Row(11, 23, "plugin", "the group sglang.srt.plugins is loaded in every process of the engine"),
)

FLAGS = (
    Row(5, 23, "--disable-radix-cache", "cached rows are not computed, so they reach no hook"),
    Row(5, 23, "--disable-cuda-graph", "no decode step is wanted; saves its capture time and memory"),
    Row(10, 13, "--disable-piecewise-cuda-graph", "on by default; a replayed prefill runs no Python in the layers"),
    Row(14, 23, "--disable-prefill-cuda-graph", "a replayed prefill runs no Python and has no request ids"),
    Row(5, 23, "--skip-tokenizer-init", "prompts are token ids; also keeps image warm-ups away"),
    Row(
        10,
        13,
        "--enforce-disable-flashinfer-allreduce-fusion",
        "fused all-reduce leaves partial sums between layers in forwards of up to 2048 tokens",
        "ranks share a sum",
    ),
)

REFUSED = (
    Row(
        5,
        9,
        "partial sums",
        "all-reduce fusion switches itself on at TP > 1 and this release has no flag to switch it off: short prompts "
        "would hold one rank's part of the sum",
        "ranks share a sum",
    ),
)

LAYERS = (
    Row(5, 10, "set_eagle3_layers_to_capture", "physical ids: this setter adds 1 to whatever it is given"),
    Row(11, 23, "set_dflash_layers_to_capture", "physical ids in every model"),
)

RIDS = (
    Row(5, 9, "absent", "ForwardBatch has no request ids: the patch carries them"),
    Row(10, 23, "ForwardBatch.rids", "request ids of the rows of a forward"),
)

INFO_PATHS = (
    Row(5, 5, "/get_server_info", "the only spelling"),
    Row(6, 23, "/server_info", "version and resolved arguments"),
)


class Release(Struct, frozen=True):
    """What one release is and needs. `ways`: ways of capture, the preferred one first."""

    version: str
    ways: tuple[Way, ...]
    flags: tuple[Row, ...]
    refused: tuple[Row, ...]
    layer_setter: str
    rids: str
    info_path: str
    health_path: str = "/health"
    generate_path: str = "/generate"
    abort_path: str = "/abort_request"
    min_new_tokens: int = 0  # 0: prefill only, nothing is sampled
    reserve_tokens: int = RESERVE_TOKENS


_VERSION = re.compile(r"0\.5\.(\d{1,2})(?:\.post\d+)?", re.ASCII)


def _at(rows: tuple[Row, ...], n: int) -> tuple[Row, ...]:
    return tuple(row for row in rows if row.first <= n <= row.last)


def release(version: str) -> Release:
    """Give what is known of `version`. Raises EngineError for a release that the table does not hold."""
    match = _VERSION.fullmatch(version)
    n = int(match[1]) if match else -1
    if not FIRST <= n <= LAST:
        raise EngineError(
            f"cannot use SGLang {version}: this release was never looked at and its capture points may differ; "
            f"install one of 0.5.{FIRST} to 0.5.{LAST}"
        )
    (first,) = _at(WAYS, n)
    ways: tuple[Way, ...] = ("plugin", "patch") if first.value == "plugin" else ("patch",)
    return Release(
        version=version,
        ways=ways,
        flags=_at(FLAGS, n),
        refused=_at(REFUSED, n),
        layer_setter=_at(LAYERS, n)[0].value,
        rids=_at(RIDS, n)[0].value,
        info_path=_at(INFO_PATHS, n)[0].value,
    )


def known() -> tuple[str, ...]:
    """Every release of the table, oldest first."""
    return tuple(f"0.5.{n}" for n in range(FIRST, LAST + 1))


def installed() -> str:
    """The version of SGLang in this environment, without importing it. Raises EngineError when there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise EngineError("cannot start the engine: no SGLang in this Python environment; install one") from None


def ranks_share_a_sum(config: Config) -> bool:
    """Whether an all-reduce between ranks of a GPU can be fused into the next layer."""
    engine = config.engine
    return engine.device == "cuda" and engine.tp // engine.dp_attention > 1


def applies(row: Row, config: Config) -> bool:
    """Whether `row` holds in the situation that `config` describes."""
    return row.when == "always" or ranks_share_a_sum(config)


def way_of(config: Config, known: Release) -> Way:
    """The way of capture: the configured one, or the release's preferred one."""
    wanted = config.engine.capture
    return known.ways[0] if wanted == "auto" else wanted


def problems(config: Config, known: Release) -> Iterator[Problem]:
    """Everything in `config` that this release cannot do."""
    engine = config.engine
    for row in known.refused:
        if applies(row, config):
            yield Problem(
                "engine.tp", engine.tp, f"SGLang {known.version}: {row.why}", "use 0.5.10 or later, or tp = 1"
            )
    if engine.capture != "auto" and engine.capture not in known.ways:
        cause = f"SGLang {known.version} loads no plugins"
        yield Problem("engine.capture", engine.capture, cause, 'write "auto" or "patch"')
    if 0 < engine.chunk_tokens < engine.dp_attention:
        cause = f"{engine.dp_attention} attention groups share it"
        yield Problem("engine.chunk_tokens", engine.chunk_tokens, cause, "write 0 or a larger one")
    if engine.device == "cpu" and known.version not in CPU_RELEASES:
        cause = f"the CPU stand-ins know {', '.join(CPU_RELEASES)} only, not {known.version}"
        yield Problem("engine.device", engine.device, cause, "install one of those, or use a GPU")


CPU_RELEASES = tuple(f"0.5.{n}" for n in range(5, LAST + 1))


def check(config: Config, known: Release, name: str) -> None:
    """Raises EngineError with one line per problem. name: the configuration file, for messages."""
    found = [problem.line(name) for problem in problems(config, known)]
    if found:
        raise EngineError("\n".join(found))
