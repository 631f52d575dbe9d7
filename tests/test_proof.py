"""The proof of an engine against one that misbehaves: whatever is wrong is found before a worker may run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import Answer, Fault
from loops import tmpfs
from rig import Rig, rows

from hsdaemon.cli import main
from hsdaemon.core.model import Proof
from hsdaemon.data import backup, lock, room
from hsdaemon.machine.checkpoint import read_model
from hsdaemon.machine.proof import ProofFiles

LENGTHS = (40, 12, 12, 12, 30)
QUICK = {"worker": {"dump_timeout_s": 0.2, "request_timeout_s": 5.0}, "proof": {"deadline_s": 20.0}}
WHOLE, SHORT, BATCH, ALONE, STORED = 1, 2, 3, 6, 7  # the number of each canary, in the order in which they are sent


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, rows(LENGTHS), QUICK)


def proved(rig: Rig) -> tuple[int, Any]:
    """Exit code of `hs-extract prove`, and the verdict that the supervisor reads."""
    files = ProofFiles(str(rig.root / "run"))
    files.prepare("e1")
    (rig.root / "run" / "proof.json").unlink(missing_ok=True)
    (rig.root / "config.toml").write_text(rig.toml())
    return main(["prove", "-c", str(rig.root / "config.toml")]), files.read()


def test_a_good_engine_is_proved_and_the_verdict_names_the_start_that_was_asked_for(rig: Rig) -> None:
    with rig.engine() as engine:
        code, verdict = proved(rig)
    assert (code, verdict.ok, verdict.invocation) == (0, True, "e1")
    assert sorted(engine.requests) == list(range(WHOLE, STORED))
    steps = json.loads((rig.root / "run/proof.json").read_text())["steps"]
    assert len(steps) == 4
    assert not list((rig.root / "spool").glob("*.hs"))


@pytest.mark.parametrize(
    ("canary", "fault", "code"),
    [
        pytest.param("*", Fault("no_dump"), "inert", id="ca_04 answers and captures nothing"),
        pytest.param("*", Fault("two_layers"), "layers", id="ca_03 two of three layers"),
        pytest.param("*", Fault("other_layers"), "layers", id="ca_02 other layers"),
        pytest.param("*", Fault("other_norm"), "norm", id="nu_04 the other norm"),
        pytest.param("*", Fault("other_ids"), "content", id="token ids of somebody else"),
        pytest.param("*", Fault("zero_layer"), "content", id="nu_03 a layer of zeros"),
        pytest.param(WHOLE, Fault("poison"), "content", id="nu_01 not finite"),
        pytest.param(SHORT, Fault("zero_row"), "content", id="ca_05 wrong in the short canary alone"),
        pytest.param(WHOLE, Fault("last_chunk_only", count=20), "content", id="rr_04 the last chunk alone"),
        pytest.param("*", Fault("cached", count=8), "content", id="rr_03 a cached prefix"),
        pytest.param(WHOLE, Fault("longer", count=64), "content", id="ca_13 more bytes than the formula"),
        pytest.param("*", Fault("other_launch"), "content", id="a dump of another start"),
    ],
)
def test_what_an_engine_gives_refutes_it(rig: Rig, canary: int | str, fault: Fault, code: str) -> None:
    with rig.engine({canary: fault}):
        exit_code, verdict = proved(rig)
    assert (exit_code, verdict.ok, verdict.code) == (1, False, code), verdict
    assert verdict.detail


def test_rr_02_two_prompts_of_a_batch_that_get_each_others_states(rig: Rig) -> None:
    with rig.engine({BATCH: Fault("swap", other=BATCH + 1), BATCH + 1: Fault("swap", other=BATCH)}):
        assert proved(rig)[1].code == "content"


def half_sum(answer: Answer, _: Fault) -> None:
    answer.values = answer.values * np.float32(0.5)


@pytest.mark.parametrize("canary", [SHORT, WHOLE])
def test_ca_06_partial_sums_on_one_side_of_a_limit_are_found_by_a_canary_on_the_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, canary: int
) -> None:
    """Halves of a sum under fusion are finite, of the right shape, and found only by comparing."""
    monkeypatch.setattr(Answer, "_half_sum", half_sum, raising=False)
    with rig.engine({canary: Fault("half_sum")}) as engine:
        verdict = proved(rig)[1]
    assert verdict.code == "chunk"
    assert engine.requests[canary] == 1


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        pytest.param({"attest": False}, "inert", "attest", id="en_14 the readiness line and no attest"),
        pytest.param({"attest_spool": "/elsewhere"}, "spool", "/elsewhere", id="sp_06 another folder"),
        pytest.param({"layers": (2, 4, 5)}, "layers", "(2, 4, 5)", id="ca_02 attests other layers"),
        pytest.param({"dtype": "float32"}, "content", "float32", id="nu_08 another dtype"),
    ],
)
def test_what_an_engine_attests_refutes_it(rig: Rig, options: dict[str, Any], code: str, words: str) -> None:
    engine = rig.engine()
    engine.options = dataclasses.replace(engine.options, **options)
    with engine:
        _, verdict = proved(rig)
    assert verdict.code == code
    assert words in verdict.detail
    assert not engine.requests, "found before anything was sent"


def test_en_06_an_engine_that_hangs_in_generate_is_no_proof_and_no_hang(rig: Rig) -> None:
    quick = Rig(rig.root, rig.data, QUICK | {"worker": {"request_timeout_s": 0.5, "dump_timeout_s": 0.2}})
    with quick.engine(hang_after=0):
        assert proved(quick)[1].code == "unreachable"


# --- continuity: the second half comes from the same engine as the first ----------------------------------------------


@pytest.fixture
def half(rig: Rig) -> Rig:
    """A job of which every row is stored."""
    with rig.engine():
        rig.work()
    return rig


def test_stored_samples_are_captured_again(half: Rig) -> None:
    with half.engine() as engine:
        assert proved(half)[1].ok
    assert sorted(engine.requests) == list(range(WHOLE, STORED + 2))


def test_nu_06_an_engine_of_other_weights_is_refuted_and_the_files_stay(
    half: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {path: path.read_bytes() for path in (half.root / "out").glob("rows_*/*")}
    real = Answer.__init__

    def other(self: Answer, *args: Any) -> None:
        real(self, *args)
        self.values = self.values[:, :, ::-1].copy()

    monkeypatch.setattr(Answer, "__init__", other)
    with half.engine():
        code, verdict = proved(half)
    assert (code, verdict.code) == (1, "continuity")
    assert "row" in verdict.detail
    assert {path: path.read_bytes() for path in (half.root / "out").glob("rows_*/*")} == kept


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("harm", [Path.unlink, cut, lambda path: path.write_bytes(b"")], ids=["gone", "cut", "empty"])
def test_a_damaged_stored_file_is_said_and_another_one_compared(half: Rig, harm: Callable[[Path], Any]) -> None:
    first = min((half.root / "out").glob("rows_*/*"))
    harm(first)
    with half.engine():
        code, verdict = proved(half)
    assert (code, verdict.ok) == (0, True)
    steps = json.loads((half.root / "run/proof.json").read_text())["steps"]
    assert any("row 0 cannot be compared" in step for step in steps)


def test_a_stored_path_that_leads_out_of_the_output_is_not_opened(half: Rig) -> None:
    with contextlib.closing(half.manifest()) as manifest, manifest.write():
        manifest.db.execute("UPDATE rows SET path = 'rows_0-2000/../../data.jsonl' WHERE row = 0")
    with half.engine():
        assert proved(half)[1].ok
    steps = json.loads((half.root / "run/proof.json").read_text())["steps"]
    assert any("row 0 cannot be compared: its path in the manifest leads out" in step for step in steps)


def test_without_one_readable_stored_file_nothing_is_said_about_the_engine(half: Rig) -> None:
    for path in (half.root / "out").glob("rows_*/*"):
        cut(path)
    with half.engine():
        code, verdict = proved(half)
    assert (code, verdict.ok, verdict.code) == (75, False, "blocked")
    assert "verify" in verdict.detail


def test_an_engine_that_the_worker_would_refuse_is_not_proved(half: Rig) -> None:
    """Other weights behind the same shapes, before anything is sent; another release of the engine."""
    for options, words in (
        ({"model": "another"}, "it has loaded model another"),
        ({"release": "0.5.22"}, "release is"),
    ):
        with half.engine(**options) as engine:  # type: ignore[arg-type]
            code, verdict = proved(half)
        assert (code, verdict.code, words in verdict.detail) == (1, "continuity", True), verdict
        assert not engine.requests


def test_without_a_manifest_the_engine_must_have_the_model_of_the_configuration(rig: Rig) -> None:
    with rig.engine(model="another") as engine:
        assert proved(rig)[1].code == "continuity"
        assert not engine.requests
    with rig.engine(model=rig.identity.model):
        assert proved(rig)[1].ok


@pytest.mark.parametrize("copied", [True, False])
def test_mf_05_a_damaged_manifest_is_the_workers_to_mend_and_keeps_no_engine_from_its_proof(
    half: Rig, copied: bool
) -> None:
    """After a power cut the worker that would rebuild it is started only when the engine is proved."""
    if copied:
        with contextlib.closing(half.manifest()) as manifest:
            backup.back_up(manifest, backup.backup_path(half.config))
    damaged = b"no database" * 1000
    half.manifest_path.write_bytes(damaged)
    with half.engine():
        code, verdict = proved(half)
    assert (code, verdict.ok) == (0, True), verdict
    steps = json.loads((half.root / "run/proof.json").read_text())["steps"]
    assert any("2 stored samples captured again agree" in step for step in steps) is copied
    assert half.manifest_path.read_bytes() == damaged


def test_a_copy_of_a_manifest_that_was_removed_on_purpose_is_nobodys_evidence(half: Rig) -> None:
    """The output was emptied to begin anew, with another dtype: the copy outlives it in another folder."""
    with contextlib.closing(half.manifest()) as manifest:
        backup.back_up(manifest, backup.backup_path(half.config))
    shutil.rmtree(half.root / "out")
    (half.root / "out").mkdir()
    other = Rig(half.root, half.data, QUICK | {"output": {"dtype": "float32"}})
    with other.engine(dtype="float32"):
        code, verdict = proved(other)
    assert (code, verdict.ok) == (0, True), verdict


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_usable_rows_are_found_behind_any_number_of_skipped_ones(tmp_path: Path) -> None:
    """A set sorted by length, its first rows beyond the context: the job must be able to begin."""
    far = Rig(tmp_path, [*[[9999]] * 300, *rows([30, 20])], QUICK | {"data": {"on_bad_row": "skip"}})
    with far.engine():
        code, verdict = proved(far)
    assert (code, verdict.ok) == (0, True), verdict


def test_a_prompt_is_as_long_as_the_spool_allows_since_longer_rows_are_never_sent(tmp_path: Path) -> None:
    large = Rig(tmp_path, rows([20000, 20000]), QUICK | {"spool": {"budget_mib": 1}})
    with large.engine(budget=1 << 20, wait_s=0.1) as engine:
        code, verdict = proved(large)
    assert (code, verdict.ok) == (0, True), verdict
    most = room.largest_in_spool(large.config, read_model(large.config.model.path))
    assert max(len(body["input_ids"]) for body in engine.bodies.values()) == most < 20000


@pytest.mark.root
def test_sp_03_a_row_that_a_small_tmpfs_cannot_hold_yet_holds_up_no_proof(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "spool", 4) as spool:
        job = Rig(tmp_path, rows([1280, 1280, *[10] * 5]), QUICK, hidden=1024)
        with job.engine() as engine:
            code, verdict = proved(job)
            assert (code, verdict.ok) == (0, True), verdict
            assert 256 < max(len(body["input_ids"]) for body in engine.bodies.values()) < 1280
            (spool / "foreign").write_bytes(bytes((4 << 20) - (8 << 10)))
            code, verdict = proved(job)
    assert (code, verdict.code) == (75, "blocked")
    assert "make room in its tmpfs" in verdict.detail


@pytest.mark.root
def test_sp_03_stored_samples_that_a_small_tmpfs_cannot_hold_are_never_skipped_in_silence(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "spool", 64) as spool:
        job = Rig(tmp_path, rows([1280] * 3), QUICK, hidden=1024)
        with job.engine():
            job.work()
            subprocess.run(["mount", "-o", "remount,size=4m", spool], check=True)
            code, verdict = proved(job)
    assert (code, verdict.ok, verdict.code) == (75, False, "blocked")
    assert "the stored samples have more" in verdict.detail


# --- what is not about the engine -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["spool-full", "stalled"])
def test_sp_03_a_spool_without_room_accuses_no_engine(rig: Rig, code: str) -> None:
    with rig.engine({"*": Fault("error", code=code, text="no room for 10 bytes")}):
        exit_code, verdict = proved(rig)
    assert (exit_code, verdict.ok, verdict.code) == (75, False, "blocked")
    assert "no room for 10 bytes; make room" in verdict.detail


def test_a_configuration_that_the_output_refuses_accuses_no_engine(half: Rig) -> None:
    other = Rig(half.root, half.data, QUICK | {"output": {"dtype": "float32"}})
    with other.engine() as engine:
        code, verdict = proved(other)
    assert (code, verdict.code) == (73, "blocked")
    assert "dtype is bfloat16 here and float32 now" in verdict.detail
    assert not engine.requests


def test_a_proof_that_cannot_be_made_says_why_and_accuses_no_engine(rig: Rig) -> None:
    held = lock.acquire(rig.root / "out")
    with rig.engine():
        code, verdict = proved(rig)
        assert (code, verdict.ok, verdict.code) == (75, False, "blocked")
        assert "manifest.lock" in verdict.detail
        held.release()
        assert proved(rig)[1].ok
        (rig.root / "data.jsonl").write_text('{"input_ids": []}\n')
        assert proved(rig)[1].code == "blocked"
        (rig.root / "data.jsonl").unlink()
        assert proved(rig)[1].code == "blocked"


def test_a_proof_by_hand_beside_a_worker_takes_nothing_from_a_good_verdict(rig: Rig) -> None:
    """Else the supervisor would stop the worker of an engine that it has just proved."""
    files = ProofFiles(str(rig.root / "run"))
    files.prepare("e1")
    files.answer(Proof("e1", True), ["shown"])
    (rig.root / "config.toml").write_text(rig.toml())
    held = lock.acquire(rig.root / "out")
    try:
        assert main(["prove", "-c", str(rig.root / "config.toml")]) == 75
    finally:
        held.release()
    assert files.read() == Proof("e1", True)
    files.prepare("e2")
    files.answer(Proof("e2", False, "blocked", "words"), [])
    assert files.read() == Proof("e2", False, "blocked", "words"), "of another start it says nothing"


@pytest.mark.root
def test_a_verdict_that_root_has_written_can_be_replaced_by_the_proof_s_account(tmp_path: Path) -> None:
    """In a sticky folder nobody replaces a file of root's: no engine could be proved any more until a reboot."""
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    run = tmp_path / "run"
    run.mkdir()
    os.chown(run, 0, 54321)
    run.chmod(0o1775)
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    files = ProofFiles(str(run))

    def as_account(number: int) -> int:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setgid(54321)
                os.setuid(54321)
                files.answer(Proof(f"e{number}", True), [])
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert as_account(1) == 0
    files.answer(Proof("e2", False, "blocked", "by hand, as root"), [])
    assert as_account(3) == 0
    assert files.read() == Proof("e3", True)
