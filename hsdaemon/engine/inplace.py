"""Whether the capture will be loaded by the engine that is about to start: looked at before any weight is read."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from hsdaemon.engine import patch
from hsdaemon.engine.releases import Way
from hsdaemon.errors import EngineError

GROUP, NAME, VALUE = "sglang.srt.plugins", "hsdaemon", "hsdaemon.capture:register"


def check(way: Way, mend: bool = False) -> None:
    """Raises EngineError when the engine would run without the capture. mend: put the source patch back first, where
    a reinstall or an upgrade took it away."""
    if way == "plugin":
        _plugin()
    else:
        _patch(mend)


def _plugin() -> None:
    found = [point.value for point in importlib.metadata.entry_points(group=GROUP) if point.name == NAME]
    if VALUE not in found:
        raise EngineError(
            f"cannot start the engine: its Python environment has no entry point {NAME} = {VALUE} in {GROUP}, so it "
            'would capture nothing; pip install hsdaemon there, or set engine.capture = "patch"'
        )
    if importlib.util.find_spec("torch") is None:
        raise EngineError("cannot start the engine: no torch in its Python environment; install one")


def _patch(mend: bool) -> None:
    tree = patch.find()
    seen = patch.apply(tree) if mend else patch.status(tree)
    if not seen.ready:
        raise EngineError(
            f"cannot start the engine: the capture's lines are not in {tree.folder} ({seen.state.value}), so it would "
            "capture nothing; hs-extract patch apply"
        )
