"""JSON lines: one object a line, hints are byte offsets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hsdaemon.data.rows import Limits, judge
from hsdaemon.data.sample import BadRow, Sample
from hsdaemon.errors import DataError

MAX_LINE = 64 * 2**20  # bytes: a sample of a million tokens has about 14 MB; more is damage, not data


def next_line(file: BinaryIO) -> bytes:
    """The next line; of an impossibly long one its first MAX_LINE + 1 bytes, the rest is passed over."""
    piece = line = file.readline(MAX_LINE + 1)
    while len(piece) > MAX_LINE and not piece.endswith(b"\n"):
        piece = file.readline(MAX_LINE + 1)
    return line


class _Line(msgspec.Struct):
    """Fields beyond these (messages, for instance) are skipped unparsed: ids are sent as they are."""

    input_ids: Any = None
    loss_mask: Any = None
    id: Any = None


class JsonLines:
    """A DataSet over a .jsonl file."""

    def __init__(self, path: Path, limits: Limits, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self._limits = limits
        self._decoder = msgspec.json.Decoder(_Line)
        self._file = self._open()
        self._end = 0

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise DataError(f"cannot read the data set {self.path}: {error.strerror}; set data.path") from None

    def rows(self, start: int = 0, hint: int = 0) -> Iterator[Sample | BadRow]:
        row = start
        with self._open() as file:
            file.seek(hint)
            while line := self._line(file):
                offset, hint = hint, file.tell()
                if not line.isspace():
                    self._end = hint
                    yield self._judge(row, offset, line)
                    row += 1

    def end_hint(self) -> int:
        return self._end

    def read(self, row: int, hint: int) -> Sample | BadRow:
        self._file.seek(hint)
        line = self._line(self._file)
        return self._judge(row, hint, line)

    def close(self) -> None:
        self._file.close()

    def _line(self, file: BinaryIO) -> bytes:
        try:
            return next_line(file)
        except OSError as error:
            raise DataError(f"cannot read the data set {self.path}: {error.strerror}; see to its disk") from None

    def _judge(self, row: int, hint: int, line: bytes) -> Sample | BadRow:
        if len(line) > MAX_LINE:
            return BadRow(row, "line-too-long", f"the line has more than {MAX_LINE} bytes", hint)
        try:
            if not line.isascii():
                line.decode()  # the decoder does not look at the fields that it skips
            fields = self._decoder.decode(line)
        except UnicodeDecodeError as error:
            return BadRow(row, "encoding", f"not UTF-8 at byte {error.start} of the line", hint)
        except (msgspec.DecodeError, RecursionError) as error:
            return BadRow(row, "json", f"not one JSON object: {error}", hint)
        return judge(row, hint, fields.input_ids, fields.loss_mask, fields.id, self._limits)
