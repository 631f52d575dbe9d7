"""What a demonstration found, and the line that it ends with."""

from __future__ import annotations

from msgspec import Struct

LIMIT = 1e-5  # float32 all the way: two implementations agree to a few 1e-6


class Verdict(Struct, frozen=True):
    """Of the files against transformers. lost, twice: rows; corrupt: files with the reason."""

    compared: int
    lost: list[int]
    twice: list[int]
    corrupt: list[str]
    max_abs_err: float
    max_rel_err: float


class Story(Struct, frozen=True):
    """Of the run. redone: claims of rows beyond the first; in_flight: rows that the kills may have cost; moved: rows
    that were done at a kill and are not the same file at the end."""

    name: str
    relative: bool  # judge by the relative error: a real model's states reach 20,000
    done: int
    redone: int
    in_flight: int
    moved: list[int]

    def problems(self, verdict: Verdict) -> list[str]:
        """Every reason why this is not ok."""
        found = []
        if verdict.lost:
            found.append(f"rows without a file: {verdict.lost[:10]}")
        if verdict.compared != self.done:
            found.append(f"{self.done} samples are done, {verdict.compared} files were compared")
        if verdict.twice or self.moved:
            found.append(f"rows extracted twice although they were done: {[*verdict.twice, *self.moved][:10]}")
        if self.redone > self.in_flight:
            found.append(f"{self.redone} rows were done again, only {self.in_flight} were in flight")
        found += verdict.corrupt[:10]
        if not self.error(verdict) <= LIMIT:
            found.append(f"the error {self.error(verdict):.2g} is above {LIMIT:g}")
        return found

    def error(self, verdict: Verdict) -> float:
        return verdict.max_rel_err if self.relative else verdict.max_abs_err

    def line(self, verdict: Verdict) -> str:
        """`demo: ok done= redone= lost= corrupt= max_abs_err=`, the last line of the output."""
        word = "FAILED" if self.problems(verdict) else "ok"
        key = "max_rel_err" if self.relative else "max_abs_err"
        twice = len(verdict.twice) + len(self.moved)
        tail = f" twice={twice}" if twice else ""
        return (
            f"{self.name}: {word} done={self.done} redone={self.redone} lost={len(verdict.lost)} "
            f"corrupt={len(verdict.corrupt)} {key}={self.error(verdict):.1e}{tail}"
        )
