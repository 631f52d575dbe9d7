"""Ask every port once. Never raises: what cannot be had is an Unreadable in its place."""

from __future__ import annotations

from hsdaemon.config import Config
from hsdaemon.core import model as m
from hsdaemon.machine.ports import Ports


def observe(ports: Ports, config: Config) -> m.Observation:
    """One look at the host. Each port answers within its own deadline."""
    now = ports.clock.now()
    wishes = ports.wishes.read()  # first: one that comes later belongs to the next turn and its configuration
    gpus: tuple[m.Gpu, ...] | m.Unreadable = ()
    holders: tuple[m.Holder, ...] | m.Unreadable = ()
    xids: tuple[m.Xid, ...] = ()
    if config.gpu_count:
        gpus = ports.gpus.read()
        holders = gpus if isinstance(gpus, m.Unreadable) else ports.procs.holders(gpus)
        xids = ports.gpus.xids()
    units = _units(ports, config, holders)
    own = {u.name: u for u in units if u.name in m.OUR_UNITS} if not isinstance(units, m.Unreadable) else {}
    names = (m.ENGINE_UNIT, m.WORKER_UNIT, m.PROOF_UNIT, m.SCAN_UNIT)
    engine, worker, proof, scan = (own.get(n) or _absent(units, n) for n in names)
    return m.Observation(
        now=now,
        volume=ports.volume.read(),
        gpus=gpus,
        holders=holders,
        units=units if isinstance(units, m.Unreadable) else tuple(u for u in units if u.name not in m.OUR_UNITS),
        engine=engine if isinstance(engine, m.Unreadable) else ports.engine.read(engine),
        proof_unit=proof,
        proof=ports.proof.read(),
        worker=worker if isinstance(worker, m.Unreadable) else ports.worker.read(worker),
        progress=ports.manifest.read(),
        spool=ports.spool.read(),
        xids=xids,
        wishes=wishes,
        scan_unit=scan,
    )


def _units(
    ports: Ports, config: Config, holders: tuple[m.Holder, ...] | m.Unreadable
) -> tuple[m.Unit, ...] | m.Unreadable:
    """Ours, those that the policy names, and those of holders, in one question."""
    theirs = () if isinstance(holders, m.Unreadable) else holders
    names = dict.fromkeys([*m.OUR_UNITS, *(h.unit for h in theirs if h.unit)])
    return ports.units.read(tuple(names), tuple(e.pattern for e in config.evict.units))


def _absent(units: tuple[m.Unit, ...] | m.Unreadable, name: str) -> m.Unit | m.Unreadable:
    return units if isinstance(units, m.Unreadable) else m.Unit(name, load="not-found")
