"""The optional Prometheus endpoint, on loopback only. Figures come from ticks; nothing is asked of the host for it."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from hsdaemon.core import facts, reasons
from hsdaemon.core import model as m
from hsdaemon.history import Tick

MIB = 1 << 20


class Metrics:
    """Gauges of one supervisor; `show` is called after every tick."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        reg = self.registry
        self._samples = Gauge("hs_samples", "Samples of the data set by state", ["state"], registry=reg)
        self._rung = Gauge("hs_rung", "1 for the rung that the ladder stands on", ["rung"], registry=reg)
        self._holds = Counter("hs_ticks", "Ticks by reason and severity", ["reason", "severity"], registry=reg)
        self._memory = Gauge("hs_gpu_memory_bytes", "GPU memory by device and holder", ["gpu", "holder"], registry=reg)
        self._free = Gauge("hs_volume_free_bytes", "Free bytes of the volume", registry=reg)
        self._rates = Gauge("hs_per_second", "Since the tick before", ["what"], registry=reg)
        self._starts = Gauge("hs_starts", "Starts that are remembered, by unit", ["unit"], registry=reg)
        self._before: tuple[float, m.Progress] | None = None

    def serve(self, port: int) -> None:
        """Raises OSError when the port is taken."""
        start_http_server(port, "127.0.0.1", self.registry)

    def show(self, tick: Tick) -> None:
        seen, plan = tick.seen, tick.plan
        reason = reasons.CATALOGUE.get(plan.reason)
        self._rung.clear()
        self._rung.labels(plan.rung).set(1)
        self._holds.labels(plan.reason, reason.severity if reason else "wait").inc()
        if isinstance(seen.progress, m.Progress):
            self._progress(seen.now.mono_s, seen.progress)
        if isinstance(seen.volume, m.Volume):
            self._free.set(seen.volume.free_bytes)
        self._starts.clear()
        for unit, count in Tally(start.unit for start in tick.past.starts).items():
            self._starts.labels(unit).set(count)
        self._gpus(seen)

    def _progress(self, now_s: float, p: m.Progress) -> None:
        pending = p.total - p.settled
        for state, n in (("done", p.done), ("failed", p.failed), ("skipped", p.skipped), ("pending", pending)):
            self._samples.labels(state).set(n)
        if self._before and now_s > self._before[0]:
            seconds, last = now_s - self._before[0], self._before[1]
            for what in ("done", "tokens", "bytes"):
                self._rates.labels(what).set((getattr(p, what) - getattr(last, what)) / seconds)
        self._before = (now_s, p)

    def _gpus(self, seen: m.Observation) -> None:
        """Device memory in use, split by whose processes hold it; "unknown" where NVML names nobody."""
        self._memory.clear()
        holders = facts.known(seen.holders) or ()
        for gpu in facts.known(seen.gpus) or ():
            kinds = {("engine" if facts.ours(seen, h) else h.kind) for h in holders if gpu.uuid in h.gpus}
            self._memory.labels(gpu.uuid, "+".join(sorted(kinds)) or "nobody").set((gpu.used_mib or 0) * MIB)
