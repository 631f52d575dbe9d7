"""The TCP ports that an engine will bind: which they are, and who holds one that is taken."""

from __future__ import annotations

import socket

import psutil  # type: ignore[import-untyped]  # ships no types

from hsdaemon.config import Config
from hsdaemon.engine.endpoint import Endpoint
from hsdaemon.errors import EngineError

# With attention data parallelism the engine binds this far above its port: one to meet, six and one a group to talk.
DELTA, FIXED = 233, 7


def plan(config: Config, port: int) -> tuple[int, ...]:
    """Every port that the engine derives from `port`."""
    groups = config.engine.dp_attention
    if groups == 1:
        return (port,)
    base = port + DELTA if port + DELTA + FIXED + groups <= 65535 else port - DELTA
    return (port, *range(base, base + FIXED + groups))


def free(host: str, port: int) -> bool:
    """Whether `port` can be bound. Connections of a former owner that still linger do not count."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError:
            return False
    return True


def owner(port: int) -> str:
    """Who listens on `port`, for a message."""
    try:
        held = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"]
        pids = [c.pid for c in held if c.pid]
        if pids:
            process = psutil.Process(pids[0])
            return f"pid {process.pid} ({' '.join(process.cmdline())[:120] or process.name()})"
    except psutil.Error as error:
        return f"a process that cannot be looked at ({error})"
    return "a process of another user or namespace"


def choose(config: Config, last: Endpoint | None, wanted: int | None = None) -> int:
    """The port to use. wanted: the supervisor's choice, tried first. last: the former start of this boot, whose port
    comes last: after an unclean stop an engine on the same port may answer and then hang.

    Raises EngineError naming the owner when nothing is free.
    """
    engine = config.engine
    span = [engine.port + i for i in range(engine.port_span) if engine.port + i <= 65535]
    if last is None or last.port not in span:
        candidates = span[:1]
    else:
        after = span.index(last.port) + 1
        candidates = span[after:] + span[:after]
    if wanted in span:
        candidates = [wanted, *(port for port in candidates if port != wanted)]
    taken: list[int] = []
    for port in candidates:
        busy = [p for p in plan(config, port) if not free(engine.host, p)]
        if not busy:
            return port
        taken += busy
    raise EngineError(
        f"cannot start the engine: port {taken[0]} is held by {owner(taken[0])}; stop it or set engine.port"
    )
