"""Field cases of the stored files and the volume under them, as the manifest, `verify` and `scan` see them."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import loops
import pytest
from outputs import apart, config_for, extract, lines, publish, publisher, ready
from test_cases_manifest import config_file, crash, outcome

from hsdaemon.cli import main
from hsdaemon.config import Config, parse
from hsdaemon.data import ingest
from hsdaemon.data.adopt import QUARANTINE, Adoption, FolderReport
from hsdaemon.data.backup import ballast_path, manifest_path
from hsdaemon.data.formats import open_sample
from hsdaemon.data.sqlite import open_manifest, open_reader
from hsdaemon.data.store import adopt_tree, open_for_scan, open_store
from hsdaemon.data.verify import MARK, Finding, reconcile
from hsdaemon.data.volume import MARKER, Guard, VolumeAway, init_volume
from hsdaemon.errors import DiskFull, StoreError

FILES = 30


def stored(tmp_path: Path, rows: int = FILES, count: int = FILES) -> Config:
    """An output with `rows` rows, `count` of them done."""
    config = config_for(tmp_path, lines(rows))
    store = ready(config)
    extract(store, tmp_path, count)
    store.close()
    return config


def file_of(config: Config, row: int) -> Path:
    return Path(config.output.path) / f"rows_0-2000/data_{row}.ckpt"


def verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, list[dict[str, object]], str]:
    """Exit code, findings, last line of `verify`."""
    code = main(["verify", "--json", "-c", str(config_file(tmp_path)), *words])
    *found, last = outcome(capsys)
    return code, [json.loads(line) for line in found], last


@pytest.mark.root
def test_st_05_on_a_full_disk_status_works_and_the_ballast_lets_the_manifest_commit(tmp_path: Path) -> None:
    with loops.loop(tmp_path, 40) as at:
        init_volume(at)
        config = config_for(tmp_path, lines(60), path=str(at / "states"), volume=str(at))
        store = ready(config)
        claims = store.manifest.claim(20)
        finished = [publish(store, claim, tmp_path) for claim in claims]
        filler = loops.fill(at)
        with pytest.raises(DiskFull, match="free some"):
            store.guard.check()
        for one in finished:
            store.manifest.commit([one])
        assert store.manifest.counts().done == 20
        text = config_file(tmp_path).read_text().replace(f"{tmp_path}/volume/states", str(at / "states"))
        (tmp_path / "hs.toml").write_text(text.replace("reserve_mib", f'volume = "{at}"\nreserve_mib'))
        code, told = apart("status", "--json", "-c", str(tmp_path / "hs.toml"))
        assert (code, json.loads(told)["done"]) == (0, 20)
        crash(store)
        loops.fill(at)
        with pytest.raises(DiskFull):
            open_store(config, "while full")
        code, told = apart("status", "--json", "-c", str(tmp_path / "hs.toml"))
        assert (code, json.loads(told)["done"]) == (0, 20)
        filler.unlink()
        again = ready(config)
        assert extract(again, tmp_path) == 40
        assert ballast_path(config).stat().st_size == 1 << 20, "made anew when space is back"
        again.close()


@pytest.mark.root
def test_st_09_nothing_is_written_below_a_mount_point_before_its_volume_is_there(tmp_path: Path) -> None:
    with loops.loop(tmp_path, 16) as at:
        init_volume(at)
    config = config_for(tmp_path, lines(3), path=str(at / "states"), volume=str(at), volume_is_mount=True)
    with pytest.raises(VolumeAway, match="no marker") as caught:
        open_store(config, "e")
    assert caught.value.code == "no-marker"
    assert list(at.iterdir()) == []
    shutil.copy(tmp_path / "volume" / MARKER, at)  # a marker without a mount is no volume either
    with pytest.raises(VolumeAway, match="nothing is mounted there"):
        open_store(config, "e")
    assert [p.name for p in at.iterdir()] == [MARKER]
    (at / MARKER).unlink()
    with loops.loop(tmp_path, 16):
        store = ready(config)
        assert extract(store, tmp_path) == 3
        store.close()


@pytest.mark.root
def test_st_10_a_volume_that_goes_away_stops_the_next_publication_and_is_taken_again(tmp_path: Path) -> None:
    with loops.loop(tmp_path, 24) as at:
        init_volume(at)
        config = config_for(tmp_path, lines(6), path=str(at / "states"), volume=str(at), volume_is_mount=True)
        store = ready(config)
        writer = publisher(store)
        claims = store.manifest.claim(6)
        store.manifest.commit([publish(store, claims[0], tmp_path, writer)])
        loops.run("umount", "-l", at)
        with pytest.raises(VolumeAway):
            publish(store, claims[1], tmp_path, writer)
        assert list(at.iterdir()) == [], "nothing lands in the folder below"
        with pytest.raises(VolumeAway):
            store.guard.take()
        crash(store)
        loops.mount(tmp_path / "disk.img", at)
        again = ready(config)
        assert extract(again, tmp_path) == 5
        assert again.manifest.counts().finished
        again.close()


@pytest.mark.root
def test_st_10_another_volume_in_its_place_is_not_written_to(tmp_path: Path) -> None:
    with loops.loop(tmp_path, 16) as at:
        init_volume(at)
        config = config_for(tmp_path, lines(3), path=str(at / "states"), volume=str(at))
        guard = Guard(config.output)
        guard.uuid = guard.take()
        (tmp_path / "other").mkdir()
        with loops.loop(tmp_path / "other", 16) as other:
            init_volume(other)
            loops.run("mount", "--bind", other, at)
            with pytest.raises(VolumeAway) as caught:
                guard.check()
            assert caught.value.code == "foreign"
            loops.run("umount", at)
        guard.check()


@pytest.mark.root
def test_st_11_a_file_system_that_turned_read_only_is_found_by_writing(tmp_path: Path) -> None:
    with loops.loop(tmp_path, 16, "errors=remount-ro") as at:
        init_volume(at)
        config = config_for(tmp_path, lines(3), path=str(at / "states"), volume=str(at))
        guard = Guard(config.output)
        guard.take()
        device = Path(loops.run("findmnt", "-no", "SOURCE", at).strip()).name
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("x")
        with pytest.raises(VolumeAway, match="Read-only") as caught:
            guard.take()
        assert caught.value.code == "read-only"
        loops.run("umount", at)
        loops.mount(tmp_path / "disk.img", at)
        guard.take()
        guard.check()


def test_a_copied_tree_is_accepted_and_a_broken_marker_is_not(tmp_path: Path) -> None:
    config = stored(tmp_path, 3, 3)
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "volume", moved)
    shutil.rmtree(tmp_path / "volume")
    moved.rename(tmp_path / "volume")
    store = ready(config)
    assert store.manifest.counts().done == 3
    store.close()
    (tmp_path / "volume" / MARKER).write_text("{}")
    with pytest.raises(StoreError, match="restore it, or remove it and run hs-extract init"):
        ready(config)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def zero_block(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def swap(path: Path) -> None:
    other, aside = path.with_name("data_1.ckpt"), path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "empty": (lambda p: os.truncate(p, 0), "size", "size"),
    "half": (lambda p: os.truncate(p, p.stat().st_size // 2), "size", "size"),
    "gone": (lambda p: p.unlink(), "missing", "missing"),
    "longer": (append, "size", "size"),
    "one bit": (flip, "", "digest"),
    "zeroed block": (zero_block, "", "digest"),
    "swapped": (swap, "", "digest"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_st_12_every_damage_is_found_and_nothing_is_substituted(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stored(tmp_path, 4, 4)
    damage, quick, deep = DAMAGE[kind]
    damage(file_of(config, 2))
    before = {p.name: p.read_bytes() for p in file_of(config, 2).parent.iterdir()}
    rows = [1, 2] if kind == "swapped" else [2]
    outcome(capsys)
    code, found, _ = verified(tmp_path, capsys)
    assert (code, [f["code"] for f in found]) == ((1, [quick]) if quick else (0, []))
    code, found, last = verified(tmp_path, capsys, "--deep", "--rate", "10000")
    assert code == 1
    assert [(f["row"], f["code"]) for f in found] == [(row, deep) for row in rows]
    assert last.startswith(f"verify: seen=4 bad={len(rows)} queued=0")
    assert {p.name: p.read_bytes() for p in file_of(config, 2).parent.iterdir()} == before
    reader = open_reader(manifest_path(config.output))
    assert reader.counts().done == 4, "repair only when asked"
    reader.close()


def test_st_13_sizes_are_found_at_once_all_six_by_reading_and_repaired_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stored(tmp_path, 9, 9)
    kinds = {0: "swapped", 2: "empty", 3: "half", 4: "one bit", 5: "zeroed block", 6: "longer"}
    for row, kind in kinds.items():
        DAMAGE[kind][0](file_of(config, row))
    before = {p.name: p.read_bytes() for p in file_of(config, 2).parent.iterdir()}
    outcome(capsys)
    _, found, _ = verified(tmp_path, capsys)
    assert [(f["row"], f["code"]) for f in found] == [(2, "size"), (3, "size"), (6, "size")]
    _, found, _ = verified(tmp_path, capsys, "--deep")
    assert [f["row"] for f in found] == [0, 1, 2, 3, 4, 5, 6]
    assert {p.name: p.read_bytes() for p in file_of(config, 2).parent.iterdir()} == before
    _, found, last = verified(tmp_path, capsys, "--deep", "--repair")
    assert last.startswith("verify: seen=9 bad=7 queued=7")
    assert sorted(p.read_bytes() for p in (Path(config.output.path) / QUARANTINE).iterdir()) == sorted(
        before[f"data_{row}.ckpt"] for row in range(7)
    )
    store = ready(config)
    assert sorted(c.row for c in store.manifest.claim(99)) == list(range(7))
    store.close()


@pytest.mark.parametrize("path", ["../../victim", "/{folder}/victim", "rows_0-2000/../../../victim", "victim", "a\0b"])
def test_a_path_that_leads_out_of_the_output_is_not_followed(
    tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stored(tmp_path, 4, 4)
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    manifest = open_manifest(manifest_path(config.output))
    manifest.db.execute("UPDATE rows SET path = ? WHERE row = 2", (path.format(folder=tmp_path),))
    manifest.close()
    outcome(capsys)
    code, found, last = verified(tmp_path, capsys, "--deep", "--repair")
    assert (code, [(f["row"], f["code"]) for f in found]) == (1, [(2, "missing")])
    assert last.startswith("verify: seen=4 bad=1 queued=1")
    assert victim.read_bytes() == b"mine"
    assert not (Path(config.output.path) / QUARANTINE).exists()
    store = ready(config)  # the file itself is where it was: adopted again
    assert store.manifest.counts().done == 4
    store.close()


def test_st_14_one_damaged_file_queues_one_row_and_deletes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stored(tmp_path, 100, 100)
    flip(file_of(config, 42))
    bad = file_of(config, 42).read_bytes()
    outcome(capsys)
    code, found, last = verified(tmp_path, capsys, "--deep", "--repair")
    assert (code, [f["row"] for f in found]) == (1, [42])
    assert "bad=1 queued=1" in last
    (aside,) = (Path(config.output.path) / QUARANTINE).iterdir()
    assert aside.read_bytes() == bad
    assert aside.suffix == ".bad"
    store = ready(config)
    assert [c.row for c in store.manifest.claim(200)] == [42]
    store.manifest.begin_epoch("again")
    extract(store, tmp_path)
    store.close()
    assert verified(tmp_path, capsys, "--deep")[0] == 0


def test_a_deep_run_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = stored(tmp_path, 10, 10)
    manifest = open_manifest(manifest_path(config.output))
    manifest.mark(MARK, 6)
    manifest.close()
    outcome(capsys)
    assert verified(tmp_path, capsys, "--deep")[2].startswith("verify: seen=4 bad=0")
    assert verified(tmp_path, capsys, "--deep")[2].startswith("verify: seen=10 bad=0")


def test_st_06_13_a_start_queues_what_is_gone_or_short(tmp_path: Path) -> None:
    config = stored(tmp_path)
    os.truncate(file_of(config, 3), 0)
    file_of(config, 4).unlink()
    store = ready(config)
    assert sorted(c.row for c in store.manifest.claim(99)) == [3, 4]
    store.close()


def test_st_17_five_restarts_redo_what_was_in_flight_and_nothing_else(tmp_path: Path) -> None:
    config = config_for(tmp_path, lines(60))
    ready(config).close()
    sent: list[int] = []
    for _ in range(5):
        store = open_store(config, "e")  # the first claims come before the background has looked at anything
        claims = store.manifest.claim(12)
        sent += [c.row for c in claims]
        store.manifest.commit([publish(store, c, tmp_path) for c in claims[:8]])
        publish(store, claims[8], tmp_path)  # durable, its commit is lost: adopted, not redone
        crash(store)
    store = open_store(config, "last")
    assert store.manifest.counts().done == 45
    assert len(sent) - len(set(sent)) <= 3 * 5, "only the three of each run that had no file"
    store.close()


def test_st_19_files_of_a_newer_version_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    config = stored(tmp_path, 4, 4)
    path = file_of(config, 1)
    raw = path.read_bytes()
    assert b'"version":1' in raw
    path.write_bytes(raw.replace(b'"version":1', b'"version":9', 1))
    manifest_path(config.output).unlink()
    before = sorted(p.name for p in path.parent.iterdir())
    with pytest.raises(StoreError, match="cannot read a sample of version 9"):
        main_scan(tmp_path)
    assert sorted(p.name for p in path.parent.iterdir()) == before


def main_scan(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    store = open_for_scan(parse(file.read_text(), str(file)), "scan")
    try:
        adopt_tree(store, unstamped=True)
    finally:
        store.close()


def foreign(path: Path) -> None:
    """Take the stamp out of a file and give it the suffix of the incident's script."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path.with_suffix(".pt"), "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            if not name.endswith("hsdaemon.json"):
                new.writestr(name, old.read(name))
    path.unlink()


def test_st_22_a_tree_without_a_manifest_is_adopted_after_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The incident's: 200 files, three gaps in the middle, cut off behind the last; three damaged among the last."""
    config = stored(tmp_path, 230, 200)
    manifest_path(config.output).unlink()
    for row in range(200):
        foreign(file_of(config, row))
    folder = file_of(config, 0).parent
    for row in (40, 70, 71):
        (folder / f"data_{row}.pt").unlink()
    os.truncate(folder / "data_197.pt", 0)
    os.truncate(folder / "data_198.pt", 500)
    flip(folder / "data_199.pt")
    file = str(config_file(tmp_path))
    with pytest.raises(StoreError, match="it has samples and no manifest; run hs-extract scan"):
        ready(config)
    outcome(capsys)
    assert main(["scan", "-c", file]) == 1
    last = outcome(capsys)[-1]
    assert last == "scan: files=197 adopted=194 bad=3 unknown=0 old_gaps=3 tail=33 done=194 pending=36"
    assert open_sample(folder / "data_5.ckpt").format == "specforge", "found by its trainer now"
    assert not list(folder.glob("*.pt"))
    assert len(list((Path(config.output.path) / QUARANTINE).iterdir())) == 3
    store = ready(config)
    assert extract(store, tmp_path) == 36
    assert store.manifest.counts().finished
    store.close()
    assert main(["scan", "-c", file]) == 0
    assert outcome(capsys)[-1].startswith("scan: files=230 adopted=0 bad=0 unknown=0 old_gaps=0 tail=0 done=230")


def test_st_22_what_a_person_had_adopted_outlives_the_manifest(tmp_path: Path) -> None:
    """Files that say nothing of themselves are taken over because a person asked: no later start would do it again."""
    config = stored(tmp_path, 8, 6)
    manifest_path(config.output).unlink()
    for row in range(6):
        foreign(file_of(config, row))
    file = str(config_file(tmp_path))
    assert main(["scan", "-c", file]) == 0
    manifest_path(config.output).write_bytes(b"damage" * 1000)
    store = ready(config)
    assert store.manifest.counts().done == 6
    store.close()


def test_st_22_files_of_other_rows_or_another_run_are_put_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stored(tmp_path, 20, 10)
    manifest_path(config.output).unlink()
    folder = file_of(config, 0).parent
    (folder / "data_3.ckpt").rename(folder / "data_15.ckpt")
    (folder / "data_4.ckpt").rename(folder / "stranger.ckpt")
    foreign(folder / "data_5.ckpt")  # says nothing of itself: only its ids can tell
    (folder / "data_5.pt").rename(folder / "data_16.pt")
    outcome(capsys)
    assert main(["scan", "-c", str(config_file(tmp_path)), "--json"]) == 1
    report = json.loads(outcome(capsys)[0])
    assert report["unknown"] == ["stranger.ckpt"]
    assert list(report["bad"]) == ["15", "16"]
    assert all(reason.startswith("ids: ") for reason in report["bad"].values())
    assert (folder / "stranger.ckpt").exists()


@pytest.mark.root
def test_st_10_a_volume_that_was_mounted_anew_is_looked_at_also_when_nobody_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "PAUSE_S", 0.05)
    (tmp_path / "local").mkdir()
    volume, kept = tmp_path / "volume", tmp_path / "kept"
    with loops.tmpfs(volume, 64):
        store = open_store(config_for(tmp_path, lines(6), manifest=str(tmp_path / "local")), "first")
        shutil.copytree(volume, kept)
        former = os.open(volume, os.O_RDONLY)  # its device number is not given out again meanwhile
    volume.rmdir()
    with loops.tmpfs(volume, 32):
        shutil.copytree(kept, volume, dirs_exist_ok=True)
        store.background.start()
        store.background.join(5.0)
        assert store.background.check(), "it waits for ever"
        store.close()
    os.close(former)


def test_st_10_files_of_a_volume_that_went_away_are_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest lies elsewhere, so that it could be told that all is gone."""
    (tmp_path / "local").mkdir()
    monkeypatch.setattr(ingest, "PAUSE_S", 0.05)
    store = ready(config_for(tmp_path, lines(6), manifest=str(tmp_path / "local")))
    extract(store, tmp_path)
    volume = tmp_path / "volume"
    volume.rename(tmp_path / "away")
    said: list[Finding] = []
    with pytest.raises(VolumeAway, match="no marker"):
        reconcile(store.guard, store.manifest, lambda: False, said.append)
    assert said == []
    assert store.manifest.counts().done == 6
    store.close()
    (tmp_path / "away").rename(volume)

    store = open_store(store.config, "later")
    looked = Adoption.walk

    def walk(self: Adoption, stop: Callable[[], bool] = lambda: False) -> list[FolderReport]:
        if volume.exists() and not seen:
            volume.rename(tmp_path / "away")
        seen.append(1)
        return looked(self, stop)

    seen: list[int] = []
    monkeypatch.setattr(Adoption, "walk", walk)
    store.background.start()
    while not seen:
        store.background.join(0.05)
    store.background.join(0.3)
    assert not store.background.check(), "it waits"
    (tmp_path / "away").rename(volume)
    while not store.background.check():
        store.background.join(0.05)
    assert store.manifest.counts().done == 6
    store.close()
