"""The proof of one start of the engine: attests, canaries through the real path, continuity with what is stored.

It runs while no worker does (it takes the output's lock) and leaves nothing behind: its dumps are its own epoch's and
are removed; the manifest is only read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import numpy.typing as npt
import structlog

from hsdaemon import wire
from hsdaemon.config import Config
from hsdaemon.data.formats import Damaged, open_sample
from hsdaemon.data.identity import IdentityMismatch, RunIdentity
from hsdaemon.data.manifest import Stored
from hsdaemon.data.sample import Sample
from hsdaemon.data.spool import Broken, Dump, Spool
from hsdaemon.data.verify import location
from hsdaemon.engine.endpoint import Endpoint
from hsdaemon.errors import EngineError, Transient
from hsdaemon.machine import disk
from hsdaemon.machine.identity import start_ticks
from hsdaemon.work import checks, client, verdict
from hsdaemon.work.checks import Wanted
from hsdaemon.work.compare import Likeness, likeness
from hsdaemon.work.decide import Failure, Kind
from hsdaemon.work.finder import Finder, new_tokens
from hsdaemon.work.planes import Planes, read_planes
from hsdaemon.work.verdict import Bounds, Refuted

POLL_S = 0.02  # a tmpfs look-up; the dump is there within milliseconds of the reply
LEAST_PATIENCE_S = 5.0
_log = structlog.get_logger()
Ints = npt.NDArray[np.int64]


class Unproved(Transient):
    """Carries a Refuted out of the steps."""

    def __init__(self, refuted: Refuted) -> None:
        super().__init__(refuted.detail)
        self.refuted = refuted


@dataclass(frozen=True, slots=True)
class Case:
    """What there is to prove with. identity: of the output; longest: the data set's longest sample that will be sent;
    few: up to three more; stored: done rows, with their samples of the data set."""

    identity: RunIdentity
    longest: Sample
    few: Sequence[Sample]
    stored: Sequence[tuple[Sample, Stored]]


@dataclass(frozen=True, slots=True)
class Proved:
    """An engine that may be trusted. launch: of this start; steps: what was shown, a sentence each."""

    launch: str
    steps: tuple[str, ...]


async def prove(config: Config, case: Case, wanted: Wanted, spool: Spool) -> Proved | Refuted:
    """Run all steps within proof.deadline_s. Never raises for what an engine does."""
    doing = ["looking for the engine"]
    try:
        async with asyncio.timeout(config.proof.deadline_s), client.session() as http:
            return await _Proof(config, case, wanted, spool, http, doing).run()
    except TimeoutError:
        return Refuted("timeout", f"not proved within {config.proof.deadline_s:g} s: {doing[-1]}")
    except Unproved as unproved:
        return unproved.refuted


class _Proof:
    def __init__(
        self,
        config: Config,
        case: Case,
        wanted: Wanted,
        spool: Spool,
        http: aiohttp.ClientSession,
        doing: list[str],
    ) -> None:
        self.config, self.case, self.wanted, self.spool, self.http, self.doing = (
            config, case, wanted, spool, http, doing,
        )  # fmt: skip
        self.bounds = Bounds(config.proof.min_cosine, config.proof.max_relative_error)
        self.sent = 0
        self.steps: list[str] = []

    def say(self, sentence: str) -> None:
        self.steps.append(sentence)
        _log.info(sentence)

    async def run(self) -> Proved:
        finder = Finder(self.config.paths.run, self.http)
        self.doing.append("waiting for the engine to answer under its own name")
        engine = await finder.ready()
        self._identity(engine)
        self._attests(engine)
        whole = await self._canaries(engine)
        await self._batch(engine)
        await self._continuity(engine)
        self.say(f"proved engine {engine.launch} with {self.sent} canaries, the longest of {whole} tokens")
        return Proved(engine.launch, tuple(self.steps))

    def _identity(self, engine: Endpoint) -> None:
        """What the worker would refuse: other weights behind the same shapes, another release."""
        try:
            checks.require_engine(engine, self.case.identity)
        except (EngineError, IdentityMismatch) as error:
            raise Unproved(Refuted("continuity", str(error))) from None

    def _attests(self, engine: Endpoint) -> None:
        self.doing.append("reading the attest files")
        attests = living_attests(Path(self.config.paths.run) / "attest")
        _refuse(
            verdict.judge_attests(
                attests,
                engine.launch,
                self.config.engine.tp,
                self.wanted,
                engine.release,
                self.config.spool.path,
            )
        )
        count = self.config.engine.tp
        who = "the only rank attests" if count == 1 else f"{count} ranks attest"
        self.say(f"{who} layers {self.wanted.layers}, {self.wanted.norm}-norm")

    async def _canaries(self, engine: Endpoint) -> int:
        """The longest sample, and prefixes of it, each sent alone."""
        ids = self.case.longest.ids
        whole = await self._capture(engine, ids)
        worst = Likeness(1.0, 0.0)
        for length in verdict.canary_lengths(len(ids), self.config.engine.chunk_tokens):
            part = await self._capture(engine, ids[:length])
            seen = _alike(whole.first(length), part)
            _refuse(verdict.judge_prefix(length, len(ids), seen, self.bounds))
            worst = worst.worse(seen)
        self.say(f"a prompt of {len(ids)} tokens and its prefixes agree: {verdict.words(worst)}")
        return len(ids)

    async def _batch(self, engine: Endpoint) -> None:
        """Samples cut to one length, sent at once and then one of them alone: replies must not be swapped."""
        few = self.case.few
        if len(few) < 2:
            return
        length = min(sample.tokens for sample in few)
        together = await asyncio.gather(*(self._capture(engine, sample.ids[:length]) for sample in few))
        again = await self._capture(engine, few[0].ids[:length])
        _refuse(verdict.judge_alone(few[0].row, _alike(again, together[0]), self.bounds))
        self.say(f"{len(few)} prompts of {length} tokens at once keep apart")

    async def _continuity(self, engine: Endpoint) -> None:
        worst, compared = Likeness(1.0, 0.0), 0
        for sample, stored in self.case.stored:
            self.doing.append(f"capturing the stored row {sample.row} again")
            kept = self._kept(stored)
            if kept is None:
                continue
            now = await self._capture(engine, sample.ids)
            _refuse(verdict.judge_shapes(sample.row, kept.shapes(), now.shapes()))
            seen = _alike(kept, now)
            _refuse(verdict.judge_continuity(sample.row, seen, self.bounds))
            worst, compared = worst.worse(seen), compared + 1
        if compared:
            self.say(f"{compared} stored samples captured again agree: {verdict.words(worst)}")
        elif self.case.stored:
            raise Unproved(Refuted("blocked", f"{self.steps[-1]}; run hs-extract verify"))

    def _kept(self, stored: Stored) -> Planes | None:
        """A stored sample; None, and said, where its file is damaged: that speaks of the disk, not of the engine."""
        path = location(Path(self.config.output.path), stored.path)
        try:
            if path is None:
                raise Damaged("its path in the manifest leads out of the output")
            kept = open_sample(path)
        except (Damaged, OSError) as error:
            self.say(f"the stored row {stored.row} cannot be compared: {error}")
            return None
        return Planes(kept.ids, kept.aux, kept.final, kept.dtype)

    async def _capture(self, engine: Endpoint, ids: Ints) -> Planes:
        """One prompt through the real path: request, reply, dump, content."""
        self.sent += 1
        rid = wire.RequestId(self.spool.epoch, self.sent, 0, len(ids))
        self.doing.append(f"canary {self.sent} of {len(ids)} tokens")
        url = engine.url + "/generate"
        try:
            limit = self.config.worker.request_timeout_s
            reply = await client.generate(self.http, url, rid, ids, new_tokens(engine), limit)
        except (client.Absent, client.Busy) as error:
            raise Unproved(Refuted("unreachable", f"the engine took no canary: {error}")) from None
        _fine(reply if isinstance(reply, Failure) else checks.check_reply(reply, rid))
        try:
            return self._judged(await self._dump(rid), rid, engine, ids)
        finally:
            self.spool.discard(rid)

    async def _dump(self, rid: wire.RequestId) -> Dump:
        patience = max(LEAST_PATIENCE_S, self.config.worker.dump_timeout_s)
        end = asyncio.get_running_loop().time() + patience
        while (found := self.spool.look(rid)) is None:
            if asyncio.get_running_loop().time() > end:
                detail = f"the engine answered, and no dump appeared in {self.spool.root} within {patience:g} s"
                raise Unproved(Refuted("inert", detail))
            await asyncio.sleep(POLL_S)
        if isinstance(found, wire.DumpError):
            _fine(checks.of_error(found))
        if isinstance(found, Broken):
            raise Unproved(Refuted("content", f"the dump of canary {rid.row} cannot be read: {found.reason}"))
        assert isinstance(found, Dump)
        return found

    def _judged(self, dump: Dump, rid: wire.RequestId, engine: Endpoint, ids: Ints) -> Planes:
        _fine(checks.check_dump(dump, rid, self.wanted, engine.launch, engine.release))
        planes = read_planes(dump)
        wrong = planes.problem(ids)
        if wrong:
            raise Unproved(Refuted("content", f"canary {rid.row} of {len(ids)} tokens: {wrong}"))
        return planes


def living_attests(folder: Path) -> list[wire.Attest]:
    """Attests of processes that still run; what cannot be read is nobody's word."""
    found = []
    for path in sorted(folder.glob("attest-*.json")):
        try:
            attest = wire.attest(disk.read_own(path).decode(errors="replace"))
        except (OSError, ValueError):
            continue
        if start_ticks(attest.pid) == attest.start_ticks:
            found.append(attest)
    return found


def _alike(first: Planes, second: Planes) -> Likeness:
    """The worst of the four states: one with large values would drown the others in a common norm."""
    worst = Likeness(1.0, 0.0)
    for (_, a), (_, b) in zip(first.states(), second.states(), strict=True):
        worst = worst.worse(likeness(a, b, first.dtype))
    return worst


def _refuse(refuted: Refuted | None) -> None:
    if refuted:
        raise Unproved(refuted)


_CODES = {"dump-layers": "layers", "dump-norm": "norm", "states": "layers", "cached": "content"}


def _fine(failure: Failure | None) -> None:
    """Raise Unproved for what a try of the worker would have failed with. A spool that is too small now speaks of the
    host, not of the engine."""
    if failure is None:
        return
    if failure.code in ("timeout", "engine-lost"):
        raise Unproved(Refuted("unreachable", failure.reason))
    if failure.kind is Kind.pressure:
        raise Unproved(Refuted("blocked", f"{failure.reason}; make room in the tmpfs of spool.path, or enlarge it"))
    code: verdict.Code = _CODES.get(failure.code, "content")  # type: ignore[assignment]  # values above are codes
    raise Unproved(Refuted(code, failure.reason))
