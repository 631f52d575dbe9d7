"""SpecForge 0.2: `rows_a-b/data_i.ckpt`, states with a leading axis of 1, final state after the norm."""

from __future__ import annotations

from collections.abc import Iterator

from hsdaemon.data.formats.container import Tensor, container
from hsdaemon.data.formats.parts import Part, Plane, Row, int64_bytes, mask_of
from hsdaemon.wire import DumpHeader, Layout


class SpecForge:
    name = "specforge"
    interleaved = False
    payload_digest = False

    def file_name(self, row: int, name: str) -> str:  # noqa: ARG002  # SpecForge knows rows by number
        return f"data_{row}.ckpt"

    def payload(self, layout: Layout) -> int:
        return layout.tokens * (sum(layout.row_bytes) + 16)

    def assemble(self, sample: Row, header: DumpHeader, stamp: bytes, digest: str) -> Iterator[Part]:  # noqa: ARG002
        aux, final = header.layout().row_bytes
        s, h = header.tokens, header.hidden
        states = Tensor(header.dtype, (1, s, h), Plane(1, s * final))
        aux_states = Tensor(header.dtype, (1, s, len(header.layers) * h), Plane(0, s * aux))
        return container(
            {
                "input_ids": Tensor("int64", (s,), int64_bytes(sample.ids)),
                "loss_mask": Tensor("int64", (s,), int64_bytes(mask_of(sample))),
                "hidden_state": states,
                "aux_hidden_state": aux_states,
            },
            stamp,
        )
