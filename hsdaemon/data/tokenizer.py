"""A model's tokenizer and chat template, read from its folder.

`tokenizer.json` is read as it is. A model without one (a tokenizer in Python, as Kimi's) is asked in a child process
that has transformers, which this process never imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from hsdaemon.errors import DataError

START_S = 180.0  # transformers imports in 5 to 30 s on busy cores
ENCODE_S = 60.0  # one text


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """ids of a text; offsets: characters [start, end) of each id, or None where the tokenizer does not tell."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None


class Tokenizer(Protocol):
    """Text to ids, nothing added."""

    def encode(self, text: str) -> Encoded: ...

    def close(self) -> None: ...


class FastTokenizer:
    """`tokenizer.json`. Raises DataError when it is none."""

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
            raise DataError(f"cannot read {path}: {error}; copy it from the model again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> Encoded:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return Encoded(encoding.ids, encoding.offsets)

    def close(self) -> None:
        """Nothing to give back."""


class ChildTokenizer:
    """A tokenizer in a child process: a JSON line with a text in, a JSON line with its ids out."""

    def __init__(self, folder: Path, *, trust_remote_code: bool) -> None:
        command = [sys.executable, "-m", "hsdaemon.data.tokenizer_child", str(folder), str(int(trust_remote_code))]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._rest = b""
        try:
            hello = self._answer(START_S)
        except DataError:
            self.close()
            raise
        if "error" in hello:
            self.close()
            hint = "" if trust_remote_code else "; code in the model's folder runs only with --trust-remote-code"
            raise DataError(f"cannot load the tokenizer of {folder}: {hello['error']}{hint}")

    def encode(self, text: str) -> Encoded:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(text).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise DataError("cannot tokenise: the tokenizer's process is gone; see its last words above") from None
        answer = self._answer(ENCODE_S)
        if "error" in answer:
            raise ValueError(answer["error"])
        return Encoded(answer["ids"], None)

    def close(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _answer(self, patience: float) -> dict[str, Any]:
        """The next line of the child, within `patience` seconds. Raises DataError."""
        assert self._child.stdout is not None
        fd, deadline = self._child.stdout.fileno(), time.monotonic() + patience
        while b"\n" not in self._rest:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise DataError(f"cannot tokenise: the tokenizer gave no answer in {patience:g} s")
            piece = os.read(fd, 1 << 20)
            if not piece:
                raise DataError("cannot tokenise: the tokenizer's process ended; see its last words above")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def open_tokenizer(folder: Path, *, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer of the model in `folder`. Raises DataError."""
    if not folder.is_dir():
        raise DataError(f"cannot load a tokenizer: {folder} is not a folder; name the model's folder")
    path = folder / "tokenizer.json"
    if path.is_file():
        return FastTokenizer(path)
    return ChildTokenizer(folder, trust_remote_code=trust_remote_code)


def template_source(folder: Path) -> tuple[str, dict[str, str]]:
    """The chat template of the model in `folder`, and its special tokens by name. Raises DataError."""
    config = _json(folder / "tokenizer_config.json")
    names = _special_tokens(_json(folder / "special_tokens_map.json") | config)
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        try:
            return alone.read_text(encoding="utf-8"), names
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {alone}: {error}; copy it from the model again") from None
    template = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        cause = "neither chat_template.jinja nor a chat_template in tokenizer_config.json"
        raise DataError(f"cannot render chats: {folder} has {cause}; use a chat model's folder")
    return template, names


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, each a text or an object with the text as `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; nothing when there is no file. Raises DataError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}; copy it from the model again") from None
    if not isinstance(value, dict):
        raise DataError(f"cannot read {path}: not an object; copy it from the model again")
    return value
