"""The rungs about GPUs: are they all there and sound, and are they ours?"""

from __future__ import annotations

from hsdaemon.config import Config
from hsdaemon.core import budget, facts
from hsdaemon.core import model as m
from hsdaemon.core.budget import Past
from hsdaemon.core.engine import leftover
from hsdaemon.core.facts import plan
from hsdaemon.core.xid import RESET

FABRIC_PATIENCE_S = 300.0  # link training of a full NVSwitch box takes about two minutes
STOPS = 3  # stops that a unit may outlive before it is called stuck; it is still asked, seldom

_NVML = {
    "no-library": "nvml-absent",
    "no-driver": "nvml-absent",
    "mismatch": "nvml-mismatch",
    "hang": "nvml-hung",
    "stuck": "nvml-stuck",
    "no-permission": "nvml-denied",
    "sandbox": "nvml-denied",
}


def gpus_visible(config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    """All configured GPUs answer and nothing is owed to them. While the engine runs, its progress is the judge."""
    if not config.gpu_count:
        return None
    if isinstance(seen.engine, m.Unreadable):
        return plan("gpus_visible", "engine-unreadable", cause=seen.engine.cause)
    if seen.engine.unit.up:
        return None
    if isinstance(seen.gpus, m.Unreadable):
        code = _NVML.get(seen.gpus.code, "nvml-unreadable")
        soon = 1.0 if code == "nvml-absent" else 5.0  # at boot every second counts
        return plan("gpus_visible", code, cause=facts.first_line(seen.gpus.cause), look_s=soon)
    return _missing(config, seen.gpus) or _unsound(config, seen, seen.gpus, past)


def _missing(config: Config, gpus: tuple[m.Gpu, ...]) -> m.Plan | None:
    there, count = facts.wanted(config, gpus), config.gpu_count
    if len(there) >= count:
        return None
    if not gpus:
        return plan("gpus_visible", "nvml-denied", cause="NVML shows no GPU at all")
    absent = [u for u in config.gpus.uuids if u not in {g.uuid for g in there}]
    missing = ", ".join(absent) or f"{count - len(there)} of any"
    return plan("gpus_visible", "gpu-missing", present=len(there), wanted=count, missing=missing)


def _unsound(config: Config, seen: m.Observation, gpus: tuple[m.Gpu, ...], past: Past) -> m.Plan | None:
    mine = facts.wanted(config, gpus)
    for code, bad in (
        ("gpu-lost", [g for g in mine if g.lost]),
        ("gpu-reboot-owed", [g for g in mine if g.recovery == "reboot"]),
        ("gpu-reset-owed", [g for g in mine if g.recovery not in ("", "none", "reboot")]),
    ):
        if bad:
            return plan("gpus_visible", code, gpus=facts.shown(tuple(bad)))
    return _xid(seen, mine, past) or _fabric(seen, mine, past)


def _xid(seen: m.Observation, mine: tuple[m.Gpu, ...], past: Past) -> m.Plan | None:
    """An Xid that only a reset cures holds until the driver itself says that nothing is owed, which older ones cannot,
    until a person who has reset the GPU says so, or until a reboot."""
    healed = {g.uuid for g in mine if g.recovery == "none"}
    names = {g.uuid for g in mine} | {""}
    said_s = past.reset_s if past.reset_boot == seen.now.boot else 0.0
    for xid in seen.xids:
        if xid.code in RESET and xid.uuid in names and xid.uuid not in healed and xid.at_s > said_s:
            return plan("gpus_visible", "gpu-xid", gpus=facts.shown(mine, (xid.uuid,)), xid=xid.code)
    return None


def _fabric(seen: m.Observation, mine: tuple[m.Gpu, ...], past: Past) -> m.Plan | None:
    bad = tuple(g for g in mine if g.fabric not in ("none", "complete"))
    if not bad:
        return None
    spells = [s for g in bad if (s := past.spell(f"fabric:{g.uuid}"))]
    age = max((seen.now.mono_s - s.first_s for s in spells), default=0.0)
    if any(g.fabric == "failed" for g in bad) or age > FABRIC_PATIENCE_S:
        return plan("gpus_visible", "fabric-late", gpus=facts.shown(bad), age=int(age))
    return plan("gpus_visible", "fabric-wait", gpus=facts.shown(bad))


def gpus_ours(config: Config, seen: m.Observation, past: Past) -> m.Plan | None:
    """No foreign process and no foreign memory on our GPUs, and none about to take them."""
    if not config.gpu_count or isinstance(seen.gpus, m.Unreadable):
        return None  # unreadable with a running engine: nothing is done about others until it is known again
    if (own := leftover(seen, past)) is not None:
        return own
    running = facts.engine_up(seen)
    for code, part in (("holders-unreadable", seen.holders), ("units-unreadable", seen.units)):
        if isinstance(part, m.Unreadable):
            return None if running else plan("gpus_ours", code, cause=part.cause)
    mine = facts.wanted(config, seen.gpus)
    held = foreign(config, seen, past)
    named = _units(config, seen, held, past, mine) or _processes(config, seen, held, past, mine)
    if named or running:
        return named
    return _unnamed(seen, held, past, mine) or _settle(config, seen, past, mine)


def foreign(config: Config, seen: m.Observation, past: Past) -> tuple[m.Holder, ...]:
    """Holders of our GPUs that are not ours. Those that compute always count; an open descriptor or a display counts
    only where memory is held that nothing else explains."""
    gpus, holders = facts.known(seen.gpus) or (), facts.known(seen.holders) or ()
    mine = facts.wanted(config, gpus)
    uuids = {g.uuid for g in mine}
    idle = {g.uuid for g in mine if g.used_mib is not None and g.used_mib <= budget.idle_mib(past, g, config)}
    running = facts.engine_up(seen)

    def counts(h: m.Holder) -> bool:
        on = uuids & set(h.gpus)
        return bool(on) and (h.kind not in ("fd", "graphics") or (not running and bool(on - idle)))

    return tuple(h for h in holders if not facts.ours(seen, h) and counts(h))


def _units(
    config: Config, seen: m.Observation, held: tuple[m.Holder, ...], past: Past, mine: tuple[m.Gpu, ...]
) -> m.Plan | None:
    """Evict the first unit that the policy lets us stop and that is on our GPUs, or on none yet."""
    anywhere = {h.unit for h in facts.known(seen.holders) or () if h.gpus}
    here = {h.unit for h in held}
    for unit in facts.known(seen.units) or ():
        how = facts.how_unit(config, unit.name)
        taking = unit.name in here or (unit.name not in anywhere and (unit.up or bool(unit.pids)))
        if how not in ("stop", "disable") or not taking:
            continue
        uuids = tuple({u for h in held if h.unit == unit.name for u in h.gpus})
        return _evict(config, seen, past, unit, how, facts.shown(mine, uuids) if uuids else "(none yet)")
    return None


def _evict(config: Config, seen: m.Observation, past: Past, unit: m.Unit, how: str, gpus: str) -> m.Plan | None:
    """One step of an eviction: look twice, keep it down and stop it, wait, kill what is left, give up."""
    now = seen.now
    sight, runs = past.spell(f"unit:{unit.name}:{unit.invocation}"), past.spell(f"up:{unit.name}")
    twice = sight is not None and sight.count >= 2 and now.mono_s - sight.first_s >= facts.SIGHTING_S
    loops = runs is not None and now.mono_s - runs.first_s >= facts.LOOP_S
    if not (twice or loops):
        return plan("gpus_ours", "holder-new", who=unit.name, gpus=gpus, look_s=facts.SIGHTING_S)
    new = (unit.name, unit.invocation) not in past.evictions
    if new and budget.returns(past, unit.name) >= config.evict.budget:
        return plan("gpus_ours", "breaker", who=unit.name, count=budget.returns(past, unit.name))
    if unit.up:
        return _stop(config, seen, past, unit, how, gpus)
    if not unit.pids:
        return None  # gone: a holder that NVML still shows is told by the memory
    return _kill_rest(config, seen, past, unit)


def _stop(config: Config, seen: m.Observation, past: Past, unit: m.Unit, how: str, gpus: str) -> m.Plan:
    stop = m.StopUnit(unit.name, unit.invocation)
    key = budget.key_of(stop)
    if budget.retry_s(past, key, seen.now, config.evict.term_grace_s) > 0:
        stuck = budget.count_of(past, key, seen.now.boot) >= STOPS
        return plan("gpus_ours", "evict-stuck" if stuck else "evict-stopping", who=unit.name, look_s=1.0)
    keep: list[m.Action] = []
    if not unit.leased:
        keep.append(m.LeaseUnit(unit.name, unit.file_state, unit.up))
    if how == "disable" and unit.file_state.startswith("enabled"):
        keep.append(m.DisableUnit(unit.name))
    return plan("gpus_ours", "evicting", *keep, stop, who=unit.name, gpus=gpus, look_s=0.5)


def _kill_rest(config: Config, seen: m.Observation, past: Past, unit: m.Unit) -> m.Plan:
    """A stop job that is "done" proves nothing: the cgroup does."""
    kill = m.KillUnit(unit.name, unit.invocation, unit.pids)
    left = past.spell(f"left:{unit.name}:{unit.invocation}")
    age = seen.now.mono_s - left.first_s if left else 0.0
    pending = any(h.kill_pending for h in facts.known(seen.holders) or () if h.pid in unit.pids)
    if age < config.evict.term_grace_s:
        return plan("gpus_ours", "evict-stopping", who=unit.name, look_s=1.0)
    return _kill(seen, past, kill, unit.name, pending)


def _kill(seen: m.Observation, past: Past, kill: m.KillUnit | m.KillProcess, who: str, pending: bool) -> m.Plan:
    key = budget.key_of(kill)
    if budget.retry_s(past, key, seen.now, facts.KILL_WAIT_S) > 0:
        return plan("gpus_ours", "evict-stopping", who=who, look_s=1.0)
    if pending or budget.count_of(past, key, seen.now.boot) >= facts.KILLS:
        return plan("gpus_ours", "evict-stuck", who=who)
    return plan("gpus_ours", "evict-killing", kill, who=who, look_s=1.0)


def _processes(
    config: Config, seen: m.Observation, held: tuple[m.Holder, ...], past: Past, mine: tuple[m.Gpu, ...]
) -> m.Plan | None:
    """The same for the first process that belongs to no unit."""
    for holder in held:
        if facts.unit_of(seen, holder) is not None or facts.how_process(config, holder) != "stop":
            continue
        name, gpus = facts.who(holder), facts.shown(mine, holder.gpus)
        sight = past.spell(f"holder:{holder.pid}:{holder.start_ticks}")
        if sight is None or sight.count < 2 or seen.now.mono_s - sight.first_s < facts.SIGHTING_S:
            return plan("gpus_ours", "holder-new", who=name, gpus=gpus, look_s=facts.SIGHTING_S)
        term = m.KillProcess(holder.pid, holder.start_ticks, holder.exe, "TERM")
        if budget.count_of(past, budget.key_of(term), seen.now.boot) == 0:
            return plan("gpus_ours", "evicting", term, who=name, gpus=gpus, look_s=1.0)
        if budget.retry_s(past, budget.key_of(term), seen.now, config.evict.term_grace_s) > 0:
            return plan("gpus_ours", "evict-stopping", who=name, look_s=1.0)
        kill = m.KillProcess(holder.pid, holder.start_ticks, holder.exe, "KILL")
        return _kill(seen, past, kill, name, holder.kill_pending)
    return None


def _unnamed(seen: m.Observation, held: tuple[m.Holder, ...], past: Past, mine: tuple[m.Gpu, ...]) -> m.Plan | None:
    """Holders that nobody lets us touch: all are named, none is."""
    left = [h for h in held if (u := facts.unit_of(seen, h)) is None or u.up or u.pids]
    if not left:
        return None
    uuids = tuple({u for h in left for u in h.gpus})
    gpus, who = facts.shown(mine, uuids), "; ".join(facts.who(h) for h in left)
    kinds = {"holder-container" if h.container or h.kind == "container" else h.kind for h in left}
    fresh = [s for h in left if (s := past.spell(f"holder:{h.pid}:{h.start_ticks}")) is None or s.count < 2]
    if fresh:
        return plan("gpus_ours", "holder-new", who=who, gpus=gpus, look_s=facts.SIGHTING_S)
    if kinds == {"holder-container"}:
        return plan("gpus_ours", "holder-container", who=who, gpus=gpus)
    if kinds == {"invisible"}:
        return plan("gpus_ours", "holder-invisible", who=who, gpus=gpus)
    return plan("gpus_ours", "holder-unnamed", who=who, gpus=gpus)


def _settle(config: Config, seen: m.Observation, past: Past, mine: tuple[m.Gpu, ...]) -> m.Plan | None:
    """Memory at its baseline in several looks on every GPU: a kill only queues the driver's work."""
    stuck = []
    for gpu in mine:
        spell = past.spell(f"stuck:{gpu.uuid}")
        if spell and seen.now.mono_s - spell.first_s > config.gpus.clear_patience_s:
            stuck.append(gpu)
    if stuck:
        evidence = ", ".join(f"{g.index}: {g.used_mib} MiB" for g in stuck)
        return plan("gpus_ours", "memory-not-freed", gpus=facts.shown(tuple(stuck)), evidence=evidence)
    wet = [g for g in mine if (s := past.spell(f"clear:{g.uuid}")) is None or s.count < config.gpus.clear_polls]
    return plan("gpus_ours", "gpus-settling", gpus=facts.shown(tuple(wet)), look_s=1.0) if wet else None
