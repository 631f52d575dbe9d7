"""One event, two renderings: a line for people, native fields for the journal.

`setup` is called once, by the root. Rooms log with `structlog.get_logger()`: a short sentence and fields. Under systemd
each field becomes a journal field of its own (`journalctl SAMPLE=data_12`), and `message_id` marks the kind of event.
A field whose name begins with an underscore is for programs: the journal has it (`journalctl RUNG=engine_up`), the
sentence does not.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import re
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

JOURNAL_SOCKET = "/run/systemd/journal/socket"
SEND_S = 1.0  # a journal that takes nothing for this long loses the line: logging must never stop the work
PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}  # syslog's levels
FIELD_CHARS = 64  # journald drops longer names
_OURS = re.compile(r"[^A-Z0-9_]")
# Names that the journal gives a meaning of its own; ours are prefixed instead of lost or misread.
_TAKEN = re.compile(r"MESSAGE$|PRIORITY$|SYSLOG_|CODE_|OBJECT_|COREDUMP_|ERRNO$|INVOCATION_ID$|DOCUMENTATION$")


def setup(
    stream: TextIO | None = None, environ: Mapping[str, str] | None = None, journal: str = JOURNAL_SOCKET
) -> None:
    """Route every structlog event to the journal when `stream` (stderr) is the journal's, else to `stream` as lines."""
    out = sys.stderr if stream is None else stream
    env = os.environ if environ is None else environ
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
    ]
    if is_journal(out, env):
        last: list[structlog.typing.Processor] = [JournalRenderer(Journal(journal), out)]
    else:
        stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if out.isatty() else "iso", utc=not out.isatty())
        console = structlog.dev.ConsoleRenderer(
            colors=out.isatty() and "NO_COLOR" not in env, pad_event_to=0, pad_level=False
        )
        last = [_for_people, stamp, console]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(20),  # info and above
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """True when systemd connected this very stream to the journal (JOURNAL_STREAM=device:inode)."""
    try:
        stat = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}"


class Sink(Protocol):
    """Where native fields go."""

    def send(self, payload: bytes) -> str | None: ...


class Journal:
    """journald's native socket. Gives the cause when a message could not be sent; never raises, never blocks long."""

    def __init__(self, path: str = JOURNAL_SOCKET) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(SEND_S)

    def send(self, payload: bytes) -> str | None:
        try:
            self._socket.sendto(payload, self._path)
        except OSError as error:
            if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS):
                return str(error)
            return self._send_file(payload)
        return None

    def _send_file(self, payload: bytes) -> str | None:
        """Hand over a sealed memory file: what journald takes when a datagram is too small."""
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        try:
            fd = os.memfd_create("hs-extract-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                with os.fdopen(os.dup(fd), "wb") as file:
                    file.write(payload)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                self._socket.sendmsg([], rights, 0, self._path)
            finally:
                os.close(fd)
        except OSError as error:
            return str(error)
        return None


class JournalRenderer:
    """The last processor: sends fields to the journal; a line on `out` (which is the journal too) when that fails."""

    def __init__(self, journal: Sink, out: TextIO) -> None:
        self._journal, self._out = journal, out

    def __call__(self, _logger: WrappedLogger, _name: str, event: EventDict) -> str:
        message = sentence(event)
        level = PRIORITY.get(str(event.pop("level", "info")), 6)
        fields = {field_name(key): str(value) for key, value in event.items() if key != "event"}
        if self._journal.send(encode({"MESSAGE": message, "PRIORITY": str(level), **fields})) is None:
            raise structlog.DropEvent
        return f"<{level}>" + message.replace("\n", f"\n<{level}>")


def sentence(event: Mapping[str, Any]) -> str:
    """The event and its fields as one text, the traceback below it."""
    hidden = ("event", "level", "message_id", "exception")
    shown = (f"{k}={v}" for k, v in event.items() if k not in hidden and not k.startswith("_"))
    words = [str(event.get("event", "")), *shown]
    text = " ".join(words)
    return f"{text}\n{event['exception']}" if "exception" in event else text


def field_name(key: str) -> str:
    """A journal field's name: capitals, digits and underscores, no leading underscore, none of the journal's own."""
    name = _OURS.sub("_", key.upper()).lstrip("_")
    if not name or name[0].isdigit() or _TAKEN.match(name):
        name = f"HS_{name}"
    return name[:FIELD_CHARS]


def encode(fields: Mapping[str, str]) -> bytes:
    """The native protocol: NAME=value, or NAME, u64 length and value when the value has line breaks."""
    return b"".join(_field(name.encode(), value.encode(errors="surrogateescape")) for name, value in fields.items())


def _field(name: bytes, value: bytes) -> bytes:
    if b"\n" in value:
        return name + b"\n" + struct.pack("<Q", len(value)) + value + b"\n"
    return name + b"=" + value + b"\n"


def _for_people(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    return {k: v for k, v in event.items() if k != "message_id" and not k.startswith("_")}
