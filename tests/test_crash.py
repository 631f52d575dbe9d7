"""Power cuts at every point of publication and commit: the short form of `make crash`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import crash
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.root
@pytest.mark.parametrize("kind", crash.SYSTEMS)
def test_st_07_no_power_cut_takes_a_done_row_and_without_the_folders_fsync_some_do(kind: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    if shutil.which("qemu-storage-daemon") is None or shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"no qemu-storage-daemon, or no mkfs.{kind}: make system")
    if f"\t{kind}\n" not in Path("/proc/filesystems").read_text():
        pytest.skip(f"the kernel has no {kind}")
    # A process of its own, since it leaves the mounts that everybody sees.
    words = [sys.executable, "bench/crash.py", "--systems", kind, "--states", "20", "--every", "3"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    last = done.stdout.splitlines()[-1] if done.stdout else done.stderr
    found = re.fullmatch(rf"crash: {kind}_bad=0/(\d+) control_bad=(\d+)/\d+", last)
    assert found is not None, done.stdout + done.stderr
    assert int(found[1]) > 20
    assert int(found[2]) > 0
    assert done.returncode == 0
