"""The proof's judgement: what an engine says of itself and how alike two captures are, as tables."""

import dataclasses

import numpy as np
import pytest

from hsdaemon import wire
from hsdaemon.work import verdict
from hsdaemon.work.checks import Wanted
from hsdaemon.work.compare import Likeness, likeness
from hsdaemon.work.verdict import Bounds, Refuted

WANTED = Wanted(layers=(1, 3, 4), norm="post", dtype="bfloat16", hidden=128, interleaved=False)
ATTEST = wire.Attest(
    launch="hs-1", stage="armed", pid=1, start_ticks=1, release="0.5.23", capture=wire.CAPTURE_VERSION, way="plugin",
    model="M", num_layers=8, hidden=128, layers=(1, 3, 4), loop_ids=(2, 4, 5), norm="post", dtype="bfloat16",
    interleaved=False, tp_rank=0, tp_size=2, dp_rank=0, spool="/s", errors=0, last_error="",
)  # fmt: skip
BOUNDS = Bounds(min_cosine=0.99, max_relative_error=0.05)


def ranks(**change: object) -> list[wire.Attest]:
    """Two ranks, the second one changed."""
    second = dataclasses.replace(ATTEST, tp_rank=1)
    return [ATTEST, dataclasses.replace(second, **change)]  # type: ignore[arg-type]  # fields of the table below


@pytest.mark.parametrize(
    ("attests", "code"),
    [
        pytest.param([], "inert", id="ca_04 nothing attests"),
        pytest.param([ATTEST], "inert", id="one rank does not"),
        pytest.param(ranks(launch="hs-0"), "inert", id="en_14 an attest of another start"),
        pytest.param(ranks(stage="broken", last_error="no setter"), "inert", id="ca_10 broken"),
        pytest.param(ranks(capture=99), "inert", id="another version of the capture"),
        pytest.param(ranks(release="0.5.22"), "inert", id="another release"),
        pytest.param(ranks(spool="/other"), "spool", id="sp_06 another folder"),
        pytest.param(ranks(layers=(2, 4, 5)), "layers", id="ca_02 off by one"),
        pytest.param(ranks(norm="pre"), "norm", id="nu_04 the other norm"),
        pytest.param(ranks(dtype="float32"), "content", id="another dtype"),
    ],
)
def test_an_attest_that_does_not_fit_refutes(attests: list[wire.Attest], code: str) -> None:
    refuted = verdict.judge_attests(attests, "hs-1", 2, WANTED, "0.5.23", "/s")
    assert refuted is not None
    assert refuted.code == code


def test_fitting_attests_of_every_rank_do_not_refute() -> None:
    assert verdict.judge_attests(ranks(), "hs-1", 2, WANTED, "0.5.23", "/s") is None


def test_sp_06_both_folders_are_named() -> None:
    refuted = verdict.judge_attests(ranks(spool="/theirs"), "hs-1", 2, WANTED, "0.5.23", "/s")
    assert refuted is not None
    assert "/theirs" in refuted.detail
    assert "/s" in refuted.detail.split()[-1]


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_equal_states_are_alike_and_others_are_not() -> None:
    rng = np.random.default_rng(1)
    first = rng.normal(size=(300, 64))
    other = rng.normal(size=(300, 64))
    same = likeness(bf16(first), bf16(first), "bfloat16")
    assert same.cosine == pytest.approx(1.0)
    assert same.relative_error == 0.0
    assert not BOUNDS.broken_by(same)
    assert not BOUNDS.broken_by(likeness(bf16(first), bf16(first * (1 + 0.002 * other)), "bfloat16"))
    assert BOUNDS.broken_by(likeness(bf16(first), bf16(other), "bfloat16"))
    assert BOUNDS.broken_by(likeness(bf16(first), bf16(first * 1.2), "bfloat16"))  # the other norm keeps the cosine


def test_single_tokens_may_differ_most_may_not() -> None:
    first = np.random.default_rng(2).normal(size=(100, 32)).astype(np.float32)
    few, most = first.copy(), first.copy()
    few[:10] = -few[:10]
    most[:60] = -most[:60]
    assert not BOUNDS.broken_by(likeness(first, few, "float32"))
    assert BOUNDS.broken_by(likeness(first, most, "float32"))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_nu_01_zero_and_non_finite_rows_count_as_the_worst(value: float) -> None:
    first = np.ones((3, 4), np.float32)
    spoilt = np.full((3, 4), value, np.float32)
    assert BOUNDS.broken_by(likeness(first, spoilt, "float32"))
    assert BOUNDS.broken_by(likeness(spoilt, spoilt, "float32"))


def test_states_of_other_shapes_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shapes"):
        likeness(np.ones((3, 4)), np.ones((4, 4)), "float32")


@pytest.mark.parametrize(
    ("longest", "chunk", "lengths"),
    [
        (2000, 512, (16, 520)),
        (515, 512, (16,)),
        (2000, 0, (16,)),
        (16, 512, (16,)),
        (1, 512, (1,)),
    ],
)
def test_canaries_are_prefixes_on_both_sides_of_a_chunk(longest: int, chunk: int, lengths: tuple[int, ...]) -> None:
    assert verdict.canary_lengths(longest, chunk) == lengths


def test_nu_06_continuity_names_the_row_and_the_numbers() -> None:
    refuted = verdict.judge_continuity(7, Likeness(0.5, 0.9), BOUNDS)
    assert refuted == Refuted("continuity", "row 7 captured again is not what is stored: median cosine 0.5000, "
                              "median relative error 0.9000")  # fmt: skip
    assert verdict.judge_continuity(7, Likeness(1.0, 0.0), BOUNDS) is None
