"""What the capture (inside the engine) and the worker must agree on: ids, names, layout, files.

Imports nothing of ours.

A *dump* is one sample's states in the spool, one file, written under a hidden name and renamed when whole:

    0                 header: MAGIC, length of the JSON (u32 LE), JSON, zeros up to HEADER_BYTES
    ids_offset        int64 token ids as the engine saw them, [tokens]; -1 where no row was captured
    planes            planar: [tokens, aux * hidden] then [tokens, hidden]; interleaved: [tokens, aux + 1, hidden]

Every plane starts at a multiple of ALIGN so that it can be read and written with O_DIRECT.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
from typing import Any, TypeVar

_T = TypeVar("_T")

CAPTURE_VERSION = 1
CAPTURE_ENV = "HSDAEMON_CAPTURE"  # JSON of CaptureConfig; the capture is inert without it
ENABLED_LINE = "[HS_DUMP] enabled:"  # for people only: a proof never reads it

MAGIC = b"HSDUMP1\n"
HEADER_BYTES = 4096
ALIGN = 4096
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

EPOCH_FILE = "epoch"  # in the spool: the epoch of the living worker; dumps of other epochs are not written
DUMP_SUFFIX = ".hs"
ERROR_SUFFIX = ".err"
PART_PREFIX, PART_SUFFIX = ".", ".part"

# Fixed width, so that no id is a prefix of another (the engine aborts by prefix), and no character that a path minds.
_RID = re.compile(r"hs1-([0-9a-f]{16})-([0-9]{10})-([0-9]{3})-([0-9]{8})", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestId:
    """One try at one row: `epoch` is 16 hex digits naming a run of a worker, `tokens` the prompt's length."""

    epoch: str
    row: int
    attempt: int
    tokens: int

    def __str__(self) -> str:
        return f"hs1-{self.epoch}-{self.row:010d}-{self.attempt:03d}-{self.tokens:08d}"


def parse_rid(text: object) -> RequestId | None:
    """Give the request id that `text` spells, or None for anything that is not exactly one of ours."""
    match = _RID.fullmatch(text) if isinstance(text, str) else None
    return RequestId(match[1], int(match[2]), int(match[3]), int(match[4])) if match else None


def dump_name(rid: RequestId) -> str:
    return f"{rid}{DUMP_SUFFIX}"


def error_name(rid: RequestId) -> str:
    return f"{rid}{ERROR_SUFFIX}"


def part_name(rid: RequestId) -> str:
    return f"{PART_PREFIX}{rid}{PART_SUFFIX}"


def spool_rid(name: str) -> RequestId | None:
    """The request id of a spool file's name (dump, error or part), or None for a foreign name."""
    for prefix, suffix in (("", DUMP_SUFFIX), ("", ERROR_SUFFIX), (PART_PREFIX, PART_SUFFIX)):
        if name.startswith(prefix) and name.endswith(suffix):
            return parse_rid(name[len(prefix) : len(name) - len(suffix)])
    return None


def _up(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where each byte of a dump lies. tokens: rows; hidden: columns of one state; aux: number of aux layers."""

    tokens: int
    hidden: int
    aux: int
    dtype: str
    interleaved: bool

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def ids_offset(self) -> int:
        return HEADER_BYTES

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of one token in each plane."""
        state = self.hidden * self.item
        return ((self.aux + 1) * state,) if self.interleaved else (self.aux * state, state)

    @property
    def plane_offsets(self) -> tuple[int, ...]:
        first = _up(self.ids_offset + 8 * self.tokens)
        if self.interleaved:
            return (first,)
        return (first, _up(first + self.tokens * self.row_bytes[0]))

    @property
    def total(self) -> int:
        """Bytes of the whole dump: what is claimed from the spool's budget before the request is sent."""
        return _up(self.plane_offsets[-1] + self.tokens * self.row_bytes[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class DumpHeader:
    """What the capture says of a dump. `rows`: rows written, each once; `layers`: physical, ascending."""

    rid: str
    tokens: int
    rows: int
    hidden: int
    layers: tuple[int, ...]
    norm: str  # "post" | "pre"
    dtype: str
    interleaved: bool
    release: str
    capture: int
    launch: str
    tp_rank: int
    dp_rank: int

    def layout(self) -> Layout:
        return Layout(self.tokens, self.hidden, len(self.layers), self.dtype, self.interleaved)


def pack_header(header: DumpHeader) -> bytes:
    """HEADER_BYTES bytes. Raises ValueError when the header does not fit."""
    body = json.dumps(dataclasses.asdict(header), separators=(",", ":")).encode()
    if len(body) > HEADER_BYTES - 12:
        raise ValueError(f"cannot write a dump header: {len(body)} bytes are too many")
    return (MAGIC + struct.pack("<I", len(body)) + body).ljust(HEADER_BYTES, b"\0")


def parse_json(raw: str | bytes) -> Any:
    """JSON from anybody. Raises ValueError for all else, and for what is JSON to Python alone or breaks later: nesting
    that no file of ours has, NaN and infinity, half a surrogate pair."""
    try:
        value = json.loads(raw, parse_constant=_no_number, parse_float=_finite)
        if (b"\\u" if isinstance(raw, bytes) else "\\u") in raw:  # type: ignore[operator]  # of one kind
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def unpack_header(raw: bytes) -> DumpHeader:
    """Read a header back. Raises ValueError for anything that is not a whole, typed header."""
    if len(raw) < HEADER_BYTES or raw[:8] != MAGIC:
        raise ValueError("cannot read the dump: no header")
    (size,) = struct.unpack_from("<I", raw, 8)
    if size > HEADER_BYTES - 12:
        raise ValueError("cannot read the dump: the header's length is impossible")
    try:
        fields = parse_json(raw[12 : 12 + size])
    except ValueError as error:
        raise ValueError(f"cannot read the dump: {error}") from None
    return _typed(DumpHeader, fields)


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureConfig:
    """The capture's whole configuration, handed over as JSON in the environment variable CAPTURE_ENV."""

    spool: str  # folder of the dumps, on a tmpfs
    attest: str  # folder where each rank writes its attest file
    launch: str  # random id of this start of the engine; also its served model name
    way: str  # "plugin" | "patch": the one way in that may arm; the other stays inert
    layers: tuple[int, ...]  # physical, ascending; () = the EAGLE-3 default (1, n//2 - 1, n - 4)
    norm: str  # "post" | "pre": the final state after or before the final norm
    dtype: str  # of the stored states
    interleaved: bool
    budget: int  # bytes: files of the spool never exceed it
    wait_s: float  # how long a forward may wait for spool space or a buffer, far below the engine's watchdog
    buffers: int  # pinned buffers of the pool


@dataclasses.dataclass(frozen=True, slots=True)
class Attest:
    """What one rank says of itself, from inside the engine's process. `stage`: "armed" (hooks are set), "seen" (after
    the first captured forward) or "broken". `start_ticks`: field 22 of /proc/pid/stat, so that a reused pid is told."""

    launch: str
    stage: str
    pid: int
    start_ticks: int
    release: str
    capture: int
    way: str  # "plugin" | "patch"
    model: str  # class name of the model
    num_layers: int
    hidden: int
    layers: tuple[int, ...]  # physical
    loop_ids: tuple[int, ...]  # the engine's own raw list
    norm: str
    dtype: str
    interleaved: bool
    tp_rank: int
    tp_size: int
    dp_rank: int
    spool: str
    errors: int
    last_error: str


def attest_name(attest: Attest) -> str:
    return f"attest-{attest.launch}-tp{attest.tp_rank:03d}-dp{attest.dp_rank:03d}-{attest.pid}.json"


@dataclasses.dataclass(frozen=True, slots=True)
class DumpError:
    """Why a sample has no dump: the content of an error file. `code`: "capture", "spool-full", "stalled", "states"
    (rows of this sample lack), "layers" (a layer or the final state lacks, so it will in every sample)."""

    rid: str
    code: str
    reason: str


def to_json(value: CaptureConfig | Attest | DumpError) -> str:
    return json.dumps(dataclasses.asdict(value), separators=(",", ":"), sort_keys=True)


def capture_config(text: str) -> CaptureConfig:
    """Raises ValueError when `text` is not exactly one."""
    return _typed(CaptureConfig, parse_json(text))


def attest(text: str) -> Attest:
    """Raises ValueError when `text` is not exactly one."""
    return _typed(Attest, parse_json(text))


def dump_error(text: str) -> DumpError:
    """Raises ValueError when `text` is not exactly one."""
    return _typed(DumpError, parse_json(text))


_PLAIN: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "bool": bool, "float": (int, float)}


def _typed(kind: type[_T], fields: object) -> _T:
    """Build `kind` from parsed JSON, refusing missing, unknown and wrongly typed fields (the sender may be anybody)."""
    wanted = {f.name: str(f.type) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]  # a TypeVar is no dataclass
    if not isinstance(fields, dict) or fields.keys() != wanted.keys():
        raise ValueError(f"cannot read a {kind.__name__}: its fields are not the expected ones")
    return kind(**{name: _value(kind, name, wanted[name], value) for name, value in fields.items()})


def _value(kind: type, name: str, wanted: str, value: object) -> object:
    if wanted == "tuple[int, ...]":
        if isinstance(value, list) and all(type(v) is int for v in value):
            return tuple(value)
    elif isinstance(value, _PLAIN[wanted]) and (wanted == "bool" or not isinstance(value, bool)):
        return value
    raise ValueError(f"cannot read a {kind.__name__}: {name} is not {wanted}")
