"""The documents say what is there: verbs, files, targets, rooms."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from docs import architecture
from hsdaemon.cli import VERBS, verb_module
from hsdaemon.errors import HsError

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "patches/README.md", *(ROOT / "docs").rglob("*.md")])
MANUAL = ROOT / "docs/hs-extract.8"
named = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def test_the_drawing_is_that_of_the_import_rules() -> None:
    page = architecture.PAGE.read_text()
    assert architecture.diagram() in page
    assert architecture.drawn(page) == page


def test_every_room_is_in_the_drawing() -> None:
    rooms = {p.stem for p in (ROOT / "hsdaemon").iterdir() if not p.name.startswith("_") and p.suffix in ("", ".py")}
    drawn = set(re.findall(r"^\| (\w+) ", architecture.diagram(), re.MULTILINE))
    assert rooms == drawn


@named
def test_every_verb_that_a_page_names_is_one(path: Path) -> None:
    said = set(re.findall(r"(?:`|\n {4}(?:sudo )?)hs-extract ([a-z]+)", path.read_text()))
    assert said <= VERBS.keys()


@named
def test_every_option_that_a_page_names_is_one_of_its_verb(path: Path) -> None:
    for verb, rest in re.findall(r"(?:`|\n {4}(?:sudo )?)hs-extract ([a-z]+)([^`\n#|]*)", path.read_text()):
        parser = argparse.ArgumentParser()
        verb_module(verb).add(parser)
        known = {name for action in parser._actions for name in action.option_strings}
        assert set(re.findall(r"--[a-z][a-z-]*", rest)) <= known, f"{verb}{rest}"
        if verb == "retry":
            assert rest.strip(), "without rows or --all it is a wrong command line"


@named
def test_every_target_that_a_page_names_is_one(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {f"bench-{bench.stem}" for bench in (ROOT / "bench").glob("*.py")}
    assert set(re.findall(r"(?:`|\n {4}(?:sudo )?)make ([a-z-]+)", path.read_text())) <= targets


@named
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_manual_has_every_verb_unit_and_exit_code() -> None:
    text = MANUAL.read_text().replace("\\-", "-")
    verbs = re.findall(r"^\.TP\n\.B ([a-z]+)$", text, re.MULTILINE)
    assert set(verbs) == VERBS.keys()
    assert [unit.name for unit in (ROOT / "systemd").glob("*.service") if unit.name not in text] == []
    codes = {int(code) for code in re.findall(r"^\.TP\n\.B (\d+)", text, re.MULTILINE)}
    assert {kind.exit_code for kind in kinds(HsError)} <= codes


def kinds(kind: type[HsError]) -> set[type[HsError]]:
    return {kind}.union(*map(kinds, kind.__subclasses__()))
