"""One file per trainer: what each loads, written directly, never loaded and saved again.

Row t of every state belongs to token t; nothing is shifted, padded or cast here.
"""

from __future__ import annotations

from hsdaemon.data.formats.modelopt import ModelOpt
from hsdaemon.data.formats.opening import Damaged, Stored, check_content, open_sample, read_stamp
from hsdaemon.data.formats.parts import (
    Format,
    Part,
    Plane,
    Row,
    Stamp,
    file_bound,
    file_size,
    folder_name,
    make_stamp,
    relative_path,
)
from hsdaemon.data.formats.specforge import SpecForge
from hsdaemon.data.formats.speculators import Speculators
from hsdaemon.errors import ConfigError

__all__ = [
    "FORMATS",
    "Damaged",
    "Format",
    "Part",
    "Plane",
    "Row",
    "Stamp",
    "Stored",
    "check_content",
    "file_bound",
    "file_size",
    "folder_name",
    "get_format",
    "make_stamp",
    "norm_refusal",
    "open_sample",
    "read_stamp",
    "relative_path",
]

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (SpecForge(), ModelOpt(), Speculators())}
_NORMS = {"specforge": ("post",), "modelopt": ("post", "pre"), "speculators": ("pre",)}


def get_format(name: str) -> Format:
    """Raises ConfigError for a name that is none."""
    if name not in FORMATS:
        raise ConfigError(f"cannot write format {name!r}: there is no such format; use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def norm_refusal(name: str, norm: str) -> str | None:
    """Why the final state of this norm must not go into files of this format; None when it may."""
    if norm in _NORMS[name]:
        return None
    wanted = " or ".join(_NORMS[name])
    return f"{name} takes the final state {wanted}-norm, not {norm}-norm: a trainer would train on it without an error"
