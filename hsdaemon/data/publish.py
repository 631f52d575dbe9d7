"""From a dump in the spool to a durable file under its final name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hsdaemon.data.formats import Format, Row


@dataclass(frozen=True, slots=True)
class Run:
    """What every dump of this run must say of itself. identity: as the manifest pins it; layers: physical."""

    identity: str
    layers: tuple[int, ...]
    norm: str
    dtype: str
    hidden: int


@dataclass(frozen=True, slots=True)
class Published:
    """A durable file. path: below the output folder; digest: xxh3-128 of the file; adopted: it was already there."""

    row: int
    path: str
    size: int
    digest: bytes
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """A dump that must not become a file. code: "header", "ids", "nonfinite", "zero-row", "zero-layer", "name", ..."""

    row: int
    code: str
    detail: str


class Publisher:
    """Publishes below `root`, quarantines into another folder of the same file system; one per writer thread.

    volume_check(bytes) runs before every publication and raises what stops it; steps(name) hears of each step done.
    """

    def __init__(
        self,
        root: Path,
        quarantine: Path,
        fmt: Format,
        run: Run,
        epoch: str,
        volume_check: Callable[[int], None],
        steps: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.root, self.quarantine, self.format, self.run, self.epoch = root, quarantine, fmt, run, epoch
        self.volume_check, self.steps = volume_check, steps

    def publish(self, sample: Row, dump: Path) -> Published | Rejected:
        """One sample: durable when this returns. Raises DiskFull, BadVolume, and what volume_check raises."""
        return self.publish_many([(sample, dump)])[0]

    def publish_many(self, items: Sequence[tuple[Row, Path]]) -> list[Published | Rejected]:
        """Small samples together: each file synced, then each folder once. Same order as `items`; raises the same."""
        raise NotImplementedError
