"""The manifest against a model: whatever happens in whatever order, it balances and no row is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hsdaemon.data import schema
from hsdaemon.data.identity import IdentityMismatch, RunIdentity
from hsdaemon.data.manifest import Claim, Done, LeaseLost, State
from hsdaemon.data.sample import BadRow, Sample, default_name, digest
from hsdaemon.data.sqlite import SqliteManifest, create, exists, open_manifest

IDENTITY = RunIdentity("d", "m", (1, 2, 3), "post", "bfloat16", "specforge", 8)


def sample(row: int, seed: int = 0, name: str | None = None) -> Sample:
    ids = np.arange(row + 1 + seed, dtype=np.int64)
    shown = name or default_name(row)
    return Sample(row, shown, ids, None, digest(ids, None, shown), row * 10)


def filled(path: Path, rows: int) -> SqliteManifest:
    manifest = create(path, IDENTITY, "volume")
    manifest.ingest([sample(i) for i in range(rows)], rows, rows * 10)
    manifest.end_scan()
    manifest.begin_epoch("e")
    return manifest


def done(claim: Claim, size: int = 100) -> Done:
    return Done(claim.row, claim.lease, f"rows_0-2000/{claim.name}.ckpt", size, bytes(16))


class Balance(RuleBasedStateMachine):
    """A model in a dict: row -> state; every lease ever given is kept, so that stale ones are tried too."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.manifest = create(self.folder / "manifest.db", IDENTITY, "volume")
        self.manifest.begin_epoch("0")
        self.states: dict[int, State] = {}
        self.seeds: dict[int, int] = {}
        self.live: dict[int, Claim] = {}
        self.claims: list[Claim] = []

    def teardown(self) -> None:
        self.manifest.close()
        shutil.rmtree(self.folder)

    @rule(bad=st.lists(st.booleans(), min_size=1, max_size=5))
    def ingest(self, bad: list[bool]) -> None:
        first = len(self.states)
        batch = [BadRow(first + i, "empty", "no ids") if b else sample(first + i) for i, b in enumerate(bad)]
        assert self.manifest.ingest(batch, first + len(batch), 0).new == len(batch)
        for i, b in enumerate(bad):
            self.states[first + i] = State.skipped if b else State.pending

    @rule(data=st.data(), bad=st.booleans())
    def edit(self, data: st.DataObject, bad: bool) -> None:
        if not self.states:
            return
        row = data.draw(st.sampled_from(sorted(self.states)))
        self.seeds[row] = self.seeds.get(row, 0) + 1
        changed = BadRow(row, "empty", "no ids") if bad else sample(row, self.seeds[row])
        self.manifest.ingest([changed], len(self.states), 0)
        self.states[row] = State.skipped if bad else State.pending
        self.live.pop(row, None)

    @rule(n=st.integers(1, 4))
    def claim(self, n: int) -> None:
        pending = [r for r, s in self.states.items() if s is State.pending]
        claims = self.manifest.claim(n)
        assert len(claims) == min(n, len(pending))
        for c in claims:
            assert self.states[c.row] is State.pending
            assert all(c.lease != old.lease for old in self.claims)
            self.states[c.row] = State.leased
            self.live[c.row] = c
        self.claims += claims

    @rule(data=st.data(), how=st.sampled_from(["commit", "retry", "charge", "fail", "skip", "release"]))
    def use(self, data: st.DataObject, how: str) -> None:
        """With any lease ever given: a live one works, a lost one changes nothing."""
        if not self.claims:
            return
        c = data.draw(st.sampled_from(self.claims))
        live = self.live.get(c.row) is c
        lost = not live and how != "release"
        with pytest.raises(LeaseLost) if lost else contextlib.nullcontext():
            self._use(c, how)
        if live:
            ends = {"commit": State.done, "fail": State.failed, "skip": State.skipped}
            self.states[c.row] = ends.get(how, State.pending)
            del self.live[c.row]

    def _use(self, c: Claim, how: str) -> None:
        if how == "commit":
            self.manifest.commit([done(c)])
        elif how in ("retry", "charge"):
            self.manifest.retry(c.row, c.lease, "timeout", "no dump", charge=how == "charge")
        elif how == "release":
            self.manifest.release([c])
        else:
            (self.manifest.fail if how == "fail" else self.manifest.skip)(c.row, c.lease, "nan", "layer 2")

    @rule()
    def commit_all_or_none(self) -> None:
        """One lost lease among live ones: nothing is recorded."""
        stale = [c for c in self.claims if self.live.get(c.row) is not c]
        if self.live and stale:
            with pytest.raises(LeaseLost):
                self.manifest.commit([*map(done, self.live.values()), done(stale[0])])

    @rule(some=st.booleans())
    def revive(self, some: bool) -> None:
        failed = [r for r, s in self.states.items() if s is State.failed]
        wanted = failed[:1] if some else failed
        assert self.manifest.revive(wanted if some else None) == len(wanted)
        for row in wanted:
            self.states[row] = State.pending

    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        if self.states:
            row = data.draw(st.sampled_from(sorted(self.states)))
            assert self.manifest.requeue([row], "damaged", "digest") == (self.states[row] is State.done)
            if self.states[row] is State.done:
                self.states[row] = State.pending

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        if self.states:
            row = data.draw(st.sampled_from(sorted(self.states)))
            adopted = self.manifest.adopt([Done(row, 0, "rows_0-2000/x.pt", 7, bytes(16))])
            assert adopted == (self.states[row] in (State.pending, State.failed))
            if adopted:
                self.states[row] = State.done

    @rule()
    def die_and_restart(self) -> None:
        self.manifest.close()
        self.manifest = open_manifest(self.folder / "manifest.db")
        assert self.manifest.begin_epoch("next") == len(self.live)
        for row in self.live:
            self.states[row] = State.pending
        self.live.clear()

    @invariant()
    def balances(self) -> None:
        c = self.manifest.counts()
        assert c.total == len(self.states) == c.pending + c.leased + c.done + c.failed + c.skipped
        for state in State:
            assert getattr(c, state.name) == list(self.states.values()).count(state)

    @invariant()
    def sums_are_those_of_the_rows(self) -> None:
        c, stored = self.manifest.counts(), self.manifest.stored()
        assert [s.row for s in stored] == sorted(r for r, s in self.states.items() if s is State.done)
        assert c.bytes == sum(s.size for s in stored)
        assert c.tokens == sum(s.tokens for s in stored)


Balance.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestBalance = Balance.TestCase


def test_claims_go_by_row_and_retried_rows_come_last(tmp_path: Path) -> None:
    manifest = filled(tmp_path / "m.db", 5)
    first = manifest.claim(2)
    assert [c.row for c in first] == [0, 1]
    assert manifest.retry(0, first[0].lease, "timeout", "no dump", charge=True) == 1
    assert manifest.retry(1, first[1].lease, "engine", "gone", charge=False) == 0
    again = manifest.claim(9)
    assert [(c.row, c.attempt, c.charged) for c in again] == [(1, 2, 0), (2, 1, 0), (3, 1, 0), (4, 1, 0), (0, 2, 1)]


def test_rows_that_are_too_long_for_now_are_passed_over(tmp_path: Path) -> None:
    manifest = filled(tmp_path / "m.db", 5)
    lengths = [sample(row).tokens for row in range(5)]
    most = sorted(lengths)[2]
    fitting = [row for row in range(5) if lengths[row] <= most]
    assert [c.row for c in manifest.claim(9, most)] == fitting
    assert sorted([c.row for c in manifest.claim(9)] + fitting) == list(range(5))


def test_deaths_of_the_engine_under_a_row_outlive_the_worker(tmp_path: Path) -> None:
    manifest = filled(tmp_path / "m.db", 2)
    for deaths in range(3):
        claim = manifest.claim(1)[0]
        assert (claim.row, claim.lost, claim.charged) == (0, deaths, 0)
        manifest.retry(0, claim.lease, "engine-lost", "it broke", charge=False, lost=True)
        manifest.close()
        manifest = open_manifest(tmp_path / "m.db")
        manifest.begin_epoch(f"e{deaths}")
    manifest.fail(0, manifest.claim(1)[0].lease, "engine-lost", "three times")
    assert manifest.revive([0]) == 1
    assert manifest.claim(1)[0].lost == 0, "a person's retry is a fresh budget"


def test_a_manifest_of_the_first_version_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as old:
        old.setattr(schema, "STEPS", schema.STEPS[:1])
        old.setattr(schema, "VERSION", 1)
        made = create(tmp_path / "m.db", IDENTITY, "volume")
        made.ingest([sample(i) for i in range(3)], 3, 30)
        made.close()
    manifest = open_manifest(tmp_path / "m.db")
    assert [c.lost for c in manifest.claim(3)] == [0, 0, 0]


def test_a_row_is_claimed_only_after_the_pass_has_come_by(tmp_path: Path) -> None:
    manifest = filled(tmp_path / "m.db", 5)
    manifest.begin_scan("other")
    assert manifest.claim(5) == []
    manifest.ingest([sample(0), sample(1)], 2, 20)
    assert [c.row for c in manifest.claim(5)] == [0, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("norm", "pre"), ("layers", (1, 2, 4)), ("model", "x"), ("dataset", "x"), ("dtype", "float32"), ("hidden", 9)],
)
def test_another_identity_is_refused_by_field(tmp_path: Path, field: str, value: object) -> None:
    manifest = filled(tmp_path / "m.db", 1)
    with pytest.raises(IdentityMismatch, match=f"{field} is") as caught:
        manifest.pin(dataclasses.replace(IDENTITY, **{field: value}))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_release_is_pinned_once_it_is_known(tmp_path: Path) -> None:
    manifest = filled(tmp_path / "m.db", 1)
    assert manifest.pin(dataclasses.replace(IDENTITY, release="0.5.23")).release == "0.5.23"
    assert manifest.pin(IDENTITY).release == "0.5.23"
    with pytest.raises(IdentityMismatch, match=r"release is 0.5.23 here and 0.5.10 now"):
        manifest.pin(dataclasses.replace(IDENTITY, release="0.5.10"))


def test_an_empty_file_left_by_a_crash_is_no_manifest(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    assert not exists(path)
    path.touch()
    assert not exists(path)
    filled(path, 1).close()
    assert exists(path)
