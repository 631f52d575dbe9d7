"""The supervisor: look at the host, climb the ladder, do at most one disruptive thing, say one sentence; for ever.

systemd runs it as hs-extract.service. By hand, --foreground works everywhere: without systemd the engine and the
worker are processes of their own, which outlive this one and are adopted by the next. SIGHUP reads the configuration
again, SIGTERM ends the supervisor and leaves engine and worker running; `hs-extract stop` ends all three.

  hs-extract run --foreground
  hs-extract run --dry-run        say each turn what would be done, do nothing
"""

from __future__ import annotations

import argparse
import contextlib
import signal
from pathlib import Path

import structlog

from hsdaemon.cli.settings import add_config, load
from hsdaemon.config import Config
from hsdaemon.errors import EXIT_OK, ConfigError, Fatal, HsError
from hsdaemon.history import History, Tick
from hsdaemon.host import build, solo
from hsdaemon.host.board import Board
from hsdaemon.host.clock import HostClock
from hsdaemon.host.preview import preview
from hsdaemon.host.wishes import WishFiles
from hsdaemon.loop import Said
from hsdaemon.loop import run as turn
from hsdaemon.machine.log import setup
from hsdaemon.machine.notify import Notify

EXITS = {75: "another supervisor runs on this host"}
_log = structlog.get_logger()


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--foreground", action="store_true", help="without systemd: engine and worker as processes")
    parser.add_argument("--dry-run", action="store_true", help="look and decide once, do nothing (as: hs-extract plan)")


def run(args: argparse.Namespace) -> int:
    config = load(args)
    if args.dry_run:
        print(preview(config, str(args.config), _foreground(args)))
        return EXIT_OK
    setup()
    clock, notifier = HostClock(), Notify()
    with contextlib.ExitStack() as stack:
        stack.enter_context(solo.only_one(config.paths.run))
        stack.enter_context(clock.listening(signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        current = Current(args, config, clock)
        ports = build.ports(current.get, str(Path(args.config).resolve()), _foreground(args), clock, notifier)
        history = History.open(Path(config.paths.state))
        turn(ports, current.get, history, lambda: stopping(clock), said(config, history))
    _log.info("the supervisor ends; engine and worker go on, the next start adopts them")
    return EXIT_OK


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
    metrics.serve(config.supervisor.metrics_port)
    return [show, metrics.show]


class Current:
    """The configuration now: read again after SIGHUP; a file that cannot be used changes nothing and is said."""

    def __init__(self, args: argparse.Namespace, config: Config, clock: HostClock) -> None:
        self._args, self._config, self._clock = args, config, clock

    def get(self) -> Config:
        if self._clock.taken(signal.SIGHUP):
            self._reload()
        return self._config

    def _reload(self) -> None:
        try:
            fresh = load(self._args)
        except HsError as error:
            _log.warning("the configuration cannot be used, the former one stays", cause=str(error))
            return
        if fresh.paths != self._config.paths or fresh.output != self._config.output:
            cause = ConfigError("cannot change paths or output while running: restart the supervisor")
            _log.warning("the configuration needs a restart, the former one stays", cause=str(cause))
            return
        self._config = fresh
        _log.info("the configuration was read again")
