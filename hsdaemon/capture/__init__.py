"""Runs inside the engine process. Imports wire alone of ours; inert without our environment.

Two ways in, one set of hooks: `register` is called by SGLang's plugin loader, `from_patch` by the source patch. The
configuration names the one that may arm, so that both can be there.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from hsdaemon.wire import CAPTURE_ENV

SCHEDULER = "sglang.srt.managers.scheduler"  # loaded in processes that may hold a rank, and in no other child


def register() -> None:
    """Entry point of SGLang's plugin loader. Does nothing in the launcher and in children without a rank."""
    if multiprocessing.parent_process() is not None and SCHEDULER in sys.modules:
        _arm("plugin")


def from_patch() -> None:
    """Entry point of the source patch, called in each scheduler process before the model is loaded."""
    _arm("patch")


def _arm(way: str) -> None:
    text = os.environ.get(CAPTURE_ENV)
    if text:
        from hsdaemon.capture import hooks

        hooks.install(text, way)
