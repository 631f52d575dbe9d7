"""The worker as a process: told to stop, killed, resumed, short of disk, on other data sets and parallelisms."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import Fault
from loops import tmpfs
from rig import Rig, rows

from hsdaemon.data import sqlite
from hsdaemon.data.manifest import LeaseLost
from hsdaemon.errors import DiskFull, EngineError
from hsdaemon.machine.notify import Notify
from hsdaemon.work.report import Report, Reporter
from hsdaemon.work.worker import RunStopped, Stalled, Worker


def until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for the world to be so."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def finish(process: subprocess.Popen[str], limit_s: float = 30.0) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    return process.returncode, out, err


def spool_dumps(job: Rig) -> list[str]:
    return [name for name in os.listdir(job.root / "spool") if name != "epoch"]


def test_a_whole_job_as_a_process(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([5, 60, 700] * 20))
    with job.engine():
        code, out, err = job.extract()
    assert (code, out) == (0, "extract: done=60 failed=0 skipped=0 pending=0 redone=0\n"), err
    job.check_files()
    assert spool_dumps(job) == []
    said = json.loads((tmp_path / "run" / "worker.json").read_text())
    assert (said["phase"], said["done"], said["pending"]) == ("done", 60, 0)


def test_ds_01_a_set_that_was_rewritten_between_two_starts_needs_no_third_one(tmp_path: Path) -> None:
    """Every line behind the first lies elsewhere now: no row is looked for at its old place."""
    job = Rig(tmp_path, rows([20] * 80), {"worker": {"concurrency": 4}})
    with job.engine(latency_s=0.02) as engine:
        process = job.start()
        until(lambda: sum(engine.requests.values()) > 8)
        process.terminate()
        assert finish(process)[0] == 75
        job.data[0] = [1] * 200
        job.write_data()
        code, _, err = job.extract()
    assert code == 0, err
    job.check_files()


def test_ds_01_a_set_that_is_replaced_in_mid_run_is_not_called_done(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([20] * 60))
    with job.engine(latency_s=0.1) as engine:
        process = job.start()
        until(lambda: sum(engine.requests.values()) > 16)
        job.data[5] = [1] * 20
        (tmp_path / "data.jsonl").unlink()
        job.write_data()
        code, _, err = finish(process)
        assert (code, "was replaced while the worker ran" in err) == (75, True), err
        code, _, err = job.extract()
    assert code == 0, err
    job.check_files()


def test_a_manifest_that_is_moved_away_in_mid_run_ends_it_and_the_next_start_has_every_row(tmp_path: Path) -> None:
    """What is committed to a file without a name is lost: nobody may hear that it is done."""
    job = Rig(tmp_path, rows([20] * 120))
    with job.engine(latency_s=0.2) as engine:
        process = job.start()
        until(lambda: sum(engine.requests.values()) > 40)
        (tmp_path / "out").rename(tmp_path / "elsewhere")
        code, _, err = finish(process)
        assert (code, "moved, removed or replaced" in err) == (75, True), err
        assert "Traceback" not in err
        code, _, err = job.extract()
    assert code == 0, err
    job.check_files()


def test_told_to_stop_it_finishes_what_is_in_flight_and_nothing_else(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 200))
    with job.engine(latency_s=0.3) as engine:
        process = job.start()
        until(lambda: sum(engine.requests.values()) >= 8)
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
        sent = sum(engine.requests.values())
    assert code == 75, err
    counts = job.counts()
    assert (counts.leased, counts.failed) == (0, 0)
    assert counts.done == sent >= 8
    assert f"done={sent} failed=0 skipped=0 pending={200 - sent}" in out
    assert engine.unfinished == 0
    assert spool_dumps(job) == []


def test_a_drain_ends_at_its_bound_and_what_was_in_flight_costs_nothing(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 20), {"worker": {"drain_s": 0.5, "request_timeout_s": 60.0}})
    with job.engine({3: Fault("hang")}) as engine:
        process = job.start()
        until(lambda: engine.requests[3] == 1)
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process)
    assert code == 75, err
    assert job.counts().leased == 0
    assert job.reasons() == {}


def test_the_second_sigterm_stops_at_once(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 8), {"worker": {"drain_s": 600.0, "request_timeout_s": 600.0, "stall_s": 900.0}})
    with job.engine({"*": Fault("hang")}) as engine:
        process = job.start()
        until(lambda: len(engine.live) == 8)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process)
        assert os.listdir(tmp_path / "spool") == [], "and the capture writes nothing more for it"
    assert code == 75, err
    assert job.counts().pending == 8


def test_st_17_a_restart_makes_nothing_again_but_what_was_in_flight(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([20] * 150))
    with job.engine(latency_s=0.02) as engine:
        for part in range(1, 5):
            process = job.start()
            until(lambda part=part: sum(engine.requests.values()) >= 30 * part)  # type: ignore[misc]
            process.kill()
            process.wait()
        code, out, err = job.extract()
    assert code == 0, err
    assert "done=150" in out
    job.check_files()
    assert sum(engine.requests.values()) - 150 <= 4 * 8
    assert engine.duplicates == 0


def test_sp_07_after_each_kill_the_whole_budget_is_free_again(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([2000] * 60), {"spool": {"budget_mib": 1}})
    with job.engine(latency_s=0.01, budget=1 << 20) as engine:
        for kill in range(1, 6):
            process = job.start()
            until(lambda kill=kill: sum(engine.requests.values()) >= 8 * kill)  # type: ignore[misc]
            process.kill()
            process.wait()
        code, _, err = job.extract()
    assert code == 0, err
    job.check_files()
    assert engine.peak_spool <= 1 << 20
    assert spool_dumps(job) == []


def test_sp_05_parts_left_by_a_killed_worker_are_swept_at_the_next_start(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([50] * 10))
    with job.engine({"*": Fault("never", 1)}) as engine:
        process = job.start()
        until(lambda: len(spool_dumps(job)) >= 8)
        process.kill()
        process.wait()
        assert any(name.startswith(".") for name in spool_dumps(job))
        engine.options.faults = {}
        code, _, err = job.extract()
    assert code == 0, err
    job.check_files()
    assert spool_dumps(job) == []


def test_sp_03_a_spool_of_64_mib_and_samples_of_10_mib_run_to_the_end(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([1280] * 14), {"worker": {"concurrency": 32, "stall_s": 60.0}}, hidden=1024)
    with job.engine(budget=64 << 20) as engine:
        worker = job.work()
    assert worker.error is None
    assert worker.retries == 0
    job.check_files()
    assert engine.peak_spool <= 64 << 20
    assert engine.peak_live <= 6


@pytest.mark.root
def test_sp_03_a_tmpfs_of_64_mib_and_samples_of_10_mib_run_to_the_end(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "spool", 64):
        job = Rig(tmp_path, rows([1280] * 14), {"worker": {"concurrency": 32}}, hidden=1024)
        with job.engine(budget=64 << 20) as engine:
            code, _, err = job.extract()
        assert code == 0, err
        job.check_files()
        assert engine.peak_spool <= 60 << 20


@pytest.mark.root
def test_sp_03_a_tmpfs_that_others_fill_is_waited_for_and_no_row_fails_by_it(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "spool", 64) as root:
        job = Rig(tmp_path, rows([1280] * 4), {"worker": {"stall_s": 60.0}}, hidden=1024)
        (root / "foreign").write_bytes(bytes(58 << 20))
        with job.engine() as engine:
            process = job.start()
            until(lambda: "fills its tmpfs" in said(job))
            assert sum(engine.requests.values()) == 0
            (root / "foreign").unlink()
            code, _, err = finish(process)
    assert code == 0, err
    assert "try failed" not in err


@pytest.mark.root
def test_sp_03_a_row_that_a_small_tmpfs_cannot_hold_yet_waits_by_name_and_holds_up_nobody(tmp_path: Path) -> None:
    """Sizes of the moment are no row's fault: the tmpfs may be enlarged, and the configuration allows the dump."""
    with tmpfs(tmp_path / "spool", 4) as root:
        lengths = [*[1280] * 12, *[10] * 30]  # more of them than are claimed ahead
        job = Rig(tmp_path, rows(lengths), {"worker": {"stall_s": 1.0, "concurrency": 4}}, hidden=1024)
        with job.engine() as engine:
            process = job.start()
            until(lambda: "or it is too small" in said(job) and job.counts().done == 30)
            time.sleep(2.5)  # longer than the stall rule: another engine would not help
            assert json.loads(said(job))["phase"] == "paused"
            assert job.counts().failed == 0
            assert not any(engine.requests[row] for row in range(12))
            process.terminate()
            assert finish(process)[0] == 75
            subprocess.run(["mount", "-o", "remount,size=64m", root], check=True)
            code, _, err = job.extract()
    assert code == 0, err
    job.check_files()
    assert [engine.requests[row] for row in range(12)] == [1] * 12


def said(job: Rig) -> str:
    path = job.root / "run" / "worker.json"
    return path.read_text() if path.exists() else ""


def test_a_start_that_fails_behind_the_volume_says_its_own_cause_in_the_status_file(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 4))
    with job.engine():
        assert job.extract()[0] == 0
        shutil.rmtree(tmp_path / "spool")
        (tmp_path / "spool").write_text("no folder")
        code, _, err = job.extract()
    assert (code, "Traceback" in err) == (73, False), err
    now = json.loads(said(job))
    assert (now["phase"], "cannot use the spool" in now["stopped_by"]) == ("stopped", True)


def test_a_run_folder_that_cannot_be_written_costs_the_status_file_alone(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 4))
    reporter = Reporter(str(tmp_path / "data.jsonl" / "run"), Notify({}))
    counts = (4, 0, 0, 0, 4, True, 0)
    reporter.tell(Report("0" * 16, 1, "working", "", *counts, 0.0, 0.0, 0.0, None, 0, 0), 0.0)
    assert (tmp_path / "data.jsonl").is_file()
    assert job.data


def test_sp_04_a_spool_that_is_removed_in_mid_run_costs_no_try(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([20] * 120), {"worker": {"concurrency": 32, "dump_timeout_s": 30.0}})
    with job.engine(latency_s=0.1) as engine:
        process = job.start()
        until(lambda: sum(engine.requests.values()) > 40)
        shutil.rmtree(tmp_path / "spool")
        code, _, err = finish(process)
    assert code == 0, err
    job.check_files()
    assert job.reasons() == {}


def test_a_second_job_on_one_spool_is_refused_and_the_first_one_goes_on(tmp_path: Path) -> None:
    first = Rig(tmp_path / "a", rows([20] * 60))
    second = Rig(tmp_path / "b", rows([20] * 5), {"spool": {"path": str(tmp_path / "a" / "spool")}})
    with first.engine(latency_s=1.0) as engine:
        process = first.start()
        until(lambda: sum(engine.requests.values()) > 8)
        code, _, err = second.extract()
        assert (code, "another output" in err) == (75, True), err
        code, _, err = finish(process)
    assert code == 0, err
    first.check_files()


def test_sp_09_a_sample_larger_than_the_whole_spool_fails_by_name_and_holds_up_nobody(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10, 20000, 10, 10]), {"spool": {"budget_mib": 1}})
    with job.engine() as engine:
        worker = job.work()
    assert worker.error is None
    job.check_files(missing=[1])
    assert job.reasons()[1][0] == "spool"
    assert "raise spool.budget_mib" in job.reasons()[1][1]
    assert engine.requests[1] == 0


def test_sp_06_an_engine_that_attests_another_spool_is_refused_with_both_paths(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 4))
    with job.engine(attest_spool="/dev/shm/another") as engine:
        worker = job.work()
    assert isinstance(worker.error, RunStopped)
    assert "/dev/shm/another" in str(worker.error)
    assert str(tmp_path / "spool") in str(worker.error)
    assert not engine.requests


def test_sp_04_the_spool_may_be_gone_after_a_reboot(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 6))
    (tmp_path / "spool").rmdir()
    with job.engine() as engine:
        (tmp_path / "spool").rmdir()
        worker = job.work()
        assert worker.error is None
        assert set(engine.requests.values()) == {1}
    job.check_files()


def test_sp_01_a_full_spool_makes_the_sample_wait_and_costs_it_nothing(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 6), {"worker": {"attempts": 1}})
    with job.engine({2: Fault("error", 2, code="spool-full", text="no room")}) as engine:
        worker = job.work()
    assert worker.error is None
    assert engine.requests[2] == 3
    job.check_files()


def test_ds_05_every_row_is_accounted_for_whatever_the_count(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([3] * 407), {"worker": {"concurrency": 32}})
    with job.engine({5: Fault("status", text="no"), 406: Fault("status", text="no")}):
        code, out, err = job.extract()
    assert (code, out) == (1, "extract: done=405 failed=2 skipped=0 pending=0 redone=0\n"), err


def test_ds_06_the_file_of_a_row_holds_that_rows_ids_in_any_order_of_lengths(tmp_path: Path) -> None:
    lengths = [1 + (37 * i) % 900 for i in range(50)]
    job = Rig(tmp_path, rows(lengths), {"spool": {"budget_mib": 1}})
    with job.engine({0: Fault("status", 1, status=503, text="busy")}, tokens_s=200_000) as engine:
        job.work()
    job.check_files()
    assert [int(rid.split("-")[2]) for rid in engine.rids][-50:] != list(range(50)), "row 0 came after others"


def test_ds_07_another_parallelism_maps_no_row_to_another_name(tmp_path: Path) -> None:
    data = rows([20] * 90)
    total = 0
    names: dict[int, str] = {}
    for concurrency, stop_at in ((8, 30), (3, 60), (17, 90)):
        job = Rig(tmp_path, data, {"worker": {"concurrency": concurrency}})

        async def drain(worker: Worker, stop_at: int = stop_at, before: int = total) -> None:
            while worker.meter.samples + before < min(stop_at, 89):
                await asyncio.sleep(0.005)
            if stop_at < 90:
                worker.drain()

        with job.engine(latency_s=0.01) as engine:
            job.work(drain)
        total += sum(engine.requests.values())
        manifest = sqlite.open_reader(job.manifest_path)
        now = {s.row: s.path for s in manifest.stored()}
        manifest.close()
        assert names.items() <= now.items()
        names = now
    assert total == 90
    Rig(tmp_path, data).check_files()


def test_nu_01_a_nan_is_one_samples_affair_with_layer_and_position(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([30] * 40))
    with job.engine({7: Fault("poison", layer=1, position=11)}) as engine:
        worker = job.work()
    assert worker.error is None
    job.check_files(missing=[7])
    code, reason = job.reasons()[7]
    assert code == "nonfinite"
    assert "layer 3" in reason
    assert "11" in reason
    assert engine.requests[7] == 3


def test_nu_02_one_infinity_is_rejected_and_twenty_in_a_row_stop_the_run(tmp_path: Path) -> None:
    bad = {row: Fault("poison", value=float("inf")) for row in range(30, 60)}
    job = Rig(tmp_path, rows([30] * 100), {"worker": {"stop_after_failures": 20, "concurrency": 4}})
    with job.engine({3: Fault("poison", value=float("inf")), **bad}):
        worker = job.work()
    assert isinstance(worker.error, RunStopped)
    assert "20 samples failed in a row" in str(worker.error)
    assert "NaN or infinity" in str(worker.error)
    counts = job.counts()
    assert counts.done >= 25
    assert (counts.failed, counts.leased) == (0, 0)


def test_nu_03_a_zero_row_is_rejected_and_a_zero_layer_stops_the_run(tmp_path: Path) -> None:
    job = Rig(tmp_path / "row", rows([30] * 10))
    with job.engine({3: Fault("zero_row", position=4)}):
        worker = job.work()
    assert worker.error is None
    job.check_files(missing=[3])
    assert job.reasons()[3][0] == "zero-row"
    job = Rig(tmp_path / "layer", rows([30] * 40))
    with job.engine({"*": Fault("zero_layer", layer=2)}, latency_s=0.02):
        worker = job.work()
    assert isinstance(worker.error, RunStopped)
    assert "layer 4" in str(worker.error)
    assert job.counts().done == job.counts().failed == 0


def test_mf_08_a_worker_that_lost_its_rows_stops_and_changes_nothing(tmp_path: Path) -> None:
    """The lock keeps two workers apart; this is what holds when it does not."""
    job = Rig(tmp_path, rows([10] * 12), {"worker": {"stall_s": 60.0}})
    manifest = job.manifest()
    taken: list[int] = []

    async def steal(worker: Worker) -> None:
        while not worker.in_flight:
            await asyncio.sleep(0.01)
        other = sqlite.open_manifest(job.manifest_path)
        other.begin_epoch("f" * 16)
        taken.extend(claim.row for claim in other.claim(12))
        other.close()

    with job.engine(latency_s=0.5):
        worker = job.work(steal)
    manifest.close()
    assert isinstance(worker.error, LeaseLost)
    assert len(taken) == 12
    counts = job.counts()
    assert (counts.done, counts.leased) == (0, 12)


def test_mf_09_tombstones_hold_over_restarts(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 20))
    poison = {row: Fault("zero_row") for row in (3, 8, 13)}
    with job.engine(poison) as engine:
        job.work()
        tried = sum(engine.requests.values())
        for _ in range(3):
            assert job.work().error is None
        assert sum(engine.requests.values()) == tried
        manifest = job.manifest()
        assert manifest.revive() == 3
        manifest.close()
        engine.options.faults = {}
        job.work()
    job.check_files()


def test_mf_12_a_stepping_wall_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Rig(tmp_path, rows([10] * 60), {"worker": {"stall_s": 5.0}})
    real = time.time
    steps = [-3600.0, 3600.0, -real(), 86400.0]

    def stepping() -> float:
        steps.append(steps.pop(0))
        return real() + steps[0]

    monkeypatch.setattr(time, "time", stepping)
    with job.engine({row: Fault("zero_row", 1) for row in range(5)}, latency_s=0.01) as engine:
        worker = job.work()
    assert worker.error is None
    job.check_files()
    assert sum(engine.requests.values()) == 65
    assert 0 < worker.meter.speed(time.monotonic()).samples < 60 / 0.01


class Full:
    """A disk that says it is full while `full` is set."""

    def __init__(self) -> None:
        self.full = False
        self.asked: list[int] = []

    def __call__(self, size: int) -> None:
        self.asked.append(size)
        if self.full:
            raise DiskFull("cannot write: disk full; free space, work goes on by itself")


def test_st_04_a_full_disk_pauses_with_its_reason_and_work_goes_on_by_itself(tmp_path: Path) -> None:
    disk = Full()
    job = Rig(tmp_path, rows([100] * 60), {"worker": {"stall_s": 3.0, "attempts": 1}}, disk)
    seen: dict[str, object] = {}

    async def fill(worker: Worker) -> None:
        while worker.meter.samples < 10:
            await asyncio.sleep(0.005)
        disk.full = True
        while not worker.pause.paused:
            await asyncio.sleep(0.005)
        seen["reason"], seen["phase"] = worker.waits_for, worker.phase
        before = worker.meter.samples
        await asyncio.sleep(4.0)  # longer than the stall rule: a pause is no stall
        seen["done meanwhile"] = worker.meter.samples - before
        disk.full = False

    with job.engine(latency_s=0.01) as engine:
        worker = job.work(fill)
    assert worker.error is None
    assert "disk full" in str(seen["reason"])
    assert seen["phase"] == "paused"
    assert int(str(seen["done meanwhile"])) <= 8  # what had been checked before the disk was full
    job.check_files()
    assert set(engine.requests.values()) == {1}
    assert max(disk.asked) > 0  # it resumes with room for two samples, not at the first free byte


@pytest.mark.parametrize("told", [True, False], ids=["told to stop", "stalled"])
def test_a_manifest_that_hangs_in_the_kernel_does_not_keep_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    asked, freed = threading.Event(), threading.Event()

    def hang(*_: object) -> list[object]:
        asked.set()
        freed.wait(30)
        return []

    async def stop(worker: Worker) -> None:
        await asyncio.to_thread(asked.wait, 10)
        if told:
            worker.drain()

    monkeypatch.setattr(sqlite.SqliteManifest, "claim", hang)
    monkeypatch.setattr("hsdaemon.work.worker.GIVE_UP_S", 0.3)
    job = Rig(tmp_path, rows([10] * 4), {"worker": {"stall_s": 20.0 if told else 0.5}})
    try:
        worker = job.work(stop, limit_s=10.0)
    finally:
        freed.set()
    assert worker.error is None if told else isinstance(worker.error, Stalled)


def test_rs_05_a_disk_slower_than_the_engine_slows_it_down_and_charges_nobody(tmp_path: Path) -> None:
    def slow(_: int) -> None:
        time.sleep(0.15)

    settings = {"worker": {"request_timeout_s": 1.0, "dump_timeout_s": 0.3, "stall_s": 5.0, "concurrency": 32}}
    job = Rig(tmp_path, rows([3000] * 40), {**settings, "spool": {"budget_mib": 1}}, slow)
    with job.engine(budget=1 << 20) as engine:
        worker = job.work()
    assert worker.error is None
    assert worker.retries == 0
    job.check_files()
    assert engine.peak_spool <= 1 << 20


def test_an_edited_row_under_a_running_worker_stops_it_before_anything_wrong_is_sent(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 5))
    job.manifest().close()
    job.data[3][0] = (job.data[3][0] + 1) % 200
    job.write_data()
    with job.engine() as engine:
        worker = job.work()
    assert isinstance(worker.error, Stalled)
    assert "row 3" in str(worker.error)
    assert engine.requests[3] == 0


def test_ds_01_a_row_that_is_not_where_it_was_is_looked_for_by_the_next_start(tmp_path: Path) -> None:
    """An edit that kept size and time, or a bad hint in the manifest: the file as a whole says nothing of it."""
    job = Rig(tmp_path, rows([10] * 5))
    with job.engine():
        code, _, err = job.extract()
        assert code == 0, err
        manifest = job.manifest()
        manifest.requeue([3], "x", "y")
        manifest.db.execute("UPDATE rows SET hint = hint + 1 WHERE row = 3")
        manifest.close()
        code, _, err = job.extract()
        assert (code, "row 3" in err) == (75, True), err
        code, _, err = job.extract()
        assert code == 0, err
    job.check_files()


def test_another_release_of_the_engine_in_one_output_is_refused(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 6))
    with job.engine():
        assert job.extract()[0] == 0
    job.data += rows([10] * 2, seed=9)
    job.write_data()
    with job.engine(release="0.5.22") as engine:
        code, _, err = job.extract()
    assert code == 73, err
    assert "release" in err
    assert not engine.requests


def test_a_release_that_nobody_knows_is_refused_before_the_first_request(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 2))
    with job.engine(release="0.9.99") as engine:
        worker = job.work()
    assert isinstance(worker.error, EngineError)
    assert not engine.requests


def test_two_workers_on_one_output_are_refused(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 20))
    with job.engine({"*": Fault("slow", seconds=1)}):
        first = job.start()
        until(lambda: (tmp_path / "run" / "worker.json").exists() and (tmp_path / "out" / "manifest.db").exists())
        until(lambda: job.counts().leased > 0)
        code, _, err = job.extract()
        assert code == 75
        assert f"pid {first.pid}" in err
        first.kill()
        first.communicate()


def test_st_09_without_its_volume_it_waits_and_writes_nothing(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 4))
    with job.engine():
        process = job.start()
        (tmp_path / ".hs-extract-volume").rename(tmp_path / "marker")
        until(lambda: (tmp_path / "run" / "worker.json").exists() or process.poll() is not None)
        said = json.loads((tmp_path / "run" / "worker.json").read_text())
        assert said["phase"] == "waiting"
        assert "marker" in said["waits_for"]
        assert os.listdir(tmp_path / "out") == []
        (tmp_path / "marker").rename(tmp_path / ".hs-extract-volume")
        code, out, err = finish(process)
    assert code == 0, err
    assert "done=4" in out


def test_systemd_hears_of_readiness_status_and_of_the_watchdog_only_when_rows_move(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([10] * 8), {"worker": {"stall_s": 6.0, "request_timeout_s": 60.0}})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, job.engine(hang_after=4):
        line.bind(str(tmp_path / "notify"))
        line.settimeout(20)
        os.environ["NOTIFY_SOCKET"] = str(tmp_path / "notify")
        try:
            process = job.start()
        finally:
            del os.environ["NOTIFY_SOCKET"]
        finish(process)
        line.setblocking(False)
        heard = []
        while True:
            try:
                heard.append(line.recv(4096).decode())
            except BlockingIOError:
                break
    assert "READY=1" in heard
    assert any(text.startswith("STATUS=") and "4/8" in text for text in heard)
    last = max(i for i, text in enumerate(heard) if text == "WATCHDOG=1")
    assert sum(text.startswith("STATUS=") for text in heard[last:]) >= 3


def test_systemd_is_asked_for_the_time_that_the_configuration_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Rig(tmp_path, rows([10] * 8), {"worker": {"stall_s": 900.0, "drain_s": 400.0, "request_timeout_s": 900.0}})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.settimeout(20)
        with job.engine({"*": Fault("slow", seconds=1)}) as engine, monkeypatch.context() as patch:
            patch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
            patch.setenv("WATCHDOG_USEC", "600000000")
            process = job.start()
            until(lambda: len(engine.live) == 8)
            process.terminate()
            assert finish(process)[0] == 0
        line.setblocking(False)
        heard = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                heard.add(line.recv(4096).decode())
    assert {"READY=1", "WATCHDOG_USEC=1800000000", "STOPPING=1", "EXTEND_TIMEOUT_USEC=460000000"} <= heard


def test_notify_takes_its_variables_out_of_the_environment() -> None:
    env = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    notify = Notify(env)
    assert env == {"HOME": "/"}
    assert notify.watchdog_s == 30
    notify.ready()
    assert Notify({}).heard is False
    assert Notify({"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}).watchdog_s is None
