"""The supervisor: look at the host, climb the ladder, do at most one disruptive thing, say one sentence; for ever.

systemd runs it as hs-extract.service. By hand, --foreground works everywhere: without systemd the engine and the
worker are processes of their own, which outlive this one and are adopted by the next. SIGHUP reads the configuration
again, SIGTERM ends the supervisor and leaves engine and worker running; `hs-extract stop` ends all three.

  hs-extract run --foreground
  hs-extract run --dry-run        look once, say what would be done, do nothing (the same as: hs-extract plan)
"""

from __future__ import annotations

import argparse
import contextlib
import signal
from operator import attrgetter
from pathlib import Path

import structlog

from hsdaemon.cli.settings import add_config, load
from hsdaemon.config import Config
from hsdaemon.core import reasons
from hsdaemon.errors import EXIT_OK, Fatal, HsError
from hsdaemon.history import History, Tick
from hsdaemon.host import build, solo
from hsdaemon.host.board import NOT_STARTED, Board
from hsdaemon.host.clock import HostClock
from hsdaemon.host.preview import preview
from hsdaemon.host.wishes import WishFiles
from hsdaemon.loop import Said
from hsdaemon.loop import run as turn
from hsdaemon.machine.log import setup
from hsdaemon.machine.notify import Notify

TRY_AGAIN_S = 2.0  # reading one small file each time
EXITS = {75: "another supervisor runs on this host"}
AT_START = attrgetter("paths", "output", "spool.path", "supervisor.metrics_port", "supervisor.probe_deadline_s")
_log = structlog.get_logger()


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--foreground", action="store_true", help="without systemd: engine and worker as processes")
    parser.add_argument("--dry-run", action="store_true", help="look and decide once, do nothing (as: hs-extract plan)")


def run(args: argparse.Namespace) -> int:
    if args.dry_run:
        print(preview(load(args), str(args.config), _foreground(args)))
        return EXIT_OK
    setup()
    clock, notifier = HostClock(), Notify()
    with clock.listening(signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        waiting = Waiting(args, clock, notifier)
        while not stopping(clock):
            try:
                return _supervise(args, clock, notifier)
            except HsError as error:
                if not notifier.heard:
                    raise  # by hand: whoever typed it is there to mend it
                waiting.wait(error)
    return EXIT_OK


def _supervise(args: argparse.Namespace, clock: HostClock, notifier: Notify) -> int:
    """Until a signal ends it. Raises HsError for what keeps it from beginning."""
    config = load(args)
    with solo.only_one(config.paths.run):
        current = Current(args, config, clock)
        ports = build.ports(current.now, str(Path(args.config).resolve()), _foreground(args), clock, notifier)
        history = History.open(Path(config.paths.state))
        turn(ports, current.get, history, lambda: stopping(clock), said(config, history))
    _log.info("the supervisor ends; engine and worker go on, the next start adopts them")
    return EXIT_OK


class Waiting:
    """A start that fails under systemd is tried again here: a restart of the unit for each try would fill the journal,
    and a unit that stays down would need somebody to log in. What keeps us is said once, and shown."""

    def __init__(self, args: argparse.Namespace, clock: HostClock, notifier: Notify) -> None:
        self._args, self._clock, self._notifier = args, clock, notifier
        self._said = ""

    def wait(self, error: HsError) -> None:
        """Until the next try, or a signal."""
        reason = reasons.CATALOGUE[NOT_STARTED]
        sentence = reasons.say(reason.code, cause=str(error))
        if sentence != self._said:
            self._said = sentence
            _log.warning(f"{sentence}. {reason.help}", _reason=reason.code, message_id=reason.message_id)
        self._notifier.ready()  # the unit is up, and waits
        self._notifier.status(sentence)
        self._show(sentence)
        self._notifier.watchdog()
        self._clock.wait(TRY_AGAIN_S)
        self._clock.taken(signal.SIGHUP)  # the next try reads the file anyway

    def _show(self, sentence: str) -> None:
        """On the board, where the configuration says where that is and nobody else's supervisor shows itself there."""
        with contextlib.suppress(HsError):
            run = load(self._args).paths.run
            if solo.holder(run) is None:
                Board(run).wait(sentence)


def _foreground(args: argparse.Namespace) -> bool:
    if args.foreground:
        return True
    if build.booted_by_systemd():
        return False
    raise Fatal("cannot supervise units: systemd is not the init here; use hs-extract run --foreground")


def stopping(clock: HostClock) -> bool:
    return any(number in clock.asked for number in (signal.SIGTERM, signal.SIGINT))


def said(config: Config, history: History) -> list[Said]:
    """Whoever is told of each tick."""
    board, wishes = Board(config.paths.run), WishFiles(config.paths.run)

    def show(tick: Tick) -> None:
        board.show(tick, history.events())
        wishes.settle(tick.seen, tick.past)

    if not config.supervisor.metrics_port:
        return [show]
    from hsdaemon.host.metrics import Metrics  # its library is loaded only where it is wanted

    metrics = Metrics()
    try:
        metrics.serve(config.supervisor.metrics_port)
    except OSError as error:  # figures are not worth the work
        _log.warning("the metrics cannot be served", port=config.supervisor.metrics_port, cause=str(error))
        return [show]
    return [show, metrics.show]


class Current:
    """The configuration now: read again after SIGHUP; a file that cannot be used changes nothing and is said."""

    def __init__(self, args: argparse.Namespace, config: Config, clock: HostClock) -> None:
        self._args, self._config, self._clock = args, config, clock

    def now(self) -> Config:
        """As of the last `get`: a port that asks in the middle of a turn takes no signal away from the next one."""
        return self._config

    def get(self) -> Config:
        """At the beginning of a turn."""
        if self._clock.taken(signal.SIGHUP):
            self._reload()
        return self._config

    def _reload(self) -> None:
        try:
            fresh = load(self._args)
        except HsError as error:
            _log.warning("the configuration cannot be used, the former one stays", cause=str(error))
            return
        if AT_START(fresh) != AT_START(self._config):
            _log.warning(
                "paths, output, spool.path, the metrics' port or the probes' deadline changed: restart the supervisor"
            )
            return
        self._config = fresh
        _log.info("the configuration was read again")
