"""Every state that a power cut during publication and commit can leave, each started from by the product itself.

A run publishes samples one by one and in a group, with a commit after each, on a file system whose writes are logged
(blklog). Then each state of that disk is mounted, judged as it lies, opened as a worker opens it, judged again and
worked on to the end. Needs root.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import blklog
from outputs import config_for, extract, lines, publish, publisher, ready
from samples import dump_of, states_of

from hsdaemon.config import Config
from hsdaemon.data import verify
from hsdaemon.data.adopt import QUARANTINE
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.formats import Damaged, check_content
from hsdaemon.data.manifest import Claim, Done, Stored, every_stored
from hsdaemon.data.publish import Published, Publisher
from hsdaemon.data.sample import Sample
from hsdaemon.data.sqlite import exists, open_reader
from hsdaemon.data.store import Store
from hsdaemon.data.volume import init_volume
from hsdaemon.errors import HsError

# MiB and mkfs of the smallest that each gives without changing how it works.
SYSTEMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ext4": (48, ("mkfs.ext4", "-q", "-F", "-O", "^resize_inode", "-J", "size=4")),
    "xfs": (64, ("mkfs.xfs", "-q", "-f", "--unsupported", "-l", "size=8m")),
    "btrfs": (112, ("mkfs.btrfs", "-q", "-f")),
}
ALONE, GROUP, ROWS = 3, 4, 10  # one by one, together, in all: the rest is in flight or pending
EARLIER, LATER = "00112233445566ff", "ffeeddccbbaa0011"  # epochs


@dataclass(slots=True)
class Story:
    """A recorded run. acked: log position from which these rows must be done, and a copy of a manifest that lies
    elsewhere as it was then."""

    folder: Path
    config: Config
    mount: Path
    kind: str
    acked: list[tuple[int, frozenset[int], Path | None]] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def note(self, store: Store) -> None:
        """What is acknowledged now."""
        rows = frozenset(kept.row for kept in every_stored(store.manifest))
        copy = None
        if self.config.output.manifest:
            copy = self.folder / f"manifest-{len(self.acked)}"
            # Another process copies: closing a descriptor on the database here would drop its locks.
            subprocess.run(["cp", "-a", self.config.output.manifest, copy], check=True)
            (copy / "manifest.db-shm").unlink(missing_ok=True)
        self.acked.append((blklog.position(self.log), rows, copy))

    def due(self, place: int) -> tuple[frozenset[int], Path | None] | None:
        """Rows that must be done in a state at `place`; None: before the first start was over."""
        found = [(rows, copy) for at, rows, copy in self.acked if at <= place]
        return found[-1] if found else None


def record(folder: Path, kind: str, *, elsewhere: bool) -> Story:
    """Publish and commit on a fresh file system. elsewhere: the manifest is on another one."""
    mib, mkfs = SYSTEMS[kind]
    folder.mkdir()
    with blklog.record(folder / "log", mib, mkfs) as mount:
        init_volume(mount)
        more = {"manifest": str(folder / "manifest")} if elsewhere else {}
        (folder / "manifest").mkdir()
        config = config_for(folder, lines(ROWS, 60), path=str(mount / "states"), volume=str(mount), **more)
        story = Story(folder, config, mount, kind)
        store = ready(config, EARLIER)
        story.note(store)
        _work(store, story)
        store.background.stop()
        store.manifest.close()
        store._lock.release()
    return story


def _work(store: Store, story: Story) -> None:
    writer = publisher(store)
    for _ in range(ALONE):
        (claim,) = store.manifest.claim(1)
        store.manifest.commit([publish(store, claim, story.folder, writer)])
        story.note(store)
    store.manifest.checkpoint(truncate=True)
    store.manifest.commit(_together(store, story.folder, writer, store.manifest.claim(GROUP)))
    story.note(store)
    for claim in store.manifest.claim(2)[:1]:  # published and not committed; the other one only claimed
        publish(store, claim, story.folder, writer)


def _together(store: Store, folder: Path, writer: Publisher, claims: list[Claim]) -> list[Done]:
    pairs = []
    for claim in claims:
        sample = store.dataset.read(claim.row, claim.hint)
        assert isinstance(sample, Sample)
        states = states_of(sample.tokens, store.identity.hidden, claim.row)
        pairs.append((sample, dump_of(folder, sample, store.identity, states)))
    outcomes = [outcome for outcome in writer.publish_many(pairs) if isinstance(outcome, Published)]
    return [Done(o.row, c.lease, o.path, o.size, o.digest) for c, o in zip(claims, outcomes, strict=True)]


@contextlib.contextmanager
def mounted(story: Story, image: Path, copy: Path | None) -> Iterator[None]:
    """A state of the disk where the disk was, and the manifest elsewhere as it was then."""
    if copy is not None:
        shutil.rmtree(story.folder / "manifest")
        shutil.copytree(copy, story.folder / "manifest")
    if story.kind == "btrfs":  # or the kernel refuses an older state of a disk that it has seen
        subprocess.run(["btrfs", "device", "scan", "--forget"], check=False, capture_output=True)
    subprocess.run(["mount", "-o", "loop", image, story.mount], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", story.mount], check=True)


def judge(story: Story, place: int, image: Path) -> str | None:
    """What is wrong with one state, or None."""
    due = story.due(place)
    assert due is not None
    with mounted(story, image, due[1]):
        return as_it_lies(story.config, due[0]) or after_a_start(story, due[0])


def as_it_lies(config: Config, due: frozenset[int]) -> str | None:
    """Before anything of ours has run there."""
    root = Path(config.output.path)
    for path in root.glob("rows_*/*.ckpt"):
        try:
            check_content(path)
        except Damaged as error:
            return f"half a file under a final name: {error}"
    reader = open_reader(manifest_path(config.output)) if exists(manifest_path(config.output)) else None
    if reader is None:
        return "the manifest is gone"
    with contextlib.closing(reader):
        return reader.integrity() or _files(root, list(every_stored(reader)), due)


def _files(root: Path, stored: list[Stored], due: frozenset[int]) -> str | None:
    """Whether the done rows are those that must be, each with its file, whole."""
    missing = due - {kept.row for kept in stored}
    if missing:
        return f"acknowledged rows are not done: {sorted(missing)}"
    found = next(filter(None, (verify.deep(root, kept) for kept in stored)), None)
    return f"row {found.row} is done, but {found.reason}" if found else None


def after_a_start(story: Story, due: frozenset[int]) -> str | None:
    """Open it as a worker does, and work to the end."""
    try:
        store = ready(story.config, LATER)
    except (HsError, OSError) as error:
        return f"the start fails: {error}"
    try:
        return _started(store, due) or _finished(store, story.folder)
    finally:
        store.close()


def _started(store: Store, due: frozenset[int]) -> str | None:
    counts, stored = store.manifest.counts(), list(every_stored(store.manifest))
    if counts.total != ROWS or counts.done + counts.pending != ROWS or counts.done != len(stored):
        return f"the counts do not balance: {counts}"
    named = {str(path.relative_to(store.root)) for path in store.root.glob("rows_*/*.ckpt")}
    if named != {kept.path for kept in stored}:
        return f"files are neither adopted nor put aside: {sorted(named)}"
    if (store.root / QUARANTINE).exists():
        return "a whole file was put aside"
    return store.manifest.integrity() or _files(store.root, stored, due)


def _finished(store: Store, folder: Path) -> str | None:
    extract(store, folder)
    left = [path.name for path in store.root.glob(".*")]
    if left:
        return f"temporary names stay: {left}"
    return _started(store, frozenset(range(ROWS)))


def enumerate_states(story: Story, most: int, every: int = 1) -> tuple[int, list[str]]:
    """Number of states judged, and what was wrong in them. most: of prefixes of the write order; each flush adds one
    with a random half of the writes before it; every: judge one in so many."""
    count, wrong = 0, []
    for number, (place, image) in enumerate(blklog.states(story.log, most)):
        if story.due(place) is None or number % every:
            continue
        count += 1
        problem = judge(story, place, image)
        if problem is not None:
            wrong.append(f"at write {place}: {problem}")
    return count, wrong
