"""One try at one row, from the request to the commit. Whatever ends it early is a Failure."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

from hsdaemon import wire
from hsdaemon.config import Config
from hsdaemon.data.manifest import Claim, Done, Manifest
from hsdaemon.data.publish import Published, Rejected
from hsdaemon.data.sample import Sample
from hsdaemon.data.spool import Broken, Dump, Spool
from hsdaemon.engine.endpoint import Endpoint
from hsdaemon.engine.releases import release
from hsdaemon.errors import Transient
from hsdaemon.machine.disk import BadVolume
from hsdaemon.work import checks, client
from hsdaemon.work.decide import Failure, Kind
from hsdaemon.work.desk import Desk
from hsdaemon.work.finder import Finder, new_tokens
from hsdaemon.work.pause import Pause
from hsdaemon.work.writers import Writers

FIRST_LOOK_S, LONGEST_LOOK_S = 0.002, 0.1  # the dump is normally there before the reply


@dataclass(slots=True)
class Tries:
    """Everything a try needs. live: ids that may still get a dump; sent: rows whose request is on its way."""

    config: Config
    wanted: checks.Wanted
    http: aiohttp.ClientSession
    finder: Finder
    spool: Spool
    writers: Writers
    desk: Desk
    pause: Pause
    live: set[wire.RequestId]
    sent: set[int]
    pinned: str = ""  # the engine's start that was found to be of this output's model and release

    async def run(self, claim: Claim, sample: Sample) -> Done | Failure:
        """The row is done and recorded, or why not. Raises LeaseLost, and what is fatal about the volume."""
        rid = wire.RequestId(self.spool.epoch, claim.row, claim.attempt, sample.tokens)
        self.live.add(rid)
        losses = self.spool.losses
        try:
            result = await self._run(claim, sample, rid, losses)
            if isinstance(result, Failure) and self.spool.losses != losses:
                return Failure(Kind.pressure, "spool-gone", f"the spool {self.spool.root} was removed meanwhile")
            return result
        finally:
            self.sent.discard(claim.row)
            self.live.discard(rid)
            self.spool.discard(rid)

    async def _run(self, claim: Claim, sample: Sample, rid: wire.RequestId, losses: int) -> Done | Failure:
        found, failure = await self._send(rid, sample)
        if failure is not None:
            return failure
        dump = await self._dump(rid, losses)
        if isinstance(dump, Failure):
            return dump
        failure = checks.check_dump(dump, rid, self.wanted, found.launch, found.release)
        if failure is not None:
            return failure
        published = await self._publish(sample, dump)
        if isinstance(published, Rejected):
            return _of_rejection(published)
        done = Done(claim.row, claim.lease, published.path, published.size, published.digest)
        await self.desk.commit(done)
        return done

    async def _send(self, rid: wire.RequestId, sample: Sample) -> tuple[Endpoint, Failure | None]:
        """Send until the engine takes it; an engine that is away or busy costs no try. The stall rule ends it."""
        again = retry_if_exception_type((client.Absent, client.Busy))
        async for attempt in AsyncRetrying(retry=again, wait=wait_exponential(multiplier=0.1, max=2)):
            with attempt:
                found = await self.finder.ready()
                await self.pause.clear()
                await self._pin(found)
                failure = await self._ask(found, rid, sample)
                return found, await self._heard(found, rid, failure)
        raise AssertionError  # without a stop rule it goes on until it returns

    async def _heard(self, found: Endpoint, rid: wire.RequestId, failure: Failure | None) -> Failure | None:
        """A port proves nothing: what would fail a row at once, or stop the run, must come from the engine itself."""
        if failure is None or failure.kind not in (Kind.refused, Kind.run):
            return failure
        self.sent.discard(rid.row)
        self.finder.suspect(found, failure.reason)
        if await self.finder.ready() == found:
            return failure
        return Failure(Kind.pressure, "engine-replaced", f"the engine was replaced meanwhile: {failure.reason}")

    async def _pin(self, found: Endpoint) -> None:
        """One output, one model and one release of the engine. Raises EngineError, IdentityMismatch."""
        if found.launch != self.pinned:
            await self.desk.do(_pin, self.desk.manifest, found)
            self.pinned = found.launch

    async def _ask(self, found: Endpoint, rid: wire.RequestId, sample: Sample) -> Failure | None:
        url = found.url + release(found.release).generate_path
        self.sent.add(rid.row)
        try:
            limit = self.config.worker.request_timeout_s
            reply = await client.generate(self.http, url, rid, sample.ids, new_tokens(found), limit)
        except (client.Absent, client.Busy) as error:
            self.sent.discard(rid.row)
            self.finder.suspect(found, str(error))
            raise
        if not isinstance(reply, Failure):
            return checks.check_reply(reply, rid)
        if reply.kind is Kind.lost:
            self.finder.suspect(found, reply.reason)
        return reply

    async def _dump(self, rid: wire.RequestId, losses: int) -> Dump | Failure:
        """Wait for the dump or the error file, with a deadline. losses: of the spool, when the request was sent."""
        loop = asyncio.get_running_loop()
        limit = self.config.worker.dump_timeout_s
        deadline, wait = loop.time() + limit, FIRST_LOOK_S
        while (found := self.spool.look(rid)) is None:
            self.spool.keep()
            if loop.time() > deadline or self.spool.losses != losses:
                reason = f"no dump in {self.spool.root} within {limit:g} s after the reply"
                return Failure(Kind.sample, "no-dump", reason)
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_LOOK_S)
        if isinstance(found, wire.DumpError):
            return checks.of_error(found)
        if isinstance(found, Broken):
            return Failure(Kind.sample, "dump", found.reason)
        return found

    async def _publish(self, sample: Sample, dump: Dump) -> Published | Rejected:
        """A full disk or an absent volume is waited for: the dump is kept, nothing is charged."""
        while True:
            await self.pause.clear()
            try:
                return await self.writers.publish(sample, dump)
            except Transient as error:
                self.pause.close(error)
            except BadVolume as error:
                if error.errno == errno.EIO:  # data were lost: a person must look
                    raise
                self.pause.close(error)


def _pin(manifest: Manifest, found: Endpoint) -> None:
    manifest.pin(checks.require_engine(found, manifest.identity()))


def _of_rejection(rejected: Rejected) -> Failure:
    """Other layers, or a layer that is zero in a whole sample, was never captured: it will be for every row."""
    if rejected.code in ("zero-layer", "run"):
        return Failure(Kind.run, rejected.code, f"row {rejected.row}: {rejected.detail}; the capture lacks it")
    return Failure(Kind.sample, rejected.code, rejected.detail)
