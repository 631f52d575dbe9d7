"""File systems of their own, for tests that fill, unmount or break one. Root only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")


def run(*words: str | Path) -> str:
    return subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True, timeout=60).stdout


@contextlib.contextmanager
def loop(folder: Path, mib: int, *options: str) -> Iterator[Path]:
    """An ext4 of `mib` MiB mounted at `folder`/mnt; it is unmounted at the end, whatever is there then."""
    need_root()
    image, at = folder / "disk.img", folder / "mnt"
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(mib << 20)
        run("mkfs.ext4", "-q", "-m0", image)
    at.mkdir(exist_ok=True)
    mount(image, at, *options)
    try:
        yield at
    finally:
        while at.is_mount():
            run("umount", "-l", at)


def mount(image: Path, at: Path, *options: str) -> None:
    run("mount", "-o", ",".join(["loop", *options]), image, at)


def fill(folder: Path) -> Path:
    """Take the last block."""
    path = folder / "fill"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return path


@contextlib.contextmanager
def tmpfs(folder: Path, mib: int) -> Iterator[Path]:
    """A tmpfs of `mib` MiB, mounted on `folder`."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(words, check=False).returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
