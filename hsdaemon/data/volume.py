"""Is this our volume, mounted, writable and not full? Asked of the path before every publication: descriptors opened
earlier go on writing to a volume that was unmounted, where nobody will look.

Identity is the UUID in the marker file. st_dev is compared only while the volume stays mounted; after a loss `take`
looks anew. Only `init` makes the marker, by a person's command.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import uuid
from pathlib import Path

from hsdaemon.config import Output
from hsdaemon.errors import DiskFull, StoreError, Transient
from hsdaemon.machine import disk
from hsdaemon.wire import parse_json

MARKER = ".hs-extract-volume"
MARKER_VERSION = 1
MIB = 2**20

# statfs magic of file systems that share a file between hosts: the manifest's WAL needs memory of one host.
_NETWORK = {
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x517B: "SMB",
    0x0BD00BD0: "Lustre",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x01021997: "9p",
}
_FUSE = 0x65735546


class VolumeAway(Transient):
    """The volume is not there, is another one, or refuses writes: write nothing, wait. code: "no-marker", "foreign",
    "not-a-mount", "changed", "unreadable", "read-only"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def volume_root(output: Output) -> Path:
    """Folder that carries the marker."""
    return Path(output.volume) if output.volume else Path(output.path).parent


def init_volume(root: Path) -> str:
    """Mark the volume; gives its UUID. A marker that is there stays. Raises StoreError, DiskFull, BadVolume."""
    if (root / MARKER).exists():
        return read_marker(root)
    made = str(uuid.uuid4())
    disk.replace(root / MARKER, json.dumps({"version": MARKER_VERSION, "uuid": made}).encode() + b"\n", 0o644)
    return made


def read_marker(root: Path) -> str:
    """UUID of the volume. Raises VolumeAway when there is no marker, StoreError when it is not one that we know."""
    path = root / MARKER
    try:
        fields = parse_json(path.read_bytes())
        version, found = int(fields["version"]), str(uuid.UUID(fields["uuid"]))
    except FileNotFoundError:
        raise VolumeAway("no-marker", f"cannot find the volume: no marker {path}; mount it, or mark it: init") from None
    except OSError as error:
        raise VolumeAway("unreadable", f"cannot read {path}: {error.strerror}; see to the volume") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"cannot read {path}: {error}; restore it, or remove it and run hs-extract init") from None
    if version > MARKER_VERSION:
        raise StoreError(f"cannot use {path}: version {version} is newer than this program; use the newer program")
    return found


class Guard:
    """The check before each write below output.path. Raises nothing at construction: `take` looks first."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.root = volume_root(output)
        self.target = Path(output.path)
        self.uuid: str | None = None  # the one that the manifest names; None: any marker will do
        self._device: int | None = None

    def take(self) -> str:
        """Take the volume's identity anew, probe that it can be written; gives its UUID. Raises VolumeAway, DiskFull,
        StoreError. The output folder is made if need be."""
        self._marked()
        try:
            disk.make_folder(self.target)
        except OSError as error:
            raise self._refusal(error) from None
        found = self.again()
        self.probe()
        return found

    def again(self) -> str:
        """Our volume, which may have been mounted anew; gives its UUID. Raises VolumeAway, DiskFull, StoreError."""
        found = self._marked()
        self._device = self._target_device()
        return found

    def present(self) -> None:
        """Still our volume. Raises VolumeAway, StoreError. What is not found below its path is gone only after this."""
        self._marked()
        device = self._target_device()
        if self._device is not None and device != self._device:
            raise VolumeAway(
                "changed", f"cannot write below {self.target}: another file system is there since the start"
            )

    def check(self, size: int = 0) -> None:
        """Still our volume, with `size` bytes above the floor. Raises VolumeAway, DiskFull, StoreError."""
        self.present()
        try:
            free = disk.free_bytes(self.target)
        except OSError as error:
            raise self._refusal(error) from None
        floor = size + self._output.reserve_mib * MIB
        if free < floor:
            raise DiskFull(
                f"cannot write below {self.target}: {free // MIB} MiB free, {-(-floor // MIB)} MiB needed with the "
                "reserve; free some space, the work goes on by itself"
            )

    def probe(self) -> None:
        """Write and sync a few bytes: mount options may still say rw after an error. Raises VolumeAway, DiskFull."""
        problem = disk.probe_write(self.target)
        if problem is not None:
            raise self._refusal(problem)

    def _target_device(self) -> int:
        try:
            return self.target.stat().st_dev
        except OSError as error:
            raise self._refusal(error) from None

    def _marked(self) -> str:
        found = read_marker(self.root)
        if self.uuid is not None and found != self.uuid:
            text = (
                f"cannot write below {self.root}: its volume is {found}, the manifest's is {self.uuid}; mount that one"
            )
            raise VolumeAway("foreign", text)
        if self._output.volume_is_mount and self.root.stat().st_dev == self.root.parent.stat().st_dev:
            raise VolumeAway(
                "not-a-mount", f"cannot write below {self.root}: nothing is mounted there; mount the volume"
            )
        return found

    def _refusal(self, error: OSError) -> VolumeAway | DiskFull:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"cannot write below {self.target}: no space left; free some, the work goes on by itself")
        code = "read-only" if error.errno == errno.EROFS else "unreadable"
        return VolumeAway(code, f"cannot write below {self.target}: {error.strerror}; see to the volume")


class _Statfs(ctypes.Structure):
    """struct statfs of 64-bit Linux; only the magic is read."""

    _fields_ = [("f_type", ctypes.c_long), ("rest", ctypes.c_byte * 256)]


def file_system(folder: Path) -> int:
    """statfs magic. Raises StoreError."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = _Statfs()
    if libc.statfs(os.fsencode(folder), ctypes.byref(found)):
        cause = os.strerror(ctypes.get_errno())
        raise StoreError(f"cannot look at the file system of {folder}: {cause}; see to the folder")
    return int(found.f_type) & 0xFFFFFFFF


def require_local(folder: Path, magic: int, *, allow_fuse: bool) -> None:
    """Raises StoreError for a file system on which the manifest's WAL could be corrupted. magic: of file_system."""
    kind = "FUSE" if magic == _FUSE and not allow_fuse else _NETWORK.get(magic)
    if kind is not None:
        raise StoreError(
            f"cannot keep the manifest in {folder}: {kind} has no memory shared by all who open it; "
            "set output.manifest to a folder on a local disk"
        )
