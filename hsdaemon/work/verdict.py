"""The proof's judgement, without touching anything: attests, canaries, continuity. First failure wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hsdaemon import wire
from hsdaemon.work.checks import Wanted
from hsdaemon.work.compare import Likeness

Code = Literal[
    "inert", "spool", "layers", "norm", "content", "chunk", "continuity", "timeout", "unreachable", "blocked"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refuted:
    """Why an engine is not trusted. detail: a sentence with the numbers in it."""

    code: Code
    detail: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """How alike two captures of the same tokens must be, as medians over tokens."""

    min_cosine: float
    max_relative_error: float

    def broken_by(self, seen: Likeness) -> bool:
        return seen.cosine < self.min_cosine or seen.relative_error > self.max_relative_error


def judge_attests(
    attests: Sequence[wire.Attest], launch: str, ranks: int, wanted: Wanted, release: str, spool: str
) -> Refuted | None:
    """Every rank of this very start says what we need. attests: of living processes, any start."""
    ours = [a for a in attests if a.launch == launch]
    missing = sorted(set(range(ranks)) - {a.tp_rank for a in ours})
    if missing:
        which = ", ".join(map(str, missing))
        return Refuted("inert", f"rank {which} of {ranks} wrote no attest file: the capture is not loaded there")
    for attest in ours:
        refuted = _judge(attest, wanted, release, spool)
        if refuted:
            return refuted
    return None


def _judge(attest: wire.Attest, wanted: Wanted, release: str, spool: str) -> Refuted | None:
    rank = f"rank {attest.tp_rank}"
    if attest.stage == "broken":
        return Refuted("inert", f"{rank}: the capture is broken: {attest.last_error}")
    if attest.spool != spool:
        return Refuted("spool", f"{rank} writes to {attest.spool}, the worker reads {spool}")
    if attest.release != release or attest.capture != wire.CAPTURE_VERSION:
        seen = f"SGLang {attest.release} with capture {attest.capture}"
        return Refuted("inert", f"{rank} runs {seen}, not {release} with capture {wire.CAPTURE_VERSION}")
    if attest.layers != wanted.layers:
        return Refuted("layers", f"{rank} captures layers {attest.layers}, the run needs {wanted.layers}")
    for name in ("norm", "dtype", "hidden", "interleaved"):
        mine, theirs = getattr(wanted, name), getattr(attest, name)
        if mine != theirs:
            return Refuted("norm" if name == "norm" else "content", f"{rank}: {name} is {theirs}, the run needs {mine}")
    return None


def judge_prefix(rows: int, whole: int, seen: Likeness, bounds: Bounds) -> Refuted | None:
    """A prompt's first rows do not depend on what follows: a prefix sent alone must give them again."""
    if not bounds.broken_by(seen):
        return None
    return Refuted("chunk", f"the first {rows} of {whole} rows differ from the same prompt sent alone: {words(seen)}")


def judge_alone(row: int, seen: Likeness, bounds: Bounds) -> Refuted | None:
    """A sample sent among others of its length must be the one that comes back when it is sent alone."""
    if not bounds.broken_by(seen):
        return None
    return Refuted("content", f"row {row} in a batch is not what it is alone: {words(seen)}")


def judge_continuity(row: int, seen: Likeness, bounds: Bounds) -> Refuted | None:
    """What is stored and what this engine gives must come from one model, its layers and its norm."""
    if not bounds.broken_by(seen):
        return None
    return Refuted("continuity", f"row {row} captured again is not what is stored: {words(seen)}")


def judge_shapes(row: int, kept: tuple[object, ...], now: tuple[object, ...]) -> Refuted | None:
    """Tokens, columns of aux and final states, dtype: another one is another model or another run."""
    if kept == now:
        return None
    return Refuted("continuity", f"row {row} is stored as (tokens, aux, final, dtype) {kept}, the engine gives {now}")


def words(seen: Likeness) -> str:
    return f"median cosine {seen.cosine:.4f}, median relative error {seen.relative_error:.4f}"


def canary_lengths(longest: int, chunk: int) -> tuple[int, ...]:
    """Prefixes of the longest sample that are sent alone, in tokens, ascending: a short one, and one that ends just
    behind the first chunk (0 = no chunks). Both sides of a graph or fusion limit are met with the longest itself."""
    wanted = {min(16, longest), min(chunk + 8, longest) if chunk else longest}
    return tuple(sorted(wanted - {longest} or {longest}))
