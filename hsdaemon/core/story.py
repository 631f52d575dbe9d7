"""What happened between two turns, for the journal: few kinds of events, each with a MESSAGE_ID that stays.

The plan's sentence tells what is done and what is waited for; these tell what has come of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hsdaemon.core import facts, reasons
from hsdaemon.core import model as m
from hsdaemon.core.engine import answered


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of event. `message_id`: for `journalctl MESSAGE_ID=...`, 32 hex digits."""

    code: str
    template: str
    message_id: str

    def say(self, **facts_of_it: object) -> Event:
        return Event(self, self.template.format(**facts_of_it))


@dataclass(frozen=True, slots=True)
class Event:
    """One event, as people read it."""

    kind: Kind
    sentence: str


STARTED = Kind("started", "the supervisor is up: {what}", "7f0d3b1c5a6e4d90b2c8e4f1a9035d67")
EVICTED = Kind("evicted", "{who} is down and stays down until it is given back", "e1b5a90c7d3f48268a4cf06b92d7135e")
ENGINE_UP = Kind("engine-up", "the engine answers, {age} s after its start", "3c9e27d84b1f4a05969d8ab0c45e71f2")
PROVED = Kind("proved", "this start of the engine is proved", "a84d6f10e2c54b7793e5b8d1076cf392")
EXTRACTING = Kind("extracting", "the worker extracts, {left} samples to go", "5d7210fb8e9c4c31a6f34bd29e80a7c5")
PAUSED = Kind("paused", "the work is paused: {why}", "c6e83f5907ab4d128fd17093b5ea2c64")
HELD = Kind("held", "held until this is mended: {help}", "92af0d4e6b8147c5bd30e7f1c85a69d3")
DONE = Kind("done", "nothing is left to extract", "f47b1c92d05e4386a9c6310e8bd57fa2")
KINDS = (STARTED, EVICTED, ENGINE_UP, PROVED, EXTRACTING, PAUSED, HELD, DONE)


def events(before: tuple[m.Observation, m.Plan] | None, seen: m.Observation, plan: m.Plan) -> Iterator[Event]:
    """What this turn shows for the first time; before: what the former turn saw and planned, None at the start."""
    if before is None:
        yield STARTED.say(what=_found(seen))
        was, old = None, ""
    else:
        was, old = before[0], before[1].reason
        yield from _evicted(was, seen)
        yield from _engine(was, seen)
    if plan.reason == "extracting" != old:
        yield EXTRACTING.say(left=_left(seen))
    if plan.rung == "volume_ready" and any(isinstance(a, m.StopWorker) for a in plan.actions):
        yield PAUSED.say(why=plan.sentence)
    if plan.reason == "done" != old:
        yield DONE.say()
    reason = reasons.CATALOGUE.get(plan.reason)
    if reason and reason.severity == "hold" and plan.reason != old:
        yield HELD.say(help=reason.help)


def _found(seen: m.Observation) -> str:
    """What ran before this supervisor did."""
    parts = (("engine", facts.known(seen.engine)), ("worker", facts.known(seen.worker)))
    names = [f"{name} (pid {part.unit.main_pid})" for name, part in parts if part and part.unit.up]
    return f"{' and '.join(names)} ran before it: adopted" if names else "nothing of ours runs yet"


def _evicted(was: m.Observation, seen: m.Observation) -> Iterator[Event]:
    held = {u.name for u in facts.known(was.units) or () if u.up or u.pids}
    for unit in facts.known(seen.units) or ():
        if unit.leased and unit.name in held and not unit.up and not unit.pids:
            yield EVICTED.say(who=unit.name)


def _engine(was: m.Observation, seen: m.Observation) -> Iterator[Event]:
    engine, former = facts.known(seen.engine), facts.known(was.engine)
    if engine is None or former is None or not engine.unit.up:
        return
    same = engine.unit.invocation == former.unit.invocation
    if answered(engine, seen.proof) and not (same and answered(former, was.proof)):
        yield ENGINE_UP.say(age=max(0, int(seen.now.mono_s - engine.unit.since_s)))
    if _proves(seen.proof, engine.unit) and not _proves(was.proof, engine.unit):
        yield PROVED.say()


def _proves(proof: m.Proof | m.Unreadable | None, unit: m.Unit) -> bool:
    return isinstance(proof, m.Proof) and proof.ok and proof.invocation == unit.invocation


def _left(seen: m.Observation) -> object:
    return seen.progress.total - seen.progress.settled if isinstance(seen.progress, m.Progress) else "all"


def page() -> str:
    """The manual's table, Markdown."""
    rows = [f"| {kind.code} | {kind.template} | `{kind.message_id}` |" for kind in KINDS]
    return "\n".join(["| event | what it says | MESSAGE_ID |", "| --- | --- | --- |", *rows]) + "\n"
