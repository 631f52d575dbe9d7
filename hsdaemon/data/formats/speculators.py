"""Speculators 0.9: `rows_a-b/hs_i.safetensors`, all states of a token together, final state before the norm.

Its reader wants one flat folder and a data set saved by `save_to_disk`: the verb `export` makes both from these files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

from hsdaemon.data.formats.parts import STAMP_KEY, Part, Plane, Row, int64_bytes
from hsdaemon.wire import DumpHeader, Layout

DIGEST_KEY = "xxh3_128"  # of the data behind the header: safetensors has no checksum of its own
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64"}
_CODES = {name: code for code, name in DTYPES.items()}


class Speculators:
    name = "speculators"
    interleaved = True
    payload_digest = True

    def file_name(self, row: int, name: str) -> str:  # noqa: ARG002  # the trainer knows rows by number
        return f"hs_{row}.safetensors"

    def payload(self, layout: Layout) -> int:
        return layout.tokens * (sum(layout.row_bytes) + 8)

    def assemble(self, sample: Row, header: DumpHeader, stamp: bytes, digest: str) -> Iterator[Part]:
        (row_bytes,) = header.layout().row_bytes
        s, states = header.tokens, header.tokens * row_bytes
        shape = [s, len(header.layers) + 1, header.hidden]
        head = {
            "__metadata__": {STAMP_KEY: stamp.decode(), DIGEST_KEY: digest or "0" * 32},
            "hidden_states": {"dtype": _CODES[header.dtype], "shape": shape, "data_offsets": [0, states]},
            "token_ids": {"dtype": "I64", "shape": [s], "data_offsets": [states, states + 8 * s]},
        }
        body = json.dumps(head, separators=(",", ":")).encode()
        body += b" " * (-len(body) % 8)  # tensors start at a multiple of 8
        yield struct.pack("<Q", len(body)) + body
        yield Plane(0, states)
        yield int64_bytes(sample.ids)
