"""One seed of the simulation: a world, a schedule of faults, the real loop, and what must hold always and at last."""

from __future__ import annotations

import random
from dataclasses import dataclass

from fakes import FakeHistory, ports
from world import FAULTS, VLLM, Cut, World

from hsdaemon import loop
from hsdaemon.core import budget, reasons
from hsdaemon.core import model as m

CALM_TICKS = 900  # after the last fault, ticks until everything must be done
# Holds that are over once their cause is mended and a person said so.
PERSON = frozenset(
    code
    for code, r in reasons.CATALOGUE.items()
    if r.severity == "hold" and code not in ("vetoed", "history-unwritable")
)


@dataclass(frozen=True)
class Result:
    seed: int
    violations: tuple[str, ...]
    ticks: int
    story: tuple[str, ...]


def schedule(seed: int) -> list[tuple[float, str]]:
    """Seconds of running time, and the fault that happens then."""
    rng = random.Random(seed * 7919 + 1)
    return sorted((rng.random() * 400, rng.choice(FAULTS)) for _ in range(rng.randrange(1, 10)))


def simulate(seed: int, faults: list[tuple[float, str]] | None = None, keep: int = 400, cut_in: int = -1) -> Result:
    """Play one seed; the supervisor dies `cut_in` steps after its start. A violation ends in the result."""
    world = World(seed, cut_in=cut_in)
    if world.rng.random() < 0.5:
        world.fault("vllm")
    due = schedule(seed) if faults is None else list(faults)
    run = _Run(world, due, keep)
    run.play()
    return Result(seed, tuple(world.violations), run.ticks, tuple(run.story))


class _Run:
    def __init__(self, world: World, due: list[tuple[float, str]], keep: int) -> None:
        self.world, self.due, self.keep = world, due, keep
        self.ports = ports(world)
        self.history = FakeHistory(world)
        self.elapsed, self.ticks = 0.0, 0
        self.story: list[str] = []
        self.last = ""

    def play(self) -> None:
        while self.due or self.elapsed < 60:
            self.turn()
            if self.world.violations:
                return
            while self.due and self.due[0][0] <= self.elapsed:
                self.happen(self.due.pop(0)[1])
        self.world.mend()
        self.tell("all faults end")
        for _ in range(CALM_TICKS):
            plan = self.turn()
            if self.world.violations:
                return
            if plan is not None and plan.reason == "done":
                self.end()
                return
            if plan is not None and plan.reason in PERSON:
                self.reset()
        self.world.wrong(f"not done {CALM_TICKS} ticks after the last fault: {self.last}")

    def tell(self, text: str) -> None:
        if len(self.story) < self.keep:
            self.story.append(f"{self.world.boot} {self.world.mono_s:7.1f} {text}")

    def happen(self, fault: str) -> None:
        boot = self.world.boots
        self.world.fault(fault)
        self.tell(f"FAULT {fault}")
        if self.world.boots != boot:
            self.history = self.history.reborn()

    def turn(self) -> m.Plan | None:
        """One tick; a death of the supervisor is followed by its restart."""
        world, before = self.world, self.world.mono_s
        self.ticks += 1
        plan = None
        try:
            plan = loop.tick(self.ports, world.config, self.history).plan  # type: ignore[arg-type]
        except Cut:
            self.tell("supervisor dies")
            self.history = self.history.reborn()
        if plan is not None:
            self.check(plan)
        world.step(min(plan.look_again_s, world.config.supervisor.tick_s) if plan else 1.0)
        if world.visitor and world.rng.random() < 0.9:
            world.end(world.visitor)
            world.visitor = 0
        self.elapsed += world.mono_s - before
        return plan

    def check(self, plan: m.Plan) -> None:
        if plan.sentence != self.last:
            self.tell(f"{plan.rung}: {plan.sentence} {[type(a).__name__ for a in plan.actions] or ''}")
            self.last = plan.sentence
        if plan.reason == "vetoed":
            self.world.wrong(f"decide made a plan that safety refuses: {plan.sentence}")
        for action in plan.actions:
            if isinstance(action, m.StopEngine | m.StopWorker):
                self.world.judge_stop(action)
        if sum(isinstance(a, m.DISRUPTIVE) for a in plan.actions) > 1:
            self.world.wrong("two disruptive actions in a tick")
        if any(count != 1 for count in self.world.settled.values()):
            self.world.wrong("a sample was done twice")

    def reset(self) -> None:
        self.tell("a person mends it and resets")
        self.world.mend()
        self.world.human()
        self.history.append(budget.Reset(self.world.now()))

    def end(self) -> None:
        """Done: everything is there, and everybody got back what was theirs."""
        world = self.world
        if len(world.settled) != world.total:
            world.wrong("done without being done")
        if world.services[m.ENGINE_UNIT].pids or world.services[m.WORKER_UNIT].pids:
            world.wrong("done with something of ours left")
        if world.before or world.services[VLLM].leased or self.history.past.leases:
            world.wrong("an evicted unit was not given back")
