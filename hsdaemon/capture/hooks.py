"""The two hooks, set once per process: after the model is loaded, and before the logits processor runs."""

from __future__ import annotations

import functools
import logging
from typing import Any

from hsdaemon import wire
from hsdaemon.capture import compat
from hsdaemon.capture.rank import Rank

log = logging.getLogger("hsdaemon.capture")

MARK = "_hsdaemon_capture"  # on the class that is hooked: whoever comes second finds it


def install(text: str, way: str) -> None:
    """Set the hooks if `text`, the configuration, names this way. Never raises: the engine goes on without us, and
    the missing or broken attest file says so."""
    rank: Rank | None = None
    try:
        config = wire.capture_config(text)
        if config.way != way or hasattr(compat.model_runner(), MARK):
            return
        rank = Rank(config, compat.release())
        _hook_logits(rank)
        _hook_load(rank)  # last: without it nothing arms
        setattr(compat.model_runner(), MARK, rank)
    except Exception as error:  # an exception here would kill the engine
        log.exception("capture: cannot set the hooks")
        if rank:
            rank.attestor.failed(f"cannot set the hooks: {type(error).__name__}: {error}")


def _hook_load(rank: Rank) -> None:
    runner = compat.model_runner()
    load = runner.load_model

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        if not getattr(self, "is_draft_worker", False):
            try:
                rank.arm(self)
            except Exception as error:  # an exception here would kill the engine
                log.exception("capture: cannot arm")
                rank.attestor.failed(f"cannot arm: {type(error).__name__}: {error}")
        return result

    runner.load_model = load_model


def _hook_logits(rank: Rank) -> None:
    processor = compat.logits_processor()
    forward = processor.forward
    read = compat.reader(forward)

    @functools.wraps(forward)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            rank.forward(read((self, *args), kwargs))
        except Exception as error:  # noqa: BLE001  # an exception here would kill the engine
            rank.attestor.failed(f"{type(error).__name__}: {error}")
        return forward(self, *args, **kwargs)

    processor.forward = hooked
