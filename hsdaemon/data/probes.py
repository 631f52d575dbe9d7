"""Volume, manifest and spool as the supervisor sees them: each asked in a child, since each can hang with its disk.

The supervisor only looks: it makes neither folder nor manifest, so nothing is left on the root disk below a mount point
whose volume is late.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hsdaemon import wire
from hsdaemon.config import Output
from hsdaemon.core.model import Outcome, Progress, Spool, Unadopted, Unreadable, Volume
from hsdaemon.errors import HsError
from hsdaemon.machine import disk
from hsdaemon.machine.child import Child, NoAnswer

FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk is told by its free bytes, not by a failed probe
VERDICT = {"no-marker": "no-marker", "foreign": "foreign", "not-a-mount": "not-mounted", "unreadable": "io-error"}


def unreadable(port: str, answer: NoAnswer) -> Unreadable:
    return Unreadable(port, answer.detail, "" if answer.kind == "died" else "hang")


@dataclass(frozen=True)
class Pinned:
    """A reply of the manifest's child: counts, and the volume that the manifest belongs to."""

    progress: Progress
    volume: str


class ManifestProbe:
    """The port ManifestPort. `volume`: UUID that the manifest names, "" until one was read."""

    def __init__(self, output: Output, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._child = Child("manifest", lambda _question: look_at_manifest(output))
        self.volume = ""

    def read(self) -> Progress | Unadopted | Unreadable | None:
        answer = self._child.ask(None, self._deadline_s)
        if isinstance(answer, NoAnswer):
            return unreadable("manifest", answer)
        if isinstance(answer, Pinned):
            self.volume = answer.volume
            return answer.progress
        return answer if isinstance(answer, Unadopted | Unreadable) else None

    def close(self) -> None:
        self._child.close()


def look_at_manifest(output: Output) -> Pinned | Unadopted | Unreadable | None:
    """Opened anew each time: a connection to a volume that went away would go on answering from nowhere."""
    from hsdaemon.data.adopt import has_samples
    from hsdaemon.data.backup import manifest_path
    from hsdaemon.data.connect import Damaged  # in the child alone, like SQLite itself
    from hsdaemon.data.sqlite import ADOPTING, open_reader

    try:
        path = manifest_path(output)
        if not path.exists() or not path.stat().st_size:
            return Unadopted() if has_samples(Path(output.path)) else None
        manifest = open_reader(path)
        try:
            c = manifest.counts()
            if manifest.mark(ADOPTING):
                return Unadopted(c.done, c.total)
            progress = Progress(c.total, c.done, c.failed, c.skipped, c.ingest_complete, c.bytes, c.tokens)
            return Pinned(progress, manifest.volume())
        finally:
            manifest.close()
    except Damaged as error:
        return Unreadable("manifest", str(error), "damaged")
    except (HsError, OSError) as error:
        return Unreadable("manifest", str(error))


class VolumeProbe:
    """The port VolumePort. `expected`: the UUID that the manifest names, "" when there is none yet; writes: whether a
    small file is written and synced each time."""

    def __init__(self, output: Output, deadline_s: float, expected: Callable[[], str], *, writes: bool = True) -> None:
        self._deadline_s = deadline_s
        self._expected = expected
        self._child = Child("volume", lambda uuid: look_at_volume(output, uuid, writes=writes))

    def read(self) -> Volume | Unreadable:
        answer = self._child.ask(self._expected(), self._deadline_s)
        if isinstance(answer, NoAnswer):
            return unreadable("volume", answer)
        assert isinstance(answer, Volume)
        return answer

    def close(self) -> None:
        self._child.close()


def look_at_volume(output: Output, expected: str, *, writes: bool = True) -> Volume:
    """Marker, mount, space, and a write that is synced: mount options and statvfs say rw for a dead disk too."""
    from hsdaemon.data.volume import VolumeAway, read_marker, volume_root

    root = volume_root(output)
    try:
        uuid = read_marker(root)
        if expected and uuid != expected:
            return Volume("foreign", f"the volume is {uuid}, the manifest's is {expected}", uuid=uuid)
        if output.volume_is_mount and not os.path.ismount(root):
            return Volume("not-mounted", f"nothing is mounted at {root}", uuid=uuid)
        target = Path(output.path)
        folder = target if target.is_dir() else root
        space = os.statvfs(folder)
        free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        failed = disk.probe_write(folder) if writes else None
    except VolumeAway as error:
        return Volume(VERDICT.get(error.code, "io-error"), str(error))
    except (HsError, OSError) as error:
        return Volume("io-error", str(error))
    if failed is not None and failed.errno not in FULL:
        verdict = "read-only" if failed.errno == errno.EROFS else "io-error"
        return Volume(verdict, f"cannot write below {folder}: {failed.strerror}", free, total, uuid)
    if failed is not None and not space.f_favail:
        free = 0  # out of inodes: blocks are left and cannot be used
    return Volume("ok", "", free, total, uuid)


class SpoolProbe:
    """The port SpoolPort."""

    def __init__(self, root: str, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._child = Child("spool", lambda verb: serve_spool(Path(root), verb))

    def read(self) -> Spool | Unreadable:
        answer = self._child.ask("look", self._deadline_s)
        if isinstance(answer, NoAnswer):
            return unreadable("spool", answer)
        assert isinstance(answer, Spool | Unreadable)
        return answer

    def sweep(self) -> Outcome:
        answer = self._child.ask("sweep", self._deadline_s)
        return answer if isinstance(answer, Outcome) else Outcome("failed", str(getattr(answer, "detail", answer)))

    def close(self) -> None:
        self._child.close()


def serve_spool(root: Path, verb: str) -> Spool | Outcome | Unreadable:
    """A spool that is not there is an empty one: a reboot takes it."""
    from hsdaemon.data import spool

    try:
        epoch = (disk.read(root / wire.EPOCH_FILE) or b"").decode(errors="replace").strip()
        if verb == "sweep":
            spool.sweep(root, epoch)
            return Outcome("done")
        return _spool(root, epoch)
    except FileNotFoundError:
        return Outcome("done") if verb == "sweep" else Spool()
    except (HsError, OSError) as error:
        return Outcome("failed", str(error)) if verb == "sweep" else Unreadable("spool", str(error))


def _spool(root: Path, epoch: str) -> Spool:
    used = files = orphans = 0
    with os.scandir(root) as entries:
        for entry in entries:
            rid = wire.spool_rid(entry.name)
            if rid is None or entry.is_dir(follow_symlinks=False):
                continue
            try:
                used += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue  # published or given up meanwhile
            files += 1
            orphans += rid.epoch != epoch
    return Spool(used, files, orphans)
