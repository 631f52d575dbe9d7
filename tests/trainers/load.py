"""Runs in the trainers' environment: load a tree with a trainer's own loader, hand the tensors back as .npz.

load.py TRAINER FOLDER OUT.npz: keys "<i>.<name>" for each sample in the loader's order, "batch.<name>" for all.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

Sample = dict[str, Any]


def plain(tensor: torch.Tensor) -> Any:
    """bfloat16 as its bits."""
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def specforge(folder: str) -> tuple[list[Sample], Sample]:
    plane = "specforge.runtime.data_plane"
    reader = importlib.import_module(f"{plane}.offline_reader").OfflineManifestReader(folder, validate_files=True)
    loader = importlib.import_module(f"{plane}.feature_dataloader").FeatureDataLoader(
        importlib.import_module(f"{plane}.feature_store").LocalFeatureStore(),
        refs=reader.read(),
        per_sample_transform=importlib.import_module("specforge.algorithms.eagle3.data").build_offline_normalizer(4096),
    )
    samples = [{name: value[0] for name, value in batch.tensors.items()} for batch in loader]
    return samples, importlib.import_module("specforge.data.utils").DataCollatorWithPadding()(samples)


def modelopt(folder: str) -> tuple[list[Sample], Sample]:
    utils = importlib.import_module("modelopt.torch.speculative.eagle.utils")
    data = utils.OfflineSupervisedDataset(sorted(map(str, Path(folder).rglob("*.pt"))), answer_only_loss=True)
    samples = [data[i] for i in range(len(data))]
    batch = utils.EagleOfflineDataCollator(64)(samples)
    return samples, batch | batch.pop("base_model_outputs")


def speculators(folder: str) -> tuple[list[Sample], Sample]:
    train = importlib.import_module("speculators.train.data")
    shift = importlib.import_module("speculators.models.eagle3.data").shift_batch
    data = train.ArrowDataset(4096, folder, on_missing="raise")
    samples = [data[i] for i in range(len(data))]
    width = samples[0]["verifier_last_hidden_states"].shape[-1]
    batch = train.CollateFn(4096, width, preprocess=shift)(samples)
    counts = torch.load(Path(folder) / "token_freq.pt", weights_only=True)
    return samples, batch | {"token_freq": torch.tensor(sorted(counts.items()))}


def main(trainer: str, folder: str, out: str) -> None:
    samples, batch = {"specforge": specforge, "modelopt": modelopt, "speculators": speculators}[trainer](folder)
    arrays = {f"{i}.{k}": plain(v) for i, s in enumerate(samples) for k, v in s.items() if isinstance(v, torch.Tensor)}
    arrays |= {f"batch.{k}": plain(v) for k, v in batch.items() if isinstance(v, torch.Tensor)}
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
