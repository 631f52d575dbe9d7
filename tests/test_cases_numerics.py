"""Field cases NU at the seam of publication: states that must not become files, and states that only look odd."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import LAYERS, States, bf16, dump_of, header_of, publisher_of, run_of, sample_of, states_of, widen

from hsdaemon.data.formats import FORMATS, norm_refusal, open_sample
from hsdaemon.data.identity import RunIdentity, require_same
from hsdaemon.data.publish import Outcome, Published, Rejected
from hsdaemon.data.stream import DumpRefused, StateCheck
from hsdaemon.errors import StoreError

TOKENS = 37
BITS = {"nan": 0x7FC0, "-nan": 0xFFC1, "inf": 0x7F80, "-inf": 0xFF80}
NAMES = [*(f"layer {layer}" for layer in LAYERS), "the final state"]
Run = RunIdentity


@pytest.fixture(params=sorted(FORMATS))
def fmt(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def outcome(folder: Path, run: Run, states: States, **header: object) -> Outcome:
    sample = sample_of(0, len(states))
    dump = dump_of(folder, sample, run, states, **header)
    result = publisher_of(folder / "out", run).publish(sample, dump)
    files = [path for path in (folder / "out").rglob("*") if path.is_file()]
    assert len(files) == isinstance(result, Published)  # a rejected dump leaves nothing at all
    return result


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("value", sorted(BITS))
@pytest.mark.parametrize(("token", "column"), [(0, 0), (20, 63), (TOKENS - 1, 31)])
def test_nu_01_nu_02_a_value_that_is_no_number_is_rejected_with_layer_and_position(
    fmt: str, layer: int, value: str, token: int, column: int, tmp_path: Path
) -> None:
    states = states_of(TOKENS)
    states[token, layer, column] = BITS[value]
    got = outcome(tmp_path, run_of(fmt), states)
    assert isinstance(got, Rejected)
    assert (got.code, got.detail) == ("nonfinite", f"NaN or infinity in {NAMES[layer]}, token {token}")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
def test_nu_02_other_dtypes_are_judged_too(dtype: str, value: float, tmp_path: Path) -> None:
    states = np.random.default_rng(0).standard_normal((9, 4, 64)).astype(dtype)
    run = run_of("specforge", dtype=dtype)
    assert isinstance(outcome(tmp_path, run, states), Published)
    states[3, 2, 7] = value
    other = tmp_path / "other"
    other.mkdir()
    got = outcome(other, run, states)
    assert isinstance(got, Rejected)
    assert got.detail == f"NaN or infinity in layer {LAYERS[2]}, token 3"


def test_massive_activations_are_numbers(fmt: str, tmp_path: Path) -> None:
    states = states_of(TOKENS)
    states[0] = bf16(np.full((4, 64), 22516.0))
    states[1, :, 0] = 0x7F7F  # the largest
    states[1, :, 1] = 0xFF7F
    states[2, :, 1:] = 0x0001  # the smallest
    assert isinstance(outcome(tmp_path, run_of(fmt), states), Published)


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("zero", [0x0000, 0x8000])
def test_nu_03_an_all_zero_state_of_a_token_is_rejected(fmt: str, layer: int, zero: int, tmp_path: Path) -> None:
    states = states_of(TOKENS)
    states[5, layer] = zero
    got = outcome(tmp_path, run_of(fmt), states)
    assert isinstance(got, Rejected)
    assert (got.code, got.detail) == ("zero-row", f"all zero: {NAMES[layer]}, token 5")


def test_nu_03_one_value_is_enough_to_be_no_zero_row(fmt: str, tmp_path: Path) -> None:
    states = states_of(TOKENS)
    states[5] = 0
    states[5, :, 63] = 0x3F80
    assert isinstance(outcome(tmp_path, run_of(fmt), states), Published)


@pytest.mark.parametrize("layer", range(4))
def test_nu_03_a_layer_that_is_zero_for_every_token_is_named(fmt: str, layer: int, tmp_path: Path) -> None:
    states = states_of(TOKENS)
    states[:, layer] = 0
    got = outcome(tmp_path, run_of(fmt), states)
    assert isinstance(got, Rejected)
    assert (got.code, got.detail) == ("zero-layer", f"{NAMES[layer]} is zero for every token")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_judgement_does_not_depend_on_how_the_bytes_are_cut(data: st.DataObject) -> None:
    fmt, hidden, tokens = data.draw(st.sampled_from(sorted(FORMATS))), data.draw(st.sampled_from([4, 12])), 5
    header = header_of(sample_of(0, tokens), run_of(fmt, hidden=hidden))
    layers = 4 if header.interleaved else 3
    plane = states_of(tokens, hidden)[:, :layers].copy()
    token, layer = data.draw(st.integers(0, tokens - 1)), data.draw(st.integers(0, layers - 1))
    kind = data.draw(st.sampled_from(["fine", "zero", "nan"]))
    if kind == "zero":
        plane[token, layer] = 0x8000
    if kind == "nan":
        plane[token, layer, data.draw(st.integers(0, hidden - 1))] = 0x7FFF
    raw, check, at = plane.tobytes(), StateCheck(header, 0), 0
    verdict = "fine"
    try:
        while at < len(raw):
            piece = raw[at : at + 2 * data.draw(st.integers(1, 40))]
            check.feed(at, memoryview(piece))
            at += len(piece)
        check.finish()
    except DumpRefused as error:
        verdict = error.detail
    expected = {"fine": "fine", "zero": f"all zero: {NAMES[layer]}, token {token}"}
    assert verdict == expected.get(kind, f"NaN or infinity in {NAMES[layer]}, token {token}")


def rms_norm(states: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> States:
    """A final norm whose weights are far from one."""
    weight = np.linspace(5, 50, states.shape[-1], dtype="<f4")
    normed: States = states / np.sqrt((states**2).mean(-1, keepdims=True) + 1e-6) * weight
    return normed


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_nu_04_the_flag_in_the_file_tells_the_norm_of_its_values(fmt: str, norm: str, tmp_path: Path) -> None:
    residual = np.random.default_rng(3).standard_normal((TOKENS, 64)).astype("<f4")
    head = np.random.default_rng(4).standard_normal((64, 11)).astype("<f4")
    logits = rms_norm(residual) @ head
    states = states_of(TOKENS)
    states[:, 3] = bf16(rms_norm(residual) if norm == "post" else residual)
    if norm_refusal(fmt, norm) is not None:
        got = outcome(tmp_path, run_of(fmt, norm=norm), states)
        assert isinstance(got, Rejected)
        assert (got.code, fmt in got.detail, f"{norm}-norm" in got.detail) == ("run", True, True)
        return
    got = outcome(tmp_path, run_of(fmt, norm=norm), states)
    assert isinstance(got, Published)
    stored = open_sample(tmp_path / "out" / got.path)
    final = widen(np.ascontiguousarray(stored.final))
    assert stored.stamp is not None
    assert stored.stamp.norm == norm
    assert bool(stored.prenorm) == (norm == "pre")
    right, wrong = (final, rms_norm(final)) if norm == "post" else (rms_norm(final), final)
    assert np.abs(right @ head - logits).max() < 0.02 * np.abs(logits).max()
    assert np.abs(wrong @ head - logits).max() > 0.2 * np.abs(logits).max()


def test_nu_05_a_dump_of_the_other_norm_never_gets_into_the_tree(tmp_path: Path) -> None:
    got = outcome(tmp_path, run_of("modelopt", norm="post"), states_of(TOKENS), norm="pre")
    assert isinstance(got, Rejected)
    assert (got.code, got.detail) == ("run", "norm is pre, this run stores post")
    with pytest.raises(StoreError, match="norm is post here and pre now"):
        require_same(run_of("modelopt", norm="post"), run_of("modelopt", norm="pre"))


@pytest.mark.parametrize(
    ("change", "code", "detail"),
    [
        ({"layers": (1, 5, 8)}, "run", "layers is (1, 5, 8), this run stores (1, 5, 9)"),
        ({"rid": "hs1-00112233445566ff-0000000001-000-00000037"}, "header", "not of row 0"),
        ({"rid": "health-check"}, "header", "not of row 0"),
        ({"rows": TOKENS - 1}, "cover", "36 of 37 rows"),
    ],
)
def test_a_header_that_says_something_else_is_refused(
    change: dict[str, object], code: str, detail: str, tmp_path: Path
) -> None:
    got = outcome(tmp_path, run_of("specforge"), states_of(TOKENS), **change)
    assert isinstance(got, Rejected)
    assert got.code == code
    assert detail in got.detail


def test_ids_that_are_not_the_rows_and_rows_that_are_missing_are_refused(tmp_path: Path) -> None:
    run, sample = run_of("specforge"), sample_of()
    other = sample_of(0, TOKENS, seed=1)  # a swapped reply of equal length
    publisher = publisher_of(tmp_path / "out", run)
    got = publisher.publish(sample, dump_of(tmp_path, other, run, states_of(TOKENS)))
    assert isinstance(got, Rejected)
    assert got.code == "ids"
    holes = sample_of()
    holes.ids[4] = -1
    got = publisher.publish(sample, dump_of(tmp_path, holes, run, states_of(TOKENS)))
    assert isinstance(got, Rejected)
    assert (got.code, got.detail) == ("cover", "37 of 37 rows were captured, first 4")


@pytest.mark.parametrize("kind", ["absent", "empty", "short", "long", "garbage"])
def test_a_dump_that_cannot_be_read_is_one_samples_affair(kind: str, tmp_path: Path) -> None:
    run, sample = run_of("specforge"), sample_of()
    dump = dump_of(tmp_path, sample, run, states_of(TOKENS))
    whole = dump.read_bytes()
    if kind == "absent":
        dump.unlink()
    else:
        changed = {"empty": b"", "short": whole[:-4096], "long": whole + bytes(4096), "garbage": b"x" * len(whole)}
        dump.write_bytes(changed[kind])
    got = publisher_of(tmp_path / "out", run).publish(sample, dump)
    assert isinstance(got, Rejected)
    assert got.code in ("dump", "header")


def test_nu_07_a_file_never_holds_more_than_its_rows(fmt: str, tmp_path: Path) -> None:
    buffer = states_of(4096)  # what the capture gathers from; the sample is a view of it
    got = outcome(tmp_path, run_of(fmt), buffer[100 : 100 + TOKENS])
    assert isinstance(got, Published)
    payload = TOKENS * (8 * 64 + (8 if fmt == "speculators" else 16))
    assert payload < got.size <= payload + 4096
    assert np.array_equal(open_sample(tmp_path / "out" / got.path).final, buffer[100 : 100 + TOKENS, 3])


def test_nu_08_the_stored_type_is_the_runs_and_nothing_is_cast_again(fmt: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((TOKENS, 4, 64), np.float32)
    values[0, 0, :2] = [1 + 2**-8, 1 + 3 * 2**-8]  # ties: to even, once down and once up
    cast = bf16(values)
    assert widen(cast[0, 0, :2]).tolist() == [1.0, 1 + 2**-6]
    got = outcome(tmp_path, run_of(fmt), cast)
    assert isinstance(got, Published)
    stored = open_sample(tmp_path / "out" / got.path)
    assert (stored.dtype, stored.aux[0, 0], stored.aux[0, 1]) == ("bfloat16", cast[0, 0, 0], cast[0, 0, 1])
    other = tmp_path / "other"
    other.mkdir()
    refused = outcome(other, run_of(fmt), values, dtype="float32")
    assert isinstance(refused, Rejected)
    assert refused.detail == "dtype is float32, this run stores bfloat16"
