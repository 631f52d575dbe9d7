"""Tick and run: observe, decide, safety, record, act, one sentence.

Boot is the first tick: nothing is restored, so recovery is the absence of state. Events only wake the loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from hsdaemon.act import act
from hsdaemon.config import Config
from hsdaemon.core import model as m
from hsdaemon.core import reasons, safety, story
from hsdaemon.core.decide import decide
from hsdaemon.errors import DiskFull, StoreError
from hsdaemon.history import History, Tick
from hsdaemon.machine.ports import Ports
from hsdaemon.observe import observe

log = structlog.get_logger()
_FIGURES = re.compile(r"[0-9]+(?= s\b| so far)")  # a note whose age or count grows is no new note
Said = Callable[[Tick], None]  # whoever shows ticks to people: status file, metrics


def tick(ports: Ports, config: Config, history: History) -> Tick:
    """One turn. What cannot be recorded is not done; an act that fails ends the turn, the next one looks again."""
    seen = observe(ports, config)
    try:
        history.look(seen, config)
        plan = safety.veto(decide(config, seen, history.past), config, seen, history.past)
        past = history.past
        plan = _perform(ports, history, seen, plan)
    except (DiskFull, StoreError) as error:
        past = history.past
        plan = _unrecorded(error)
    done = Tick(seen, past, plan)
    history.tick(done)
    ports.notifier.status(plan.sentence)
    return done


def _perform(ports: Ports, history: History, seen: m.Observation, plan: m.Plan) -> m.Plan:
    """Intent, act, end, one action after the other."""
    for action in plan.actions:
        history.intend(seen, action)  # a crash after it: the act was perhaps done, the next look tells
        outcome = act(ports, action)
        history.ended(seen, action, outcome)
        if outcome.result != "done" or outcome.cause:  # done, but not all of it can be
            sentence = f"{plan.sentence}; {type(action).__name__}: {outcome.result} {outcome.cause}".rstrip()
            plan = replace(plan, sentence=sentence)
        if outcome.result != "done":
            break
    return plan


def _unrecorded(error: Exception) -> m.Plan:
    return m.Plan("record", "history-unwritable", reasons.say("history-unwritable", cause=error))


def run(
    ports: Ports,
    config: Callable[[], Config],
    history: History,
    stop: Callable[[], bool],
    said: Sequence[Said] = (),
) -> None:
    """Turn until `stop`. `config` is asked each turn, so that a reload counts from the next one. READY after the first
    finished turn; the watchdog is fed by a finished turn and by nothing else."""
    last: Tick | None = None
    while not stop():
        done = tick(ports, config(), history)
        if last is None:
            ports.notifier.ready()
        _tell(done, last)
        last = done
        for show in said:
            show(done)
        ports.notifier.watchdog()
        if not stop():
            ports.clock.wait(min(done.plan.look_again_s, max(1.0, config().supervisor.tick_s)))
    ports.notifier.stopping()


def _tell(now: Tick, before: Tick | None) -> None:
    """Into the journal: what came of the last turn, the plan's sentence when its reason is new, and new notes."""
    plan = now.plan
    former = before.plan.reason if before else ""
    told = list(story.events((before.seen, before.plan) if before else None, now.seen, plan))
    for event in (event for event in told if event.kind is not story.HELD):
        log.info(event.sentence, _event=event.kind.code, message_id=event.kind.message_id)
    reason = reasons.CATALOGUE[plan.reason]
    if plan.reason != former:
        say = log.warning if reason.severity == "hold" else log.info
        actions = " ".join(type(a).__name__ for a in plan.actions)
        say(plan.sentence, _rung=plan.rung, _reason=plan.reason, _actions=actions, message_id=reason.message_id)
    for event in (event for event in told if event.kind is story.HELD):
        log.warning(event.sentence, _event=event.kind.code, _reason=plan.reason, message_id=event.kind.message_id)
    told_before = {_FIGURES.sub("", note) for note in before.plan.notes} if before else set()
    for note in plan.notes:
        if _FIGURES.sub("", note) not in told_before:
            log.warning(note, _rung=plan.rung)
