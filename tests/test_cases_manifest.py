"""Field cases of the manifest: what a library, a disk, a clock or a second worker may do to it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import loops
import pytest
from outputs import config_for, extract, lines, publish, ready, write_jsonl
from test_manifest import IDENTITY, done, filled

from hsdaemon.cli import main
from hsdaemon.data import lock, schema
from hsdaemon.data import store as store_module
from hsdaemon.data.adopt import Adoption
from hsdaemon.data.backup import back_up, backup_path, manifest_path, restore, set_aside
from hsdaemon.data.connect import Damaged
from hsdaemon.data.dataset import open_dataset
from hsdaemon.data.ingest import ingest
from hsdaemon.data.manifest import LeaseLost, State
from hsdaemon.data.rows import Limits
from hsdaemon.data.sqlite import SqliteManifest, create, open_manifest, open_reader
from hsdaemon.data.store import Store, open_store
from hsdaemon.data.volume import file_system, require_local
from hsdaemon.errors import DiskFull, StoreError
from hsdaemon.machine.identity import boot_id, start_ticks

ROOT = Path(__file__).parent.parent
NFS, CIFS, LUSTRE, FUSE, EXT4 = 0x6969, 0xFF534D42, 0x0BD00BD0, 0x65735546, 0xEF53


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on a tmpfs, where an fsync costs nothing: for tests of thousands of commits."""
    folder = Path("/dev/shm") / f"hs-test-{os.getpid()}-{random.getrandbits(32):08x}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def config_file(folder: Path) -> Path:
    """The config of config_for(folder) as a file."""
    path = folder / "hs.toml"
    path.write_text(
        f'[data]\npath = "{folder}/data.jsonl"\n[model]\npath = "{folder}/model"\n'
        f'[output]\npath = "{folder}/volume/states"\nreserve_mib = 1\n'
        f'[paths]\nrun = "{folder}/run"\nstate = "{folder}/state"\nlog = "{folder}/log"\n'
    )
    return path


def outcome(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a verb printed, without the log lines of this process."""
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("20")]


def crash(store: Store) -> None:
    """What a SIGKILL leaves: no checkpoint, no clean end, the lock free."""
    store.background.stop()
    store.manifest.close()
    store._lock.release()


@pytest.mark.parametrize("version", ["3.40.1", "3.46.0", "3.51.2"])
def test_mf_01_a_library_with_the_reset_race_is_refused(version: str) -> None:
    with pytest.raises(StoreError, match=f"cannot use SQLite {version}: .*3.51.3"):
        schema.require_sqlite(version)


def test_mf_01_commits_survive_a_checkpoint_loop_beside_them(memory: Path) -> None:
    path = memory / "m.db"
    manifest = filled(path, 20_000)
    stop = threading.Event()

    def checkpoints() -> None:
        other = open_manifest(path)
        while not stop.is_set():
            other.checkpoint(truncate=True)
        other.close()

    thread = threading.Thread(target=checkpoints)
    thread.start()
    committed = 0
    while claims := manifest.claim(100):
        for claim in claims:
            manifest.commit([done(claim)])
        committed += len(claims)
    stop.set()
    thread.join()
    manifest.close()
    again = open_manifest(path)
    assert committed == again.counts().done == len(again.stored(limit=10**6)) == 20_000
    assert again.integrity() is None


@pytest.mark.parametrize(("magic", "kind"), [(NFS, "NFS"), (CIFS, "CIFS"), (LUSTRE, "Lustre"), (FUSE, "FUSE")])
def test_mf_02_a_network_file_system_is_refused_with_the_way_out(magic: int, kind: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"{kind} has no memory shared .*set output.manifest to a folder on a local"):
        require_local(tmp_path, magic, allow_fuse=False)
    require_local(tmp_path, EXT4, allow_fuse=False)


@pytest.mark.root
def test_mf_02_a_fuse_mount_is_refused_unless_allowed_and_the_manifest_may_live_elsewhere(tmp_path: Path) -> None:
    loops.need_root()
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed")
    back, volume = tmp_path / "back", tmp_path / "volume"
    back.mkdir()
    volume.mkdir()
    loops.run("bindfs", back, volume)
    try:
        assert file_system(volume) == FUSE
        config = config_for(tmp_path, lines(3))
        with pytest.raises(StoreError, match="FUSE"):
            ready(config)
        assert not manifest_path(config.output).exists()
        local = tmp_path / "local"
        local.mkdir()
        store = ready(config_for(tmp_path, lines(3), manifest=str(local)))
        assert extract(store, tmp_path) == 3
        store.close()
        assert (local / "manifest.db").exists()
    finally:
        loops.run("umount", "-l", volume)


def test_mf_03_no_write_is_ever_locked_out_by_another(memory: Path) -> None:
    """Two that read, then write, as fast as they can: a deferred transaction would be "locked" at once."""
    path = memory / "m.db"
    filled(path, 200).close()

    def work(_: int) -> None:
        manifest = open_manifest(path)
        for _ in range(1500):
            manifest.release(manifest.claim(1))
        manifest.close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


def test_mf_03_the_control_fails_in_a_deferred_transaction(memory: Path) -> None:
    path = memory / "m.db"
    filled(path, 2).close()
    one, other = open_manifest(path), open_manifest(path)
    one.db.execute("BEGIN; SELECT count(*) FROM rows").fetchall()
    other.release(other.claim(1))
    with pytest.raises(apsw.BusyError):
        one.db.execute("UPDATE rows SET hint = 1")


def test_mf_04_a_backup_during_writes_is_whole_and_the_rest_comes_from_the_files(tmp_path: Path) -> None:
    config = config_for(tmp_path, lines(40))
    store = ready(config)
    stop = threading.Event()
    saved = backup_path(config)

    def backups() -> None:
        other = open_manifest(manifest_path(config.output))
        while not stop.is_set():
            back_up(other, saved)
        other.close()

    thread = threading.Thread(target=backups)
    thread.start()
    extract(store, tmp_path, 20)
    stop.set()
    thread.join()
    back_up(store.manifest, saved)
    extract(store, tmp_path, 10)
    before = store.manifest.stored()
    crash(store)
    with contextlib.closing(open_reader(saved)) as copy:
        assert copy.integrity() is None
        assert copy.counts().done == 20
    manifest_path(config.output).write_bytes(b"damage" * 1000)
    again = ready(config)
    assert again.manifest.stored() == before
    assert again.manifest.counts().pending == 10
    again.close()


@pytest.mark.root
def test_a_backup_that_root_makes_is_the_workers(tmp_path: Path) -> None:
    """A person's scan: the folder of the backups is sticky, so the worker could never replace one of root's."""
    loops.need_root()
    store = ready(config_for(tmp_path, lines(3)))
    os.chown(store.manifest.path, 12345, 12346)
    for _ in range(2):
        back_up(store.manifest, tmp_path / "state" / "copy.db")
        made = (tmp_path / "state" / "copy.db").stat()
        assert (made.st_uid, made.st_gid) == (12345, 12346)
    path = store.manifest.path
    store.close()
    path.unlink()
    restored = restore(path, tmp_path / "state" / "copy.db")
    assert restored is not None
    restored.mark("any", 1)
    restored.close()
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346), "and so is what root restores from it"


def overwrite_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\xa5" * 8192)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def scribble(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 400)


@pytest.mark.parametrize("backed_up", [True, False])
@pytest.mark.parametrize("damage", [overwrite_page, cut, scribble])
def test_mf_05_a_damaged_database_is_set_aside_whole_and_rebuilt(
    tmp_path: Path, damage: Callable[[Path], None], backed_up: bool
) -> None:
    config = config_for(tmp_path, lines(60))
    store = ready(config)
    extract(store, tmp_path, 10)
    if backed_up:
        back_up(store.manifest, backup_path(config))
    extract(store, tmp_path, 20)
    store.manifest.checkpoint(truncate=True)
    counts, stored = store.manifest.counts(), store.manifest.stored()
    crash(store)
    path = manifest_path(config.output)
    damage(path)
    again = ready(config)
    assert dataclasses.replace(again.manifest.counts(), leased=0) == counts
    assert again.manifest.stored() == stored
    assert path.with_name("manifest.db.damaged-1").exists()
    assert again.manifest.integrity() is None
    again.close()


@pytest.mark.parametrize("backed_up", [True, False])
def test_mf_05_a_text_that_is_none_is_found_by_the_work_and_mended_by_the_next_start(
    tmp_path: Path, backed_up: bool
) -> None:
    config = config_for(tmp_path, lines(6))
    store = ready(config)
    extract(store, tmp_path)
    stored = store.manifest.stored()
    store.manifest.db.execute("UPDATE rows SET path = CAST(x'726f77ff' AS TEXT) WHERE row = 3")
    assert store.manifest.integrity() is None
    if backed_up:
        back_up(store.manifest, backup_path(config))
    store.close()
    with pytest.raises(Damaged, match="a worker's start rebuilds it"):
        ready(config)
    again = ready(config)
    assert again.manifest.stored() == stored
    again.close()
    ready(config).close()


# What a bad disk may make of a value: SQL, run where no table is strict and no check holds.
IMPOSSIBLE = {
    "a name that leads out": "UPDATE rows SET name = '../../x' WHERE row = 1",
    "a name that hides": "UPDATE rows SET name = '.x' WHERE row = 1",
    "a name that is no text": "UPDATE rows SET name = x'ff' WHERE row = 1",
    "a name with half a character": "UPDATE rows SET name = CAST(x'61ff' AS TEXT) WHERE row = 1",
    "tries": "UPDATE rows SET tries = 'x' WHERE row = 5",
    "tokens": "UPDATE rows SET tokens = 'x' WHERE row = 5",
    "tokens below 0": "UPDATE rows SET tokens = -7 WHERE row = 5",
    "charged": "UPDATE rows SET charged = x'00' WHERE row = 5",
    "hint": "UPDATE rows SET hint = 'x' WHERE row = 5",
    "hint below 0": "UPDATE rows SET hint = -1 WHERE row = 5",
    "state": "UPDATE rows SET state = 1.5, lease = 3, path = NULL WHERE row = 1",
    "size": "UPDATE rows SET size = 'x' WHERE row = 1",
    "digest": "UPDATE rows SET digest = 'x' WHERE row = 5",
    "lease": "UPDATE meta SET value = 'x' WHERE key = 'lease'",
    "scan row": "UPDATE meta SET value = 'x' WHERE key = 'scan_row'",
    "scan hint": "UPDATE meta SET value = 0.5 WHERE key = 'scan_hint'",
    "identity": "UPDATE meta SET value = '{' WHERE key = 'identity'",
    "no identity": "DELETE FROM meta WHERE key = 'identity'",
    "no volume": "DELETE FROM meta WHERE key = 'volume'",
    "no scan": "DELETE FROM meta WHERE key = 'scan_row'",
    "no counts": "DELETE FROM counts WHERE state = 2",
    "counts": "UPDATE counts SET n = 'x' WHERE state = 2",
    "a wrong count": "UPDATE counts SET n = n + 4 WHERE state = 1",
    "a trigger": "UPDATE sqlite_schema SET sql = replace(sql, 'OF state,', 'OF tries,') WHERE name = 'rows_changed'",
    "an index": "UPDATE sqlite_schema SET sql = replace(sql, 'state = 1', 'state = 9') WHERE name = 'rows_leased'",
}


def loosened(path: Path, sql: str) -> None:
    """Run `sql` on a manifest as if its tables had neither types nor checks."""
    with contextlib.closing(apsw.Connection(str(path))) as db:
        kept = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'").fetchall()
        db.execute("PRAGMA writable_schema = ON")
        for words in (") STRICT, ", ") "), (") STRICT", ")"):
            db.execute("UPDATE sqlite_schema SET sql = replace(sql, ?, ?) WHERE type = 'table'", words)
    with contextlib.closing(apsw.Connection(str(path))) as db:
        db.execute("PRAGMA ignore_check_constraints = ON; PRAGMA writable_schema = ON")
        db.execute(sql)
        for name, text in kept:
            db.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (text, name))


@pytest.mark.parametrize("sql", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
@pytest.mark.parametrize("in_flight", [False, True])
def test_mf_05_a_value_that_cannot_be_is_no_traceback_and_is_mended_by_the_next_start(
    tmp_path: Path, sql: str, in_flight: bool
) -> None:
    rows = [{**row, "id": f"chat {i}"} for i, row in enumerate(lines(6))]
    config = config_for(tmp_path, rows, format="modelopt")
    store = ready(config)
    extract(store, tmp_path, 4)
    stored = store.manifest.stored()
    store.close()
    loosened(manifest_path(config.output), sql)
    if in_flight:
        loosened(manifest_path(config.output), "UPDATE rows SET state = 1, lease = 2, path = NULL WHERE row IN (1, 5)")
    for _ in range(2):
        with contextlib.suppress(Damaged):
            ready(config).close()
    again = ready(config)
    assert again.manifest.stored() == stored
    assert extract(again, tmp_path) == 2
    assert again.manifest.counts().finished
    again.close()


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE rows SET name = '../x' WHERE row = 1",
        "UPDATE rows SET name = CAST(x'61ff' AS TEXT) WHERE row = 1",
        "INSERT INTO faults VALUES (1, 'x', CAST(x'61ff' AS TEXT), 0)",
    ],
)
def test_mf_05_one_bad_text_costs_no_other_row(tmp_path: Path, sql: str) -> None:
    """Files of an older tree say nothing of themselves: a manifest made anew would not have them."""
    config = config_for(tmp_path, [{**row, "id": f"chat {i}"} for i, row in enumerate(lines(6))])
    store = ready(config)
    extract(store, tmp_path, 4)
    stored = store.manifest.stored()
    for kept in stored:
        path = store.root / kept.path
        path.write_bytes(path.read_bytes() + b"no stamp can be read in this")
        store.manifest.db.execute("UPDATE rows SET size = ? WHERE row = ?", (path.stat().st_size, kept.row))
    stored = store.manifest.stored()
    store.manifest.db.execute(sql)
    with contextlib.suppress(Damaged):
        store.manifest.stored()
        store.manifest.faults(list(State))
    store.close()
    for _ in range(2):
        with contextlib.suppress(Damaged):
            ready(config).close()
    again = ready(config)
    assert again.manifest.stored() == stored
    assert again.manifest.faults([State.done]) == [] or again.manifest.faults([State.done])[0].row == 1
    assert not list(again.root.glob("manifest.db.damaged-*"))
    assert not (again.root / "quarantine").exists()
    again.close()


def test_mf_05_a_removed_log_costs_nothing_that_has_a_file(tmp_path: Path) -> None:
    config = config_for(tmp_path, lines(30))
    store = ready(config)
    store.manifest.checkpoint(truncate=True)
    extract(store, tmp_path, 12)
    stored = store.manifest.stored()
    path = manifest_path(config.output)
    copy = tmp_path / "copy.db"
    shutil.copyfile(path, copy)  # as it is on disk without its log; read by other means, so only now
    crash(store)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    shutil.copyfile(copy, path)
    again = ready(config)
    assert again.manifest.stored() == stored
    again.close()


def test_mf_05_a_log_without_its_database_is_not_played_into_the_restored_copy(tmp_path: Path) -> None:
    config = config_for(tmp_path, lines(60))
    store = ready(config)
    extract(store, tmp_path, 10)
    back_up(store.manifest, backup_path(config))
    store.manifest.checkpoint(truncate=True)
    extract(store, tmp_path, 30)
    stored = store.manifest.stored()
    path = manifest_path(config.output)
    log = path.with_name("manifest.db-wal").read_bytes()
    crash(store)
    path.unlink()
    path.with_name("manifest.db-wal").write_bytes(log)
    again = ready(config)
    assert again.manifest.integrity() is None
    assert again.manifest.stored() == stored
    assert path.with_name("manifest.db.damaged-1-wal").read_bytes() == log
    again.close()


@pytest.mark.parametrize("backed_up", [True, False])
def test_mf_05_a_rebuild_that_dies_is_gone_on_with_before_anything_is_made_again(
    tmp_path: Path, backed_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tmp_path, lines(40))
    store = ready(config)
    if backed_up:
        back_up(store.manifest, backup_path(config))
    extract(store, tmp_path, 30)
    crash(store)
    manifest_path(config.output).write_bytes(b"damage" * 1000)
    died: list[int] = []

    def full(*_: object) -> None:
        died.append(1)
        raise DiskFull("cannot")

    with monkeypatch.context() as patch:
        patch.setattr(Adoption, "walk", full)
        for _ in range(2):
            with pytest.raises(DiskFull):
                open_store(config, "dies")
    assert len(died) == 2
    beats: list[int] = []
    again = open_store(config, "goes on", beat=lambda: beats.append(1))
    assert again.manifest.counts().done == 30
    assert beats
    again.close()
    beats.clear()
    open_store(config, "then", beat=lambda: beats.append(1)).close()
    assert not beats, "it is over"


def test_mf_05_a_rebuild_that_dies_before_its_first_step_needs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damaged one is away by then and there is no other: its samples are still not a stranger's."""
    config = config_for(tmp_path, lines(10))
    store = ready(config)
    extract(store, tmp_path)
    store.close()
    manifest_path(config.output).write_bytes(b"damage" * 1000)

    def full(*_: object, **__: object) -> SqliteManifest:
        raise DiskFull("cannot")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "create", full)
        for _ in range(2):
            with pytest.raises(DiskFull):
                open_store(config, "waits for room")
    again = ready(config)
    assert again.manifest.counts().done == 10
    again.close()


def test_mf_05_what_is_put_aside_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "manifest.db"
    for content in (b"first", b"second"):
        path.with_name("manifest.db-wal").write_bytes(content)
        set_aside(path)
    path.write_bytes(b"third")
    set_aside(path)
    left = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert left == {
        "manifest.db.damaged-1-wal": b"first",
        "manifest.db.damaged-2-wal": b"second",
        "manifest.db.damaged-3": b"third",
    }


HOLD = "import sys, time; from pathlib import Path; from hsdaemon.data import lock\n"


def holder(folder: Path, *before: str) -> subprocess.Popen[str]:
    """A process that has the lock of `folder` and says so."""
    code = HOLD + f"held = lock.acquire(Path({str(folder)!r})); print('held', flush=True); time.sleep(60)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([*before, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def sign(folder: Path, pid: int, ticks: int, boot: str) -> None:
    (folder / lock.LOCK_NAME).write_text(json.dumps({"pid": pid, "start_ticks": ticks, "boot_id": boot}))


def test_mf_06_a_pid_in_the_lock_that_is_somebody_elses_does_not_matter(tmp_path: Path) -> None:
    sign(tmp_path, 1, start_ticks(1) or 0, boot_id())
    lock.acquire(tmp_path).release()
    sign(tmp_path, os.getpid(), 1, "another boot")
    lock.acquire(tmp_path).release()


@pytest.mark.root
def test_mf_06_the_same_pid_again_in_a_pid_namespace_starts_at_once(tmp_path: Path) -> None:
    """The first holder is killed; the next process has its very number, under another boot id."""
    loops.need_root()
    boot = tmp_path / "boot_id"
    boot.write_text("00000000-0000-0000-0000-000000000000\n")
    code = HOLD + f"held = lock.acquire(Path({str(tmp_path)!r})); print(__import__('os').getpid(), flush=True)"
    script = f"""
    mount --bind {boot} /proc/sys/kernel/random/boot_id
    echo 4000 > /proc/sys/kernel/ns_last_pid; {sys.executable} -c "{code}; import os; os.kill(os.getpid(), 9)"
    echo 11111111-1111-1111-1111-111111111111 > {boot}
    echo 4000 > /proc/sys/kernel/ns_last_pid; {sys.executable} -c "{code}"
    """
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "sh", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.split() == ["4001", "4001"], done.stderr


def test_mf_07_a_killed_holder_leaves_no_lock_and_a_living_one_is_named(tmp_path: Path) -> None:
    child = holder(tmp_path)
    ticks = start_ticks(child.pid)
    with pytest.raises(lock.LockHeld, match=rf"pid {child.pid} \(start {ticks}, boot {boot_id()[:8]}\)"):
        lock.acquire(tmp_path)
    assert lock.living_holder(tmp_path) == child.pid
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert lock.living_holder(tmp_path) is None
    lock.acquire(tmp_path).release()


def test_mf_07_the_lock_is_not_inherited_by_what_the_worker_starts(tmp_path: Path) -> None:
    held = lock.acquire(tmp_path)
    child = subprocess.Popen(["sleep", "30"], close_fds=False)
    held.release()
    lock.acquire(tmp_path).release()
    child.kill()
    child.wait()


def test_mf_07_a_lock_file_that_cannot_be_signed_locks_all_the_same(tmp_path: Path) -> None:
    (tmp_path / lock.LOCK_NAME).write_bytes(b"\xff\x00 nonsense")
    fd = os.open(tmp_path / lock.LOCK_NAME, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(lock.LockHeld, match="another process"):
        lock.acquire(tmp_path)
    os.close(fd)


def test_mf_08_a_worker_taken_for_dead_changes_nothing_any_more(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    slow = filled(path, 4)
    mine = slow.claim(2)
    other = open_manifest(path)
    other.begin_epoch("other")
    theirs = other.claim(2)
    assert [c.row for c in theirs] == [c.row for c in mine]
    other.commit([done(theirs[0], size=5)])
    for act in (
        lambda: slow.commit([done(mine[0])]),
        lambda: slow.commit([done(mine[1])]),
        lambda: slow.fail(mine[1].row, mine[1].lease, "x", "y"),
        lambda: slow.retry(mine[1].row, mine[1].lease, "x", "y", charge=True),
    ):
        with pytest.raises(LeaseLost):
            act()
    slow.release(mine)
    counts = other.counts()
    assert (counts.done, counts.leased, counts.bytes) == (1, 1, 5)
    other.commit([done(theirs[1])])


def test_mf_09_tombstones_hold_until_retry_revives_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(tmp_path, lines(10))
    sent: list[int] = []
    for _ in range(3):
        store = ready(config)
        while claims := store.manifest.claim(4):
            for claim in claims:
                sent.append(claim.row)
                if claim.row in (2, 5, 7):
                    store.manifest.fail(claim.row, claim.lease, "nonfinite", "NaN in layer 5 at token 3")
                else:
                    store.manifest.commit([publish(store, claim, tmp_path)])
        store.close()
    assert sorted(sent) == list(range(10))
    file = str(config_file(tmp_path))
    assert main(["errors", "-c", file, "--json"]) == 1
    listed = [json.loads(line) for line in outcome(capsys)]
    assert [(f["row"], f["state"], f["reason"]) for f in listed] == [
        (row, "failed", "NaN in layer 5 at token 3") for row in (2, 5, 7)
    ]
    assert main(["retry", "-c", file, "5", "6"]) == 1, "row 6 is not a failed one"
    store = ready(config)
    assert [c.row for c in store.manifest.claim(9)] == [5]
    store.close()
    assert main(["retry", "-c", file, "--all"]) == 0
    assert outcome(capsys)[-1] == "retry: revived=2"


@pytest.mark.parametrize("batches", range(4))
def test_mf_10_a_pass_and_a_run_go_on_at_the_row_where_they_stopped(tmp_path: Path, batches: int) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [{"input_ids": [i % 1000, i // 1000]} for i in range(2500)])
    config = config_for(tmp_path, None)
    manifest = create(tmp_path / "m.db", IDENTITY, "v")
    left = iter([False] * batches + [True])
    dataset = open_dataset(config.data, Limits())
    assert not ingest(dataset, manifest, config.data, lambda: next(left))
    at, hint = manifest.scan_state()[1:3]
    assert at == (0, 64, 1064, 2064)[batches]
    assert next(iter(dataset.rows(at, hint))).row == at
    manifest.close()
    manifest = open_manifest(tmp_path / "m.db")
    assert ingest(open_dataset(config.data, Limits()), manifest, config.data)
    assert manifest.counts().total == 2500
    assert path.exists()


def test_mf_11_status_reads_no_row_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(tmp_path, lines(30))
    store = ready(config)
    extract(store, tmp_path, 20)
    store.close()
    shutil.rmtree(tmp_path / "volume/states/rows_0-2000")
    assert main(["status", "--json", "-c", str(config_file(tmp_path))]) == 0
    (line,) = outcome(capsys)
    facts = json.loads(line)
    assert (facts["total"], facts["done"], facts["pending"], facts["finished"]) == (30, 20, 10, False)
    reader = open_reader(manifest_path(config.output))
    asked: list[str] = []

    def note(_cursor: object, sql: str, _bound: object) -> bool:
        asked.append(sql)
        return True

    reader.db.exec_trace = note
    reader.counts()
    reader.rate(60)
    reader.faults([State.failed, State.skipped])
    reader.db.exec_trace = None
    unbound = [sql.replace("?", "1") for sql in asked if sql.startswith("SELECT")]
    plans = [reader.db.execute(f"EXPLAIN QUERY PLAN {sql}").fetchall() for sql in unbound]
    assert plans
    assert [p for plan in plans for p in plan if str(p[3]).startswith("SCAN rows")] == []


@pytest.mark.parametrize("step", [-3600.0, 3600.0, -1e10], ids=["-1 h", "+1 h", "1970"])
def test_mf_12_a_stepped_wall_clock_changes_nothing(
    tmp_path: Path, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.db"
    filled(path, 30).close()
    now = [5000.0]
    manifest = open_manifest(path, clock=lambda: now[0])
    manifest.begin_epoch("e")
    real = time.time
    for i, claim in enumerate(manifest.claim(20)):
        if i == 10:
            monkeypatch.setattr(time, "time", lambda: max(0.0, real() + step))
        now[0] += 2.0
        manifest.commit([done(claim)])
    late = manifest.claim(1)[0]
    assert manifest.retry(late.row, late.lease, "timeout", "no dump", charge=True) == 1
    rate = manifest.rate(600.0)
    assert rate.samples_s == pytest.approx(0.5)
    assert rate.bytes_s == pytest.approx(50.0)
    now[0] += 10_000.0
    assert manifest.rate(600.0).samples_s == 0.0


def test_mf_13_a_newer_manifest_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    manifest = filled(path, 3)
    manifest.db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    manifest.checkpoint(truncate=True)
    manifest.close()
    before = path.read_bytes()
    for opening in (open_manifest, open_reader):
        with pytest.raises(StoreError, match="use the newer program"):
            opening(path)
    assert path.read_bytes() == before


def test_mf_13_a_foreign_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    apsw.Connection(str(path)).execute("CREATE TABLE mine (x)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="it is not a manifest"):
        open_manifest(path)
    assert path.read_bytes() == before


@pytest.mark.root
def test_mf_14_a_full_disk_is_no_damage_and_the_row_is_committed_later(tmp_path: Path) -> None:
    with loops.loop(tmp_path, 24) as at:
        manifest = filled(at / "m.db", 2000)
        claims = manifest.claim(2000)
        filler = loops.fill(at)

        def commit_all() -> None:
            for claim in claims:
                manifest.commit([done(claim)])

        with pytest.raises(DiskFull, match="no space left"):
            commit_all()
        finished = manifest.counts().done
        assert manifest.integrity() is None
        filler.unlink()
        for claim in claims[finished:]:
            manifest.commit([done(claim)])
        assert manifest.counts().done == 2000
        manifest.close()


def test_a_database_that_is_none_is_damaged_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    path.write_bytes(b"x" * 9000)
    with pytest.raises(Damaged):
        open_manifest(path)
