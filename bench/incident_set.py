"""The incident's data set and what its engine had stored before the storage ran full. A process of its own, for torch.

python -m bench.incident_set make FOLDER ROWS STORED     model, train.jsonl, tree/, truth.npy below FOLDER, made once
python -m bench.incident_set judge FOLDER OUTPUT         JSON: every stored file against transformers and the old tree

The tree is as the incident left it: no manifest, no stamps, `.pt` files with SpecForge's keys, 2,000 rows a folder (as
many folders whatever the scale), one sample missing in three folders, the last folder cut short.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from hsdaemon.demo import models, reference
from hsdaemon.machine.checkpoint import eagle3_layers

LENGTHS = (4, 12)  # tokens: what is shown is the way, not the engine's speed
VOCAB, FIRST_ID = 512, 4
HIDDEN, LAYERS = 64, 7
WHOLE = 37_312
FOLDER_ROWS = 2_000
GAPS = (4_321, 6_789, 8_642)  # rows of the whole set: three old errors in three folders between 4000 and 10000
SEED = 3
BATCH = 512
LIMIT = 1e-5  # float32 all the way


class Finding(Struct, frozen=True):
    """What a judge saw. changed: adopted files that are not what they were, byte for byte; twice: rows of two files."""

    files: int
    kept: int
    lost: list[int]
    twice: list[int]
    changed: list[str]
    corrupt: list[str]
    max_abs_err: float


def gaps(rows: int) -> list[int]:
    """The old errors at this scale: three rows, each in a third of its own."""
    return [row * rows // WHOLE for row in GAPS]


def folder_of(row: int) -> str:
    first = row // FOLDER_ROWS * FOLDER_ROWS
    return f"rows_{first}-{first + FOLDER_ROWS}"


def stored_rows(rows: int, stored: int) -> list[int]:
    """The rows that have a file: the first ones, without the gaps."""
    missing = set(gaps(rows))
    return [row for row in range(stored + len(missing)) if row not in missing]


def make(folder: Path, rows: int, stored: int) -> None:
    """A crash leaves no facts.json, and the next call begins anew."""
    if (folder / "facts.json").exists():
        return
    for name in ("model", "tree"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    model = models.make(str(folder / "model"), models.Tiny(layers=LAYERS, hidden=HIDDEN, vocab=VOCAB, arch="llama"))
    for file in Path(model).iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone, and the engine has an account of its own
    data = _data(folder / "train.jsonl", rows)
    states = list(_truth(model, [row["input_ids"] for row in data]))
    np.save(folder / "truth.npy", np.concatenate(states))
    for row in stored_rows(rows, stored):
        path = folder / "tree" / folder_of(row) / f"data_{row}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        aux, final = _split(torch.from_numpy(states[row]))
        ids, mask = (torch.tensor(data[row][key]) for key in ("input_ids", "loss_mask"))
        torch.save(
            {"input_ids": ids, "loss_mask": mask, "hidden_state": final[None], "aux_hidden_state": aux[None]}, path
        )
    first = gaps(rows)[0]  # the first row without a file: the first that is extracted
    facts = {"rows": rows, "stored": stored, "first": f"{folder_of(first)}/data_{first}.ckpt"}
    (folder / "facts.json").write_text(json.dumps(facts))


def _data(path: Path, rows: int) -> list[dict[str, Any]]:
    draw = random.Random(SEED)  # data, no secret
    made = []
    for _ in range(rows):
        size = draw.randint(*LENGTHS)
        prompt = draw.randrange(size)
        ids = [draw.randrange(FIRST_ID, VOCAB) for _ in range(size)]
        made.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (size - prompt)})
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return made


def _truth(folder: str, rows: Sequence[list[int]]) -> Iterator[np.ndarray]:
    """[S, 4 * hidden] float32 of each row, in order: aux states, then the final one after the norm."""
    loaded, layers = reference.load(folder), eagle3_layers(LAYERS)
    lengths: dict[int, list[int]] = defaultdict(list)
    for row, ids in enumerate(rows):
        lengths[len(ids)].append(row)
    found: dict[int, np.ndarray] = {}
    for same in lengths.values():
        for at in range(0, len(same), BATCH):
            part = same[at : at + BATCH]
            aux, _, post = reference.batch_states(loaded, [rows[row] for row in part], layers)
            both = torch.cat((aux, post), dim=-1).numpy()
            found.update(zip(part, both, strict=True))
    return (found[row] for row in range(len(rows)))


def _split(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return states[:, :-HIDDEN].contiguous(), states[:, -HIDDEN:].contiguous()


def judge(folder: Path, output: Path) -> Finding:
    """Every sample file below `output`: old ones by their bytes, new ones by their states."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    truth = np.load(folder / "truth.npy", mmap_mode="r")
    starts = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    files = [path for path in output.glob("rows_*/data_*.*") if path.name[0] != "."]
    seen, changed, corrupt, worst, kept = Counter[int](), [], [], 0.0, 0
    for path in files:
        row = int(path.stem.removeprefix("data_"))
        seen[row] += 1
        old = folder / "tree" / path.parent.name / f"{path.stem}.pt"
        if old.exists():
            kept += 1
            if old.read_bytes() != path.read_bytes():
                changed.append(path.name)
            continue
        try:
            worst = max(worst, _error(rows[row], truth[starts[row] : starts[row + 1]], path))
        except Exception as error:  # noqa: BLE001  # whatever a damaged file raises, the finding is the same
            corrupt.append(f"{path.name}: {error}")
    return Finding(
        files=len(files),
        kept=kept,
        lost=[row for row in range(len(rows)) if not seen[row]],
        twice=[row for row, n in seen.items() if n > 1],
        changed=changed,
        corrupt=corrupt,
        max_abs_err=worst,
    )


def _error(row: dict[str, Any], wanted: np.ndarray, path: Path) -> float:
    found = torch.load(path, weights_only=True)
    for key in ("input_ids", "loss_mask"):
        if found[key].tolist() != row[key]:
            raise ValueError(f"{key} is not the row's")
    both = torch.cat((found["aux_hidden_state"][0], found["hidden_state"][0]), dim=-1).numpy()
    if both.shape != wanted.shape or not np.isfinite(both).all():
        raise ValueError(f"states of shape {both.shape}, or not finite")
    error = float(np.abs(both - wanted).max())
    if error > LIMIT:
        raise ValueError(f"off by {error:.1e}")
    return error


def main(verb: str, folder: str, *more: str) -> int:
    import msgspec

    torch.set_num_threads(1)
    if verb == "make":
        make(Path(folder), *map(int, more))
    else:
        print(msgspec.json.encode(judge(Path(folder), Path(more[0]))).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
