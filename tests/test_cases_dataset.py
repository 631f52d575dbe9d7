"""Field cases of the data set: what is in a row, what happens to a bad one, what a row keeps across restarts."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outputs import CONTEXT, VOCAB, config_for, extract, lines, publish, publisher, ready, write_jsonl, write_model

from hsdaemon.cli import main
from hsdaemon.config import Config, Data
from hsdaemon.data import jsonl
from hsdaemon.data.dataset import open_dataset
from hsdaemon.data.formats import FORMATS, open_sample
from hsdaemon.data.manifest import Claim, State
from hsdaemon.data.passes import EditedRow
from hsdaemon.data.rows import Limits
from hsdaemon.data.sample import BadRow, Sample, name_problem
from hsdaemon.data.store import open_store
from hsdaemon.errors import DataError
from hsdaemon.machine.checkpoint import RESERVE_TOKENS, read_model

LIMITS = Limits(VOCAB, CONTEXT - RESERVE_TOKENS)
GOOD = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}


def policy(config: Config, **values: str) -> Config:
    return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, **values))


def judged(folder: Path, rows: list[object]) -> list[Sample | BadRow]:
    return list(open_dataset(Data(path=str(write_jsonl(folder / "set.jsonl", rows))), LIMITS).rows())


def codes(entries: list[Sample | BadRow]) -> list[str]:
    return [e.code if isinstance(e, BadRow) else "good" for e in entries]


def test_ds_01_one_edited_row_alone_is_done_again(tmp_path: Path) -> None:
    rows = lines(20)
    config = config_for(tmp_path, rows)
    store = ready(config)
    extract(store, tmp_path, 10)
    before = {s.row: s.digest for s in store.manifest.stored()}
    store.close()
    rows[7]["input_ids"][3] = (rows[7]["input_ids"][3] + 1) % VOCAB
    rows[2]["note"] = "every byte offset behind this row moves, its content does not"
    write_jsonl(Path(config.data.path), rows)
    store = ready(config)
    assert store.manifest.claim(99)[0].row == 7
    assert store.manifest.counts().done == 9
    store.manifest.begin_epoch("again")
    extract(store, tmp_path)
    after = {s.row: s.digest for s in store.manifest.stored()}
    assert [row for row in before if before[row] != after[row]] == [7]
    assert store.manifest.counts().finished
    store.close()


def test_ds_01_an_edited_row_is_refused_by_policy(tmp_path: Path) -> None:
    rows = lines(20)
    config = config_for(tmp_path, rows)
    store = ready(config)
    extract(store, tmp_path, 10)
    store.close()
    rows[7]["input_ids"][3] ^= 1
    write_jsonl(Path(config.data.path), rows)
    with pytest.raises(EditedRow, match="row 7 of the data set was edited"):
        ready(policy(config, on_edited_row="refuse"))


@pytest.mark.parametrize("edit", ["insert", "swap", "move"])
@pytest.mark.parametrize("fmt", ["modelopt", "specforge"])
def test_ds_01_rows_that_changed_places_take_their_names_along(tmp_path: Path, fmt: str, edit: str) -> None:
    """Files are named by ids: what has a row's name now may be an earlier content of another row."""
    rows = [{**row, "id": f"chat-{i}"} for i, row in enumerate(lines(40))]
    config = config_for(tmp_path, rows, format=fmt)
    store = ready(config)
    extract(store, tmp_path, 30)
    store.close()
    if edit == "insert":
        rows.insert(20, {"input_ids": [5, 6, 7], "id": "new"})
    elif edit == "swap":
        rows[20], rows[25] = rows[25], rows[20]
    else:
        rows.insert(35, rows.pop(20))
    write_jsonl(Path(config.data.path), rows)
    store = ready(config)
    extract(store, tmp_path)
    counts = store.manifest.counts()
    assert (counts.done, counts.skipped, counts.finished) == (len(rows), 0, True)
    for kept in store.manifest.stored():
        assert kept.name == rows[kept.row]["id"]
        assert open_sample(store.root / kept.path).ids.tolist() == rows[kept.row]["input_ids"]
    store.close()
    ready(config).close()


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_ds_01_no_trainer_finds_what_an_edit_took_out_of_the_set(tmp_path: Path, fmt: str) -> None:
    """A row that got another id, and one that cannot be used any more: their old files are put aside."""
    rows: list[dict[str, Any]] = [{**row, "id": f"chat-{i}"} for i, row in enumerate(lines(6))]
    norm = "pre" if fmt == "speculators" else "post"
    config = policy(config_for(tmp_path, rows, text="", format=fmt), on_bad_row="skip")
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, norm=norm))
    store = ready(config)
    extract(store, tmp_path)
    folder = store.root / "rows_0-2000"
    (folder / "stranger.pt").write_bytes(b"of somebody else")
    store.close()
    rows[2]["id"] = "renamed"
    rows[4]["input_ids"] = []
    write_jsonl(Path(config.data.path), rows)
    store = ready(config)
    extract(store, tmp_path)
    done = {kept.path for kept in store.manifest.stored()}
    assert len(done) == 5
    assert {f"rows_0-2000/{path.name}" for path in folder.iterdir()} == done | {"rows_0-2000/stranger.pt"}
    assert len(list((store.root / "quarantine").iterdir())) == 2
    store.close()


def test_ds_01_another_data_set_is_refused(tmp_path: Path) -> None:
    config = config_for(tmp_path, lines(20))
    ready(config).close()
    write_jsonl(Path(config.data.path), [{"input_ids": [i + 1, 2, 3]} for i in range(20)])
    with pytest.raises(Exception, match="dataset is"):
        ready(config)


def test_ds_01_a_row_that_vanished_is_refused(tmp_path: Path) -> None:
    config = config_for(tmp_path, lines(20))
    ready(config).close()
    write_jsonl(Path(config.data.path), lines(19))
    with pytest.raises(Exception, match="the set has 19 rows now and had 20"):
        ready(config)


BAD: list[tuple[str, Any]] = [
    ("no-ids", {"loss_mask": [1]}),
    ("no-ids", {"input_ids": None}),
    ("no-ids", {"input_ids": "1 2"}),
    ("no-ids", {"input_ids": [1.5]}),
    ("no-ids", {"input_ids": [[1]]}),
    ("no-ids", {"input_ids": [True]}),
    ("no-ids", {"input_ids": [2**70]}),
    ("empty", {"input_ids": []}),
    ("mask-zero", {"input_ids": [1, 2], "loss_mask": [0, 0]}),
    ("mask-length", {"input_ids": [1, 2], "loss_mask": [1]}),
    ("mask-length", {"input_ids": [1, 2], "loss_mask": [1, 1, 1]}),
    ("mask-type", {"input_ids": [1, 2], "loss_mask": [1, 2]}),
    ("mask-type", {"input_ids": [1, 2], "loss_mask": "11"}),
    ("ids-range", {"input_ids": [1, -1]}),
    ("ids-range", {"input_ids": [VOCAB]}),
    ("json", []),
    ("json", "text"),
]


@pytest.mark.parametrize(("code", "row"), BAD)
def test_ds_02_a_row_that_cannot_be_used_is_skipped_with_its_number(tmp_path: Path, code: str, row: object) -> None:
    config = policy(config_for(tmp_path, [GOOD, row, {**GOOD, "input_ids": [3, 2, 1]}]), on_bad_row="skip")
    store = ready(config)
    counts = store.manifest.counts()
    assert (counts.total, counts.skipped, counts.pending) == (3, 1, 2)
    (fault,) = store.manifest.faults([State.skipped])
    assert (fault.row, fault.code) == (1, code)
    assert [c.row for c in store.manifest.claim(9)] == [0, 2], "a bad row is never sent"
    store.close()


@pytest.mark.parametrize(("code", "row"), BAD)
def test_ds_02_a_row_that_cannot_be_used_is_refused_with_its_number(tmp_path: Path, code: str, row: object) -> None:
    with pytest.raises(DataError, match=f"row 1: {code}: "):
        ready(config_for(tmp_path, [GOOD, row]))


def test_ds_02_a_mended_row_is_taken_up(tmp_path: Path) -> None:
    config = policy(config_for(tmp_path, [*lines(3), {"input_ids": []}]), on_bad_row="skip")
    ready(config).close()
    write_jsonl(Path(config.data.path), lines(4))
    store = ready(config)
    assert (store.manifest.counts().pending, store.manifest.counts().skipped) == (4, 0)
    store.close()


def test_ds_03_ids_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    found = judged(tmp_path, [{"input_ids": [0, VOCAB - 1]}, {"input_ids": [-1]}, {"input_ids": [5, VOCAB]}])
    assert codes(found) == ["good", "ids-range", "ids-range"]
    assert str(found[2]) == f"row 2: ids-range: id {VOCAB} is not within 0 to {VOCAB - 1}"


def test_ds_04_a_row_beyond_the_context_is_skipped_and_never_cut(tmp_path: Path) -> None:
    sizes = [CONTEXT - RESERVE_TOKENS, CONTEXT - RESERVE_TOKENS + 1, CONTEXT - 1, CONTEXT, CONTEXT + 1]
    rows: list[object] = [{"input_ids": [i] * size} for i, size in enumerate(sizes)]
    store = ready(config_for(tmp_path, rows))
    assert [(f.row, f.code) for f in store.manifest.faults([State.skipped])] == [(i, "too-long") for i in (1, 2, 3, 4)]
    assert [c.tokens for c in store.manifest.claim(9)] == [sizes[0]]
    store.close()
    with pytest.raises(DataError, match=r"row 1: too-long: .*data.on_long_row"):
        ready(policy(config_for(tmp_path / "volume", rows), on_long_row="refuse"))


def test_ds_05_no_row_is_lost_whatever_the_count_divides_by(tmp_path: Path) -> None:
    rows: list[object] = [{"input_ids": [i % VOCAB, i // VOCAB]} for i in range(10_007)]
    rows[5000] = {"input_ids": []}
    store = ready(policy(config_for(tmp_path, rows), on_bad_row="skip"))
    seen = []
    while claims := store.manifest.claim(32):
        seen += [c.row for c in claims]
    counts = store.manifest.counts()
    assert sorted([*seen, 5000]) == list(range(10_007))
    assert counts.total == 10_007
    store.close()


@pytest.mark.parametrize("sizes", [[8, 3, 17, 1]], ids=["restarts"])
def test_ds_06_07_names_and_rows_stay_together_at_any_parallelism(tmp_path: Path, sizes: list[int]) -> None:
    rng = np.random.default_rng(3)
    rows: list[dict[str, Any]] = [{"input_ids": [i, *[1] * int(rng.integers(1, 60))]} for i in range(50)]
    config = config_for(tmp_path, rows)
    taken: list[int] = []
    for size in sizes:
        store = ready(config)
        writer = publisher(store)
        while claims := store.manifest.claim(size):
            taken += [c.row for c in claims]
            store.manifest.commit([publish(store, c, tmp_path, writer) for c in reversed(claims)])
            if len(taken) in range(size, 50, 13):
                break
        store.close()
    store = ready(config)
    extract(store, tmp_path)
    stored = store.manifest.stored()
    assert len(taken) == len(set(taken)), "nothing is done twice"
    assert [s.row for s in stored] == list(range(50))
    for s in stored:
        assert s.path == f"rows_0-2000/data_{s.row}.ckpt"
        assert open_sample(store.root / s.path).ids.tolist() == rows[s.row]["input_ids"]
    store.close()


def test_ds_08_check_tells_bytes_and_time_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(tmp_path, lines(100))
    free = 10**15 // 2**20  # MiB of reserve: no disk here has so much
    words = ["check", "-c", str(written(tmp_path, config, free)), "--rate", "600"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "cannot fit: " in out
    assert "time: 0 m 02 s at 600 tok/s" in out
    needed = int(out.split("disk: ")[1].split(" bytes needed")[0].replace(",", ""))
    payload = sum(12 * (8 * 64 + 16) for _ in range(100))
    assert payload <= needed <= payload + 100 * 4096
    assert main([*words, "--allow-short-disk"]) == 0


def written(folder: Path, config: Config, reserve_mib: int) -> Path:
    """The config as a file."""
    path = folder / "hs.toml"
    path.write_text(
        f'[data]\npath = "{config.data.path}"\n[model]\npath = "{config.model.path}"\n'
        f'[output]\npath = "{config.output.path}"\nreserve_mib = {reserve_mib}\n'
        f'[paths]\nrun = "{folder}/run"\nstate = "{folder}/state"\nlog = "{folder}/log"\n'
    )
    return path


class Throttled(io.RawIOBase):
    """A file that gives 64 KiB a time and counts: the test stops it where it likes."""

    def __init__(self, path: Path, reads: list[int], most: Callable[[], bool]) -> None:
        self._file = path.open("rb")
        self._reads, self._most = reads, most

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        while not self._most():
            time.sleep(0.01)
        self._reads.append(len(buffer))
        return self._file.readinto(memoryview(buffer)[: 1 << 16])


def test_ds_09_rows_are_claimed_while_the_set_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source stalls after 256 KiB: what has come by then is claimed, the rest follows when it flows again."""
    rows: list[object] = [{"input_ids": [i % VOCAB, i // VOCAB, 1, 2]} for i in range(30_000)]
    config = config_for(tmp_path, rows)
    reads: list[int] = []
    flowing = False

    def opened(self: jsonl.JsonLines) -> Any:
        return io.BufferedReader(Throttled(self.path, reads, lambda: flowing or len(reads) < 4))

    monkeypatch.setattr(jsonl.JsonLines, "_open", opened)
    store = open_store(config, "e")
    store.background.start()
    claims: list[Claim] = []
    deadline = time.monotonic() + 20
    while not claims and time.monotonic() < deadline:
        claims = store.manifest.claim(4)
        time.sleep(0.01)
    assert [c.row for c in claims] == [0, 1, 2, 3]
    assert not store.manifest.counts().ingest_complete
    flowing = True
    while not store.background.check():
        store.background.join(0.05)
    assert store.manifest.counts().total == 30_000
    store.close()


NAMES: list[tuple[Any, str]] = [
    ("../x", "name"),
    ("a/b", "name"),
    ("a\\b", "name"),
    ("", "name"),
    (".", "name"),
    ("..", "name"),
    (".hidden", "name"),
    ("x" * 300, "name"),
    ("a\nb", "name"),
    ("a\0b", "name"),
    ("data_5", "name"),
    (1.5, "name"),
    (True, "name"),
    (["x"], "name"),
]


@pytest.mark.parametrize(("name", "code"), NAMES)
def test_ds_10_a_name_never_leaves_its_folder(tmp_path: Path, name: object, code: str) -> None:
    assert codes(judged(tmp_path, [GOOD, {**GOOD, "id": name}])) == ["good", code]


def test_ds_10_the_second_row_of_a_name_is_refused(tmp_path: Path) -> None:
    rows: list[object] = [{**GOOD, "id": "same"}, {**GOOD, "id": "other"}, {**GOOD, "id": "same"}, {**GOOD, "id": 7}]
    with pytest.raises(DataError, match="row 2: name-twice: row 0 has the id 'same' too"):
        ready(config_for(tmp_path, rows))
    store = ready(policy(config_for(tmp_path), on_bad_row="skip"))
    assert [(f.row, f.code) for f in store.manifest.faults([State.skipped])] == [(2, "name-twice")]
    assert [c.name for c in store.manifest.claim(9)] == ["same", "other", "7"]
    store.close()


@given(st.text(max_size=12))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ds_10_an_accepted_name_is_one_plain_file_name(tmp_path: Path, name: str) -> None:
    if name_problem(name, 3) is None:
        assert (tmp_path / name).parent == tmp_path
        assert (tmp_path / name).name == name
        assert name not in (".", "..")


DAMAGE: list[tuple[bytes, str]] = [
    (b'{"input_ids": [1, 2', "json"),
    (b'{"input_ids": [1], "id": "caf\xe9"}', "encoding"),
    (b'{"input_ids": [1], "messages": "caf\xe9"}', "encoding"),
    (b"\x00\x01\x02", "json"),
    (b"[" * 100_000, "json"),
    (b"{}", "no-ids"),
]


@pytest.mark.parametrize(("line", "code"), DAMAGE)
def test_ds_11_a_damaged_line_is_one_bad_row(tmp_path: Path, line: bytes, code: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"input_ids": [1]}\n\n' + line + b'\n{"input_ids": [2]}')
    assert codes(list(open_dataset(Data(path=str(path)), LIMITS).rows())) == ["good", code, "good"]


def test_ds_11_a_line_without_an_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE", 1000)
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"input_ids": [1]}\n' + b"9" * 100_000 + b'\n{"input_ids": [2]}\n')
    assert codes(list(open_dataset(Data(path=str(path)), LIMITS).rows())) == ["good", "line-too-long", "good"]


def test_ds_11_a_parquet_without_the_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path)
    with pytest.raises(DataError, match="no column input_ids; it has text"):
        open_dataset(Data(path=str(path)), LIMITS)


@pytest.mark.parametrize("content", [b"", b"PAR1 and then something else"])
@pytest.mark.parametrize("name", ["set.parquet", "set.jsonl"])
def test_ds_11_no_damaged_file_is_a_traceback(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if name == "set.jsonl" and content:
        assert codes(list(open_dataset(Data(path=str(path)), LIMITS).rows())) == ["json"]
        return
    with pytest.raises(DataError, match=f"cannot read the data set {path}"):
        open_dataset(Data(path=str(path)), LIMITS)


@pytest.mark.parametrize("content", [b"\n\n", b" \n"])
def test_ds_11_a_set_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    config = config_for(tmp_path, [])
    Path(config.data.path).write_bytes(content)
    with pytest.raises(DataError, match="it has no rows"):
        ready(config)


def test_ds_11_the_message_of_a_damaged_parquet_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    path.write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(DataError) as refused:
        open_dataset(Data(path=str(path)), Limits())
    assert "\n" not in str(refused.value)


def test_ds_11_a_damaged_row_group_is_read_once_and_not_for_each_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2, 3]] * 1000}), path, row_group_size=500)
    dataset = open_dataset(Data(path=str(path)), Limits())
    opened = []
    whole = pq.ParquetFile.iter_batches

    def torn(self: Any, *args: Any, **words: Any) -> Any:
        opened.append(words["row_groups"])
        for n, batch in enumerate(whole(self, *args, **words)):
            if words["row_groups"] == [0] and n == 2:
                raise OSError("Corrupt snappy compressed data.")
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", torn)
    got = list(dataset.rows())
    assert [isinstance(row, BadRow) for row in got] == [False] * 128 + [True] * 372 + [False] * 500
    assert opened == [[0], [1]]
    assert isinstance(dataset.read(5, 0), Sample), "what lies before the damage can still be read"


def test_ds_11_a_disk_that_cannot_be_read_is_no_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2, 3]]}), path)
    dataset = open_dataset(Data(path=str(path)), Limits())

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", failing)
    with pytest.raises(DataError, match="see to its disk"):
        dataset.read(0, 0)


def test_ds_11_texts_that_are_none_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    names = pa.array([b"a", b"\xff\xfe", b"c"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"input_ids": [[1], [2], [3]], "id": names}), path)
    entries = list(open_dataset(Data(path=str(path)), LIMITS).rows())
    assert [entry.code if isinstance(entry, BadRow) else entry.name for entry in entries] == ["a", "parquet", "c"]


def test_ds_11_a_flipped_page_of_a_parquet_is_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    pq.write_table(pa.table({"input_ids": [[i, 1] for i in range(300)]}), path, row_group_size=100, compression="zstd")
    raw = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    raw[start : start + 64] = bytes(64)
    path.write_bytes(raw)
    entries = list(open_dataset(Data(path=str(path)), LIMITS).rows())
    assert [e.row for e in entries] == list(range(300))
    assert set(codes(entries)[100:200]) == {"parquet"}
    assert set(codes(entries)[:100] + codes(entries)[200:]) == {"good"}


@given(st.binary(max_size=200))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ds_11_any_bytes_are_rows_or_bad_rows(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(content + b"\n")
    entries = list(open_dataset(Data(path=str(path)), LIMITS).rows())
    assert [e.row for e in entries] == list(range(len(entries)))


def test_ds_12_messages_beside_ids_are_not_looked_at(tmp_path: Path) -> None:
    (entry,) = judged(tmp_path, [{"messages": [{"role": "user", "content": "hi"}], "input_ids": [4, 5, 6]}])
    assert isinstance(entry, Sample)
    assert entry.ids.tolist() == [4, 5, 6]


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_ds_13_narrow_types_become_int64_with_the_same_values(tmp_path: Path, group: int) -> None:
    rows = lines(10)
    ids = pa.array([r["input_ids"] for r in rows], pa.list_(pa.int32()))
    mask = pa.array([r["loss_mask"] for r in rows], pa.large_list(pa.uint8()))
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"input_ids": ids, "loss_mask": mask}), path, row_group_size=group)
    store = ready(policy(config_for(tmp_path), path=str(path)))
    extract(store, tmp_path)
    for s in store.manifest.stored():
        opened = open_sample(store.root / s.path)
        assert opened.ids.dtype == np.int64
        assert opened.mask is not None
        assert opened.mask.dtype == np.int64
        assert opened.ids.tolist() == rows[s.row]["input_ids"]
        assert opened.mask.tolist() == rows[s.row]["loss_mask"]
    store.close()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_read_again_by_its_hint_is_the_same(tmp_path: Path, suffix: str) -> None:
    rows = lines(200)
    path = tmp_path / f"data.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=70)
    dataset = open_dataset(Data(path=str(path)), LIMITS)
    first = list(dataset.rows())
    assert len(first) == 200
    for i in np.random.default_rng(1).permutation(200):
        was, again = first[i], dataset.read(int(i), first[i].hint)
        assert isinstance(was, Sample)
        assert isinstance(again, Sample)
        assert again.digest == was.digest
    rest = list(dataset.rows(150, first[150].hint))
    assert [e.row for e in rest] == list(range(150, 200))


def test_a_model_folder_that_says_too_little_is_refused(tmp_path: Path) -> None:
    assert read_model(str(write_model(tmp_path / "m"))).vocab == VOCAB
    for text in ("{", "[]", "{}", '{"text_config": {"vocab_size": -1}}'):
        (tmp_path / "m/config.json").write_text(text)
        with pytest.raises(Exception, match="cannot read the model"):
            read_model(str(tmp_path / "m"))
