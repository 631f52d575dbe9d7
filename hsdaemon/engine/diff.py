"""One shipped patch: parse it, and judge a file of an engine against it. Pure: texts in, texts out.

A patch only inserts blocks of whole lines, each between two marks; the first mark carries a digest of the lines
between them. So the file without our blocks is what the engine's makers shipped (or what others made of it), and
whether anybody touched our own lines is told from the file alone, for every version of ours.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import hashlib
import re
from collections.abc import Sequence

from hsdaemon.errors import EngineError

_BEGIN = re.compile(r"[ \t]*# hsdaemon patch (\d+) \(([0-9a-f]{8})\) begin\b")
_END = re.compile(r"[ \t]*# hsdaemon patch (\d+) end\b")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class State(enum.Enum):
    """What a file, or a whole tree, is. The values are the words that an operator sees."""

    OURS = "ours"  # exactly what the patch makes of the release
    OURS_EDITED = "ours-with-foreign-edits"  # our lines are whole, others changed lines elsewhere
    PRISTINE = "pristine"  # exactly the release
    EDITED = "foreign-edits"  # no line of ours, others changed lines; the patch fits
    OLDER = "older"  # whole lines of an older version of ours, or not all of them
    PARTIAL = "partial"  # of a tree: some files are ours, others not
    NEWER = "newer"  # whole lines of a version that this installation does not know
    MODIFIED = "modified"  # somebody changed our lines
    CONFLICT = "conflict"  # the patch does not fit
    MISSING = "missing"  # the file is not there, or is none


@dataclasses.dataclass(frozen=True, slots=True)
class Hunk:
    """Lines `before` at line `start` (1-based) become `after`."""

    start: int
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One file of the engine: path below the folder that holds the package, SHA-256 without and with the patch."""

    path: str
    pristine: str
    patched: str
    hunks: tuple[Hunk, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """What one release needs."""

    release: str
    version: int
    targets: tuple[Target, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """State of one file, its text, and that with and without our lines: None where it must not be written."""

    state: State
    text: str
    applied: str | None
    reverted: str | None
    reason: str = ""


def sha256(text: str) -> str:
    return hashlib.sha256(encode(text)).hexdigest()


def decode(data: bytes) -> str:
    """Any bytes as a text that `encode` turns back into the same bytes."""
    return data.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def lines_of(text: str) -> list[str]:
    """Lines with their ends; only a newline ends a line, so that joining gives `text` back."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def mark(version: int, body: Sequence[str], indent: str, why: str) -> list[str]:
    """`body` (lines with their ends) as a block of ours."""
    first = f"{indent}# hsdaemon patch {version} ({_digest(body)}) begin: {why}\n"
    return [first, *body, f"{indent}# hsdaemon patch {version} end\n"]


def _digest(body: Sequence[str]) -> str:
    return sha256("".join(body))[:8]


def parse(text: str, name: str) -> Patch:
    """Read a shipped patch. name: the file, for messages. Raises EngineError when it is not whole."""
    head, sep, body = text.partition("\n\n")
    fields = [line.partition(": ")[::2] for line in head.split("\n")]
    try:
        if not sep or dict(fields)["digest"] != sha256(body):
            raise ValueError("it is cut off or was changed")
        version, release = int(dict(fields)["hsdaemon-patch"]), dict(fields)["release"]
        hunks = _parse_body(lines_of(body))
        targets = tuple(_target(value, hunks) for key, value in fields if key == "file")
        if not targets or {t.path for t in targets} != hunks.keys():
            raise ValueError("its files are not those that it names")
    except (KeyError, ValueError) as error:
        cause = f"no line {error}" if isinstance(error, KeyError) else str(error)
        raise EngineError(f"cannot use the patch {name}: {cause}; install hsdaemon again") from None
    return Patch(release, version, targets)


def _target(value: str, hunks: dict[str, list[Hunk]]) -> Target:
    path, pristine, patched = value.split(" ")
    return Target(path, pristine, patched, tuple(hunks.get(path, ())))


def _parse_body(lines: list[str]) -> dict[str, list[Hunk]]:
    """Hunks per file of a unified diff whose names are a/PATH and b/PATH."""
    found: dict[str, list[Hunk]] = {}
    at = 0
    while at < len(lines):
        old, new = lines[at], lines[at + 1] if at + 1 < len(lines) else ""
        path = old.removeprefix("--- a/").rstrip("\n")
        if old != f"--- a/{path}\n" or new != f"+++ b/{path}\n" or path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"no file begins at line {at + 1} of its body")
        at += 2
        found[path] = []
        while at < len(lines) and lines[at].startswith("@@"):
            hunk, at = _parse_hunk(lines, at)
            found[path].append(hunk)
    return found


def _parse_hunk(lines: list[str], at: int) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[at])
    if not match:
        raise ValueError(f"no hunk begins at line {at + 1} of its body")
    old, new = (int(match[g]) if match[g] else 1 for g in (2, 3))
    before: list[str] = []
    after: list[str] = []
    at += 1
    while at < len(lines) and (len(before) < old or len(after) < new):
        kind, line = lines[at][:1], lines[at][1:]
        if kind not in (" ", "-", "+"):
            break
        before += [line] * (kind != "+")
        after += [line] * (kind != "-")
        at += 1
    if (len(before), len(after)) != (old, new):
        raise ValueError("a hunk has fewer lines than it says")
    return Hunk(int(match[1]), tuple(before), tuple(after)), at


def fit(text: str, hunks: Sequence[Hunk]) -> str | None:
    """`text` with all hunks, each where its lines are found exactly and only once; None when one is not."""
    lines = lines_of(text)
    moved = 0
    for hunk in hunks:
        at = _place(lines, hunk, hunk.start - 1 + moved)
        if at is None:
            return None
        lines[at : at + len(hunk.before)] = hunk.after
        moved = at - (hunk.start - 1) + len(hunk.after) - len(hunk.before)
    return "".join(lines)


def _place(lines: list[str], hunk: Hunk, guess: int) -> int | None:
    before = list(hunk.before)
    if lines[guess : guess + len(before)] == before:
        return guess
    found = [i for i in range(len(lines) - len(before) + 1) if lines[i : i + len(before)] == before]
    return found[0] if len(found) == 1 else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Split:
    """A file taken apart: the text without our blocks, and what the blocks say of themselves."""

    rest: str
    versions: frozenset[int]
    torn: str  # why our marks cannot be trusted, or ""
    touched: bool  # a block is not what its mark says


def _split(text: str) -> _Split:
    rest: list[str] = []
    body: list[str] | None = None
    versions: set[int] = set()
    touched, said = False, ""
    for line in lines_of(text):
        begin, end = _BEGIN.match(line), _END.match(line)
        if begin if body is not None else end:
            return _Split("", frozenset(versions), "the marks around our lines do not pair", True)
        if begin:
            versions.add(int(begin[1]))
            body, said = [], begin[2]
        elif end and body is not None:
            touched = touched or _digest(body) != said
            body = None
        elif body is not None:
            body.append(line)
        else:
            rest.append(line)
    torn = "the marks around our lines do not pair" if body is not None else ""
    return _Split("".join(rest), frozenset(versions), torn, touched)


def judge(text: str, target: Target, version: int) -> Verdict:
    """Tell by content what a file is, and what it would be with and without our lines."""
    digest = sha256(text)
    split = _split(text)
    if split.torn:
        return Verdict(State.CONFLICT, text, None, None, f"{target.path}: {split.torn}")
    if split.touched:
        return Verdict(State.MODIFIED, text, None, None, f"{target.path}: somebody changed the lines between our marks")
    if not split.versions:
        return _without_ours(text, digest, target)
    if max(split.versions) > version:
        reason = f"{target.path}: version {max(split.versions)} of the patch is in it and this is version {version}"
        return Verdict(State.NEWER, text, None, split.rest, reason)
    if digest == target.patched:
        return Verdict(State.OURS, text, text, split.rest)
    wanted, reason = _fitted(split.rest, target)
    if wanted is None:
        return Verdict(State.CONFLICT, text, None, split.rest, reason)
    return Verdict(State.OURS_EDITED if wanted == text else State.OLDER, text, wanted, split.rest)


def _without_ours(text: str, digest: str, target: Target) -> Verdict:
    wanted, reason = _fitted(text, target)
    if wanted is None:
        return Verdict(State.CONFLICT, text, None, text, reason)
    return Verdict(State.PRISTINE if digest == target.pristine else State.EDITED, text, wanted, text)


def _fitted(rest: str, target: Target) -> tuple[str | None, str]:
    wanted = fit(rest, target.hunks)
    if wanted is None:
        return None, f"{target.path}: the lines around the place of the patch are not those of the release"
    if sha256(rest) == target.pristine:
        same = sha256(wanted) == target.patched
        return (wanted, "") if same else (None, f"{target.path}: the patch does not give what it promises")
    try:
        ast.parse(encode(wanted))
    except (SyntaxError, ValueError) as error:
        return None, f"{target.path}: with the patch it would not compile ({error})"
    return wanted, ""


def sha256_without_ours(text: str) -> str | None:
    """SHA-256 of the file without our lines: names the release by content. None where our lines are not whole."""
    split = _split(text)
    return None if split.torn or split.touched else sha256(split.rest)
