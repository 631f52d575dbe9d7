"""One function per action: the only caller of whatever changes the host. Each re-checks identity and returns soon."""

from __future__ import annotations

from hsdaemon.core import model as m
from hsdaemon.machine.ports import Ports


def act(ports: Ports, action: m.Action) -> m.Outcome:
    """Do it, or say why not. Never raises for a reason that the world gives."""
    match action:
        case m.LeaseUnit(name, file_state, was_up):
            return ports.units.lease(name, file_state, was_up)
        case m.DisableUnit(name):
            return ports.units.disable(name)
        case m.StopUnit(name, invocation):
            return ports.units.stop(name, invocation)
        case m.KillUnit(name, invocation, pids):
            return ports.units.kill(name, invocation, pids)
        case m.KillProcess(pid, ticks, exe, signal):
            return ports.procs.signal(pid, ticks, exe, signal)
        case m.ReleaseUnits(names):
            return _release(ports, names)
        case m.ApplyPatch(release):
            return ports.engine.apply_patch(release)
        case m.SweepStale(paths):
            return ports.engine.sweep(paths)
        case m.SweepSpool():
            return ports.spool.sweep()
        case m.StartScan(after):
            return ports.units.start(m.SCAN_UNIT, after)
        case m.StartEngine(after, port, fingerprint):
            return _then(ports.engine.prepare(port, fingerprint), ports, m.ENGINE_UNIT, after)
        case m.RunProof(invocation, after):
            return _then(ports.proof.prepare(invocation), ports, m.PROOF_UNIT, after)
        case m.StartWorker(_, after):
            return ports.units.start(m.WORKER_UNIT, after)
        case m.StopEngine(invocation):
            return ports.units.stop(m.ENGINE_UNIT, invocation)
        case m.StopProof(invocation):
            return ports.units.stop(m.PROOF_UNIT, invocation)
        case m.StopWorker(invocation):
            return ports.units.stop(m.WORKER_UNIT, invocation)


def _then(prepared: m.Outcome, ports: Ports, unit: str, after: str) -> m.Outcome:
    return ports.units.start(unit, after) if prepared.result == "done" else prepared


def _release(ports: Ports, names: tuple[str, ...]) -> m.Outcome:
    """All of them, also when one fails: the others' owners wait too."""
    ends = [(name, ports.units.release(name)) for name in names]
    cause = "; ".join(f"{name}: {end.cause}" for name, end in ends if end.cause or end.result != "done")
    return m.Outcome("done" if all(end.result == "done" for _, end in ends) else "failed", cause)
