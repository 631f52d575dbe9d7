"""What the proof works with: samples of the data set and stored files, found without changing anything."""

from __future__ import annotations

import itertools

from hsdaemon.data.dataset import DataSet
from hsdaemon.data.manifest import Stored
from hsdaemon.data.sample import Sample
from hsdaemon.data.sqlite import SqliteManifest
from hsdaemon.errors import DataError
from hsdaemon.work.proof import Case

FIRST_ROWS = 256  # looked through where no manifest knows the lengths yet
FEW = 3


def gather(dataset: DataSet, manifest: SqliteManifest | None, stored: int) -> Case:
    """stored: how many done rows to compare with. Raises DataError when no row of the data set is usable."""
    first = [row for row in itertools.islice(dataset.rows(), FIRST_ROWS) if isinstance(row, Sample)]
    known = _longest(dataset, manifest)
    longest = max([*first, *known], key=lambda sample: sample.tokens, default=None)
    if longest is None:
        raise DataError(f"cannot prove the engine: none of the first {FIRST_ROWS} rows is usable; run hs-extract check")
    return Case(longest, first[:FEW], _stored(dataset, manifest, stored))


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
