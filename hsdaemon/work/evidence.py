"""What the proof works with: samples of the data set and stored files, found without changing anything."""

from __future__ import annotations

import dataclasses

from hsdaemon.data.dataset import DataSet
from hsdaemon.data.identity import RunIdentity
from hsdaemon.data.manifest import Stored
from hsdaemon.data.sample import Sample
from hsdaemon.data.sqlite import SqliteManifest
from hsdaemon.errors import DataError, Transient
from hsdaemon.work.proof import Case

FIRST_ROWS = 256  # looked through where no manifest knows the lengths yet
FEW = 3


def gather(
    dataset: DataSet, manifest: SqliteManifest | None, identity: RunIdentity, stored: int, most_tokens: int
) -> Case:
    """identity: of the output; stored: how many done rows to compare with; most_tokens: whose dump the spool can hold:
    longer prompts are cut, longer rows not sent now. Raises DataError when no row of the data set is usable,
    Transient when none of the stored rows can be captured again for want of room."""
    first = _usable(dataset)
    known = _longest(dataset, manifest)
    longest = max([*first, *known], key=lambda sample: sample.tokens, default=None)
    if longest is None:
        raise DataError(f"cannot prove the engine: no row of {dataset.path} is usable; run hs-extract check")
    cut = [dataclasses.replace(sample, ids=sample.ids[:most_tokens]) for sample in (longest, *first[:FEW])]
    pairs = _stored(dataset, manifest, stored)
    kept = [pair for pair in pairs if pair[0].tokens <= most_tokens]
    if pairs and not kept:
        raise Transient(
            f"cannot prove the engine: the stored samples have more than the {most_tokens} tokens for which there is "
            "room in the spool; enlarge its tmpfs, or raise spool.budget_mib"
        )
    return Case(identity, cut[0], cut[1:], kept)


def _usable(dataset: DataSet) -> list[Sample]:
    """Of the first FIRST_ROWS rows; where none of them can be used, the first one that can."""
    found: list[Sample] = []
    for entry in dataset.rows():
        if isinstance(entry, Sample):
            found.append(entry)
        if found and entry.row >= FIRST_ROWS - 1:
            break
    return found


def _longest(dataset: DataSet, manifest: SqliteManifest | None) -> list[Sample]:
    found = manifest.longest() if manifest else None
    sample = dataset.read(*found) if found else None
    return [sample] if isinstance(sample, Sample) else []


def _stored(dataset: DataSet, manifest: SqliteManifest | None, wanted: int) -> list[tuple[Sample, Stored]]:
    """Done rows from the beginning, the end and the middle, whose data set row is still what was captured."""
    if manifest is None or not wanted:
        return []
    pairs = []
    for kept in manifest.spread(wanted):
        sample = dataset.read(kept.row, kept.hint)
        if isinstance(sample, Sample) and sample.digest == kept.row_digest:
            pairs.append((sample, kept))
    return pairs
