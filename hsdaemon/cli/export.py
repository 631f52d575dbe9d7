"""Make something else of what is stored: what a trainer needs beside the samples, or the same samples smaller.

Speculators reads one flat folder and a data set saved to disk. `export speculators` makes both beside each other: the
table of all done rows with token counts, and relative links to the samples, numbered as the table. Nothing is copied.
Made again after more samples are done: remove the folder first.

`export compressed` writes each done sample, smaller by about 30 per cent and without losing a bit, into another folder;
no trainer reads those. `export restored` gives the very files back. Both go on where they were interrupted.

  hs-extract export speculators                          into <output>/export; then: --data-path FOLDER
  hs-extract export speculators --to FOLDER              keep it on the same machine: links point into <output>
  hs-extract export compressed --to FOLDER               needs: pip install 'hsdaemon[compress]'
  hs-extract export restored --from FOLDER --to FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hsdaemon.cli.settings import add_config, load
from hsdaemon.config import Config
from hsdaemon.data import sqlite
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.dataset import open_dataset
from hsdaemon.data.export import export_speculators
from hsdaemon.data.identity import row_limits
from hsdaemon.data.manifest import every_stored
from hsdaemon.data.sample import BadRow, Sample
from hsdaemon.data.verify import location
from hsdaemon.errors import EXIT_OK, ConfigError, DataError
from hsdaemon.machine.checkpoint import read_model

if TYPE_CHECKING:
    from hsdaemon.data.compress import Tally


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("what", choices=["speculators", "compressed", "restored"], help="what to make")
    parser.add_argument("--to", metavar="FOLDER", type=Path, help="the new folder (speculators: <output>/export)")
    parser.add_argument("--from", dest="source", metavar="FOLDER", type=Path, help="restored: the compressed samples")


def run(args: argparse.Namespace) -> int:
    if args.what == "restored":
        return _restore(args)
    config = load(args)
    if args.what == "compressed":
        return _compress(args, config)
    if config.output.format != args.what:
        raise ConfigError(f"cannot export for {args.what}: output.format is {config.output.format}")
    target = (args.to or Path(config.output.path) / "export").absolute()
    rows = export_speculators(_done(config), target)
    print(f"export: ok rows={rows} folder={target}")
    return EXIT_OK


def _compress(args: argparse.Namespace, config: Config) -> int:
    from hsdaemon.data import compress  # its library is an extra

    target = _named(args.to, "--to")
    if target.is_relative_to(Path(config.output.path).absolute()):
        raise ConfigError(f"cannot compress into {target}: it is inside of the output; name a folder beside it")
    with contextlib.closing(sqlite.open_reader(manifest_path(config.output))) as manifest:
        tally = compress.compress_rows(
            every_stored(manifest), Path(config.output.path), target, manifest.identity().dtype
        )
    return _told(tally, target)


def _restore(args: argparse.Namespace) -> int:
    from hsdaemon.data import compress

    target = _named(args.to, "--to")
    return _told(compress.restore_all(_named(args.source, "--from"), target), target)


def _named(folder: Path | None, option: str) -> Path:
    if folder is None:
        raise ConfigError(f"cannot export: {option} not given; name a folder")
    return folder.absolute()


def _told(tally: Tally, target: Path) -> int:
    ratio = tally.payload / tally.packed if tally.packed else 1.0
    print(
        f"export: ok files={tally.files} skipped={tally.skipped} mb={tally.payload / 1e6:.0f}"
        f" packed_mb={tally.packed / 1e6:.0f} ratio={ratio:.3f} folder={target}"
    )
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
            path = location(Path(config.output.path), stored.path)
            if path is None:
                raise DataError(
                    f"cannot export row {stored.row}: its path leads out of the output; run hs-extract verify"
                )
            yield sample, path
