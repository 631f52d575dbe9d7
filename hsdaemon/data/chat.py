"""Chats to token ids and an assistant-only loss mask, by the model's own chat template.

The mask marks what the assistant says. Where the template has generation markers they tell; where not, the difference
between the chat up to the assistant's header and the chat with its answer does: both are prefixes of the whole text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from hsdaemon.data.tokenizer import Encoded, Tokenizer

Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, end) of the rendered text

# Speakers of `conversations` rows ("from") as the roles that templates know.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class BadChat(Exception):  # a finding about a row, not a failure of the program
    """A row that cannot become a sample. code: a word for counting; the text is for a person."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """A chat as the trainer takes it. ids, mask: one length; mask is 1 where the assistant speaks."""

    ids: list[int]
    mask: list[int]


def messages(row: Mapping[str, Any]) -> list[Message]:
    """The chat of a row of either kind, with the roles that templates know. Raises BadChat."""
    turns = row.get("messages")
    if turns is None:
        turns = row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise BadChat("no-chat", "messages or conversations must be a list with entries")
    chat = [_message(i, turn) for i, turn in enumerate(turns)]
    if not any(m["role"] == "assistant" for m in chat):
        raise BadChat("no-assistant", f"{len(chat)} messages, none by the assistant")
    return chat


def _message(i: int, turn: object) -> Message:
    if not isinstance(turn, dict):
        raise BadChat("message", f"message {i} is not an object")
    if "role" in turn:
        role = turn["role"]
        fields = {key: value for key, value in turn.items() if value is not None or key == "content"}
    else:
        role, fields = ROLES.get(str(turn.get("from")), turn.get("from")), {"content": turn.get("value")}
    if not isinstance(role, str) or role not in ROLES.values():
        raise BadChat("role", f"message {i} is by {str(role)[:40]!r}")
    if not isinstance(fields.get("content"), str | list) and "tool_calls" not in fields:
        raise BadChat("message", f"message {i} has no text")
    return {**fields, "role": role}


def tools(row: Mapping[str, Any]) -> list[Any] | None:
    """The tools that a row offers the assistant, or None. Raises BadChat."""
    offered = row.get("tools")
    if isinstance(offered, str):
        try:
            offered = json.loads(offered)
        except (ValueError, RecursionError):
            raise BadChat("tools", "tools is a text, and not JSON") from None
    if offered is not None and not isinstance(offered, list):
        raise BadChat("tools", f"tools is not a list but {type(offered).__name__}")
    return offered or None


class Template:
    """A model's chat template, rendered as the model's authors expect. source: Jinja; names: its special tokens."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self.marked = _MARKERS.search(source) is not None
        self._names = dict(names)
        self._open, self._close = (f"\x02{secrets.token_hex(8)}{c}" for c in "<>")  # no chat can contain them
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        env.filters["tojson"] = _tojson
        env.globals |= {"raise_exception": _refuse, "strftime_now": _now, "generation_marks": (self._open, self._close)}
        self._template = env.from_string(source)

    def text(self, chat: Sequence[Message], offered: list[Any] | None, *, prompt: bool = False) -> str:
        """The chat as text. prompt: ends where the assistant begins to answer. Raises BadChat."""
        marked = self._render(chat, offered, prompt)
        return marked.replace(self._open, "").replace(self._close, "")

    def spans(self, chat: Sequence[Message], offered: list[Any] | None) -> tuple[str, list[Span]]:
        """The chat as text, and where in it the assistant speaks. Raises BadChat."""
        if self.marked:
            return self._marked_spans(self._render(chat, offered, prompt=False))
        whole = self.text(chat, offered)
        turns = (i for i, message in enumerate(chat) if message["role"] == "assistant")
        return whole, [self._turn(whole, chat, offered, i) for i in turns]

    def _marked_spans(self, marked: str) -> tuple[str, list[Span]]:
        """Take the marks out again. Nested marks count once."""
        pieces: list[str] = []
        spans: list[Span] = []
        at, depth, start = 0, 0, 0
        for piece in re.split(f"({re.escape(self._open)}|{re.escape(self._close)})", marked):
            if piece == self._open:
                start, depth = (at if depth == 0 else start), depth + 1
            elif piece == self._close:
                depth -= 1
                if depth == 0:
                    spans.append((start, at))
            else:
                pieces.append(piece)
                at += len(piece)
        return "".join(pieces), spans

    def _turn(self, whole: str, chat: Sequence[Message], offered: list[Any] | None, i: int) -> Span:
        """Where turn `i` stands in `whole`: from the end of its header to its own end. Raises BadChat."""
        head = self.text(chat[:i], offered, prompt=True)
        start = _common(whole, head)
        # A header may end in what this answer lacks (an opened thought); what stands before the header may not differ.
        if start < len(head) and start < len(self.text(chat[:i], offered)):
            raise BadChat("prefix", f"what stands before message {i} differs in the whole chat")
        answered = self.text(chat[: i + 1], offered)
        if not whole.startswith(answered) or len(answered) < start:
            raise BadChat("prefix", f"message {i} differs in the whole chat")
        return start, len(answered)

    def _render(self, chat: Sequence[Message], offered: list[Any] | None, prompt: bool) -> str:
        try:
            return self._template.render(
                messages=list(chat), tools=offered, documents=None, add_generation_prompt=prompt, **self._names
            )
        # A template is a program and the chat is anybody's: whatever it raises is about this row.
        except Exception as error:  # noqa: BLE001
            raise BadChat("template", " ".join(f"{type(error).__name__}: {error}".split())[:300]) from None


def _common(a: str, b: str) -> int:
    """How many characters two texts have in common at their beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a.startswith(b[:middle]) else (low, middle - 1)
    return low


class _Generation(jinja2.ext.Extension):
    """The `generation` block: what stands in it is the assistant's, and is put between marks."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [jinja2.nodes.Name("generation_marks", "load")])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, marks: tuple[str, str], caller: jinja2.runtime.Macro) -> str:
        return f"{marks[0]}{caller()}{marks[1]}"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return dt.datetime.now().strftime(form)  # noqa: DTZ005  # templates print the local date


def tokens(row: Mapping[str, Any], template: Template, tokenizer: Tokenizer) -> Tokens:
    """A row of chat data as ids and mask. Raises BadChat."""
    chat, offered = messages(row), tools(row)
    text, spans = template.spans(chat, offered)
    try:
        encoded = tokenizer.encode(text)
    except (TypeError, ValueError) as error:
        raise BadChat("text", str(error)[:300]) from None
    mask = [0] * len(encoded.ids)
    for first, last in _token_spans(text, spans, encoded, tokenizer):
        mask[first:last] = [1] * (last - first)
    if not any(mask):
        raise BadChat("mask-zero", "the assistant's turns are empty")
    return Tokens(encoded.ids, mask)


def _token_spans(text: str, spans: Sequence[Span], encoded: Encoded, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Spans of characters as spans of tokens: every token that has a character of it."""
    if encoded.offsets is None:
        return [(_before(text[:a], encoded, tokenizer), _before(text[:b], encoded, tokenizer)) for a, b in spans]
    found = []
    for start, end in spans:
        touched = [i for i, (a, b) in enumerate(encoded.offsets) if a < end and b > start]
        if touched:
            found.append((touched[0], touched[-1] + 1))
    return found


def _before(head: str, whole: Encoded, tokenizer: Tokenizer) -> int:
    """How many tokens of `whole` belong to its beginning `head`, for a tokenizer that tells no offsets."""
    with contextlib.suppress(IndexError):
        for i, token in enumerate(tokenizer.encode(head).ids):
            if whole.ids[i] != token:
                return i
        return i + 1 if head else 0
    return len(whole.ids)
