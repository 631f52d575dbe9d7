"""The catalogue of reasons."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hsdaemon.core import reasons

CORE = Path(reasons.__file__).parent


def test_every_reason_says_what_to_do() -> None:
    for reason in reasons.CATALOGUE.values():
        assert reason.help.endswith("."), reason.code
        assert len(reason.help) > 6, reason.code
        assert reason.template, reason.code
        assert not reason.template.endswith("."), reason.code
        if reason.severity == "hold":
            assert reason.help != "Nothing.", f"{reason.code}: a hold needs somebody to do something"


def test_codes_and_message_ids_are_unique_and_stable() -> None:
    ids = [r.message_id for r in reasons.CATALOGUE.values()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", i) for i in ids)
    assert reasons.CATALOGUE["extracting"].message_id == "19fb14e9f72d5f59b5a7f9bfe9c7feb0"
    assert reasons.CATALOGUE["engine-start"].message_id == "1f46c1ed5e4f5052997b2e456e6348ee"


def strings(path: Path) -> set[str]:
    return {
        n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant) and type(n.value) is str
    }


def test_every_reason_is_used() -> None:
    rooms = [p for p in CORE.glob("*.py") if p.name != "reasons.py"] + [
        CORE.parent / "loop.py",
        CORE.parent / "host" / "board.py",
    ]
    used = set().union(*(strings(p) for p in rooms))
    assert set(reasons.CATALOGUE) - used == set()


def test_the_manual_carries_the_catalogue() -> None:
    """The table is made by `reasons.page()`."""
    page = (CORE.parents[1] / "docs" / "operations.md").read_text()
    assert reasons.page() in page
