"""Draws the diagram of docs/architecture.md from the import rules in pyproject.toml: python -m docs.architecture

The captions are those of the map in hsdaemon/__init__.py.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawn by docs/architecture.py from pyproject.toml -->\n", "<!-- end of the drawing -->\n"
WIDTH = 100


def layers() -> list[list[str]]:
    """Rooms by layer, the one that may import all others first."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [rule["layers"] for rule in rules if rule["type"] == "layers"]
    return [re.findall(r"hsdaemon\.(\w+)", layer) for layer in found]


def captions() -> dict[str, str]:
    """Room and what it is for."""
    text = (ROOT / "hsdaemon" / "__init__.py").read_text()
    return dict(re.findall(r"^(\w+) {2,}(.+)$", text.partition("room  ")[2], re.MULTILINE))


def diagram() -> str:
    """A box a layer, imports pointing down; beside them what runs inside the engine."""
    known = captions()
    lines = []
    for rooms in layers():
        lines += [f"| {room:<10} {known[room]}" for room in rooms]
        lines += ["+" + "-" * (WIDTH - 1)]
    lines += ["", f"| {'capture':<10} {known['capture']}", f"| {'wire':<10} {known['wire']} (every room may import it)"]
    return BEGIN + "```text\n+" + "-" * (WIDTH - 1) + "\n" + "\n".join(lines) + "\n```\n" + END


def drawn(page: str) -> str:
    """The page with the diagram as it is today."""
    before, _, rest = page.partition(BEGIN)
    return before + diagram() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
