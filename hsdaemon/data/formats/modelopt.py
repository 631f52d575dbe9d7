"""ModelOpt 0.47: `rows_a-b/<conversation_id>.pt`, no batch axis, either norm, pre-norm with a flag."""

from __future__ import annotations

from collections.abc import Iterator

from hsdaemon.data.formats.container import Tensor, Value, container
from hsdaemon.data.formats.parts import Part, Plane, Row, int64_bytes, mask_of
from hsdaemon.data.sample import name_problem
from hsdaemon.wire import DumpHeader, Layout


class ModelOpt:
    name = "modelopt"
    interleaved = False
    payload_digest = False

    def file_name(self, row: int, name: str) -> str:
        problem = name_problem(name, row)
        if problem:
            raise ValueError(f"{name[:80]!r} cannot name a file: {problem}")
        return f"{name}.pt"

    def payload(self, layout: Layout) -> int:
        return layout.tokens * (sum(layout.row_bytes) + 16)

    def assemble(self, sample: Row, header: DumpHeader, stamp: bytes, digest: str) -> Iterator[Part]:  # noqa: ARG002
        aux, final = header.layout().row_bytes
        s, h = header.tokens, header.hidden
        values: dict[str, Value] = {
            "input_ids": Tensor("int64", (s,), int64_bytes(sample.ids)),
            "hidden_states": Tensor(header.dtype, (s, h), Plane(1, s * final)),
            "aux_hidden_states": Tensor(header.dtype, (s, len(header.layers) * h), Plane(0, s * aux)),
            "loss_mask": Tensor("int64", (s,), int64_bytes(mask_of(sample))),
            "conversation_id": sample.name,
        }
        if header.norm == "pre":
            values["hidden_states_prenorm"] = True
        return container(values, stamp)
