"""Make what a trainer needs beside the samples. So far one trainer needs anything: speculators.

Speculators reads one flat folder and a data set saved to disk. `export` makes both beside each other: the table of all
done rows with token counts, and relative links to the samples, numbered as the table. Nothing is copied.

  hs-extract export speculators                  into <output>/export
  hs-extract export speculators --to FOLDER      keep it on the same machine: links point into <output>

Then: --data-path FOLDER. Made again after more samples are done: remove the folder first.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from hsdaemon.cli.settings import add_config, load
from hsdaemon.config import Config
from hsdaemon.data import sqlite
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.dataset import open_dataset
from hsdaemon.data.export import export_speculators
from hsdaemon.data.identity import row_limits
from hsdaemon.data.manifest import every_stored
from hsdaemon.data.sample import BadRow, Sample
from hsdaemon.errors import EXIT_OK, ConfigError, DataError
from hsdaemon.machine.checkpoint import read_model


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("trainer", choices=["speculators"], help="who will read it")
    parser.add_argument("--to", metavar="FOLDER", type=Path, help="the new folder (default: <output>/export)")


def run(args: argparse.Namespace) -> int:
    config = load(args)
    if config.output.format != args.trainer:
        raise ConfigError(f"cannot export for {args.trainer}: output.format is {config.output.format}")
    target = (args.to or Path(config.output.path) / "export").absolute()
    rows = export_speculators(_done(config), target)
    print(f"export: ok rows={rows} folder={target}")
    return EXIT_OK


def _done(config: Config) -> Iterator[tuple[Sample, Path]]:
    """Every done row with its file. Raises DataError when the data set no longer has a row as it was extracted."""
    limits = row_limits(config, read_model(config.model.path))
    with (
        contextlib.closing(sqlite.open_reader(manifest_path(config.output))) as manifest,
        contextlib.closing(open_dataset(config.data, limits)) as dataset,
    ):
        for stored in every_stored(manifest):
            sample = dataset.read(stored.row, stored.hint)
            if isinstance(sample, BadRow) or sample.digest != stored.row_digest:
                raise DataError(f"cannot export row {stored.row}: it was edited since; run hs-extract extract first")
            yield sample, Path(config.output.path) / stored.path
