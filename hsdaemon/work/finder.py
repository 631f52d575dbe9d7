"""Where the engine is now: engine.json, read again whenever it is replaced, and a server behind it that is ours.

A port proves nothing (another server may hold it), so each start is asked once for its name before it is trusted.
"""

from __future__ import annotations

import asyncio
import glob
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp

from hsdaemon import wire
from hsdaemon.engine import endpoint, releases
from hsdaemon.engine.endpoint import Endpoint
from hsdaemon.machine import disk
from hsdaemon.work import client

POLL_S = 0.25
MAX_NAME_BYTES = 16 << 20  # every setting and every rank's state are beside the name
ASK_S = 10.0  # to say its name; short, the answer takes no forward


class Finder:
    """Gives an endpoint that answered under its own name. `reason` says what is waited for, "" when found.

    attested(attest): called for each rank's attest file of a new start; raises what forbids its use.
    """

    def __init__(
        self,
        run: str,
        http: aiohttp.ClientSession,
        attested: Callable[[wire.Attest], None] = lambda _: None,
        poll_s: float = POLL_S,
    ) -> None:
        self.reason = "the engine to be looked for"
        self._run = run
        self._http = http
        self._attested = attested
        self._poll_s = poll_s
        self._found: Endpoint | None = None
        self._mark: tuple[int, int] | None = None
        self._lock = asyncio.Lock()

    async def ready(self) -> Endpoint:
        """Wait for it. Without end: the caller's stall rule is the deadline. Raises EngineError (unknown release)."""
        if self._found is not None and self._mark == self._stat():
            return self._found
        async with self._lock:
            while (found := await self._look()) is None:
                await asyncio.sleep(self._poll_s)
            return found

    def suspect(self, seen: Endpoint, cause: str) -> None:
        """A request failed there: ask again before the next one."""
        if self._found == seen:
            self._found, self.reason = None, f"the engine at {seen.url}: {cause}"

    async def _look(self) -> Endpoint | None:
        mark = self._stat()
        if self._found is not None and self._mark == mark:
            return self._found
        self._found = None
        candidate = endpoint.read(self._run)
        if candidate is None:
            self.reason = f"an engine: there is no {endpoint.path(self._run)}; hs-extract serve starts one"
            return None
        known = releases.release(candidate.release)
        name = await self._name(candidate, known.info_path)
        if name != candidate.launch:
            return None
        for attest in self._attests(candidate.launch):
            self._attested(attest)
        self._found, self._mark, self.reason = candidate, mark, ""
        return candidate

    def _attests(self, launch: str) -> Iterator[wire.Attest]:
        """What the ranks of this start say of themselves. That they say anything at all is for the proof to ask."""
        for path in sorted((Path(self._run) / "attest").glob(f"attest-{glob.escape(launch)}-*.json")):
            try:
                yield wire.attest(disk.read_own(path).decode())
            except (OSError, ValueError) as error:
                self.reason = f"the engine {launch}: {path} cannot be read: {error}"

    async def _name(self, candidate: Endpoint, info_path: str) -> str | None:
        """What the server calls itself, or None with the reason set."""
        try:
            url = candidate.url + info_path
            limit = aiohttp.ClientTimeout(total=ASK_S)
            async with self._http.get(url, timeout=limit, allow_redirects=False) as reply:
                name = wire.parse_json(await client.bounded(reply, MAX_NAME_BYTES) or b"").get("served_model_name")
        except TimeoutError:
            self.reason = f"the engine at {candidate.url}: it does not answer"
            return None
        except aiohttp.ClientConnectorError:
            self.reason = f"the engine at {candidate.url}: nothing listens there, it loads or is gone"
            return None
        except (aiohttp.ClientError, ConnectionError) as error:
            self.reason = f"the engine at {candidate.url}: {error}"
            return None
        except (ValueError, AttributeError, RecursionError):
            self.reason = f"the engine at {candidate.url}: its answer cannot be understood"
            return None
        if name != candidate.launch:
            self.reason = f"the engine {candidate.launch}: the port {candidate.port} belongs to {str(name)[:80]!r}"
        return str(name)

    def _stat(self) -> tuple[int, int] | None:
        try:
            seen = Path(endpoint.path(self._run)).stat()
        except OSError:
            return None
        return seen.st_ino, seen.st_mtime_ns


def new_tokens(found: Endpoint) -> int:
    """The smallest max_new_tokens that this release accepts: 0 is prefill only."""
    return releases.release(found.release).min_new_tokens
