"""python -m hsdaemon.demo.compare MODEL DATA OUTPUT LAYERS: every stored state against transformers.

Computes the reference first, while others work; then waits for a line on stdin, reads the files as a trainer does, and
prints one JSON object (`Verdict`).
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch

from hsdaemon.demo import reference
from hsdaemon.demo.verdict import Verdict

_NAME = re.compile(r"data_([0-9]+)\.ckpt", re.ASCII)


def main(model: str, data: Path, output: Path, layers: list[int]) -> int:
    torch.set_num_threads(1)  # the engine needs the cores more
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    loaded = reference.load(model)
    expected = []
    for row in rows:
        aux, _, post = reference.states(loaded, row["input_ids"], layers)
        expected.append((aux, post))
    sys.stdin.readline()
    print(msgspec.json.encode(judge(rows, expected, output)).decode())
    return 0


def judge(rows: list[dict[str, Any]], expected: list[tuple[torch.Tensor, torch.Tensor]], output: Path) -> Verdict:
    """Compare the files below `output` with the rows and their expected (aux, final)."""
    files = [(int(m[1]), path) for path in sorted(output.rglob("*.ckpt")) if (m := _NAME.fullmatch(path.name))]
    seen = Counter(row for row, _ in files)
    worst, relative, corrupt = 0.0, 0.0, []
    for row, path in files:
        try:
            found = torch.load(path, weights_only=True)
            errors = _errors(rows[row], expected[row], found)
        # Whatever a damaged file raises, the finding is the same.
        except Exception as error:  # noqa: BLE001
            corrupt.append(f"{path.name}: {error}")
            continue
        worst, relative = max(worst, errors[0]), max(relative, errors[1])
    return Verdict(
        compared=len(files) - len(corrupt),
        lost=[i for i in range(len(rows)) if not seen[i]],
        twice=[row for row, n in seen.items() if n > 1],
        corrupt=corrupt,
        max_abs_err=worst,
        max_rel_err=relative,
    )


def _errors(
    row: dict[str, Any], expected: tuple[torch.Tensor, torch.Tensor], found: dict[str, Any]
) -> tuple[float, float]:
    """The largest absolute error, and the largest error of a row's state against that state's norm."""
    for key, wanted in (("input_ids", row["input_ids"]), ("loss_mask", row["loss_mask"])):
        if found[key].dtype != torch.int64 or found[key].tolist() != wanted:
            raise ValueError(f"{key} is not the row's")
    aux, final = found["aux_hidden_state"][0], found["hidden_state"][0]
    if aux.shape != expected[0].shape or final.shape != expected[1].shape:
        raise ValueError(f"shapes {tuple(aux.shape)}, {tuple(final.shape)}")
    hidden = final.shape[1]
    ours, theirs = (torch.cat(pair, 1).reshape(len(aux), -1, hidden) for pair in ((aux, final), expected))
    difference = ours - theirs
    if not bool(torch.isfinite(difference).all()):
        raise ValueError("a value is not finite")
    relative = difference.norm(dim=-1) / theirs.norm(dim=-1)
    return float(difference.abs().max()), float(relative.max())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])))
