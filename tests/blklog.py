"""Every state a disk can have after a power cut: block-level write-order enumeration, without device-mapper.

    with record("/var/tmp/rec") as mount:                       # a fresh ext4; each write to its disk is logged
        publish(mount, 1); acked[1] = position("/var/tmp/rec")  # from this log position on, item 1 must survive
    for place, image in states("/var/tmp/rec"):                 # mount the disk as it was then, and check it

Needs root, e2fsprogs and qemu-storage-daemon (package qemu-system-common), which logs in the dm-log-writes format.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

FLUSH, FUA, DISCARD = 1, 2, 4
SECTOR = 512


@contextlib.contextmanager
def record(
    folder: str | Path,
    mib: int = 48,
    mkfs: Sequence[str] = ("mkfs.ext4", "-q", "-F", "-O", "^resize_inode", "-J", "size=4"),
) -> Iterator[Path]:
    """Yield the mount point of a fresh file system of `mib` MiB whose disk writes are logged, with their flushes.

    folder: new folder for the images.  Raises subprocess.CalledProcessError when a tool fails."""
    mount, base, log, export, pid = (Path(folder, n) for n in ("mount", "base.img", "log.img", "export.img", "pid"))
    mount.mkdir(parents=True)
    for image, size in ((base, mib << 20), (log, 1 << 30), (export, 0)):
        image.touch()
        os.truncate(image, size)
    subprocess.run([*mkfs, base], check=True, capture_output=True)
    _copy(base, Path(folder, "clean.img"))
    nodes = [
        f"driver=file,node-name=f0,filename={base}",
        f"driver=file,node-name=f1,filename={log}",
        "driver=raw,node-name=r0,file=f0",
        "driver=raw,node-name=r1,file=f1",
        f"driver=blklogwrites,node-name=b,file=r0,log=r1,log-sector-size={SECTOR}",
    ]
    subprocess.run(
        [
            "qemu-storage-daemon",
            *(word for node in nodes for word in ("--blockdev", node)),
            "--export",
            f"type=fuse,id=e,node-name=b,mountpoint={export},writable=on",
            "--pidfile",
            pid,
            "--daemonize",
        ],
        check=True,
    )
    daemon = int(pid.read_text())
    try:
        subprocess.run(["mount", "-o", "loop", export, mount], check=True)
        try:
            yield mount
        finally:
            subprocess.run(["umount", mount], check=True)
    finally:
        os.kill(daemon, 15)
        end = time.monotonic() + 30
        while os.path.exists(f"/proc/{daemon}"):  # a daemon of its own: not our child, so nothing to wait for
            assert time.monotonic() < end, f"the storage daemon {daemon} does not end"
            time.sleep(0.02)  # until `end`


def position(folder: str | Path) -> int:
    """The number of log entries so far."""
    return int(struct.unpack("<QQQI", Path(folder, "log.img").open("rb").read(28))[2])


def states(folder: str | Path, most: int = 150, seed: int = 1) -> Iterator[tuple[int, Path]]:
    """Yield (position, image): about `most` prefixes of the write order and, at each flush, a random half of the writes
    since the flush before.  The next state overwrites the image; mounting it is allowed."""
    count, choose = position(folder), random.Random(seed)
    clean, written, durable, image = (Path(folder, f"{n}.img") for n in ("clean", "written", "durable", "state"))
    _copy(clean, written)
    _copy(clean, durable)
    window: list[tuple[int, int, bytes]] = []  # flags, offset and data since the last flush
    place = SECTOR
    with Path(folder, "log.img").open("rb") as log:
        for number in range(1, count + 1):
            log.seek(place)
            sector, length, flags, _ = struct.unpack("<QQQQ", log.read(32))
            place += SECTOR
            if flags & FLUSH:
                _copy(durable, image)
                _apply(image, [w for w in window if w[0] & FUA or choose.random() < 0.5])
                yield number - 1, image
                _apply(durable, window)
                window = []
            if length and not flags & DISCARD:
                log.seek(place)
                window.append((flags, sector * SECTOR, log.read(length * SECTOR)))
                place += length * SECTOR
                _apply(written, window[-1:])
            if number % max(1, count // most) == 0:
                _copy(written, image)
                yield number, image


def _copy(source: Path, target: Path) -> None:
    """Holes stay holes: most of an image is one. The target is a new file: the loop device of a state that was just
    unmounted may still write its last blocks, into the old one."""
    target.unlink(missing_ok=True)
    subprocess.run(["cp", "--sparse=auto", source, target], check=True)


def _apply(image: Path, writes: list[tuple[int, int, bytes]]) -> None:
    with image.open("r+b") as f:
        for _, offset, data in writes:
            f.seek(offset)
            f.write(data)
