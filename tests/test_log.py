"""One event, two renderings: lines for people, native fields in the journal."""

import io
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from sdbox import Box, until

from hsdaemon.machine import log


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "socket"))
        server.settimeout(5)
        yield server


def received(server: socket.socket) -> dict[str, str]:
    """What journald would read: from the datagram, or from the memory file that came with it."""
    payload, fds, _flags, _who = socket.recv_fds(server, 1 << 20, 1)
    for fd in fds:
        with os.fdopen(fd, "rb") as file:
            file.seek(0)
            payload = file.read()
    fields = {}
    while payload:
        head, _, rest = payload.partition(b"\n")
        if b"=" in head:
            name, _, value = head.partition(b"=")
            payload = rest
        else:
            (size,) = struct.unpack_from("<Q", rest)
            name, value, payload = head, rest[8 : 8 + size], rest[9 + size :]
        fields[name.decode()] = value.decode()
    return fields


def under_systemd(tmp_path: Path, socket_name: str = "socket") -> Path:
    """Set logging up as if systemd had connected a stream to the journal; gives that stream's file."""
    path = tmp_path / "stderr"
    stream = path.open("w", buffering=1)
    stat = os.fstat(stream.fileno())
    log.setup(stream, {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}, str(tmp_path / socket_name))
    return path


def test_fields_reach_the_journal_by_name(tmp_path: Path, journal: socket.socket) -> None:
    lines = under_systemd(tmp_path)
    structlog.get_logger().warning("sample failed", sample="data_12", unit="hs-worker.service", message_id="ab" * 16)
    assert received(journal) == {
        "MESSAGE": "sample failed sample=data_12 unit=hs-worker.service",
        "PRIORITY": "4",
        "SAMPLE": "data_12",
        "UNIT": "hs-worker.service",
        "MESSAGE_ID": "ab" * 16,
    }
    assert lines.read_text() == ""


@pytest.mark.parametrize("size", [10, 1_000_000], ids=["datagram", "memory file"])
def test_values_with_line_breaks_of_any_size_arrive_whole(tmp_path: Path, journal: socket.socket, size: int) -> None:
    under_systemd(tmp_path)
    reason = "a\nb=c\n" + "x" * size
    structlog.get_logger().error("engine died", reason=reason)
    assert received(journal)["REASON"] == reason


def test_a_traceback_is_in_the_message(tmp_path: Path, journal: socket.socket) -> None:
    under_systemd(tmp_path)
    try:
        raise ValueError("boom")
    except ValueError:
        structlog.get_logger().exception("cannot go on")
    fields = received(journal)
    assert fields["MESSAGE"].startswith("cannot go on\nTraceback")
    assert "ValueError: boom" in fields["EXCEPTION"]
    assert fields["PRIORITY"] == "3"


def test_without_a_journal_socket_the_line_goes_to_the_stream(tmp_path: Path) -> None:
    lines = under_systemd(tmp_path, "nobody")
    structlog.get_logger().error("engine died", code=7)
    assert lines.read_text() == "<3>engine died code=7\n"


@pytest.mark.parametrize(
    ("key", "name"),
    [("sample", "SAMPLE"), ("_secret", "SECRET"), ("2nd", "HS_2ND"), ("priority", "HS_PRIORITY"), ("a.b", "A_B")],
)
def test_a_field_name_is_one_that_the_journal_keeps(key: str, name: str) -> None:
    assert log.field_name(key) == name


def test_elsewhere_an_event_is_one_readable_line() -> None:
    out = io.StringIO()
    log.setup(out, {})
    structlog.get_logger().info("sample done", row=3, message_id="ab" * 16)
    (line,) = out.getvalue().splitlines()
    assert line.endswith("[info] sample done row=3")


def test_a_stale_journal_variable_is_not_believed() -> None:
    out = io.StringIO()
    log.setup(out, {"JOURNAL_STREAM": "1:2"})
    structlog.get_logger().info("hello")
    assert "hello" in out.getvalue()


SPEAKER = """
import structlog
from hsdaemon.machine import log
log.setup()
structlog.get_logger().error("engine died", sample="data_12", reason="x" * 1_000_000, message_id="ab" * 16)
"""


@pytest.mark.root
def test_a_real_journal_keeps_every_field(box: Box) -> None:
    root = str(Path(__file__).parent.parent)
    box.start_unit("speaker", sys.executable, "-c", SPEAKER, env={"PYTHONPATH": root}, props=["RemainAfterExit=yes"])
    query = ("-o", "json", "--all", "MESSAGE_ID=" + "ab" * 16)
    until(lambda: box.journal(*query), 30)
    fields = json.loads(box.journal(*query).splitlines()[0])
    assert fields["_SYSTEMD_UNIT"] == "speaker.service"
    assert (fields["SAMPLE"], fields["PRIORITY"]) == ("data_12", "3")
    assert fields["MESSAGE"].startswith("engine died sample=data_12 ")
    assert len(fields["REASON"]) == 1_000_000
