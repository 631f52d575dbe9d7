"""The contract between capture and worker: what one packs the other reads, and nothing else is read."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsdaemon import wire

HEADER = wire.DumpHeader(
    rid=str(wire.RequestId("0123456789abcdef", 7, 1, 77)),
    tokens=77,
    rows=77,
    hidden=128,
    layers=(1, 3, 4),
    norm="post",
    dtype="bfloat16",
    interleaved=False,
    release="0.5.23",
    capture=wire.CAPTURE_VERSION,
    launch="hs-1",
    tp_rank=0,
    dp_rank=0,
)


@given(row=st.integers(0, 10**10 - 1), attempt=st.integers(0, 999), tokens=st.integers(0, 10**8 - 1))
def test_rr_10_ids_have_one_width_and_are_read_back(row: int, attempt: int, tokens: int) -> None:
    rid = wire.RequestId("0123456789abcdef", row, attempt, tokens)
    assert len(str(rid)) == len(HEADER.rid)
    assert wire.parse_rid(str(rid)) == rid
    for name in (wire.dump_name(rid), wire.error_name(rid), wire.part_name(rid)):
        assert wire.spool_rid(name) == rid


@given(st.text())
def test_foreign_ids_and_names_are_not_ours(text: str) -> None:
    assert wire.parse_rid(text) is None
    assert wire.spool_rid(text) is None


@pytest.mark.parametrize("text", [HEADER.rid + "\n", HEADER.rid + "x", "../" + HEADER.rid, HEADER.rid.upper(), 5, None])
def test_near_misses_are_not_ours(text: object) -> None:
    assert wire.parse_rid(text) is None


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 2200])
def test_planes_are_aligned_and_do_not_overlap(tokens: int, interleaved: bool) -> None:
    layout = wire.Layout(tokens, 7168, 3, "bfloat16", interleaved)
    end = layout.ids_offset + 8 * tokens
    for offset, row in zip(layout.plane_offsets, layout.row_bytes, strict=True):
        assert offset % wire.ALIGN == 0
        assert offset >= end
        end = offset + row * tokens
    assert end <= layout.total < end + wire.ALIGN
    assert sum(layout.row_bytes) == 4 * 7168 * 2


def test_header_is_read_back() -> None:
    raw = wire.pack_header(HEADER)
    assert len(raw) == wire.HEADER_BYTES
    assert wire.unpack_header(raw) == HEADER


@given(st.binary(max_size=64), st.integers(0, wire.HEADER_BYTES - 1))
def test_a_damaged_header_is_an_error_or_another_header(noise: bytes, at: int) -> None:
    raw = bytearray(wire.pack_header(HEADER))
    raw[at : at + len(noise)] = noise
    try:
        read = wire.unpack_header(bytes(raw[: wire.HEADER_BYTES]))
    except ValueError:
        return
    assert dataclasses.is_dataclass(read)


@pytest.mark.parametrize(
    "change", [{"tokens": "77"}, {"tokens": True}, {"layers": [1, "3", 4]}, {"extra": 1}, {"rid": None}]
)
def test_wrongly_typed_fields_are_refused(change: dict[str, object]) -> None:
    fields = {**dataclasses.asdict(HEADER), **change}
    with pytest.raises(ValueError, match="cannot read"):
        wire._typed(wire.DumpHeader, json.loads(json.dumps(fields)))
