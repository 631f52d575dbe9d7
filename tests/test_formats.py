"""Each trainer's files: names, container, keys, values, positions; read back by us, by torch, and by the trainers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickletools
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from samples import LAYERS, States, bf16, dump_of, header_of, publisher_of, run_of, sample_of, states_of, widen

from hsdaemon.data.export import export_speculators
from hsdaemon.data.formats import (
    FORMATS,
    Damaged,
    check_content,
    file_bound,
    get_format,
    norm_refusal,
    open_sample,
    read_stamp,
    relative_path,
)
from hsdaemon.data.formats import container as torch_container
from hsdaemon.data.formats.parts import mask_of
from hsdaemon.data.identity import RunIdentity
from hsdaemon.data.publish import Published
from hsdaemon.data.sample import Sample
from hsdaemon.errors import StoreError

TRAINERS = Path(__file__).parent.parent / ".venv-trainers/bin/python"
LENGTHS = (37, 1, 20)
CONTAINERS = ("specforge", "modelopt")


def store(root: Path, run: RunIdentity, sample: Sample, states: States) -> Path:
    root.mkdir(exist_ok=True)
    outcome = publisher_of(root / run.format, run).publish(sample, dump_of(root, sample, run, states))
    assert isinstance(outcome, Published), outcome
    assert (root / run.format / outcome.path).stat().st_size == outcome.size
    return root / run.format / outcome.path


@pytest.fixture(params=sorted(FORMATS))
def fmt(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=LENGTHS, ids="S={}".format)
def stored(request: pytest.FixtureRequest, fmt: str, tmp_path: Path) -> tuple[Sample, States, Path]:
    sample = sample_of(2003, request.param, name="conv-7" if fmt == "modelopt" else "")
    states = states_of(request.param)
    return sample, states, store(tmp_path, run_of(fmt), sample, states)


def load(path: Path, *, mapped: bool = False, weights_only: bool = True) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    values = torch.load(path, mmap=mapped, weights_only=weights_only)
    assert isinstance(values, dict)
    return values


def bits(tensor: torch.Tensor) -> States:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def test_names_folders_and_ends_are_the_trainers() -> None:
    table = [("specforge", 0, "rows_0-2000/data_0.ckpt"), ("specforge", 1999, "rows_0-2000/data_1999.ckpt")]
    table += [("specforge", 2000, "rows_2000-4000/data_2000.ckpt"), ("modelopt", 5, "rows_0-2000/conv-1.pt")]
    table += [("speculators", 37311, "rows_36000-38000/hs_37311.safetensors")]
    for name, row, path in table:
        assert relative_path(get_format(name), row, "conv-1") == path


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "data_6", "x" * 201, "line\nbreak"])
def test_a_name_that_no_file_may_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a file"):
        relative_path(get_format("modelopt"), 5, name)


def test_container_is_stored_and_names_only_torchs_own_globals(stored: tuple[Sample, States, Path]) -> None:
    _, _, path = stored
    if path.suffix == ".safetensors":
        (size,) = np.fromfile(path, "<u8", 1)
        head = json.loads(path.read_bytes()[8 : 8 + int(size)])
        ends = [info["data_offsets"][1] for name, info in head.items() if name != "__metadata__"]
        assert 8 + size + max(ends) == path.stat().st_size
        return
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        names = {arg for op, arg, _ in pickletools.genops(archive.read("archive/data.pkl")) if op.name == "GLOBAL"}
    allowed = (
        "torch._utils _rebuild_tensor_v2",
        "torch BFloat16Storage",
        "torch LongStorage",
        "collections OrderedDict",
    )
    assert names == set(allowed)


def test_tensor_data_are_aligned_for_mapped_loads(stored: tuple[Sample, States, Path]) -> None:
    _, _, path = stored
    if path.suffix != ".safetensors":
        for value in load(path, mapped=True).values():
            assert not isinstance(value, torch.Tensor) or value.data_ptr() % 64 == 0


@pytest.mark.parametrize(("mapped", "weights_only"), list(itertools.product([False, True], repeat=2)))
def test_keys_dtypes_and_shapes_are_the_tables(
    stored: tuple[Sample, States, Path], mapped: bool, weights_only: bool
) -> None:
    sample, _, path = stored
    s, h = len(sample.ids), 64
    tables: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
        ".ckpt": {
            "input_ids": (torch.int64, (s,)),
            "loss_mask": (torch.int64, (s,)),
            "hidden_state": (torch.bfloat16, (1, s, h)),
            "aux_hidden_state": (torch.bfloat16, (1, s, 3 * h)),
        },
        ".pt": {
            "input_ids": (torch.int64, (s,)),
            "hidden_states": (torch.bfloat16, (s, h)),
            "aux_hidden_states": (torch.bfloat16, (s, 3 * h)),
            "loss_mask": (torch.int64, (s,)),
        },
        ".safetensors": {"hidden_states": (torch.bfloat16, (s, 4, h)), "token_ids": (torch.int64, (s,))},
    }
    values = load(path, mapped=mapped, weights_only=weights_only)
    if path.suffix == ".pt":
        assert values.pop("conversation_id") == sample.name
    assert {key: (value.dtype, tuple(value.shape)) for key, value in values.items()} == tables[path.suffix]
    assert all(value.is_contiguous() and value.storage_offset() == 0 for value in values.values())


def test_size_follows_the_formula(stored: tuple[Sample, States, Path]) -> None:
    sample, _, path = stored
    payload = len(sample.ids) * (8 * 64 + (8 if path.suffix == ".safetensors" else 16))
    fmt = next(f for f in FORMATS.values() if path.suffix in f.file_name(0, "data_0"))
    layout = header_of(sample, run_of(fmt.name)).layout()
    assert payload < path.stat().st_size <= payload + 4096
    assert path.stat().st_size <= file_bound(fmt, layout, sample.name)


def test_opening_a_sample_touches_none_of_its_states(stored: tuple[Sample, States, Path]) -> None:
    """They are gigabytes of another's tree, perhaps, or on a bad sector, where a mapped page ends the process."""
    opened = open_sample(stored[2])
    for states in (opened.aux, opened.final):
        assert not states.flags.owndata
        assert not states.flags.writeable, "a part of the mapped file, not of a copy"


def test_values_are_the_rows_and_the_captured_bytes(stored: tuple[Sample, States, Path]) -> None:
    sample, states, path = stored
    got = open_sample(path)
    assert np.array_equal(got.ids, sample.ids)
    assert got.mask is None or np.array_equal(got.mask, mask_of(sample))  # the last position too
    assert np.array_equal(got.aux, states[:, :3].reshape(len(sample.ids), -1))
    assert np.array_equal(got.final, states[:, 3])
    values = load(path)
    if path.suffix == ".safetensors":
        assert np.array_equal(bits(values["hidden_states"]), states)
    else:
        assert np.array_equal(bits(values[next(k for k in values if k.startswith("aux"))]).ravel(), got.aux.ravel())
        assert np.array_equal(
            bits(values[next(k for k in values if k.startswith("hidden"))]).ravel(), got.final.ravel()
        )
        assert torch.equal(values["loss_mask"], torch.from_numpy(sample.mask))


def test_a_file_tells_what_it_is(stored: tuple[Sample, States, Path], fmt: str) -> None:
    sample, _, path = stored
    stamp = read_stamp(path)
    assert stamp is not None
    assert (stamp.format, stamp.row, stamp.name, stamp.sample) == (fmt, 2003, sample.name, sample.digest.hex())
    assert (stamp.layers, stamp.norm, stamp.dtype) == (LAYERS, run_of(fmt).norm, "bfloat16")
    assert stamp.run == run_of(fmt).digest()


def test_a_data_set_without_masks_gets_ones(tmp_path: Path) -> None:
    for fmt in CONTAINERS:
        sample = sample_of(0, 9, mask=False)
        got = open_sample(store(tmp_path, run_of(fmt), sample, states_of(9)))
        assert got.mask is not None
        assert got.mask.tolist() == [1] * 9


def test_row_t_belongs_to_token_t_and_the_trainers_shifts_pair_it_with_the_next(fmt: str, tmp_path: Path) -> None:
    tokens = 23
    sample = sample_of(0, tokens)
    states = bf16(np.broadcast_to(np.arange(1, tokens + 1, dtype="<f4")[:, None, None], (tokens, 4, 64)))
    got = open_sample(store(tmp_path, run_of(fmt), sample, states))
    at = widen(got.aux[:, 0])
    assert at.tolist() == list(range(1, tokens + 1)) == widen(got.final[:, 0]).tolist()
    if fmt == "modelopt":
        labels = np.append(got.ids[1:], -100)
        pairs = list(zip(at[:-1].astype(int), labels[:-1], strict=True))
    else:  # the trainer drops position 0 of ids and keeps aux from position 0
        pairs = list(zip(at[:-1].astype(int), got.ids[1:], strict=True))
    assert pairs == [(t + 1, sample.ids[t + 1]) for t in range(tokens - 1)]


def test_aux_thirds_are_the_layers_in_ascending_order(fmt: str, tmp_path: Path) -> None:
    values = np.broadcast_to(np.array([*LAYERS, 99], "<f4")[None, :, None], (11, 4, 64))
    got = open_sample(store(tmp_path, run_of(fmt), sample_of(0, 11), bf16(values)))
    thirds = widen(got.aux).reshape(11, 3, 64)
    assert [set(thirds[:, k].ravel().tolist()) for k in range(3)] == [{layer} for layer in map(float, LAYERS)]
    assert set(widen(got.final).ravel().tolist()) == {99.0}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_store_dtypes_load_as_they_are(fmt: str, dtype: str, tmp_path: Path) -> None:
    run = run_of(fmt, dtype=dtype)
    states = np.random.default_rng(0).standard_normal((7, 4, 64)).astype(dtype)
    path = store(tmp_path, run, sample_of(0, 7), states)
    got = open_sample(path)
    assert (got.dtype, got.final.dtype) == (dtype, np.dtype(dtype))
    assert np.array_equal(got.final, states[:, 3])
    assert getattr(torch, dtype) in {value.dtype for value in load(path).values() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("kind", ["bit", "zeroed", "cut", "empty", "appended", "garbage"])
def test_damage_is_found(stored: tuple[Sample, States, Path], kind: str) -> None:
    _, _, path = stored
    raw = bytearray(path.read_bytes())
    at = len(raw) // 2
    damaged = {
        "bit": bytes(raw[:at]) + bytes([raw[at] ^ 4]) + bytes(raw[at + 1 :]),
        "zeroed": bytes(raw[: at - 100]) + bytes(200) + bytes(raw[at + 100 :]),
        "cut": bytes(raw[:at]),
        "empty": b"",
        "appended": bytes(raw) + b"x",
        "garbage": os.urandom(len(raw)),
    }[kind]
    path.write_bytes(damaged)
    with pytest.raises(Damaged):
        check_content(path)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 5000), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_hostile_bytes_never_raise_anything_else(
    at: int, value: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for fmt in ("modelopt", "speculators"):
        raw = bytearray(small_file(fmt, tmp_path_factory))
        raw[at % len(raw)] = value
        path = tmp_path_factory.getbasetemp() / "hostile"
        path.write_bytes(raw[: len(raw) - cut])
        for look in (open_sample, check_content, read_stamp):
            with contextlib.suppress(StoreError):
                look(path)


_small: dict[str, bytes] = {}


def small_file(fmt: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if fmt not in _small:
        run = run_of(fmt, hidden=4)
        _small[fmt] = store(tmp_path_factory.mktemp(fmt), run, sample_of(0, 2), states_of(2, 4)).read_bytes()
    return _small[fmt]


@pytest.mark.parametrize("called", [True, False])
def test_a_pickle_that_names_or_calls_anything_else_is_refused_unrun(called: bool, tmp_path: Path) -> None:
    words = b"X\x0b\0\0\0hidden_statcos\nsystem\n"
    evil = b"\x80\x02}" + words + (b"(X\5\0\0\0falsetR" if called else b"") + b"s."
    path = tmp_path / "evil.pt"
    parts = torch_container.archive([("data.pkl", evil), ("version", b"3\n")])
    path.write_bytes(b"".join(part for part in parts if isinstance(part, bytes)))
    with pytest.raises(Damaged, match="global os system is not allowed"):
        open_sample(path)


def test_torchs_own_files_open_too(tmp_path: Path) -> None:
    states = torch.randn(5, 64).to(torch.bfloat16)
    aux = torch.randn(5, 192).to(torch.bfloat16)
    ids = torch.arange(5)
    path = tmp_path / "x.pt"
    torch.save({"input_ids": ids, "loss_mask": ids, "hidden_state": states[None], "aux_hidden_state": aux[None]}, path)
    got = open_sample(path)
    check_content(path)
    assert (got.format, got.stamp) == ("specforge", None)
    assert np.array_equal(got.aux, bits(aux))
    assert np.array_equal(got.ids, ids.numpy())


def test_a_tensor_that_is_a_view_of_more_is_told(tmp_path: Path) -> None:
    big = torch.randn(9, 64).to(torch.bfloat16)
    path = tmp_path / "x.pt"
    torch.save({"input_ids": torch.arange(5), "hidden_states": big[:, :32][:5], "aux_hidden_states": big[:5]}, path)
    with pytest.raises(Damaged, match="view"):
        open_sample(path)


def test_sizes_beyond_four_gigabytes_use_the_wide_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_container, "ZIP64_AT", 1000)
    path = store(tmp_path, run_of("specforge"), sample_of(0, 37), states_of(37))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert load(path, mapped=True)["hidden_state"].shape == (1, 37, 64)
    assert np.array_equal(open_sample(path).final, states_of(37)[:, 3])


def test_a_stamp_of_a_later_version_is_refused_before_its_content(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    values = torch_container.container({"note": "x"}, b'{"version": 2, "all": "different"}')
    path.write_bytes(b"".join(part for part in values if isinstance(part, bytes)))
    with pytest.raises(StoreError, match="version 2"):
        read_stamp(path)


@pytest.mark.parametrize(
    ("name", "norm", "taken"),
    [
        ("specforge", "post", True),
        ("specforge", "pre", False),
        ("modelopt", "post", True),
        ("modelopt", "pre", True),
        ("speculators", "post", False),
        ("speculators", "pre", True),
    ],
)
def test_norms_that_a_format_takes(name: str, norm: str, taken: bool) -> None:
    assert (norm_refusal(name, norm) is None) == taken


def test_prenorm_is_flagged_for_modelopt_and_absent_otherwise(tmp_path: Path) -> None:
    for norm, flag in (("post", None), ("pre", True)):
        path = store(tmp_path / norm, run_of("modelopt", norm=norm), sample_of(), states_of(37))
        assert load(path).get("hidden_states_prenorm") is flag
        assert open_sample(path).prenorm is flag


# What the trainers themselves make of it.


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Two samples of 37 and 20 tokens, as a trainer's loader gives them."""
    if not TRAINERS.exists():
        pytest.skip("no trainers here: make trainers")
    root = tmp_path_factory.mktemp("trees")

    def run_loader(fmt: str) -> dict[str, Any]:
        out = root / f"{fmt}.npz"
        done = [
            (sample, store(root, run_of(fmt), sample, states_of(len(sample.ids), seed=sample.row)))
            for sample in (sample_of(0, 37), sample_of(1, 20))
        ]
        folder = root / fmt
        if fmt == "speculators":
            folder = folder / "export"
            assert export_speculators(done, folder) == 2
        words = [str(TRAINERS), str(Path(__file__).parent / "trainers/load.py"), fmt, str(folder), str(out)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, ended.stderr
        return dict(np.load(out))

    return run_loader


def test_specforges_loader_gives_the_tensors_and_a_batch(loaded: Callable[[str], dict[str, Any]]) -> None:
    got = loaded("specforge")
    for row, tokens in ((0, 37), (1, 20)):
        sample, states = sample_of(row, tokens), states_of(tokens, seed=row)
        assert np.array_equal(got[f"{row}.input_ids"], sample.ids[None])
        assert np.array_equal(got[f"{row}.target"].view("<u2")[0], states[:, 3])
        assert np.array_equal(got[f"{row}.hidden_state"].view("<u2")[0], states[:, :3].reshape(tokens, -1))
        assert sample.mask is not None
        assert got[f"{row}.loss_mask"].tolist() == [[*sample.mask[:-1].tolist(), 0]]
    assert got["batch.input_ids"].shape == (2, 37)
    assert got["batch.hidden_state"].shape == (2, 37, 192)


def test_modelopts_loader_gives_the_tensors_and_a_batch(loaded: Callable[[str], dict[str, Any]]) -> None:
    got = loaded("modelopt")
    for row, tokens in ((0, 37), (1, 20)):
        sample, states = sample_of(row, tokens), states_of(tokens, seed=row)
        assert np.array_equal(got[f"{row}.input_ids"], sample.ids)
        assert np.array_equal(got[f"{row}.labels"], [*sample.ids[1:], -100])
        assert np.array_equal(got[f"{row}.loss_mask"], mask_of(sample))
        assert np.array_equal(got[f"{row}.base_model_hidden_states"].view("<u2"), states[:, 3])
        assert np.array_equal(got[f"{row}.aux_hidden_states"].view("<u2"), states[:, :3].reshape(tokens, -1))
    assert got["batch.aux_hidden_states"].shape == (2, 64, 192)


def test_speculators_loader_gives_the_tensors_a_batch_and_the_counts(loaded: Callable[[str], dict[str, Any]]) -> None:
    got = loaded("speculators")
    counts: dict[int, int] = {}
    for row, tokens in ((0, 37), (1, 20)):
        sample, states = sample_of(row, tokens), states_of(tokens, seed=row)
        assert np.array_equal(got[f"{row}.input_ids"], sample.ids)
        assert np.array_equal(got[f"{row}.loss_mask"], mask_of(sample))
        assert np.array_equal(got[f"{row}.verifier_last_hidden_states"].view("<u2"), states[:, 3])
        assert np.array_equal(got[f"{row}.hidden_states"].view("<u2"), states[:, :3].reshape(tokens, -1))
        for token in sample.ids[sample.mask == 1].tolist():
            counts[token] = counts.get(token, 0) + 1
    assert got["batch.token_freq"].tolist() == [list(item) for item in sorted(counts.items())]
    ids, positions = got["batch.input_ids"][0], got["batch.position_ids"][0]
    packed = np.concatenate([sample_of(0, 37).ids[1:], sample_of(1, 20).ids[1:]])
    assert np.array_equal(ids[: len(packed)], packed)
    assert positions[0] == 1


def test_export_refuses_a_folder_that_exists_and_an_empty_set(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no row is done"):
        export_speculators([], tmp_path / "export")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "export").mkdir()
    with pytest.raises(StoreError, match="exists"):
        export_speculators([(sample_of(), tmp_path / "x")], tmp_path / "export")
