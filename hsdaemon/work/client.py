"""One request to the engine; whatever happens on the way is a value."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt

from hsdaemon import wire
from hsdaemon.work.decide import Failure, Kind

MAX_REPLY_BYTES = 64 << 10  # ours are under 1 KiB; states as numbers are megabytes
CONNECT_S = 10.0
_BUSY = (429, 503)  # queue full, warming up, draining
_CLOSED = (401, 403, 404, 405)  # nobody who looks at the row says so: it would be said to every row


class Absent(Exception):  # a state of the engine, not an error of ours
    """Nothing listens: the request was never sent."""


class Busy(Exception):
    """The engine takes no requests now."""


def session() -> aiohttp.ClientSession:
    """A connection per request: closing it aborts the request, and no stale one is ever taken for a dead engine."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), trust_env=False)


async def generate(
    http: aiohttp.ClientSession,
    url: str,
    rid: wire.RequestId | str,
    ids: npt.NDArray[np.int64],
    new_tokens: int,
    limit_s: float,
) -> Any:
    """The parsed reply, or a Failure. Raises Absent and Busy. limit_s: the whole request, queueing included."""
    parameters = {"max_new_tokens": new_tokens, "temperature": 0.0}
    body = msgspec.json.encode({"rid": str(rid), "input_ids": ids.tolist(), "sampling_params": parameters})
    timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
    headers = {"Content-Type": "application/json"}
    try:
        async with http.post(url, data=body, headers=headers, timeout=timeout, allow_redirects=False) as reply:
            return await _read(reply)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise Absent(str(error)) from None
    except TimeoutError:
        return Failure(Kind.sample, "timeout", f"no reply within {limit_s:g} s")
    except (aiohttp.ClientError, ConnectionError) as error:
        return Failure(Kind.lost, "engine-lost", f"the connection broke: {type(error).__name__}: {error}")


async def _read(reply: aiohttp.ClientResponse) -> Any:
    raw = await bounded(reply)
    if reply.status in _BUSY:
        raise Busy(_words(raw) or f"HTTP {reply.status}")
    if reply.status in _CLOSED:
        cause = f"the engine takes no requests of ours, {reply.status}: {_words(raw)}"
        return Failure(Kind.run, f"http-{reply.status}", f"{cause}; start it with hs-extract serve")
    if 400 <= reply.status < 500:
        return Failure(Kind.refused, "refused", f"the engine refused it with {reply.status}: {_words(raw)}")
    if reply.status != 200:
        return Failure(Kind.sample, f"http-{reply.status}", f"the engine answered {reply.status}: {_words(raw)}")
    if raw is None:
        cause = f"the reply is larger than {MAX_REPLY_BYTES} bytes: the engine sends states as numbers in it"
        return Failure(Kind.run, "states-in-reply", f"{cause}; start it with hs-extract serve")
    try:
        return wire.parse_json(raw)
    except (ValueError, RecursionError):
        return Failure(Kind.sample, "reply", f"the reply is not JSON: {_words(raw)}")


async def bounded(reply: aiohttp.ClientResponse, limit: int = MAX_REPLY_BYTES) -> bytes | None:
    """The body, or None when it is longer than `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in reply.content.iter_chunked(1 << 16):
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return b"".join(parts)


def _words(raw: bytes | None) -> str:
    """The server's own words, from JSON where it is JSON."""
    text = (raw or b"").decode(errors="replace").strip()
    try:
        error = wire.parse_json(text).get("error", text)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        return text[:500]
    return text[:500]
