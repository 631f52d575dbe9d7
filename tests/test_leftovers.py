"""What killed engines leave behind goes by proof of death; what anybody uses stays."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsdaemon.engine import leftovers

OLD = 1_000_000_000


def dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def segment(shm: Path, name: str, mtime: float = OLD) -> Path:
    path = shm / name
    path.write_bytes(b"x" * 4096)
    os.utime(path, (mtime, mtime))
    return path


def test_sp_08_only_segments_of_dead_owners_go(shm: Path) -> None:
    dead = dead_pid()
    gone = [segment(shm, f"sgl_shm_mm_{dead}_{i}") for i in range(200)]
    kept = [
        segment(shm, f"sgl_shm_mm_{os.getpid()}_0"),
        segment(shm, "nccl-abc"),
        segment(shm, f"sgl_shm_{dead}"),
        segment(shm, "hs-extract"),
    ]
    found = leftovers.find([], shm)
    assert found == sorted(map(str, gone))
    assert leftovers.sweep([*found, *map(str, kept)], [], shm) == []
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)


def test_sp_08_a_segment_without_a_number_goes_when_nobody_has_it_mapped(shm: Path) -> None:
    name = "sglang_loads_061061898f8e_{}.shm"
    gone = segment(shm, name.format("8d2ea508"))
    young = shm / name.format("00000001")
    young.write_bytes(b"x" * 4096)
    used = segment(shm, name.format("00000002"))
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        file.close()
        assert leftovers.find([], shm) == [str(gone)]


def test_en_08_a_build_lock_goes_unless_its_builder_has_it_open(tmp_path: Path) -> None:
    caches = leftovers.caches({"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"), "HOME": str(tmp_path)})
    stale, held = tmp_path / "ext/py311/a/lock", tmp_path / "ext/py311/b/lock"
    for path in (stale, held):
        path.parent.mkdir(parents=True)
        path.touch()
    with held.open():
        assert leftovers.find(caches, tmp_path / "none") == [str(stale)]
        assert leftovers.sweep([str(stale), str(held)], caches, tmp_path / "none") == []
    assert not stale.exists()
    assert held.exists()


def test_sp_08_a_number_of_another_namespace_is_no_proof_of_death(shm: Path) -> None:
    """A container that shares the folder numbers its processes by itself."""
    used = segment(shm, f"sgl_shm_mm_{dead_pid()}_0")
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        file.close()
        assert leftovers.find([], shm) == []
    assert leftovers.find([], shm) == [str(used)]
