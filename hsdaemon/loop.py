"""Tick and run: observe, decide, safety, record, act, one sentence.

Boot is the first tick: nothing is restored, so recovery is the absence of state. Events only wake the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from hsdaemon.act import act
from hsdaemon.config import Config
from hsdaemon.core import model as m
from hsdaemon.core import reasons, safety
from hsdaemon.core.decide import decide
from hsdaemon.errors import DiskFull, StoreError
from hsdaemon.history import History, Tick
from hsdaemon.machine.ports import Ports
from hsdaemon.observe import observe

log = structlog.get_logger()
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
        if outcome.result != "done":
            sentence = f"{plan.sentence}; {type(action).__name__}: {outcome.result} {outcome.cause}".rstrip()
            return replace(plan, sentence=sentence)
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
    last: tuple[str, str] | None = None
    while not stop():
        done = tick(ports, config(), history)
        if last is None:
            ports.notifier.ready()
        if (now := (done.plan.reason, done.plan.sentence)) != last:
            _tell(done.plan, None if last is None else last[0])
            last = now
        for show in said:
            show(done)
        ports.notifier.watchdog()
        if not stop():
            ports.clock.wait(min(done.plan.look_again_s, max(1.0, config().supervisor.tick_s)))
    ports.notifier.stopping()


def _tell(plan: m.Plan, before: str | None) -> None:
    """The sentence into the journal: loudly when its reason is new, quietly when only its figures are."""
    reason = reasons.CATALOGUE.get(plan.reason)
    fields = {
        "rung": plan.rung,
        "reason": plan.reason,
        "message_id": reason.message_id if reason else "",
        "actions": [type(a).__name__ for a in plan.actions],
    }
    if plan.reason == before:
        log.debug(plan.sentence, **fields)
    elif reason and reason.severity == "hold":
        log.warning(plan.sentence, **fields, todo=reason.help)
    else:
        log.info(plan.sentence, **fields)
    for note in plan.notes:
        log.debug(note, rung=plan.rung)
