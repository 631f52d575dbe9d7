"""Fixtures that more than one file of tests uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import engines
import fake_nvml
import pytest
import structlog
from sdbox import Box

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers: one has all real engines, which share a server; boxes stay with their file."""
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.xdist_group("engine"))
        elif item.get_closest_marker("root"):
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """A verb called in this process binds the log to a stream that is closed by the next test."""
    yield
    structlog.reset_defaults()


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


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tiny checkpoints: engines.tiny(tiny_models, "llama") makes one."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def kimi(tiny_models: Path) -> str:
    """A tiny Kimi-K2.5, float32, 8 layers, hidden 128, 512 tokens in its vocabulary."""
    return engines.tiny(tiny_models, "kimi_k25")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory, kimi: str) -> Iterator[engines.Engine]:
    """A real SGLang that serves `kimi` in chunks of 64 tokens with the capture in it, shared by the whole session."""
    folder, spool = tmp_path_factory.mktemp("engine"), tmp_path_factory.mktemp("spool")
    config = engines.write_config(folder, kimi, port=engines.free_port(), spool=spool, chunk_tokens=64)
    with engines.running(config, spool) as running:
        yield running
