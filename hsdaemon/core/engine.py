"""The rungs about the engine: does its installation carry the capture, does it run, and is this very start proved?"""

from __future__ import annotations

from hsdaemon.config import Config
from hsdaemon.core import budget, facts
from hsdaemon.core import model as m
from hsdaemon.core.budget import Past
from hsdaemon.core.facts import plan
from hsdaemon.core.xid import RESTART

PATCHES = 2  # tries before a person should look; then it is tried seldom
PATCH_WAIT_S = 300.0
BLOCKED_S = 15.0  # first wait before a proof that could not be made is tried again, doubled each time
PROOFS = 2  # proofs of one start that may end without an answer
# As parts of engine.start_patience_s:
GROWING = 1 / 6  # log, CPU or memory that moved within this time extends the patience ...
HARD = 4  # ... up to this many times the configured one
SILENT = 1 / 2  # none of them moved while loading: a stale lock, a hung collective
STOPPING_S = 180.0  # TimeoutStopSec of the unit and some


def engine_patched(_config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    """The engine's installation carries our capture. A running engine is judged by its proof instead."""
    rung = "engine_patched"
    if isinstance(seen.engine, m.Unreadable):
        return plan(rung, "engine-unreadable", cause=seen.engine.cause)
    if not seen.engine.unit.gone:
        return None
    capture = seen.engine.capture
    if isinstance(capture, m.Unreadable):
        return plan(rung, "capture-unreadable", cause=capture.cause)
    if capture.state in ("ours", "plugin"):
        return None
    cause = capture.detail or capture.state
    if capture.state in ("absent", "older"):
        return _patch(seen, past, capture, cause)
    hold = {"foreign": "patch-foreign", "read-only": "patch-read-only", "missing": "engine-missing"}
    return plan(rung, hold.get(capture.state, "release-unsupported"), release=capture.release or "?", cause=cause)


def _patch(seen: m.Observation, past: Past, capture: m.Capture, cause: str) -> m.Plan:
    apply = m.ApplyPatch(capture.release)
    key = budget.key_of(apply)
    if budget.count_of(past, key, seen.now.boot) >= PATCHES and budget.retry_s(past, key, seen.now, PATCH_WAIT_S) > 0:
        return plan("engine_patched", "patch-failed", cause=cause)
    return plan("engine_patched", "patching", apply, release=capture.release or "?", cause=cause, look_s=0.2)


def engine_up(config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    """Our unit runs and answers, with the arguments that it would be given today."""
    if isinstance(seen.engine, m.Unreadable):
        return plan("engine_up", "engine-unreadable", cause=seen.engine.cause)
    engine, unit = seen.engine, seen.engine.unit
    if unit.up:
        return _stop_for(config, seen, engine) or unproved_worker(seen, unit) or _loading(config, seen, engine, past)
    if (left := leftover(seen, past)) is not None:
        return left
    if unit.load != "loaded":
        return plan("engine_up", "engine-blocked", cause=unit.load)
    return _worker_first(seen) or _spent(config, seen, engine, past) or _start(config, seen, engine, past)


def _stop_for(config: Config, seen: m.Observation, engine: m.Engine) -> m.Plan | None:
    """Reasons to stop a running engine that are not its silence."""
    unit, gpus_seen = engine.unit, facts.known(seen.gpus)
    # "" is a line whose GPU is not known: one of ours, perhaps. While no GPU can be read, every line is of that kind.
    mine = {g.uuid for g in facts.wanted(config, gpus_seen)} | {""} if gpus_seen else set()
    for xid in seen.xids:
        if xid.code in RESTART and xid.at_s > unit.since_s and xid.uuid in mine:
            gpus = facts.shown(gpus_seen or (), (xid.uuid,))
            return plan("engine_up", "engine-xid", m.StopEngine(unit.invocation, "engine-xid"), xid=xid.code, gpus=gpus)
    end = facts.known(engine.endpoint)
    if not (seen.wishes.reload_now and end and engine.wanted and end.fingerprint != engine.wanted):
        return None
    worker = facts.known(seen.worker)
    if worker and worker.unit.up:
        return plan("engine_up", "engine-reload", m.StopWorker(worker.unit.invocation, "engine-reload"), look_s=1.0)
    if worker and not worker.unit.gone:
        return plan("engine_up", "worker-stopping", look_s=1.0)
    return plan("engine_up", "engine-reload", m.StopEngine(unit.invocation, "engine-reload"))


def answered(engine: m.Engine, proof: m.Proof | m.Unreadable | None) -> bool:
    """This start of the engine has come up. Once it was proved, only progress tells more."""
    if isinstance(proof, m.Proof) and proof.invocation == engine.unit.invocation:
        return True
    end = facts.known(engine.endpoint)
    same = end is not None and (not engine.unit.main_pid or end.pid == engine.unit.main_pid)
    return same and engine.health == "ok"


def unproved_worker(seen: m.Observation, engine: m.Unit) -> m.Plan | None:
    """Somebody restarted the engine: the worker stops before the new one answers."""
    worker, proof = facts.known(seen.worker), seen.proof
    if worker is None or not worker.unit.up:
        return None
    if isinstance(proof, m.Unreadable):
        return None  # cannot tell: what runs goes on
    if proof is not None and proof.ok and proof.invocation == engine.invocation:
        return None
    stop = m.StopWorker(worker.unit.invocation, "worker-unproved")
    return plan("engine_proved", "worker-unproved", stop, look_s=1.0)


def _loading(config: Config, seen: m.Observation, engine: m.Engine, past: Past) -> m.Plan | None:
    if answered(engine, seen.proof):
        return None
    unit, now_s = engine.unit, seen.now.mono_s
    age = now_s - unit.since_s
    moved = [v.since_s for key in ("log", "memory", "cpu") if (v := past.mark(key))]
    quiet = now_s - max([unit.since_s, *moved])
    patience = config.engine.start_patience_s
    if quiet > SILENT * patience:
        stop = m.StopEngine(unit.invocation, "engine-silent")
        return plan("engine_up", "engine-silent", stop, age=int(quiet))
    if age > patience and (quiet > GROWING * patience or age > HARD * patience):
        return plan("engine_up", "engine-late", m.StopEngine(unit.invocation, "engine-late"), age=int(age))
    return plan("engine_up", "engine-loading", age=int(age), log=engine.log_bytes, look_s=1.0)


def leftover(seen: m.Observation, past: Past) -> m.Plan | None:
    """Stopped is an empty cgroup: grandchildren outlive a killed engine and keep its GPUs."""
    engine = facts.known(seen.engine)
    if engine is None or engine.unit.up or engine.unit.gone:
        return None
    unit = engine.unit
    left = past.spell("left:engine")
    age = seen.now.mono_s - left.first_s if left else 0.0
    grace = STOPPING_S if unit.active == "deactivating" else facts.KILL_WAIT_S
    if age < grace or not unit.pids:
        return plan("engine_up", "engine-stopping", look_s=1.0)
    kill = m.KillUnit(unit.name, unit.invocation, unit.pids)
    key = budget.key_of(kill)
    if budget.retry_s(past, key, seen.now, facts.KILL_WAIT_S) > 0:
        return plan("engine_up", "engine-stopping", look_s=1.0)
    if budget.count_of(past, key, seen.now.boot) >= facts.KILLS:
        return plan("engine_up", "engine-stuck")
    return plan("engine_up", "engine-leftover", kill, look_s=1.0)


def _worker_first(seen: m.Observation) -> m.Plan | None:
    """No worker runs while the engine changes: it would spend its samples' attempts on nobody."""
    if isinstance(seen.worker, m.Unreadable):
        return plan("engine_up", "worker-unreadable", cause=seen.worker.cause)
    if seen.worker.unit.up:
        return plan("engine_up", "engine-down", m.StopWorker(seen.worker.unit.invocation, "engine-down"), look_s=1.0)
    if not seen.worker.unit.gone:
        return plan("engine_up", "worker-stopping", look_s=1.0)
    return None


def _spent(config: Config, seen: m.Observation, engine: m.Engine, past: Past) -> m.Plan | None:
    """The crash budget, and the wait between two starts."""
    count = budget.failures(past, m.ENGINE_UNIT, seen.now.boot)
    last = past.last_start(m.ENGINE_UNIT)
    cause = (last.ended if last else "") or "cut by a reboot"
    if engine.last_lines:
        cause = f"{cause}: {engine.last_lines[-1][:200]}"
    memory = [s for s in past.starts if s.unit == m.ENGINE_UNIT and s.ended.startswith("oom-kill")]
    if len(memory) >= 2:
        return plan("engine_up", "engine-memory")
    if count >= config.supervisor.start_budget:
        return plan("engine_up", "engine-budget", count=count, cause=cause)
    sup = config.supervisor
    wait = budget.wait_s(past, m.ENGINE_UNIT, seen.now, sup.backoff_s, sup.backoff_max_s)
    if wait > 0:
        return plan("engine_up", "engine-backoff", cause=cause, wait=int(wait) + 1, look_s=min(wait, 5.0))
    return None


def _start(config: Config, seen: m.Observation, engine: m.Engine, past: Past) -> m.Plan:
    sweep = m.SweepStale(engine.stale)
    if engine.stale and budget.count_of(past, budget.key_of(sweep), seen.now.boot) < 2:
        return plan("engine_up", "engine-sweep", sweep, count=len(engine.stale), look_s=0.2)
    port = next_port(config, engine, past)
    if port is None:
        owners = ", ".join(f"{p}: {owner}" for p, owner in engine.busy_ports[:3])
        return plan("engine_up", "ports-busy", who=owners)
    attempt = budget.failures(past, m.ENGINE_UNIT, seen.now.boot) + 1
    start = m.StartEngine(engine.unit.invocation, port, engine.wanted)
    if cause := budget.unheard(past, start, seen.now, config.supervisor.backoff_s):
        return plan("engine_up", "engine-blocked", cause=cause)
    return plan("engine_up", "engine-start", start, attempt=attempt, port=port, look_s=2.0)


def next_port(config: Config, engine: m.Engine, past: Past) -> int | None:
    """The first free port; after an unclean end not the one that was used last, which may be haunted."""
    first, span = config.engine.port, config.engine.port_span
    busy = {port for port, _ in engine.busy_ports}
    free = [p for p in range(first, min(first + span, 65536)) if p not in busy]
    end, last = facts.known(engine.endpoint), past.last_start(m.ENGINE_UNIT)
    unclean = engine.unit.active == "failed" or (last is not None and last.ended not in ("", "engine-reload"))
    if end and unclean and len(free) > 1 and end.port in free:
        later = [p for p in free if p > end.port]
        return later[0] if later else free[0]
    return free[0] if free else None


def engine_proved(config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    """This very start of the engine passed the proof; until then no worker runs."""
    rung = "engine_proved"
    if isinstance(seen.engine, m.Unreadable) or isinstance(seen.worker, m.Unreadable):
        return plan(rung, "engine-unreadable", cause="units cannot be read")
    if isinstance(seen.proof, m.Unreadable) and seen.proof.code != "damaged":
        return plan(rung, "proof-unreadable", cause=seen.proof.cause)
    if isinstance(seen.proof_unit, m.Unreadable):
        return plan(rung, "units-unreadable", cause=seen.proof_unit.cause)
    if (scan := scan_first(seen)) is not None:
        return scan
    engine, proof = seen.engine.unit, facts.known(seen.proof)
    mine = proof is not None and proof.invocation == engine.invocation
    if proof is not None and mine and proof.ok:
        return None
    if seen.proof_unit.up or seen.proof_unit.pids:
        return _proof_runs(config, seen, seen.proof_unit, engine, past)
    return _verdict(seen, engine, proof if mine else None, seen.proof_unit, past)


def scan_first(seen: m.Observation) -> m.Plan | None:
    """Nobody works on an output while its samples are being adopted."""
    scan = seen.scan_unit
    if isinstance(scan, m.Unreadable):
        return plan("engine_proved", "units-unreadable", cause=scan.cause)
    if scan.gone:
        return None
    done = seen.progress.done if isinstance(seen.progress, m.Unadopted | m.Progress) else "?"
    return plan("engine_proved", "scan-running", age=int(seen.now.mono_s - scan.since_s), done=done, look_s=1.0)


def _proof_runs(config: Config, seen: m.Observation, unit: m.Unit, engine: m.Unit, past: Past) -> m.Plan:
    age = seen.now.mono_s - unit.since_s
    other = budget.count_of(past, f"proof:{engine.invocation}", seen.now.boot) == 0
    stop = m.StopProof(unit.invocation)
    due = unit.up and (age > 1.5 * config.proof.deadline_s or other)
    if due and budget.retry_s(past, budget.key_of(stop), seen.now, 30.0) == 0:
        return plan("engine_proved", "proof-late", stop, look_s=1.0)
    return plan("engine_proved", "proof-running", age=int(age), look_s=1.0)


def _verdict(seen: m.Observation, engine: m.Unit, proof: m.Proof | None, unit: m.Unit, past: Past) -> m.Plan:
    """No proof runs: begin one, or say what the last one found."""
    rung = "engine_proved"
    count = budget.count_of(past, f"proof:{engine.invocation}", seen.now.boot)
    cause = (proof.detail or proof.code) if proof else f"no verdict: {budget.cause_of(unit)}"
    if proof is not None and proof.code == "blocked":
        if budget.retry_s(past, f"proof:{engine.invocation}", seen.now, BLOCKED_S) > 0:
            return plan(rung, "proof-blocked", cause=cause)
        return plan(rung, "proving", m.RunProof(engine.invocation, unit.invocation), look_s=1.0)
    if proof is None or count == 0 or proof.code in ("timeout", "unreachable"):  # 0: a human reset the count
        if count >= PROOFS:
            return plan(rung, "proof-again", m.StopEngine(engine.invocation, "proof-again"), cause=cause)
        if budget.retry_s(past, f"proof:{engine.invocation}", seen.now, 5.0) > 0:
            return plan(rung, "proof-running", age=0, look_s=1.0)
        return plan(rung, "proving", m.RunProof(engine.invocation, unit.invocation), look_s=1.0)
    codes = {"inert": "proof-inert", "spool": "proof-spool", "continuity": "proof-continuity"}
    content = dict.fromkeys(("layers", "norm", "content", "chunk"), "proof-content")
    return plan(rung, (codes | content).get(proof.code, "proof-failed"), cause=cause)
