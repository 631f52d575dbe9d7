"""Stop all three: the supervisor, then the worker, which finishes what is in flight, then the engine.

`systemctl stop hs-extract` stops the supervisor alone and leaves engine and worker running. Evicted units stay down;
hs-extract release gives them back. Enabled units start again at the next boot: systemctl disable hs-extract.

  hs-extract stop
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hsdaemon.cli.settings import add_config, load
from hsdaemon.core import model as m
from hsdaemon.errors import EXIT_OK, Transient
from hsdaemon.host import build, solo
from hsdaemon.machine.ports import Units

POLL_S = 0.2
SUPERVISOR_S = 30.0
PROOF_S = 30.0  # of proof and scan: TimeoutStopSec of their units and some
ENGINE_S = 200.0  # TimeoutStopSec of its unit and some
EXITS = {75: "something did not stop in time; the line says what and why"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    config = load(args)
    foreground = build.foreground(config)
    units = build.units(config, str(Path(args.config).resolve()), foreground)
    _supervisor(config.paths.run, units, foreground)
    for name, patience in (
        (m.PROOF_UNIT, PROOF_S),
        (m.SCAN_UNIT, PROOF_S),
        (m.WORKER_UNIT, config.worker.drain_s + 60),
        (m.ENGINE_UNIT, ENGINE_S),
    ):
        _stop(units, name, patience)
    print("stop: ok supervisor, worker and engine are down")
    return EXIT_OK


def _supervisor(run: str, units: Units, foreground: bool) -> None:
    """Through systemd where it is a unit, so that Restart= does not bring it back."""
    if not foreground:
        _stop(units, m.SUPERVISOR_UNIT, SUPERVISOR_S)
    pid = solo.tell(run, signal.SIGTERM)
    if pid:
        _wait(lambda: solo.holder(run) is None, SUPERVISOR_S, f"the supervisor (pid {pid})")


def _stop(units: Units, name: str, patience_s: float) -> None:
    unit = _read(units, name)
    if unit.gone:
        return
    print(f"stopping {name}", flush=True)
    outcome = units.stop(name, unit.invocation)
    if outcome.result == "failed":
        raise Transient(f"cannot stop {name}: {outcome.cause}; run this as root, or try again")
    _wait(lambda: _read(units, name).gone, patience_s, name)


def _read(units: Units, name: str) -> m.Unit:
    found = units.read((name,))
    if isinstance(found, m.Unreadable):
        raise Transient(f"cannot look at {name}: {found.cause}; try again")
    return found[0]


def _wait(ended: Callable[[], bool], patience_s: float, who: str) -> None:
    deadline = time.monotonic() + patience_s
    while not ended():
        if time.monotonic() > deadline:
            raise Transient(f"cannot stop {who}: it is still there after {patience_s:g} s; hs-extract status shows why")
        time.sleep(POLL_S)  # systemd and plain processes alike are only looked at; the deadline is above
