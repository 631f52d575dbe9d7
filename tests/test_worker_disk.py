"""The worker on a small file system of its own: filled by others, unmounted under it, read-only."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loops import fill, loop
from rig import Rig, rows

from hsdaemon.data.volume import init_volume

pytestmark = pytest.mark.root

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 40 MiB, marked as ours."""
    with loop(tmp_path, 40) as mounted:
        init_volume(mounted)
        yield mounted


def job_on(disk: Path, root: Path, count: int, tokens: int = 4000) -> Rig:
    """Rows of 256 KiB (tokens * 4 states * 8 columns * 2 bytes) in an output on `disk`."""
    output = {"path": str(disk / "out"), "volume": str(disk), "volume_is_mount": True, "reserve_mib": 4}
    (root / "job").mkdir()
    return Rig(root / "job", rows([tokens] * count), {"output": output, "worker": {"stall_s": 5.0}})


def said(job: Rig) -> dict[str, Any]:
    path = job.root / "run" / "worker.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def until(job: Rig, process: subprocess.Popen[str], phase: str, done: int = 0, limit_s: float = 30.0) -> dict[str, Any]:
    deadline = time.monotonic() + limit_s
    while not ((now := said(job)).get("phase") == phase and now["done"] >= done):
        assert time.monotonic() < deadline, now
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return now


def names(disk: Path) -> list[str]:
    return sorted(p.name for p in (disk / "out").rglob("data_*"))


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("leave_mib", [3, 0])
def test_st_04_rs_07_st_05_a_disk_filled_by_others_pauses_and_goes_on_by_itself(
    disk: Path, tmp_path: Path, leave_mib: int
) -> None:
    """leave_mib=3: below the floor; 0: not one block left."""
    job = job_on(disk, tmp_path, 60)
    with job.engine(latency_s=0.4) as engine:
        process = job.start()
        until(job, process, "working", done=5)
        if leave_mib:
            with (disk / "fill").open("wb") as other:
                os.posix_fallocate(other.fileno(), 0, shutil.disk_usage(disk).free - leave_mib * MIB)
        else:
            fill(disk)
        paused = until(job, process, "paused")
        assert "free" in paused["waits_for"]
        time.sleep(6.0)  # longer than the stall rule
        later = until(job, process, "paused")
        assert later["done"] - paused["done"] <= 8
        assert names(disk) == sorted({p.name for p in (disk / "out").glob("rows_*/data_*.ckpt")})
        sizes = {p.stat().st_size for p in (disk / "out").glob("rows_*/data_*.ckpt")}
        assert max(sizes) - min(sizes) < 4096
        (disk / "fill").unlink()
        code, out, err = end(process)
    assert code == 0, err
    assert "done=60 failed=0" in out
    assert sum("] paused at" in line for line in err.splitlines()) == 1, err
    assert all(n <= 2 for n in engine.requests.values())


def test_ds_08_a_set_that_will_not_fit_is_refused_before_the_disk_is_full(disk: Path, tmp_path: Path) -> None:
    job = job_on(disk, tmp_path, 200)
    with job.engine(latency_s=0.4) as engine:
        code, _, err = end(job.start())
        assert code == 73, err
        assert "cannot fit the samples" in err
        sent = sum(engine.requests.values())
        assert sent < 200
        assert end(job.start())[0] == 73
        assert sum(engine.requests.values()) == sent, "the set is known by now: nothing is sent"
        job.settings["output"]["allow_short_disk"] = True  # type: ignore[index]
        process = job.start()
        until(job, process, "paused", done=20)
        process.terminate()
        code, _, err = end(process)
    assert code == 75, err


def test_ds_08_a_disk_that_others_fill_later_is_no_reason_to_refuse(disk: Path, tmp_path: Path) -> None:
    job = job_on(disk, tmp_path, 60)
    with job.engine(latency_s=0.4):
        process = job.start()
        until(job, process, "working", done=5)
        process.terminate()
        assert end(process)[0] == 75
        with (disk / "fill").open("wb") as other:
            os.posix_fallocate(other.fileno(), 0, shutil.disk_usage(disk).free - 6 * MIB)
        process = job.start()
        until(job, process, "paused")
        (disk / "fill").unlink()
        code, _, err = end(process)
    assert code == 0, err


def test_st_10_an_unmounted_volume_stops_the_writing_and_is_taken_again(disk: Path, tmp_path: Path) -> None:
    job = job_on(disk, tmp_path, 60)
    image = next(tmp_path.glob("*.img"), None) or next(tmp_path.rglob("*.img"))
    with job.engine(latency_s=0.4):
        process = job.start()
        until(job, process, "working", done=5)
        source = subprocess.check_output(["findmnt", "-no", "SOURCE", str(disk)], text=True).strip()
        subprocess.run(["umount", "-l", str(disk)], check=True)
        paused = until(job, process, "paused")
        assert "marker" in paused["waits_for"]
        assert os.listdir(disk) == []
        subprocess.run(["mount", source if Path(source).exists() else str(image), str(disk)], check=True)
        code, out, err = end(process)
    assert code == 0, err
    assert "done=60 failed=0" in out
