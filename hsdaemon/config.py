"""Every setting as one frozen tree. `parse` makes it from a text; reading the file is the caller's business.

Each field says its unit in its name or description, and why its default is what it is. A wrong file is one ConfigError
that lists every problem, a line each: file, key, value, cause, what to write instead.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from hsdaemon.errors import ConfigError

Seconds = Annotated[float, Meta(gt=0, le=2e6)]  # 23 days: more milliseconds than that are no number to D-Bus
Count = Annotated[int, Meta(ge=1)]
Mib = Annotated[int, Meta(ge=1)]
# No NUL: no path, argument or variable has one.
Word = Annotated[str, Meta(pattern=r"^[^\x00]*$")]
Text = Annotated[str, Meta(pattern=r"^[^\x00]+$")]
Name = Annotated[str, Meta(pattern=r"^[^\x00=]+$")]
Folder = Annotated[str, Meta(pattern=r"^/[^\x00]*$", description="an absolute path")]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file: unknown keys are refused."""


class Data(Section, frozen=True):
    """The data set."""

    path: Folder  # .jsonl or .parquet with `input_ids` and optional `loss_mask`, `id`
    on_bad_row: Literal["skip", "refuse"] = "refuse"  # no ids, ids out of the vocabulary, mask of another length, ...
    on_long_row: Literal["skip", "refuse"] = "skip"  # longer than model.context_tokens less the engine's reserve
    on_edited_row: Literal["redo", "refuse"] = "redo"  # content digest differs from the one that was extracted


class Model(Section, frozen=True):
    """The model whose states are taken."""

    path: Folder
    revision: str = ""  # pinned in the manifest; "" = digest of config.json and the weight files' names and sizes
    layers: tuple[Annotated[int, Meta(ge=0)], ...] = ()  # physical, ascending; () = EAGLE-3 default 1, n//2 - 1, n - 4
    norm: Literal["post", "pre"] = "post"  # the final state after or before the final norm; speculators needs "pre"
    context_tokens: Annotated[int, Meta(ge=0)] = 0  # longest context; 0 = what the model's config.json says


class Output(Section, frozen=True):
    """Where samples and manifest live."""

    path: Folder
    format: Literal["specforge", "modelopt", "speculators"] = "specforge"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of the stored states, cast once
    volume: Folder | None = None  # mount point that must carry our marker; None = the folder above `path`
    volume_is_mount: bool = False  # True: write only while `volume` is a mount point
    reserve_mib: Mib = 2048  # free space that is never used: the floor that pauses the work
    allow_short_disk: bool = False  # True: start although all samples will not fit; the work pauses when it is full
    ballast_mib: Mib = 64  # a file beside the manifest, given up on a full disk so that the manifest can commit
    manifest: Folder | None = None  # manifest.db elsewhere, on a local disk, when `path` is a network file system
    backup: Folder | None = None  # copies of the manifest, once a minute; None = paths.state: another disk than `path`
    allow_fuse: bool = False  # FUSE has no shared memory we can trust for WAL unless you know better


class Spool(Section, frozen=True):
    """Dumps between engine and worker, on a tmpfs."""

    path: Folder = "/dev/shm/hs-extract"  # noqa: S108  # own folder: /dev/shm is shared with NCCL and others
    budget_mib: Mib = 16384  # hard limit of all files in it; 16 GiB hold about 130 samples of 126 MB
    wait_s: Seconds = 60.0  # how long the engine may wait for space; far below engine.watchdog_s


class Engine(Section, frozen=True):
    """The SGLang server."""

    device: Literal["cuda", "cpu"] = "cuda"
    tp: Count = 1  # ranks
    dp_attention: Count = 1  # attention data-parallel groups
    capture: Literal["auto", "plugin", "patch"] = "auto"  # auto: plugin where the release has plugins
    host: Literal["127.0.0.1", "::1"] = "127.0.0.1"  # the server takes any request: loopback only
    port: Annotated[int, Meta(ge=1024, le=65535)] = 30000
    port_span: Count = 20  # after an unclean stop the next port of this many is taken
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    chunk_tokens: Annotated[int, Meta(ge=0)] = 16384  # chunked prefill; 0 = off
    max_running: Count = 64
    max_total_tokens: Annotated[int, Meta(ge=0)] = 0  # KV pool; 0 = the engine's choice
    mem_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.80  # leaves room for the capture's device buffer
    watchdog_s: Seconds = 600.0  # the engine's own; above the longest forward
    start_patience_s: Seconds = 1800.0  # 11 minutes are normal for 600 GB of weights
    buffers: Count = 3  # pinned buffers of the capture
    trust_remote_code: bool = False
    pipeline: Count = 1  # only 1: the capture sees part of the rows otherwise
    two_batch_overlap: bool = False  # only False, the same
    disaggregation: Literal["null", "prefill", "decode"] = "null"  # only "null", the same
    radix_cache: bool = False  # only False: cached rows are not computed, so not captured
    mixed_chunk: bool = False  # only False: decode rows would ride in prefill batches
    extra_args: tuple[Word, ...] = ()  # appended to the argument line; what we set ourselves is refused
    environment: dict[Name, Word] = {}  # added to the engine's environment


class Worker(Section, frozen=True):
    """The extraction worker."""

    concurrency: Count = 32  # requests in flight
    request_timeout_s: Seconds = 600.0  # of one request, queueing in the engine included
    dump_timeout_s: Seconds = 60.0  # from the reply to a visible dump
    stall_s: Seconds = 300.0  # no sample done for this long while work is pending: stop with the cause
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3  # tries at one row before it is failed
    stop_after_failures: Count = 20  # samples failed in a row: the cause is not the samples
    writer_threads: Count = 2  # a fast NVMe needs 2 to 4
    drain_s: Seconds = 120.0  # SIGTERM: what is in flight may take this long
    backoff_s: Seconds = 1.0  # first wait before a retry, doubled each time


class Supervisor(Section, frozen=True):
    """The loop."""

    tick_s: Seconds = 5.0
    probe_deadline_s: Seconds = 10.0  # of one observation of a port
    stall_s: Seconds = 600.0  # manifest not advancing while the worker runs: worker, then engine is restarted
    start_budget: Count = 3  # engine starts without one new sample before it holds
    backoff_s: Seconds = 10.0  # first wait between engine starts, doubled each time
    backoff_max_s: Seconds = 900.0
    on_done: Literal["release", "keep"] = "release"  # give GPUs and evicted units back when all is done
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # Prometheus on loopback; 0 = off


class Gpus(Section, frozen=True):
    """Which GPUs the engine needs."""

    uuids: tuple[str, ...] = ()  # () = the first engine.tp GPUs, none for an engine on the CPU; see Config.gpu_count
    baseline_mib: Mib = 600  # memory that an idle GPU may hold; learned per GPU, this is the upper bound
    clear_polls: Count = 3  # polls at the baseline before a GPU counts as free
    clear_patience_s: Seconds = 120.0  # how long freed memory may lag behind a dead process


class EvictUnit(Section, frozen=True):
    """A unit, or a pattern of units, that may be stopped."""

    pattern: Text  # shell pattern against the unit's name
    how: Literal["report", "stop", "disable"] = "report"


class EvictProcess(Section, frozen=True):
    """An executable that may be stopped when it belongs to no unit."""

    executable: Text  # shell pattern against /proc/PID/exe
    how: Literal["report", "stop"] = "report"


class Evict(Section, frozen=True):
    """Who may be taken off the GPUs. What no entry names is reported and waited for."""

    units: tuple[EvictUnit, ...] = ()
    processes: tuple[EvictProcess, ...] = ()
    term_grace_s: Seconds = 30.0
    budget: Count = 5  # evictions of one unit before the breaker trips; only a human resets it


class Proof(Section, frozen=True):
    """What an engine must show before it is trusted."""

    deadline_s: Seconds = 600.0
    continuity_samples: Annotated[int, Meta(ge=0, le=3)] = 2  # stored samples captured again and compared
    min_cosine: Annotated[float, Meta(gt=0, le=1)] = 0.99  # median over tokens; kernels differ a little, models a lot
    max_relative_error: Annotated[float, Meta(gt=0, le=1)] = 0.05  # median over tokens


class Paths(Section, frozen=True):
    """The product's own folders."""

    run: Folder = "/run/hs-extract"  # endpoint, attest files, status: gone after a reboot
    state: Folder = "/var/lib/hs-extract"  # history, leases: survives a reboot
    log: Folder = "/var/log/hs-extract"  # the engine's output


class Config(Section, frozen=True):
    """The whole file."""

    data: Data
    model: Model
    output: Output
    spool: Spool = Spool()
    engine: Engine = Engine()
    worker: Worker = Worker()
    supervisor: Supervisor = Supervisor()
    gpus: Gpus = Gpus()
    evict: Evict = Evict()
    proof: Proof = Proof()
    paths: Paths = Paths()

    @property
    def gpu_count(self) -> int:
        """GPUs that must be there and free before the engine starts: one a rank. An engine on the CPU takes none; those
        that are named are cleared for it all the same, so that a host is rehearsed whole before its real engine."""
        return self.engine.tp if self.engine.device == "cuda" else len(self.gpus.uuids)


class Problem(Struct, frozen=True):
    """One wrong value: the line that a person reads."""

    key: str
    value: object
    cause: str
    instead: str

    def line(self, name: str) -> str:
        shown = "" if self.value is msgspec.UNSET else f" = {self.value!r}"
        return f"cannot use {name}: {self.key}{shown}: {self.cause}; {self.instead}"


def parse(text: str, name: str) -> Config:
    """Make the tree from TOML. name: the file, for messages. Raises ConfigError with one line per problem."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits or 1,000 brackets is no TOMLDecodeError
        raise ConfigError(f"cannot use {name}: not TOML: {error}; mend that line") from None
    unknown = list(_unknown(raw, Config, ""))
    if unknown:
        raise ConfigError("\n".join(p.line(name) for p in unknown))
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_shape(raw, str(error)).line(name)) from None
    problems = list(impossible(config))
    if problems:
        raise ConfigError("\n".join(p.line(name) for p in problems))
    return config


def impossible(config: Config) -> Iterator[Problem]:
    """Combinations that cannot work, whatever the release of the engine."""
    e, m, o = config.engine, config.model, config.output
    for key, value, only in (
        ("pipeline", e.pipeline, 1),
        ("two_batch_overlap", e.two_batch_overlap, False),
        ("disaggregation", e.disaggregation, "null"),
    ):
        if value != only:
            yield Problem(f"engine.{key}", value, "the capture would see part of the rows", f"write {_toml(only)}")
    if e.radix_cache:
        yield Problem("engine.radix_cache", True, "cached rows are not computed, so not captured", "write false")
    if e.mixed_chunk:
        yield Problem("engine.mixed_chunk", True, "decode rows would ride in prefill batches", "write false")
    if o.format == "speculators" and m.norm != "pre":
        cause = "speculators applies the final norm itself and a post-norm state would be normed twice"
        yield Problem("model.norm", m.norm, cause, 'write "pre", or another output.format')
    if o.format == "specforge" and m.norm != "post":
        cause = "specforge feeds the final state to lm_head as it is"
        yield Problem("model.norm", m.norm, cause, 'write "post", or output.format = "modelopt"')
    if list(m.layers) != sorted(set(m.layers)) or len(m.layers) not in (0, 3):
        cause = "three different physical layers in ascending order are needed"
        yield Problem("model.layers", list(m.layers), cause, "write such a list, or [] for the EAGLE-3 default")
    if config.spool.wait_s * 4 > e.watchdog_s:
        cause = f"a full spool would hold a forward for too long against engine.watchdog_s = {e.watchdog_s:g}"
        yield Problem("spool.wait_s", config.spool.wait_s, cause, f"write {e.watchdog_s / 4:g} or less")
    if e.tp % e.dp_attention:
        yield Problem("engine.dp_attention", e.dp_attention, f"does not divide engine.tp = {e.tp}", "write a divisor")
    if config.gpus.uuids and e.device == "cuda" and len(config.gpus.uuids) != e.tp:
        cause = f"engine.tp = {e.tp} ranks need as many GPUs"
        yield Problem("gpus.uuids", list(config.gpus.uuids), cause, "name one GPU a rank, or none")
    if len(set(config.gpus.uuids)) < len(config.gpus.uuids):
        yield Problem("gpus.uuids", list(config.gpus.uuids), "one of them is there twice", "name each GPU once")
    if not config.data.path.endswith((".jsonl", ".parquet")):
        yield Problem("data.path", config.data.path, "the name tells the kind", "name a .jsonl or .parquet")


def _toml(value: object) -> str:
    return {True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)


def _struct(kind: Any) -> type[Struct] | None:
    """The table behind a field's type, through tuple[...] and unions."""
    for candidate in (kind, *getattr(kind, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Struct):
            return candidate
    return None


def _unknown(raw: object, kind: type[Struct], path: str) -> Iterator[Problem]:
    """Every key of `raw` that no table knows, each with the nearest key that exists."""
    if isinstance(raw, list):
        for i, item in enumerate(raw):
            yield from _unknown(item, kind, f"{path.rstrip('.')}[{i}].")
        return
    if not isinstance(raw, dict):
        return
    fields = {f.name: f.type for f in msgspec.structs.fields(kind)}
    for key, value in raw.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            instead = f"write {near[0]}" if near else f"known here: {', '.join(fields)}"
            yield Problem(f"{path}{key}", msgspec.UNSET, "no such setting", instead)
        elif (inner := _struct(fields[key])) is not None:
            yield from _unknown(value, inner, f"{path}{key}.")


def _shape(raw: object, message: str) -> Problem:
    """A msgspec message ("Expected `int`, got `str` - at `$.engine.tp`") as a Problem with the offending value."""
    cause, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    value: object = raw
    for step in path.replace("[", ".[").split(".") if path else ():
        try:
            value = value[int(step[1:-1])] if step.startswith("[") else value[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError, ValueError):
            value = msgspec.UNSET
    if isinstance(value, dict):
        value = msgspec.UNSET
    return Problem(path or "the file", value, cause[:1].lower() + cause[1:], "see etc/hs-extract.toml for the key")
