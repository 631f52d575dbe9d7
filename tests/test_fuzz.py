"""Hostile input gives typed errors, and touches nothing outside: the short form of `make fuzz`."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = 60
SLOW = {"manifest": 12, "dump": 25}  # a start, three publications


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Thousands of warnings would hide what failed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.mark.parametrize("name", sorted(fuzz.TARGETS))
def test_a_broken_file_gives_a_typed_error_and_touches_nothing_outside(name: str, tmp_path: Path) -> None:
    seeds = fuzz.TARGETS[name].seeds()

    @settings(
        max_examples=SLOW.get(name, EXAMPLES),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(seeds), fuzz.edits)
    def run(seed: bytes, damage: list[fuzz.Edit]) -> None:
        fuzz.attempt(name, fuzz.broken(seed, damage), tmp_path / "fuzz")

    run()


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="no atheris here")
def test_files_bred_by_coverage_give_typed_errors(tmp_path: Path) -> None:
    bench = Path(__file__).parents[1] / "bench/guided.py"
    words = [sys.executable, str(bench), "--seconds", "4", "--targets", "stored files", "dump"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" faults=0")
