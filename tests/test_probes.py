"""Volume, manifest and spool on real file systems that fail in real ways."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sdbox import until

from hsdaemon import wire
from hsdaemon.config import Output
from hsdaemon.core.model import WORKER_UNIT, Spool, Unit, Unreadable, Volume
from hsdaemon.data.probes import ManifestProbe, SpoolProbe, VolumeProbe
from hsdaemon.data.volume import MARKER, init_volume
from hsdaemon.work.probe import WorkerProbe


class Disk:
    """A small ext4 on a loop device, as the volume of an output."""

    def __init__(self, folder: Path) -> None:
        self.image, self.mount = folder / "image", folder / "volume"
        self.mount.mkdir()
        run("truncate", "-s", "16M", self.image)
        run("mkfs.ext4", "-q", "-m0", self.image)
        self.attach()
        self.output = Output(path=str(self.mount / "out"), volume=str(self.mount), volume_is_mount=True)

    def attach(self, *options: str) -> None:
        run("mount", "-o", ",".join(("loop", *options)), self.image, self.mount)

    def detach(self) -> None:
        run("umount", "-l", self.mount)

    def shut_down(self) -> None:
        fd = os.open(self.mount, os.O_RDONLY)
        fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 2))
        os.close(fd)


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    disk = Disk(tmp_path)
    init_volume(disk.mount)
    yield disk
    subprocess.run(["fsfreeze", "-u", disk.mount], check=False, capture_output=True)
    until(
        lambda: subprocess.run(["umount", disk.mount], capture_output=True).returncode == 0 or not disk.mount.is_mount()
    )


@pytest.fixture
def volume(disk: Disk) -> Iterator[VolumeProbe]:
    probe = VolumeProbe(disk.output, 1.0, lambda: "")
    yield probe
    probe.close()


def seen(probe: VolumeProbe) -> Volume:
    volume = probe.read()
    assert not isinstance(volume, Unreadable), volume
    return volume


pytestmark = pytest.mark.root


def test_st_09_sy_06_a_late_volume_is_seen_when_it_comes_and_nothing_is_written_below_its_mount_point(
    disk: Disk, volume: VolumeProbe
) -> None:
    disk.detach()
    assert seen(volume).verdict == "no-marker"
    assert list(disk.mount.iterdir()) == []
    disk.attach()
    ok = seen(volume)
    assert ok.verdict == "ok"
    assert 0 < ok.free_bytes < ok.total_bytes


def test_a_marker_on_the_root_disk_is_not_a_mount(disk: Disk, volume: VolumeProbe) -> None:
    disk.detach()
    init_volume(disk.mount)
    assert seen(volume).verdict == "not-mounted"
    (disk.mount / MARKER).unlink()


def test_the_volume_of_another_manifest_is_foreign(disk: Disk) -> None:
    probe = VolumeProbe(disk.output, 5, lambda: "11111111-1111-1111-1111-111111111111")
    assert seen(probe).verdict == "foreign"
    probe.close()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"version": 1}', b'{"version": 99, "uuid": "x"}', b"\xff"])
def test_a_damaged_marker_is_a_verdict(disk: Disk, volume: VolumeProbe, text: bytes) -> None:
    (disk.mount / MARKER).write_bytes(text)
    assert seen(volume).verdict == "io-error"


def test_st_11_read_only_is_found_by_writing(disk: Disk, volume: VolumeProbe) -> None:
    run("mount", "-o", "remount,ro", disk.mount)
    assert seen(volume).verdict == "read-only"
    run("mount", "-o", "remount,rw", disk.mount)
    assert seen(volume).verdict == "ok"


def test_a_dead_disk_is_an_io_error_though_statvfs_answers(disk: Disk, volume: VolumeProbe) -> None:
    assert seen(volume).verdict == "ok"
    disk.shut_down()
    assert os.statvfs(disk.mount).f_bavail > 0
    assert seen(volume).verdict == "io-error"


def test_rs_07_a_full_disk_is_told_by_its_free_bytes(disk: Disk, volume: VolumeProbe) -> None:
    subprocess.run(["dd", "if=/dev/zero", f"of={disk.mount}/fill", "bs=1k"], check=False, capture_output=True)
    full = seen(volume)
    assert (full.verdict, full.free_bytes) == ("ok", 0)
    (disk.mount / "fill").unlink()
    assert seen(volume).free_bytes > 1 << 20


def test_rs_04_a_hung_disk_costs_a_deadline_once_and_everything_continues_after_the_thaw(
    disk: Disk, volume: VolumeProbe
) -> None:
    run("fsfreeze", "-f", disk.mount)
    looks = [volume.read(), volume.read(), volume.read()]
    causes = [look.cause for look in looks if isinstance(look, Unreadable) and look.code == "hang"]
    assert "did not answer" in causes[0]
    assert ["sits in the kernel" in cause for cause in causes] == [False, True, True]  # no second deadline
    run("fsfreeze", "-u", disk.mount)
    until(lambda: isinstance(look := volume.read(), Volume) and look.verdict == "ok")


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A FUSE mount and its server, which the test may stop."""
    if os.geteuid() != 0:
        pytest.skip("FUSE needs root")
    back, front = tmp_path / "back", tmp_path / "front"
    back.mkdir()
    front.mkdir()
    with subprocess.Popen(["bindfs", "-f", str(back), str(front)]) as server:
        until(front.is_mount)
        yield front, server
        server.kill()
    run("umount", "-l", front)


def test_rs_06_a_mount_whose_server_hangs_costs_a_deadline(fuse: tuple[Path, subprocess.Popen[bytes]]) -> None:
    mount, server = fuse
    init_volume(mount)
    output = Output(path=str(mount / "out"), volume=str(mount))
    probe, manifest = VolumeProbe(output, 1.0, lambda: ""), ManifestProbe(output, 1.0)
    assert seen(probe).verdict == "ok"
    server.send_signal(19)
    for look in (probe.read(), manifest.read()):
        assert isinstance(look, Unreadable)
        assert look.code == "hang"
    server.send_signal(18)
    until(lambda: isinstance(probe.read(), Volume))
    assert manifest.read() is None
    server.kill()
    server.wait()
    dead = probe.read()  # ENOTCONN on every call
    assert isinstance(dead, Volume)
    assert dead.verdict == "io-error"
    probe.close()
    manifest.close()


def test_no_manifest_yet_is_neither_progress_nor_a_failure(tmp_path: Path) -> None:
    probe = ManifestProbe(Output(path=str(tmp_path / "out")), 5)
    assert probe.read() is None
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/manifest.db").write_bytes(b"not a database, but long enough to look like one" * 100)
    damaged = probe.read()
    assert isinstance(damaged, Unreadable)
    assert damaged.code == "damaged"
    probe.close()


def test_sp_02_the_spool_is_counted_and_swept_of_dead_epochs_alone(tmp_path: Path) -> None:
    probe = SpoolProbe(str(tmp_path / "spool"), 5)
    assert probe.read() == Spool()
    assert probe.sweep().result == "done"
    root = tmp_path / "spool"
    root.mkdir()
    (root / wire.EPOCH_FILE).write_text("a" * 16)
    for epoch in "ab":
        rid = wire.parse_rid(f"hs1-{epoch * 16}-0000000001-001-00000007")
        assert rid is not None
        (root / wire.dump_name(rid)).write_bytes(b"x" * 10)
        (root / wire.part_name(rid)).write_bytes(b"x" * 5)
    (root / "foreign").write_text("x")
    assert probe.read() == Spool(30, 4, 2)
    assert probe.sweep().result == "done"
    assert probe.read() == Spool(15, 2, 0)
    assert (root / "foreign").exists()
    probe.close()


def test_rs_07_a_pause_of_the_worker_is_believed_while_it_is_fresh_and_its_own(tmp_path: Path) -> None:
    file = tmp_path / "worker.json"
    words = {"sentence": "paused at 3/9", "stopped_by": "", "waits_for": "room", "pid": 7, "phase": "paused"}
    unit = Unit(WORKER_UNIT, active="active", pids=(7,))

    def paused(unit: Unit = unit, **more: object) -> str:
        file.write_text(json.dumps({**words, **more}))
        seen = WorkerProbe(str(tmp_path)).read(unit)
        assert not isinstance(seen, Unreadable)
        return seen.paused

    assert paused() == "room"
    assert paused(phase="working") == ""
    assert paused(Unit(WORKER_UNIT, active="failed")) == ""
    assert paused(pid=8) == "", "an earlier worker's"
    os.utime(file, (1, 1))
    seen = WorkerProbe(str(tmp_path)).read(unit)
    assert not isinstance(seen, Unreadable)
    assert seen.paused == "", "it hangs: nobody has said that for years"
