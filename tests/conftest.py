"""Fixtures that more than one file of tests uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fake_nvml
import pytest
from sdbox import Box

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fake libnvidia-ml.so.1, shown in every box; a test writes the state file "state" there."""
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def box(nvml: Path) -> Iterator[Box]:
    """A booted box with the repository and the interpreter visible; its journal is printed when the test fails."""
    if os.geteuid() != 0:
        pytest.skip("boxes need root")
    with Box(disk=128, raw=["/var/lib/hs"], bind=[nvml]) as box:
        yield box
        print(box.journal("-n", "100") if box.pid1 else box.console())
