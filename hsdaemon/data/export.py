"""What the speculators trainer wants beside the samples: a data set saved to disk, token counts, one flat folder.

    <target>/data-00000-of-00001.arrow  state.json  dataset_info.json     columns input_ids, loss_mask, seq_len
    <target>/token_freq.pt                                                id -> count, where the mask is 1
    <target>/hidden_states/hs_<i>.safetensors                             links to the samples, i = row of the table

Only done rows are in it, numbered anew without gaps: the trainer's numbering is that of its table. The folder is made
under a temporary name and renamed when whole: a crash leaves a folder that no one reads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from hsdaemon.data.formats.container import archive, pickle_counts
from hsdaemon.data.formats.parts import Ints, mask_of
from hsdaemon.data.sample import Sample
from hsdaemon.errors import StoreError
from hsdaemon.machine import disk

ARROW_NAME = "data-00000-of-00001.arrow"
COLUMNS = ("input_ids", "loss_mask", "seq_len")
_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())])
_BATCH = 1000  # rows


def export_speculators(rows: Iterable[tuple[Sample, Path]], target: Path) -> int:
    """Write the folder from done rows and their files; gives the number of rows. Raises StoreError, DiskFull."""
    if target.exists():
        raise StoreError(f"cannot export to {target}: it exists; remove it or name another folder")
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir()
        (draft / "hidden_states").mkdir()
        count = _fill(rows, draft, target)
        disk.sync_tree(draft)
        draft.rename(target)
        disk.sync_folder(target.parent)
    except OSError as error:
        raise disk.explain(error, target.parent) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return count


def _fill(rows: Iterable[tuple[Sample, Path]], draft: Path, target: Path) -> int:
    """Table, links and counts. Raises OSError, StoreError when there is not one row."""
    counts, batch, number = np.zeros(0, np.int64), list[Sample](), 0
    with pa.OSFile(str(draft / ARROW_NAME), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        for number, (sample, path) in enumerate(rows, 1):  # the last one counts
            link = draft / "hidden_states" / f"hs_{number - 1}.safetensors"
            link.symlink_to(os.path.relpath(path, target / "hidden_states"))
            counts = _count(counts, sample)
            batch.append(sample)
            if len(batch) == _BATCH:
                writer.write_batch(_record(batch))
                batch.clear()
        if batch:
            writer.write_batch(_record(batch))
    if not number:
        raise StoreError("cannot export: no row is done yet; run hs-extract extract")
    (draft / "state.json").write_text(json.dumps(_state(), indent=2))
    (draft / "dataset_info.json").write_text(json.dumps(_info(), indent=2))
    freq = {int(token): int(counts[token]) for token in np.flatnonzero(counts)}
    parts = archive([("data.pkl", pickle_counts(freq)), ("byteorder", b"little"), ("version", b"3\n")])
    (draft / "token_freq.pt").write_bytes(b"".join(part for part in parts if isinstance(part, bytes)))
    return number


def _count(counts: Ints, sample: Sample) -> Ints:
    found = np.bincount(sample.ids[mask_of(sample) == 1])
    grown = np.zeros(max(len(found), len(counts)), np.int64)
    grown[: len(counts)] += counts
    grown[: len(found)] += found
    return grown


def _record(batch: list[Sample]) -> pa.RecordBatch:
    columns = [[s.ids for s in batch], [mask_of(s) for s in batch], [len(s.ids) for s in batch]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=_SCHEMA)


def _state() -> dict[str, object]:
    """What `load_from_disk` reads first: files and the torch format."""
    return {
        "_data_files": [{"filename": ARROW_NAME}],
        "_fingerprint": os.urandom(8).hex(),
        "_format_columns": list(COLUMNS),
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }


def _info() -> dict[str, object]:
    number = {"dtype": "int64", "_type": "Value"}
    numbers = {"feature": number, "_type": "List"}
    features = {"input_ids": numbers, "loss_mask": numbers, "seq_len": number}
    return {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
