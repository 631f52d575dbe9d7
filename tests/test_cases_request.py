"""Faults between request and dump: every row is accounted for, nothing wrong is stored, nobody innocent pays."""

import asyncio
import json
import socket
from pathlib import Path

import numpy as np
import pytest
from fake_engine import Fault
from rig import Rig, rows

from hsdaemon import wire
from hsdaemon.errors import EngineError, Fatal, Transient
from hsdaemon.work import client
from hsdaemon.work.worker import RunStopped, Stalled, Worker


def rig(tmp_path: Path, lengths: list[int], **worker: object) -> Rig:
    return Rig(tmp_path, rows(lengths), {"worker": worker} if worker else {})


def test_the_whole_job_is_done_and_every_state_is_where_it_belongs(tmp_path: Path) -> None:
    job = rig(tmp_path, [1, 2, 3, 511, 512, 513, 1500, *range(4, 40)])
    with job.engine() as engine:
        worker = job.work()
    assert worker.error is None
    job.check_files()
    assert set(engine.requests.values()) == {1}
    assert engine.duplicates == 0
    assert 1 < engine.peak_live <= 8


def test_rr_01_rows_without_an_answer_are_tried_again_then_failed_by_name(tmp_path: Path) -> None:
    job = rig(tmp_path, [5] * 12, dump_timeout_s=0.2)
    with job.engine({3: Fault("no_dump"), 9: Fault("no_dump")}) as engine:
        job.work()
    job.check_files(missing=[3, 9])
    assert job.counts().failed == 2
    assert set(job.reasons()) == {3, 9}
    assert job.reasons()[3][0] == "no-dump"
    assert engine.requests[3] == engine.requests[9] == 3


def test_rr_02_swapped_replies_of_equal_length_are_both_rejected(tmp_path: Path) -> None:
    job = rig(tmp_path, [6] * 10)
    with job.engine({2: Fault("swap", 1, other=5), 5: Fault("swap", 1, other=2)}) as engine:
        worker = job.work()
    assert worker.retries == 2
    assert engine.requests[2] == engine.requests[5] == 2
    job.check_files()


@pytest.mark.parametrize("change", ["wrong_rid", "wrong_count", "other_ids", "garbage", "other_launch"])
def test_rr_02_id_and_tokens_must_both_match(tmp_path: Path, change: str) -> None:
    job = rig(tmp_path, [6] * 6)
    with job.engine({2: Fault(change, 1)}) as engine:
        worker = job.work()
    assert worker.retries == 1
    assert engine.requests[2] == 2
    job.check_files()


def test_rr_03_a_cached_prefix_is_a_length_mismatch(tmp_path: Path) -> None:
    job = rig(tmp_path, [120] * 4)
    shared = job.data[0][:100]
    job.data[1] = shared + job.data[1][100:]
    job.write_data()
    with job.engine({0: Fault("cached", count=100), 1: Fault("prefix", count=100)}):
        job.work()
    job.check_files(missing=[0, 1])
    assert job.reasons()[0][0] == "cached"
    assert job.reasons()[1][0] == "dump-length"


@pytest.mark.parametrize("kind", ["last_chunk", "last_chunk_only"])
def test_rr_04_only_the_last_chunk_is_rejected(tmp_path: Path, kind: str) -> None:
    job = rig(tmp_path, [63, 64, 65, 127, 128, 129])
    faults = {row: Fault(kind, count=n % 64 or 64) for row, n in enumerate([63, 64, 65, 127, 128, 129])}
    with job.engine(faults):
        job.work()
    job.check_files(missing=[2, 3, 4, 5])
    assert {code for code, _ in job.reasons().values()} <= {"dump-cover", "cover", "dump-length"}


@pytest.mark.parametrize("count", [-1, 1])
def test_rr_05_one_row_too_few_or_too_many_is_rejected(tmp_path: Path, count: int) -> None:
    job = rig(tmp_path, [10] * 4)
    with job.engine({1: Fault("rows", count=count)}):
        job.work()
    job.check_files(missing=[1])
    assert job.reasons()[1][0] == "dump-length"


def test_rr_06_a_late_dump_is_waited_for_within_bounds(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 6, dump_timeout_s=1.0)
    with job.engine({1: Fault("late", seconds=0.4), 2: Fault("never", 1)}) as engine:
        job.work()
    job.check_files()
    assert engine.requests[1] == 1
    assert engine.requests[2] == 2


def test_rr_07_a_timeout_is_tried_again_then_a_tombstone_with_its_reason(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 6, request_timeout_s=0.3)
    with job.engine({4: Fault("slow", seconds=2)}) as engine:
        job.work()
    job.check_files(missing=[4])
    assert job.reasons()[4] == ("timeout", "no reply within 0.3 s (try 3 of 3)")
    assert engine.requests[4] == 3


def test_rr_08_states_in_the_reply_are_refused_with_the_cause(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 6)
    with job.engine({"*": Fault("states_in_reply")}):
        worker = job.work()
    assert isinstance(worker.error, RunStopped)
    assert "hs-extract serve" in str(worker.error)
    assert job.counts().failed == 0


def test_rr_09_no_two_live_ids_are_equal(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 4, request_timeout_s=0.3)
    with job.engine({1: Fault("slow", 2, seconds=1.5)}) as engine:
        job.work()
    job.check_files()
    assert engine.requests[1] == 3
    assert engine.duplicates == 0
    assert len(set(engine.rids)) == len(engine.rids)


def test_rr_10_ids_are_of_one_width_and_none_is_a_prefix_of_another(tmp_path: Path) -> None:
    job = rig(tmp_path, [3] * 120)
    with job.engine() as engine:
        job.work()
    assert {len(rid) for rid in engine.rids} == {len(str(wire.RequestId("0" * 16, 1, 1, 1)))}
    assert len(set(engine.rids)) == 120


def test_rr_11_a_refusal_is_not_tried_again_and_keeps_the_servers_words(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 6)
    with job.engine({2: Fault("status", status=400, text="ids beyond the vocabulary")}) as engine:
        job.work()
    job.check_files(missing=[2])
    assert engine.requests[2] == 1
    assert job.reasons()[2] == ("refused", "the engine refused it with 400: ids beyond the vocabulary")


@pytest.mark.parametrize("kind", ["reset", "half"])
def test_rr_12_a_broken_reply_is_sent_once_more_and_charged_to_nobody(tmp_path: Path, kind: str) -> None:
    job = rig(tmp_path, [10] * 8, attempts=1)
    with job.engine({3: Fault(kind, 1)}) as engine:
        job.work()
    job.check_files()
    assert engine.requests[3] == 2
    assert sum(engine.requests.values()) == 9


def test_rr_12_a_dead_engine_costs_its_rows_nothing_and_the_next_one_is_found(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 40, attempts=1)
    engine = job.engine({20: Fault("die", 1)}, latency_s=0.05)

    async def restart(_: Worker) -> None:
        await asyncio.to_thread(engine.died.wait, 20)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(engine.restart, "hs-second")

    with engine:
        worker = job.work(restart)
    assert worker.error is None
    job.check_files()
    assert job.counts().failed == 0
    assert all(n <= 2 for n in engine.requests.values())
    assert sum(n == 2 for n in engine.requests.values()) <= 8


def test_en_12_the_row_that_kills_the_engine_is_found_and_its_neighbours_are_done(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 20, attempts=1)
    engine = job.engine({7: Fault("die")}, latency_s=0.02)
    deaths = 0

    async def keep_alive(worker: Worker) -> None:
        nonlocal deaths
        while job.counts().open:
            if engine.died.is_set():
                deaths += 1
                await asyncio.sleep(0.2)
                await asyncio.to_thread(engine.restart, f"hs-{deaths}")
            await asyncio.sleep(0.02)

    with engine:
        worker = job.work(keep_alive)
    assert worker.error is None
    job.check_files(missing=[7])
    assert job.reasons()[7][0] == "engine-lost"
    assert 2 <= engine.requests[7] <= 3  # one may have been cut before it was read


def test_en_12_it_is_found_also_when_each_death_ends_the_worker_as_under_a_supervisor(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 20, attempts=1)
    engine = job.engine({7: Fault("die")}, latency_s=0.02)

    async def end_with_the_engine(worker: Worker) -> None:
        while job.counts().open and not engine.died.is_set():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        worker.drain()

    with engine:
        for start in range(6):
            job.work(end_with_the_engine)
            if engine.died.is_set():
                engine.restart(f"hs-{start}")
    job.check_files(missing=[7])
    assert job.reasons()[7][0] == "engine-lost"
    assert 2 <= engine.requests[7] <= 3


def test_503_and_429_cost_nothing(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 6, attempts=1)
    with job.engine({1: Fault("status", 1, status=503, text="busy"), 2: Fault("status", 1, status=429)}) as engine:
        job.work()
    job.check_files()
    assert engine.requests[1] == engine.requests[2] == 2


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_server_that_takes_no_requests_of_ours_stops_the_run_and_fails_no_row(tmp_path: Path, status: int) -> None:
    job = rig(tmp_path, [10] * 6)
    with job.engine({"*": Fault("status", status=status, text="not here")}):
        worker = job.work()
    assert isinstance(worker.error, RunStopped)
    assert f"{status}: not here" in str(worker.error)
    assert (job.counts().failed, job.counts().pending) == (0, 6)


@pytest.mark.parametrize("status", [400, 404])
def test_what_another_server_on_the_engines_port_refuses_is_no_rows_fault(tmp_path: Path, status: int) -> None:
    """The engine died while nothing was in flight, and somebody else has its port by now."""
    held = False

    def space(_: int) -> None:
        if held:
            raise Transient("held by a test")

    job = Rig(tmp_path, rows([10] * 60), {"worker": {"attempts": 1}}, space)
    engine = job.engine(latency_s=0.02)

    async def replace(worker: Worker) -> None:
        nonlocal held
        while worker.meter.samples < 2:
            await asyncio.sleep(0.005)
        held = True
        worker.pause.close(Transient("held by a test"))
        quiet = 0  # looks in a row that see nothing in flight: what was past the pause has been sent
        while quiet < 50:
            quiet = 0 if engine.live else quiet + 1
            await asyncio.sleep(0.01)
        options = {"launch": "vllm", "port": engine.port, "announce": False, "attest": False}
        await asyncio.to_thread(engine.stop)
        with job.engine({"*": Fault("status", status=status, text="no")}, **options) as other:
            held = False
            async with asyncio.timeout(15):
                while not other.requests:
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
        await asyncio.to_thread(engine.restart, "hs-second")

    with engine:
        worker = job.work(replace)
    assert worker.error is None
    assert job.counts().failed == 0
    job.check_files()


def test_an_engine_that_takes_no_connection_in_time_is_absent_and_charges_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.2)

    async def ask(port: int) -> object:
        async with client.session() as http:
            rid = wire.RequestId("0" * 16, 1, 1, 1)
            return await client.generate(http, f"http://127.0.0.1:{port}/generate", rid, np.asarray([1]), 0, 60.0)

    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        with pytest.raises(client.Absent):
            asyncio.run(ask(full.getsockname()[1]))


def test_a_reply_nested_without_end_is_one_failed_try(tmp_path: Path) -> None:
    job = Rig(tmp_path, rows([5] * 6))
    with job.engine({2: Fault("nested", 1)}):
        worker = job.work()
    assert worker.error is None
    assert worker.retries == 1
    job.check_files()


def test_samples_are_never_sent_where_a_reply_points_to(tmp_path: Path) -> None:
    """Another server on a reused port must not carry the data set off."""
    (tmp_path / "elsewhere").mkdir()
    other = Rig(tmp_path / "elsewhere", rows([5]))
    job = Rig(tmp_path / "job", rows([5] * 3))
    with other.engine() as elsewhere:
        fault = Fault("redirect", path=f"http://127.0.0.1:{elsewhere.port}/generate")
        with job.engine({1: fault}):
            job.work()
        assert sum(elsewhere.requests.values()) == 0
    assert job.reasons()[1][0] == "http-307"
    job.check_files(missing=[1])


def test_500_is_tried_again(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 6)
    with job.engine({1: Fault("status", 1, status=500, text="oops")}) as engine:
        job.work()
    job.check_files()
    assert engine.requests[1] == 2


def test_en_06_an_engine_that_answers_nothing_is_a_stall_with_the_wait_named(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 20, stall_s=1.5, request_timeout_s=60)
    with job.engine(hang_after=5) as engine:
        worker = job.work()
    assert isinstance(worker.error, Stalled)
    assert "waiting for the engine to answer" in str(worker.error)
    counts = job.counts()
    assert (counts.done, counts.failed, counts.leased) == (5, 0, 0)
    assert engine.duplicates == 0


def test_no_engine_is_waited_for_by_name_and_no_longer_than_the_stall_rule(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 3, stall_s=1.0)
    worker = job.work()
    assert isinstance(worker.error, Stalled)
    assert "engine.json" in str(worker.error)
    assert job.counts().pending == 3


def test_another_server_on_the_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 3, stall_s=1.0)
    with job.engine() as engine:
        path = tmp_path / "run" / "engine.json"
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({**fields, "launch": "hs-other"}))
        worker = job.work()
    assert "belongs to 'hs-fake'" in str(worker.error)
    assert not engine.requests


def test_an_engine_that_loaded_another_model_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    """A configuration for another model, or other weights in its folder, while the old engine still runs."""
    job = Rig(tmp_path, rows([5] * 20))
    with job.engine(model="another") as engine:
        worker = job.work()
        assert isinstance(worker.error, EngineError)
        assert "it has loaded model another" in str(worker.error)
        assert sum(engine.requests.values()) == 0
        assert job.counts().pending == 20
        engine.stop()
        engine.options.model = job.identity.model
        engine.restart("hs-ours")
        assert job.work().error is None
    job.check_files()


def test_the_smallest_number_of_new_tokens_is_asked_for(tmp_path: Path) -> None:
    job = rig(tmp_path, [10])
    with job.engine() as engine:
        job.work()
    (body,) = engine.bodies.values()
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert body["input_ids"] == job.data[0]


@pytest.mark.parametrize("kind", ["two_layers", "other_layers", "other_norm", "other_dtype", "other_hidden"])
def test_a_dump_of_another_kind_stops_the_run_at_the_first(tmp_path: Path, kind: str) -> None:
    job = rig(tmp_path, [10] * 30)
    with job.engine({"*": Fault(kind)}, latency_s=0.02) as engine:
        worker = job.work()
    assert isinstance(worker.error, Fatal)
    assert sum(engine.requests.values()) <= 16
    counts = job.counts()
    assert (counts.done, counts.failed, counts.leased) == (0, 0, 0)


def test_ca_19_a_missing_final_state_stops_the_run_at_the_first(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 30)
    with job.engine({"*": Fault("error", code="layers", text="no final state")}, latency_s=0.02):
        worker = job.work()
    assert isinstance(worker.error, RunStopped)
    assert "no final state" in str(worker.error)


def test_ca_09_an_error_of_the_capture_is_one_samples(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 6)
    with job.engine({1: Fault("error", 1, text="out of buffers"), 2: Fault("error", text="broken row")}):
        job.work()
    job.check_files(missing=[2])
    assert job.reasons()[2] == ("capture", "the capture says: broken row (try 3 of 3)")


def test_ca_13_a_dump_larger_than_the_formula_is_rejected(tmp_path: Path) -> None:
    job = rig(tmp_path, [10] * 4)
    with job.engine({1: Fault("longer", count=4096), 2: Fault("shorter", count=4096)}):
        job.work()
    job.check_files(missing=[1, 2])
    assert {job.reasons()[row][0] for row in (1, 2)} == {"dump-size"}
