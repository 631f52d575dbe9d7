"""What follows a failed try, as tables; progress and stalls under any clock."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsdaemon import wire
from hsdaemon.data.spool import Dump
from hsdaemon.work import checks, decide, progress
from hsdaemon.work.decide import Fail, Failure, Kind, Retry, Stop

NAN = Failure(Kind.sample, "nonfinite", "NaN at layer 3, position 7")
LOST = Failure(Kind.lost, "engine-lost", "connection reset")

TABLE = [
    ("a first bad dump", NAN, 0, 0, Retry(charge=True, wait_s=1)),
    ("a second one", NAN, 1, 0, Retry(charge=True, wait_s=2)),
    ("the last one", NAN, 2, 0, Fail("nonfinite", "NaN at layer 3, position 7 (try 3 of 3)")),
    ("refused", Failure(Kind.refused, "refused", "too long"), 0, 0, Fail("refused", "too long")),
    ("lost once", LOST, 0, 1, Retry(charge=False, wait_s=0)),
    ("lost twice", LOST, 2, 2, Retry(charge=False, wait_s=0)),
    ("no room", Failure(Kind.pressure, "spool-full", "full"), 2, 0, Retry(charge=False, wait_s=1)),
    ("for every row", Failure(Kind.run, "dump-layers", "two layers"), 0, 0, Stop("two layers")),
]


@pytest.mark.parametrize(
    ("failure", "charged", "losses", "want"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_verdicts(failure: Failure, charged: int, losses: int, want: object) -> None:
    assert decide.after(failure, charged, losses, attempts=3, first_wait_s=1) == want


def test_en_12_a_row_under_which_the_engine_was_lost_n_times_in_a_row_is_failed() -> None:
    verdict = decide.after(LOST, 0, 3, attempts=3, first_wait_s=1)
    assert isinstance(verdict, Fail)
    assert "lost 3 times in a row" in verdict.reason
    assert not decide.alone(1)
    assert decide.alone(2)


@given(st.integers(1, 200))
def test_backoff_grows_and_is_bounded(tries: int) -> None:
    assert decide.backoff_s(1, tries) <= decide.backoff_s(1, tries + 1) <= decide.LONGEST_WAIT_S


def test_nu_02_many_failures_in_a_row_stop_with_the_named_cause() -> None:
    streak = decide.Streak(3)
    assert streak.failure(1, 0, NAN) is None
    assert streak.failure(1, 0, NAN) is None
    assert streak.failure(2, 0, NAN) is None
    stop = streak.failure(9, 0, NAN)
    assert stop is not None
    assert "3 samples failed in a row" in stop.cause
    assert "row 9" in stop.cause
    assert "NaN at layer 3" in stop.cause


def test_successes_second_tries_and_lost_engines_are_no_streak() -> None:
    streak = decide.Streak(2)
    assert streak.failure(1, 0, NAN) is None
    streak.success()
    assert streak.failure(2, 0, NAN) is None
    assert streak.failure(3, 1, NAN) is None
    assert streak.failure(4, 0, LOST) is None


def test_a_stall_is_told_once_its_time_is_up_and_a_pause_is_none() -> None:
    stall = decide.Stall(300, 1000)
    assert stall.look(1300, idle=False, waits_for="the engine") is None
    assert stall.look(1301, idle=True, waits_for="the engine") is None
    assert stall.look(1601, idle=False, waits_for="the engine") is None
    stop = stall.look(1602, idle=False, waits_for="the engine")
    assert stop is not None
    assert "301 s" in stop.cause
    assert "waiting for the engine" in stop.cause


RID = wire.RequestId("0123456789abcdef", 7, 1, 4)
META = {"id": str(RID), "prompt_tokens": 4, "cached_tokens": 0}


@pytest.mark.parametrize(
    ("change", "code", "kind"),
    [
        ({}, None, None),
        ({"id": str(wire.RequestId("0123456789abcdef", 8, 1, 4))}, "reply-id", Kind.sample),
        ({"prompt_tokens": 3}, "prompt-tokens", Kind.sample),
        ({"cached_tokens": 2}, "cached", Kind.sample),
        ({"hidden_states": [[0.5]]}, "states-in-reply", Kind.run),
    ],
)
def test_replies(change: dict[str, object], code: str | None, kind: Kind | None) -> None:
    found = checks.check_reply({"meta_info": {**META, **change}}, RID)
    assert (found and found.code, found and found.kind) == (code, kind)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)))
def test_any_json_is_judged(reply: object) -> None:
    assert checks.check_reply(reply, RID) is not None
    assert checks.check_reply({"meta_info": reply}, RID) is not None


WANTED = checks.Wanted((1, 3, 4), "post", "bfloat16", 8, False)
HEADER = wire.DumpHeader(
    str(RID), 4, 4, 8, (1, 3, 4), "post", "bfloat16", False, "0.5.23", wire.CAPTURE_VERSION, "hs-1", 0, 0
)


@pytest.mark.parametrize(
    ("change", "code", "kind"),
    [
        ({}, None, None),
        ({"layers": (3, 4)}, "dump-layers", Kind.run),
        ({"norm": "pre"}, "dump-norm", Kind.run),
        ({"dtype": "float32"}, "dump-dtype", Kind.run),
        ({"hidden": 16}, "dump-hidden", Kind.run),
        ({"interleaved": True}, "dump-interleaved", Kind.run),
        ({"release": "0.5.22"}, "dump-release", Kind.run),
        ({"rid": "other"}, "dump-id", Kind.sample),
        ({"launch": "hs-2"}, "dump-launch", Kind.sample),
        ({"tokens": 5, "rows": 5}, "dump-length", Kind.sample),
        ({"rows": 3}, "dump-cover", Kind.sample),
    ],
)
def test_headers(change: dict[str, object], code: str | None, kind: Kind | None) -> None:
    header = dataclasses.replace(HEADER, **change)  # type: ignore[arg-type]  # a table of fields
    dump = Dump(Path("x"), header.layout().total, header)
    found = checks.check_dump(dump, RID, WANTED, "hs-1", "0.5.23")
    assert (found and found.code, found and found.kind) == (code, kind)
    longer = Dump(Path("x"), header.layout().total + 4096, header)
    assert checks.check_dump(longer, RID, WANTED, "hs-1", "0.5.23") is not None


def test_mf_12_rate_and_time_left_come_from_the_given_clock_alone() -> None:
    meter = progress.Meter(1000.0)
    for second in range(1, 601):
        meter.add(1000.0 + second, tokens=100, size=1_000_000)
    speed = meter.speed(1600.0, window_s=60)
    assert speed.samples == pytest.approx(1, rel=0.05)
    assert speed.tokens == pytest.approx(100, rel=0.05)
    assert speed.mbytes == pytest.approx(1, rel=0.05)
    assert progress.eta_s(speed, open_rows=10, open_tokens=6000) == pytest.approx(60, rel=0.05)
    assert meter.speed(2600.0, window_s=60).samples == 0
    assert progress.eta_s(meter.speed(2600.0, 60), 5, 50) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (0, "0 m 00 s"), (665, "11 m 05 s"), (11220, "3 h 07 m"), (187200, "2 d 04 h")],
)
def test_spans_for_people(seconds: float | None, text: str) -> None:
    assert progress.span(seconds) == text
