"""The engine's environment, the capture's configuration in it, and the fingerprint of both. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

import hsdaemon
from hsdaemon import wire
from hsdaemon.config import Config
from hsdaemon.engine import argline
from hsdaemon.engine.releases import Release, way_of
from hsdaemon.errors import ConfigError

HERE = Path(__file__).resolve().parent
PACKAGE = Path(hsdaemon.__file__).resolve().parent.parent

# Never handed on: a child that speaks for the service, or a switch that would turn the capture off.
SCRUBBED = (
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_FDS",
    "LISTEN_PID",
    "SGLANG_PLUGINS",
    "SGLANG_PLATFORM",
    "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION",
    wire.CAPTURE_ENV,
)

FIXED = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # a health probe must not queue behind a long prefill
    "PYTHONUNBUFFERED": "1",  # the last lines before a kill are the ones that matter
    "HF_HUB_OFFLINE": "1",  # the model is a folder; an unattended start may not wait for a network
    "TRANSFORMERS_OFFLINE": "1",
}

CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the triton stand-in compiles nothing
    "OMP_NUM_THREADS": "1",
}

MULTIMODAL = ("kimi_k25",)  # an image processor would be loaded, and a tiny checkpoint has no files for one


def capture_config(config: Config, known: Release, launch: str) -> wire.CaptureConfig:
    """What the capture is told."""
    return wire.CaptureConfig(
        spool=config.spool.path,
        attest=str(Path(config.paths.run) / "attest"),
        launch=launch,
        way=way_of(config, known),
        layers=config.model.layers,
        norm=config.model.norm,
        dtype=config.output.dtype,
        interleaved=config.output.format == "speculators",
        budget=config.spool.budget_mib << 20,
        wait_s=config.spool.wait_s,
        buffers=config.engine.buffers,
    )


def environment(
    config: Config, known: Release, launch: str, base: Mapping[str, str], cores: Sequence[int], kind: str
) -> dict[str, str]:
    """The whole environment. base: ours; cores: those this process may use; kind: model_type of the model.

    Raises ConfigError where engine.environment names what we set or scrub ourselves.
    """
    ours = _ours(config, cores, kind)
    taken = {*ours, *SCRUBBED, "PYTHONPATH"}
    clash = sorted(taken & config.engine.environment.keys())
    if clash:
        raise ConfigError(f"cannot use engine.environment: {clash[0]}: hs-extract sets or removes it; remove it")
    kept = {name: value for name, value in base.items() if name not in SCRUBBED}
    path = dict.fromkeys([*_folders(config, known), *filter(None, base.get("PYTHONPATH", "").split(":"))])
    told = {wire.CAPTURE_ENV: wire.to_json(capture_config(config, known, launch)), "PYTHONPATH": ":".join(path)}
    return kept | config.engine.environment | ours | told


def fingerprint(config: Config, known: Release, cores: Sequence[int], kind: str) -> str:
    """16 hex digits of all that shapes an engine, whatever its launch id and port: another one wants another engine."""
    parts = {
        "release": known.version,
        "capture": wire.CAPTURE_VERSION,
        "options": argline.options(config, known),
        "environment": config.engine.environment | _ours(config, cores, kind),
        "told": wire.to_json(capture_config(config, known, "")),
    }
    return xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())


def _ours(config: Config, cores: Sequence[int], kind: str) -> dict[str, str]:
    if config.engine.device != "cpu":
        return dict(FIXED)
    tp = config.engine.tp
    ours = FIXED | CPU
    if kind in MULTIMODAL:
        ours["HS_CPU_NO_MM"] = "1"
    if tp > 1:  # one core list a rank, else the engine wants a NUMA node for each
        ours["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
    return ours


def _folders(config: Config, known: Release) -> list[str]:
    """Folders that go on PYTHONPATH: our package, so that the engine loads this capture and no other."""
    fixes = "plugin" if "plugin" in known.ways else "noplugins"
    cpu = [str(HERE / "cpu" / name) for name in ("standins", fixes)] if config.engine.device == "cpu" else []
    return [*cpu, str(PACKAGE)]
