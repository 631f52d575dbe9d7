"""etc/hs-extract.toml is the manual of the configuration: it parses, and no setting is missing from it."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hsdaemon import config

EXAMPLE = Path(__file__).parent.parent / "etc" / "hs-extract.toml"
TEXT = EXAMPLE.read_text()


def settings(kind: type[msgspec.Struct], table: str = "") -> Iterator[tuple[str, str]]:
    """Every (table, key) of the tree; lists of tables by their table's name."""
    for field in msgspec.structs.fields(kind):
        inner = config._struct(field.type)
        if inner is None:
            yield table, field.name
        else:
            yield from settings(inner, f"{table}.{field.name}".lstrip("."))


def written() -> set[tuple[str, str]]:
    """The settings in the file: on, or shown in a comment."""
    found, table = set(), ""
    for line in TEXT.splitlines():
        if match := re.fullmatch(r"\[+([a-z_.]+)\]+", line):
            table = match[1]
        elif match := re.match(r"(?:# )?([a-z_]+) = ", line):
            found.add((table, match[1]))
    return found


def test_it_is_the_incidents_machine() -> None:
    parsed = config.parse(TEXT, str(EXAMPLE))
    assert (parsed.engine.tp, parsed.model.layers) == (8, (1, 29, 57))
    assert {(u.pattern, u.how) for u in parsed.evict.units} == {
        ("vllm*.service", "disable"),
        ("sglang*.service", "disable"),
    }


@pytest.mark.parametrize(("table", "key"), list(settings(config.Config)))
def test_every_setting_is_in_it(table: str, key: str) -> None:
    assert (table, key) in written()


def test_it_names_nothing_that_does_not_exist() -> None:
    assert written() == set(settings(config.Config))
