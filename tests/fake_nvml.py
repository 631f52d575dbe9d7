"""Build the fake libnvidia-ml.so.1 and drive its state file (format: head of nvml/fake_nvml.c)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def build(folder: str | Path) -> Path:
    """Compile libnvidia-ml.so.1 into `folder` (0.4 s) and return the folder, for LD_LIBRARY_PATH.

    Raises subprocess.CalledProcessError when gcc fails."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = "libnvidia-ml.so.1"
    source = Path(__file__).parent / "nvml" / "fake_nvml.c"
    flags = f"-shared -fPIC -O1 -Wall -Wextra -Werror -Wl,-soname,{name}".split()
    subprocess.run(["gcc", *flags, "-o", folder / name, source, "-lpthread"], check=True)
    return folder


def write_state(path: str | Path, *lines: str) -> None:
    """Replace the state file atomically, so that a running program never reads half of it."""
    new = Path(f"{path}.new")
    new.write_text("\n".join(lines) + "\n")
    os.replace(new, path)
