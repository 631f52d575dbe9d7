"""What an Xid asks for (NVIDIA's catalogue, by class). Others, like 43, are told by the engine's own errors."""

from __future__ import annotations

RESTART = frozenset({8, 13, 31, 45, 68, 69, 94})  # the process is broken, the GPU is not
RESET = frozenset({48, 61, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 154, 155, 156, 158})
