"""Is this reply, and is this dump, the answer to that request? Judged by id, lengths and header, never by order."""

from __future__ import annotations

import dataclasses

from hsdaemon import wire
from hsdaemon.data.formats import get_format
from hsdaemon.data.identity import RunIdentity, require_same
from hsdaemon.data.spool import Dump
from hsdaemon.engine.endpoint import Endpoint
from hsdaemon.errors import EngineError
from hsdaemon.work.decide import Failure, Kind


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What every dump of this run must say of itself."""

    layers: tuple[int, ...]  # physical
    norm: str
    dtype: str
    hidden: int
    interleaved: bool

    def layout(self, tokens: int) -> wire.Layout:
        return wire.Layout(tokens, self.hidden, len(self.layers), self.dtype, self.interleaved)


def wanted_by(identity: RunIdentity) -> Wanted:
    """What dumps must be for an output of this identity."""
    interleaved = get_format(identity.format).interleaved
    return Wanted(identity.layers, identity.norm, identity.dtype, identity.hidden, interleaved)


def require_engine(found: Endpoint, identity: RunIdentity) -> RunIdentity:
    """One output, one model and one release: the identity with this engine's release in it. Raises EngineError,
    IdentityMismatch."""
    if found.model not in ("", identity.model):
        raise EngineError(
            f"cannot use engine {found.launch}: it has loaded model {found.model}, this output is of {identity.model}; "
            "stop it and start it with hs-extract serve and this configuration"
        )
    offered = dataclasses.replace(identity, release=found.release)
    require_same(identity, offered)
    return offered


def check_reply(reply: object, rid: wire.RequestId) -> Failure | None:
    """What is wrong with the engine's JSON, first thing first."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(meta, dict):
        return Failure(Kind.sample, "reply", f"the engine's reply has no meta_info: {str(reply)[:200]}")
    if meta.get("id") != str(rid):
        return Failure(Kind.sample, "reply-id", f"the reply is for {str(meta.get('id'))[:80]!r}, not for {rid}")
    if meta.get("hidden_states") is not None:
        cause = "the engine sends states as numbers in the reply: it was started with another argument line than ours"
        return Failure(Kind.run, "states-in-reply", f"{cause}; start it with hs-extract serve")
    if meta.get("prompt_tokens") != rid.tokens:
        return Failure(
            Kind.sample, "prompt-tokens", f"{meta.get('prompt_tokens')} tokens were computed, {rid.tokens} sent"
        )
    cached = meta.get("cached_tokens")
    if cached not in (0, None):
        return Failure(Kind.sample, "cached", f"{cached} tokens came from a cache and have no states")
    return None


def check_dump(dump: Dump, rid: wire.RequestId, wanted: Wanted, launch: str, release: str) -> Failure | None:
    """What is wrong with the dump's header or size, first thing first."""
    header = dump.header
    for name in ("layers", "norm", "dtype", "hidden", "interleaved"):
        mine, theirs = getattr(wanted, name), getattr(header, name)
        if mine != theirs:
            return Failure(
                Kind.run,
                f"dump-{name}",
                f"the capture wrote {name} {theirs}, this run needs {mine}; restart the engine",
            )
    if header.release != release:
        return Failure(Kind.run, "dump-release", f"the dump is from SGLang {header.release}, the engine is {release}")
    if header.rid != str(rid):
        return Failure(Kind.sample, "dump-id", f"the dump says {header.rid!r}, its name {rid}")
    if header.launch != launch:
        return Failure(Kind.sample, "dump-launch", f"the dump is from engine start {header.launch!r}, not {launch!r}")
    if header.tokens != rid.tokens:
        return Failure(Kind.sample, "dump-length", f"{header.tokens} rows for {rid.tokens} tokens")
    if header.rows != header.tokens:
        return Failure(Kind.sample, "dump-cover", f"{header.rows} of {header.tokens} rows were captured")
    if dump.size != header.layout().total:
        return Failure(Kind.sample, "dump-size", f"{dump.size} bytes, the formula gives {header.layout().total}")
    return None


def of_error(error: wire.DumpError) -> Failure:
    """The capture says why there is no dump."""
    reason = f"the capture says: {error.reason}"
    if error.code in ("spool-full", "stalled"):
        return Failure(Kind.pressure, error.code, reason)
    if error.code == "layers":
        return Failure(Kind.run, error.code, f"{reason}; restart the engine, see its log")
    return Failure(Kind.sample, error.code or "capture", reason)
