"""Field cases ST: what a crash, a full or failing disk, and a hasty reader may do to a publication: nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import outputs
import pytest
from samples import dump_of, publisher_of, run_of, sample_of, states_of

from hsdaemon.data import publish
from hsdaemon.data.formats import FORMATS, Damaged, check_content, open_sample
from hsdaemon.data.publish import Published, Rejected
from hsdaemon.data.sample import Sample
from hsdaemon.errors import DiskFull, StoreError
from hsdaemon.machine import disk

STEPS = ("checked", "opened", "written", "truncated", "synced", "named", "folder synced")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for mounts")


def killed_at(work: Callable[[], object], patch: Callable[[], None] = lambda: None) -> int:
    """Run `work` in a child made by fork; gives the signal that ended it, 0 when it came to its end."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            patch()
            work()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert not (os.WIFEXITED(status) and os.WEXITSTATUS(status)), "the child failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: str) -> Callable[[str], None]:
    return lambda done: die() if done == step else None


def die_at_write(number: int) -> Callable[[], None]:
    """The n-th write of a block is the last thing that happens (half of it done)."""

    def install() -> None:
        count, write = [0], disk.Draft.write

        def counted(draft: disk.Draft, block: memoryview) -> None:
            count[0] += 1
            if count[0] == number:
                write(draft, block[: len(block) // 2 // disk.BLOCK * disk.BLOCK])
                die()
            write(draft, block)

        pytest.MonkeyPatch().setattr(disk.Draft, "write", counted)  # in a child that ends here

    return install


def final_names(root: Path) -> list[str]:
    """What any trainer could find."""
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.suffix in (".ckpt", ".pt", ".safetensors", ".gz")
    )


def whole(path: Path, sample: Sample) -> bool:
    try:
        check_content(path)
        return bool(np.array_equal(open_sample(path).ids, sample.ids))
    except Damaged:
        return False


@pytest.fixture
def spool() -> Iterator[Path]:
    """A folder on another file system than the output."""
    folder = Path("/dev/shm") / f"hs-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def loop_mount(folder: Path, mib: int, kind: str = "ext4") -> Iterator[Path]:
    """A fresh file system of `mib` MiB on a loop device."""
    if shutil.which(f"mkfs.{kind}") is None or f"\t{kind}\n" not in Path("/proc/filesystems").read_text():
        pytest.skip(f"no {kind} here")
    image, mount = folder / "v.img", folder / "v"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(mib << 20)
    options = ["-q", "-m0"] if kind == "ext4" else ["-q"]
    subprocess.run([f"mkfs.{kind}", *options, str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_st_01_the_name_appears_once_and_whole(tmp_path: Path, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, sample = run_of("specforge", hidden=512), sample_of(0, 200)
    dump = dump_of(spool, sample, run, states_of(200, 512))
    monkeypatch.setattr(publish, "BUFFER_BYTES", 64 << 10)
    final, seen = tmp_path / "out/rows_0-2000/data_0.ckpt", list[bool | None]()
    stop, pace = threading.Event(), threading.Event()

    def slow(draft: disk.Draft, block: memoryview, write: Callable[..., None] = disk.Draft.write) -> None:
        write(draft, block)
        pace.wait(0.005)

    def poll() -> None:
        while not stop.is_set():
            seen.append(whole(final, sample) if final.exists() else None)
        seen.append(whole(final, sample))

    monkeypatch.setattr(disk.Draft, "write", slow)
    publisher = publisher_of(tmp_path / "out", run)
    reader = threading.Thread(target=poll)
    reader.start()
    publisher.publish(sample, dump)
    stop.set()
    reader.join()
    assert seen[0] is None
    assert set(seen) == {None, True}
    assert seen == sorted(seen, key=bool)  # never gone again


@pytest.mark.parametrize("way", ["linkat", "renameat2", "link"])
def test_st_02_killed_at_every_write_the_name_is_absent(
    way: str, tmp_path: Path, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sample = run_of("specforge", hidden=512), sample_of(0, 100)
    dump = dump_of(spool, sample, run, states_of(100, 512))
    monkeypatch.setattr(publish, "BUFFER_BYTES", 64 << 10)
    monkeypatch.setattr(disk, "probe_abilities", lambda *_: disk.Abilities(way, way == "linkat"))
    root, ends = tmp_path / "out", list[int]()
    while not ends or ends[-1]:
        ends.append(killed_at(lambda: publisher_of(root, run).publish(sample, dump), die_at_write(len(ends) + 1)))
        assert bool(final_names(root)) == (not ends[-1])
    assert len(ends) > 5
    assert whole(root / "rows_0-2000/data_0.ckpt", sample)
    assert [p.name for p in root.rglob("*") if p.is_file()] == ["data_0.ckpt"]  # a start swept what the dead left


def test_st_02_control_a_move_across_file_systems_leaves_half_a_file(tmp_path: Path, spool: Path) -> None:
    source, target = spool / "x.ckpt", tmp_path / "x.ckpt"
    source.write_bytes(bytes(1 << 20))

    def move() -> None:
        with source.open("rb") as file, target.open("wb", buffering=0) as out:
            for number in range(4):
                out.write(file.read(256 << 10))
                if number == 1:
                    die()

    assert killed_at(move) == signal.SIGKILL
    assert target.stat().st_size == 512 << 10


def test_st_03_cut_and_empty_files_are_told_from_whole_ones(tmp_path: Path) -> None:
    run = run_of("specforge")
    publisher = publisher_of(tmp_path / "out", run)
    samples = [sample_of(row, 9) for row in range(30)]
    outcomes = publisher.publish_many([(s, dump_of(tmp_path, s, run, states_of(9))) for s in samples])
    paths = [tmp_path / "out" / o.path for o in outcomes if isinstance(o, Published)]
    for number, path in enumerate(paths[10:]):
        os.truncate(path, 0 if number < 3 else path.stat().st_size * number // 20)
    assert [whole(path, sample) for path, sample in zip(paths, samples, strict=True)] == [True] * 10 + [False] * 20


@root_only
@pytest.mark.root
@pytest.mark.parametrize(
    "able", [disk.Abilities("linkat", True), disk.Abilities("renameat2", False)], ids=["direct", "draft"]
)
def test_st_04_a_full_disk_is_named_leaves_nothing_and_goes_on(
    able: disk.Abilities, tmp_path: Path, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "probe_abilities", lambda *_: able)
    run, sample = run_of("specforge", hidden=2048), sample_of(0, 1200)
    dump = dump_of(spool, sample, run, states_of(1200, 2048))  # 20 MB
    with loop_mount(tmp_path, 36) as mount:
        steps: list[str] = []
        publisher = publisher_of(mount / "out", run, steps=steps.append)
        filler = mount / "filler"
        filler.write_bytes(bytes(16 << 20))
        for _ in range(2):
            with pytest.raises(DiskFull, match="disk full"):
                publisher.publish(sample, dump)
        assert [path for path in (mount / "out").rglob("*") if path.is_file()] == []
        assert steps == ["checked"] * 2  # the disk said so before the first byte
        filler.unlink()
        outcome = publisher.publish(sample, dump)
        assert isinstance(outcome, Published)
        assert whole(mount / "out" / outcome.path, sample)


@root_only
@pytest.mark.root
def test_st_04_without_fallocate_the_full_disk_is_found_while_writing(
    tmp_path: Path, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_allocate", lambda *_: None)
    run, sample = run_of("specforge", hidden=2048), sample_of(0, 1200)
    dump = dump_of(spool, sample, run, states_of(1200, 2048))
    with loop_mount(tmp_path, 20) as mount:
        with pytest.raises(DiskFull):
            publisher_of(mount / "out", run).publish(sample, dump)
        assert final_names(mount) == []
        assert disk.free_bytes(mount) > 5 << 20  # what was written is given back


def shut_down(mount: Path) -> None:
    """The file system forgets all that its log does not have, as at a power cut."""
    fd = os.open(mount, os.O_RDONLY)
    fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 2))
    os.close(fd)


def after_power_cut(folder: Path, work: Callable[[Path], None], kind: str = "ext4") -> list[tuple[str, int]]:
    """Files and their sizes after `work` on a loop mount, a power cut and a replay of the journal."""
    with loop_mount(folder, 320 if kind == "xfs" else 32, kind) as mount:
        work(mount)
        shut_down(mount)
    subprocess.run(["mount", "-o", "loop", str(folder / "v.img"), str(folder / "v")], check=True)
    try:
        found = [path for path in (folder / "v").rglob("*") if path.suffix == ".ckpt"]
        return [(str(path.relative_to(folder / "v")), path.stat().st_size) for path in found]
    finally:
        subprocess.run(["umount", str(folder / "v")], check=True)


@root_only
@pytest.mark.root
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_st_06_no_empty_file_after_a_power_cut(kind: str, tmp_path: Path, spool: Path) -> None:
    run, sample = run_of("specforge"), sample_of()
    dump = dump_of(spool, sample, run, states_of(37))
    sizes: list[int] = []

    def work(mount: Path) -> None:
        outcome = publisher_of(mount / "out", run).publish(sample, dump)
        assert isinstance(outcome, Published)
        sizes.append(outcome.size)

    assert after_power_cut(tmp_path, work, kind) == [("out/rows_0-2000/data_0.ckpt", sizes[0])]


@root_only
@pytest.mark.root
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_local_file_systems_have_the_best_way(kind: str, tmp_path: Path, spool: Path) -> None:
    run, sample = run_of("specforge"), sample_of()
    with loop_mount(tmp_path, 320, kind) as mount:
        publisher = publisher_of(mount / "out", run)
        assert publisher.abilities == disk.Abilities("linkat", True)
        for adopted in (False, True):
            outcome = publisher.publish(sample, dump_of(spool, sample, run, states_of(37)))
            assert isinstance(outcome, Published)
            assert outcome.adopted == adopted
            assert whole(mount / "out" / outcome.path, sample)


@root_only
@pytest.mark.root
def test_st_06_st_07_control_without_the_folders_fsync_the_file_is_gone(
    tmp_path: Path, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sample = run_of("specforge"), sample_of()
    dump = dump_of(spool, sample, run, states_of(37))

    def work(mount: Path) -> None:
        publisher = publisher_of(mount / "out", run)
        os.sync()
        monkeypatch.setattr(disk, "sync_folder", lambda _: None)
        assert isinstance(publisher.publish(sample, dump), Published)

    assert after_power_cut(tmp_path, work) == []


CHILD = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import samples
run, sample, steps = samples.run_of("specforge"), samples.sample_of(), []
publisher = samples.publisher_of(Path({root!r}), run, steps=steps.append)
print("ready", flush=True); sys.stdin.readline()
def attempt():
    try:
        return str(publisher.publish(sample, Path({dump!r})))
    except Exception as error:
        return [type(error).__name__, getattr(error, "errno", None)]
print(json.dumps([attempt(), list(steps), attempt()]))
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("when", "held"), [("1", False), ("2", False), ("3", False), ("1..2", True), ("2+", True), ("3+", True)]
)
def test_st_08_a_failed_fsync_gives_the_inode_up_and_two_hold(when: str, held: bool, tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("no strace")
    root, sample = tmp_path / "out", sample_of()
    dump = dump_of(tmp_path, sample, run_of("specforge"), states_of(37))
    code = CHILD.format(tests=str(Path(__file__).parent), root=str(root), dump=str(dump))
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        words = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync", "-p", str(child.pid)]
        with subprocess.Popen([*words, "-e", f"inject=fsync:error=EIO:when={when}"]) as tracer:
            wait_traced(child.pid)
            first, steps, second = json.loads(child.communicate("go\n")[0])
            tracer.terminate()
    if held:
        assert first == ["BadVolume", errno.EIO]
        assert second == first  # all writing has stopped
        assert final_names(root) == []
    else:
        assert steps.count("checked") == 2  # a new inode, written anew from the dump
        assert first.startswith("Published(")
        assert whole(root / "rows_0-2000/data_0.ckpt", sample)


def wait_traced(pid: int, patience: float = 10.0) -> None:
    deadline = time.monotonic() + patience
    while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("fmt", sorted(FORMATS))
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_st_15_files_have_0666_less_the_umask(fmt: str, umask: int, tmp_path: Path) -> None:
    run, sample = run_of(fmt), sample_of()
    dump = dump_of(tmp_path, sample, run, states_of(37))
    before = os.umask(umask)
    try:
        for way in ("linkat", "renameat2", "link"):
            publisher = publisher_of(tmp_path / way, run)
            publisher._able = disk.Abilities(way, True)
            outcome = publisher.publish(sample, dump)
            assert isinstance(outcome, Published)
            assert (tmp_path / way / outcome.path).stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(before)


@pytest.mark.root
def test_st_16_a_fuse_file_system_without_unnamed_files_gets_the_fallback(tmp_path: Path) -> None:
    if shutil.which("bindfs") is None or not Path("/dev/fuse").exists():
        pytest.skip("no bindfs")
    back, front = tmp_path / "back", tmp_path / "front"
    back.mkdir()
    front.mkdir()
    with subprocess.Popen(["bindfs", "-f", str(back), str(front)]) as fuse:
        try:
            deadline = time.monotonic() + 10
            while not front.is_mount():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            run, sample = run_of("specforge"), sample_of()
            publisher = publisher_of(front / "out", run)
            assert publisher.abilities.way != "linkat"
            dump = dump_of(tmp_path, sample, run, states_of(37))
            outcome = publisher.publish(sample, dump)
            assert isinstance(outcome, Published)
            again = publisher.publish(sample, dump)
            assert isinstance(again, Published)
            assert again.adopted  # the name is never given twice
            assert whole(back / "out" / outcome.path, sample)
            assert [p.name for p in (back / "out").rglob("*") if p.is_file()] == ["data_0.ckpt"]
        finally:
            subprocess.run(["umount", str(front)], check=False)
            fuse.wait(10)


@pytest.mark.parametrize("missing", ["tmpfile", "rename", "all"])
def test_st_16_the_probe_takes_what_there_is_or_refuses_with_the_reason(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_link = os.open, os.link

    def no_tmpfile(path: str, flags: int, *args: object, **more: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no")
        return real_open(path, flags, *args, **more)  # type: ignore[arg-type]

    def unable(*args: object, **more: object) -> None:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(os, "open", no_tmpfile)
    if missing != "tmpfile":
        monkeypatch.setattr(disk, "_rename_new", unable)
    monkeypatch.setattr(os, "link", unable if missing == "all" else real_link)
    if missing == "all":
        with pytest.raises(StoreError, match=r"cannot publish below .* without overwriting"):
            disk.probe_abilities(tmp_path, "0" * 16)
    else:
        expected = disk.Abilities("renameat2" if missing == "tmpfile" else "link", True)
        assert disk.probe_abilities(tmp_path, "0" * 16) == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_st_18_killed_between_any_two_steps_it_is_redone_or_adopted(fmt: str, step: str, tmp_path: Path) -> None:
    run, sample, root = run_of(fmt), sample_of(), tmp_path / "out"
    dump = dump_of(tmp_path, sample, run, states_of(37))
    assert killed_at(lambda: publisher_of(root, run, steps=die_at(step)).publish(sample, dump)) == signal.SIGKILL
    left = final_names(root)
    assert len(left) == (step in ("named", "folder synced"))
    outcome = publisher_of(root, run).publish(sample, dump)
    assert isinstance(outcome, Published)
    assert outcome.adopted == bool(left)
    assert final_names(root) == [outcome.path]
    assert whole(root / outcome.path, sample)


@pytest.mark.parametrize("step", [*STEPS, "committed"])
def test_st_18_killed_between_publication_and_commit_nothing_is_lost_or_twice(step: str, tmp_path: Path) -> None:
    config = outputs.config_for(tmp_path, outputs.lines(3))

    def work() -> None:
        store = outputs.ready(config)
        done = [outputs.publish(store, claim, tmp_path) for claim in store.manifest.claim(1)]
        writer = outputs.publisher(store)
        writer._steps = die_at(step)
        (claim,) = store.manifest.claim(1)
        store.manifest.commit(done)
        store.manifest.commit([outputs.publish(store, claim, tmp_path, writer)])
        die()

    assert killed_at(work) == signal.SIGKILL
    store = outputs.ready(config, "f" * 16)  # a later run of the worker: reconciles before the first request
    counts = store.manifest.counts()
    assert counts.done == 1 + (step in ("named", "folder synced", "committed"))  # adopted, or never left
    assert outputs.extract(store, tmp_path) == 3 - counts.done
    stored = store.manifest.stored()
    assert [item.row for item in stored] == [0, 1, 2]
    assert final_names(store.root) == sorted(item.path for item in stored)
    assert all((store.root / item.path).stat().st_size == item.size for item in stored)
    store.close()


def test_st_18_several_samples_killed_between_their_names(tmp_path: Path) -> None:
    run, root = run_of("specforge"), tmp_path / "out"
    items = [(s, dump_of(tmp_path, s, run, states_of(9))) for s in (sample_of(row, 9) for row in range(4))]
    count = [0]

    def second_name(step: str) -> None:
        count[0] += step == "named"
        if count[0] == 2:
            die()

    assert killed_at(lambda: publisher_of(root, run, steps=second_name).publish_many(items)) == signal.SIGKILL
    assert len(final_names(root)) == 2
    outcomes = publisher_of(root, run).publish_many(items)
    assert [isinstance(o, Published) and o.adopted for o in outcomes] == [True, True, False, False]
    assert len(final_names(root)) == 4


@pytest.mark.parametrize("failing", range(2, 6))
def test_st_08_a_group_is_written_anew_as_a_whole(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, root = run_of("specforge"), tmp_path / "out"
    items = [(s, dump_of(tmp_path, s, run, states_of(9))) for s in (sample_of(row, 9) for row in range(3))]
    publisher, count, real = publisher_of(root, run), [0], os.fsync

    def fsync(fd: int) -> None:
        count[0] += 1
        if count[0] == failing:  # 1: the name of rows_0-2000; 2 to 4: the samples; 5: the folder
            raise OSError(errno.EIO, "lost")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    outcomes = publisher.publish_many(items)
    assert [isinstance(o, Published) and not o.adopted for o in outcomes] == [True] * 3  # all of them on new inodes
    assert all(whole(root / f"rows_0-2000/data_{sample.row}.ckpt", sample) for sample, _ in items)


def test_st_11_a_cured_volume_is_written_to_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, sample = run_of("specforge"), sample_of()
    publisher = publisher_of(tmp_path / "out", run)
    dump = dump_of(tmp_path, sample, run, states_of(37))

    def readonly(fd: int) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", readonly)
        with pytest.raises(disk.BadVolume) as caught:
            publisher.publish(sample, dump)
        assert caught.value.errno == errno.EROFS
    assert isinstance(publisher.publish(sample, dump), Published)


def test_a_check_of_the_volume_comes_before_every_byte(tmp_path: Path) -> None:
    run, sample = run_of("specforge"), sample_of()
    dump = dump_of(tmp_path, sample, run, states_of(37))
    asked: list[int] = []

    def gone(size: int) -> None:
        asked.append(size)
        raise StoreError("cannot write: the volume is not mounted")

    with pytest.raises(StoreError, match="not mounted"):
        publisher_of(tmp_path / "out", run, volume_check=gone).publish(sample, dump)
    assert asked == [dump.stat().st_size]
    assert list((tmp_path / "out").iterdir()) == []


def test_another_files_name_is_never_taken(tmp_path: Path) -> None:
    run = run_of("modelopt")
    publisher = publisher_of(tmp_path / "out", run)
    first, second = sample_of(0, 9, name="same"), sample_of(1, 9, name="same")
    assert isinstance(publisher.publish(first, dump_of(tmp_path, first, run, states_of(9))), Published)
    refused = publisher.publish(second, dump_of(tmp_path, second, run, states_of(9)))
    assert isinstance(refused, Rejected)
    assert (refused.code, "row 0's" in refused.detail) == ("name", True)
    assert whole(tmp_path / "out/rows_0-2000/same.pt", first)


@pytest.mark.parametrize("kind", ["pipe", "link to the same", "folder"])
def test_what_is_no_file_under_a_samples_name_is_put_aside(kind: str, tmp_path: Path) -> None:
    run = run_of("specforge")
    publisher, sample = publisher_of(tmp_path / "out", run), sample_of(0, 9)
    own, other = tmp_path / "out/rows_0-2000/data_0.ckpt", tmp_path / "elsewhere"
    dump = dump_of(tmp_path, sample, run, states_of(9))
    assert isinstance(publisher.publish(sample, dump), Published)
    own.rename(other)
    make: dict[str, Callable[[], None]] = {
        "pipe": lambda: os.mkfifo(own),
        "link to the same": lambda: own.symlink_to(other),
        "folder": own.mkdir,
    }
    make[kind]()
    done = publisher.publish(sample, dump)
    assert isinstance(done, Published)
    assert not done.adopted
    assert stat.S_ISREG(own.lstat().st_mode)
    assert whole(own, sample)
    assert len(list((tmp_path / "out/quarantine").iterdir())) == 1


def test_a_file_that_somebody_else_copied_here_is_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("specforge")
    publisher, sample = publisher_of(tmp_path / "out", run), sample_of(0, 9)
    own = tmp_path / "out/rows_0-2000/data_0.ckpt"
    dump = dump_of(tmp_path, sample, run, states_of(9))
    assert isinstance(publisher.publish(sample, dump), Published)
    shutil.copy(own, tmp_path / "copy")
    own.unlink()
    shutil.copy(tmp_path / "copy", own)
    sync, synced = disk.sync, list[int]()

    def watched(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        sync(fd)

    monkeypatch.setattr(disk, "sync", watched)
    done = publisher.publish(sample, dump)
    assert isinstance(done, Published)
    assert done.adopted
    assert own.stat().st_ino in synced


def litter(root: Path, sample: Path) -> None:
    """All that may lie in an output beside done samples."""
    rows, content = root / "rows_0-2000", sample.read_bytes()
    suffix = sample.suffix
    (rows / f".data_9{suffix}.{'0' * 16}.tmp").write_bytes(content)
    for name in ("manifest.db", "manifest.db-wal", "manifest.db-shm", "ballast", "lock", "scan.json"):
        (root / name).write_bytes(b"x")
    bad = rows / f"data_8{suffix}"
    bad.write_bytes(b"damaged")
    disk.set_aside(bad, root / "quarantine")


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_st_20_trainers_searches_find_exactly_the_done_samples(fmt: str, tmp_path: Path) -> None:
    run, root = run_of(fmt), tmp_path / "out"
    publisher = publisher_of(root, run)
    samples = [sample_of(row, 9) for row in (0, 5, 1999, 2000)]
    outcomes = publisher.publish_many([(s, dump_of(tmp_path, s, run, states_of(9))) for s in samples])
    done = sorted(root / o.path for o in outcomes if isinstance(o, Published))
    assert len(done) == 4
    litter(root, done[0])
    walked = [Path(folder) / name for folder, _, names in os.walk(root) for name in names]
    assert sorted(path for path in walked if path.name.endswith((".ckpt", ".ckpt.gz"))) == (done * (fmt == "specforge"))
    assert sorted(root.rglob("*.pt")) == (done * (fmt == "modelopt"))
    assert sorted(root.rglob("hs_*.safetensors")) == (done * (fmt == "speculators"))


def test_st_21_a_redo_is_a_new_inode_and_readers_keep_their_bytes(tmp_path: Path) -> None:
    run, root = run_of("specforge"), tmp_path / "out"
    publisher = publisher_of(root, run)
    sample = sample_of()
    first = publisher.publish(sample, dump_of(tmp_path, sample, run, states_of(37)))
    assert isinstance(first, Published)
    path = root / first.path
    inode, reader, kept = path.stat().st_ino, open_sample(path), states_of(37)[:, 3]
    second = publisher.publish(sample, dump_of(tmp_path, sample, run, states_of(37, seed=1)))
    assert isinstance(second, Published)
    assert path.stat().st_ino != inode
    assert np.array_equal(reader.final, kept)
    assert np.array_equal(open_sample(path).final, states_of(37, seed=1)[:, 3])
    (aside,) = (root / "quarantine").iterdir()  # nothing is deleted
    assert (aside.stat().st_ino, aside.suffix) == (inode, ".bad")
