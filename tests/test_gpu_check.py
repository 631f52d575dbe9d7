"""The check of the capture on a GPU: it finds planted defects, and all of it but CUDA runs on the CPU."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import gpu_check
from bench.gpu_models import BASE, UNIT, decoded
from hsdaemon import wire

ROOT = Path(__file__).parents[1]
HIDDEN, TOKENS = 16, 40
HEADER = wire.DumpHeader("", TOKENS, TOKENS, HIDDEN, (1, 3, 4), "post", "bfloat16", False, "", 1, "", 0, 0)

States = np.ndarray


def sample() -> tuple[States, States]:
    """ids, and states [tokens, 4 * hidden] of which each aux state carries them."""
    draw = np.random.default_rng(5)
    ids = draw.integers(4, 9000, TOKENS)
    states = draw.normal(size=(TOKENS, 4 * HIDDEN)).astype(np.float32)
    for aux in range(3):
        for digit in range(3):
            states[:, aux * HIDDEN + digit] = ids // BASE**digit % BASE * UNIT
    return ids, states


def written(path: Path, ids: States, states: States) -> Path:
    """A planar bfloat16 dump."""
    layout = HEADER.layout()
    raw = bytearray(layout.total)
    raw[: wire.HEADER_BYTES] = wire.pack_header(dataclasses.replace(HEADER, rid="x"))
    raw[layout.ids_offset : layout.ids_offset + 8 * TOKENS] = ids.astype(np.int64).tobytes()
    for part, at in zip(np.split(states, [3 * HIDDEN], axis=1), layout.plane_offsets, strict=True):
        data = torch.from_numpy(part.copy()).bfloat16().view(torch.int16).numpy().tobytes()
        raw[at : at + len(data)] = data
    path.write_bytes(raw)
    return path


def judged(folder: Path, break_it: Callable[[States, States], tuple[States, States]]) -> gpu_check.Content:
    ids, states = sample()
    np.save(folder / "prompt-0.npy", ids)
    np.save(folder / "states-0.npy", states)
    return gpu_check.compare(folder, [written(folder / "dump", *break_it(ids.copy(), states.copy())), None])


def test_a_right_dump_is_right_and_a_missing_one_is_counted(tmp_path: Path) -> None:
    seen = judged(tmp_path, lambda ids, states: (ids, states))
    assert seen.good
    assert (seen.dumps, seen.prompts) == (1, 2)
    assert 0 < max(seen.errors) < 0.01, "bfloat16 rounds"


def shifted(ids: States, states: States) -> tuple[States, States]:
    return ids, np.roll(states, 1, axis=0)


def swapped(ids: States, states: States) -> tuple[States, States]:
    states[[7, 8]] = states[[8, 7]]
    return ids, states


def other_ids(ids: States, states: States) -> tuple[States, States]:
    ids[5] += 1
    return ids, states


def other_layer(ids: States, states: States) -> tuple[States, States]:
    states[:, :HIDDEN] = states[:, HIDDEN : 2 * HIDDEN]
    return ids, states


def no_number(ids: States, states: States) -> tuple[States, States]:
    states[3, -1] = np.nan
    return ids, states


@pytest.mark.parametrize("break_it", [shifted, swapped, other_ids, other_layer, no_number])
def test_a_defect_is_found(tmp_path: Path, break_it: Callable[[States, States], tuple[States, States]]) -> None:
    assert not judged(tmp_path, break_it).good


def test_a_value_that_is_no_digit_names_no_token() -> None:
    assert decoded(np.array([[1 * UNIT, 2 * UNIT, 0.0], [0.3, 0.0, 0.0]], np.float32)).tolist() == [1 + 2 * BASE, -1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 0
    assert re.match(r"gpu-check: skipped: torch \S+ of \S+ sees no GPU", capsys.readouterr().out)


@pytest.mark.engine
def test_the_whole_check_runs_on_the_cpu(tmp_path: Path) -> None:
    words = [sys.executable, "bench/gpu_check.py", "--rehearse", "--shapes", "kimi-small"]
    done = subprocess.run(
        [*words, "--folder", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("gpu-check: ok card=none ")
    assert "kimi_captured_dumps=6/6 kimi_captured_ids=exact" in last
