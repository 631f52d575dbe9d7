"""Where the engine is: <paths.run>/engine.json, written just before exec, so that its pid is the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from hsdaemon.config import Word
from hsdaemon.machine import disk
from hsdaemon.machine.identity import boot_id, start_ticks

NAME = "engine.json"


class Endpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """One start of the engine. `start_ticks`: field 22 of /proc/pid/stat; `fingerprint`: of all that shapes it;
    `model`: revision of its checkpoint as it was before the load, "" = not known."""

    launch: str
    pid: int
    start_ticks: int
    boot_id: str
    host: Literal["127.0.0.1", "::1"]
    port: Annotated[int, Meta(ge=1, le=65535)]
    release: str
    way: str
    fingerprint: str
    argv: tuple[str, ...]
    log: Word
    model: str = ""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def path(run: str) -> Path:
    return Path(run) / NAME


def read(run: str) -> Endpoint | None:
    """The endpoint in folder `run`, or None where there is none or where it cannot be understood."""
    try:
        return msgspec.json.decode(disk.read_own(path(run)), type=Endpoint)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


def write(run: str, endpoint: Endpoint) -> None:
    """Replace it in one step. A crash leaves the old one or the new one; a reboot takes both."""
    disk.replace(path(run), msgspec.json.encode(endpoint))


def alive(endpoint: Endpoint) -> bool:
    """Whether the very process that was written down still runs."""
    return endpoint.boot_id == boot_id() and start_ticks(endpoint.pid) == endpoint.start_ticks
