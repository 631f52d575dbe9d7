"""SGLang's argument line, from the configuration and the release. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hsdaemon.config import Config
from hsdaemon.engine.releases import Release, applies
from hsdaemon.errors import ConfigError

# Options that would change what is captured or who may ask, each with the reason that the refusal gives.
FORBIDDEN = {
    "--allow-auto-truncate": "a truncated prompt would be stored as if it were whole",
    "--enable-mixed-chunk": "decode rows would ride in prefill batches",
    "--enable-two-batch-overlap": "the capture would see part of the rows",
    "--enable-single-batch-overlap": "the capture would see part of the rows",
    "--enable-piecewise-cuda-graph": "a replayed prefill runs no Python in the layers",
    "--enforce-piecewise-cuda-graph": "a replayed prefill runs no Python in the layers",
    "--cuda-graph-backend-prefill": "a replayed prefill runs no Python in the layers",
    "--cuda-graph-config": "a replayed prefill runs no Python in the layers",
    "--enable-flashinfer-allreduce-fusion": "it leaves partial sums between the layers",
    "--enable-return-hidden-states": "states travel as files, never as numbers in the reply",
    "--enable-return-aux-hidden-states": "the capture sets the layers itself",
    "--return-aux-hidden-state-layer-ids": "the capture sets the layers itself",
    "--speculative-algorithm": "no draft model may run beside the capture",
    "--speculative-draft-model-path": "no draft model may run beside the capture",
    "--enable-hierarchical-cache": "cached rows are not computed, so not captured",
    "--enable-dp-attention": "engine.dp_attention sets it",
    "--attn-dp-size": "engine.dp_attention sets it",
    "--dp-size": "engine.dp_attention sets it",
    "--data-parallel-size": "engine.dp_attention sets it",
    "--tensor-parallel-size": "engine.tp sets it",
    "--pp-size": "the capture would see part of the rows",
    "--pipeline-parallel-size": "the capture would see part of the rows",
    "--disaggregation-mode": "the capture would see part of the rows",
    "--nnodes": "the spool is of one host",
    "--model": "model.path sets it",
    "--api-key": "the worker sends none; the server listens on loopback only",
    "--ssl-keyfile": "the worker speaks plain HTTP over loopback",
    "--ssl-certfile": "the worker speaks plain HTTP over loopback",
    "--config": "a second file could undo this argument line",
    "--enable-prefill-cuda-graph": "a replayed prefill runs no Python in the layers",
    "--context-length": "model.context_tokens sets it",
    "--revision": "model.path names a folder",
}

CPU_FLAGS = ("--attention-backend", "torch_native", "--disable-overlap-schedule")


def options(config: Config, known: Release) -> tuple[str, ...]:
    """Every option that does not change from start to start, extra_args last. Raises ConfigError on a collision."""
    ours = tuple(_ours(config, known))
    _refuse_collisions(config.engine.extra_args, ours)
    return (*ours, *config.engine.extra_args)


def command(config: Config, known: Release, launch: str, port: int) -> tuple[str, ...]:
    """The whole line. launch: id of this start, which is also the served model name; port: where it listens."""
    identity = ("--host", config.engine.host, "--port", str(port), "--served-model-name", launch)
    return (sys.executable, "-m", "sglang.launch_server", *identity, *options(config, known))


def _ours(config: Config, known: Release) -> Iterator[str]:
    engine, model = config.engine, config.model
    yield from ("--model-path", model.path, "--device", engine.device, "--dtype", engine.dtype)
    yield from ("--tp-size", str(engine.tp))
    if engine.dp_attention > 1:
        yield from ("--dp-size", str(engine.dp_attention), "--enable-dp-attention")
    yield from (row.value for row in known.flags if applies(row, config))
    yield from ("--chunked-prefill-size", str(engine.chunk_tokens or -1))
    if engine.chunk_tokens:
        yield from ("--max-prefill-tokens", str(engine.chunk_tokens))
    yield from ("--max-running-requests", str(engine.max_running))
    if engine.max_total_tokens:
        yield from ("--max-total-tokens", str(engine.max_total_tokens))
    if model.context_tokens:
        yield from ("--context-length", str(model.context_tokens))
    yield from ("--mem-fraction-static", f"{engine.mem_fraction:g}", "--watchdog-timeout", f"{engine.watchdog_s:g}")
    if engine.trust_remote_code:
        yield "--trust-remote-code"
    if engine.device == "cpu":
        yield from CPU_FLAGS


def _refuse_collisions(extra: tuple[str, ...], ours: tuple[str, ...]) -> None:
    """Abbreviations count: the engine's parser accepts any unambiguous beginning of an option."""
    taken = dict.fromkeys((w for w in ours if w.startswith("--")), "the configuration sets it")
    taken |= dict.fromkeys(("--host", "--port", "--served-model-name"), "every start sets it")
    taken |= FORBIDDEN
    for word in extra:
        flag = word.partition("=")[0]
        hits = [name for name in taken if flag.startswith("--") and len(flag) > 2 and name.startswith(flag)]
        if hits:
            shown = f"{flag} ({hits[0]})" if flag != hits[0] else flag
            raise ConfigError(f"cannot use engine.extra_args: {shown}: {taken[hits[0]]}; remove it")
