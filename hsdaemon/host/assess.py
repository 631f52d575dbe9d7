"""The report that a person would write after a crash: what survived, what is in the way, what will be done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from hsdaemon.config import Config
from hsdaemon.core import facts
from hsdaemon.core import model as m
from hsdaemon.data.survey import FolderCount, Survey, survey
from hsdaemon.engine import weights
from hsdaemon.history import Tick
from hsdaemon.host.preview import words

GIB = 1 << 30
SHOWN = 40  # folders; the full ones between them are summed


def report(config: Config, tick: Tick, systemd: bool) -> str:
    """Every section, from one tick and the names of the stored files."""
    sections = (
        ("Host", _host(tick.seen.now, systemd)),
        ("Volume", _volume(config, tick.seen.volume)),
        ("Output", _output(config, tick.seen.progress)),
        ("Model", _model(config)),
        ("Engine", _engine(tick.seen)),
        ("Spool", _spool(config, tick.seen.spool)),
        ("GPUs", _gpus(tick.seen)),
        ("Units of the eviction policy", _units(tick.seen)),
        ("What comes next", iter(words(tick).splitlines())),
    )
    return "\n".join(f"{title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections)


def _host(now: m.Now, systemd: bool) -> Iterator[str]:
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    yield f"up for {up / 3600:.1f} h, boot {now.boot}"
    yield "systemd is the init" if systemd else "systemd is not the init: engine and worker would be plain processes"


def _volume(config: Config, volume: m.Volume | m.Unreadable) -> Iterator[str]:
    if isinstance(volume, m.Unreadable):
        yield f"cannot be read: {volume.cause}"
        return
    yield f"{config.output.volume or config.output.path}: {volume.verdict} {volume.detail}".rstrip()
    if volume.verdict == "ok":
        yield f"{volume.free_bytes / GIB:.1f} GiB free of {volume.total_bytes / GIB:.1f} GiB"


def _output(config: Config, progress: m.Progress | m.Unadopted | m.Unreadable | None) -> Iterator[str]:
    root = Path(config.output.path)
    total = None
    if isinstance(progress, m.Unreadable):
        yield f"manifest: cannot be read: {progress.cause}"
    elif not isinstance(progress, m.Progress):
        yield "manifest: none; what is stored is told by its files"
    else:
        total = progress.total if progress.ingest_complete else None
        open_rows = progress.total - progress.settled
        yield (
            f"manifest: {progress.done} done, {progress.failed} failed, {progress.skipped} skipped, {open_rows} to go"
        )
    try:
        found = survey(root, total)
    except OSError as error:
        yield f"{root}: cannot be read: {error.strerror}"
        return
    yield f"files: {found.files} samples, {found.bytes / GIB:.1f} GiB in {len(found.folders)} folders (not opened)"
    yield from _folders(found)


def _folders(found: Survey) -> Iterator[str]:
    """Folders with something to say; full ones are summed up."""
    odd = [folder for folder in found.folders if folder.files != folder.expected or folder.empty]
    full = len(found.folders) - len(odd)
    if full:
        yield f"{full} folders are full"
    yield from (_folder(folder) for folder in odd[:SHOWN])
    if len(odd) > SHOWN:
        yield f"and {len(odd) - SHOWN} more folders with gaps"
    if found.files and found.named:
        yield f"gaps: {found.old} old errors before the last file, {found.tail} cut off behind it"


def _folder(folder: FolderCount) -> str:
    empty = f", {folder.empty} empty files" if folder.empty else ""
    return f"{folder.name}: {folder.files} of {folder.expected}: {folder.old} old, {folder.tail} cut off{empty}"


def _model(config: Config) -> Iterator[str]:
    try:
        found = weights.look(Path(config.model.path))
    except OSError as error:
        yield f"{config.model.path}: cannot be read: {error.strerror}"
        return
    yield f"{config.model.path}: {found.shards} shards, {found.bytes / GIB:.1f} GiB"
    if found.whole:
        yield "all shards are there and as long as their headers say"
    for what, names in (("missing", found.missing), ("cut short", found.cut)):
        if names:
            yield f"{what}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"


def _engine(seen: m.Observation) -> Iterator[str]:
    if isinstance(seen.engine, m.Unreadable):
        yield f"cannot be read: {seen.engine.cause}"
        return
    engine = seen.engine
    capture = engine.capture
    if isinstance(capture, m.Unreadable):
        yield f"capture: cannot be read: {capture.cause}"
    else:
        yield f"capture: {capture.state} in SGLang {capture.release or '(none)'} {capture.detail}".rstrip()
    yield f"unit {engine.unit.name}: {engine.unit.load}, {engine.unit.active}, {len(engine.unit.pids)} processes"
    for port, owner in engine.busy_ports:
        yield f"port {port} is held by {owner}"
    for path in engine.stale:
        yield f"left by a dead engine: {path}"
    worker = seen.worker
    if isinstance(worker, m.Worker):
        yield f"unit {worker.unit.name}: {worker.unit.load}, {worker.unit.active} {worker.said}".rstrip()


def _spool(config: Config, spool: m.Spool | m.Unreadable) -> Iterator[str]:
    if isinstance(spool, m.Unreadable):
        yield f"{config.spool.path}: cannot be read: {spool.cause}"
    else:
        yield f"{config.spool.path}: {spool.files} files, {spool.used_bytes / GIB:.2f} GiB, {spool.orphans} of the dead"


def _gpus(seen: m.Observation) -> Iterator[str]:
    if isinstance(seen.gpus, m.Unreadable):
        yield f"cannot be read: {seen.gpus.cause}"
        return
    if not seen.gpus:
        yield "none (an engine on the CPU needs none)"
    for gpu in seen.gpus:
        used = "?" if gpu.used_mib is None else f"{gpu.used_mib / 1024:.1f}"
        owes = f", owes a {gpu.recovery}" if gpu.recovery not in ("", "none") else ""
        lost = ", lost" if gpu.lost else ""
        yield f"{gpu.index}: {gpu.name} {used} of {gpu.total_mib / 1024:.1f} GiB in use{lost}{owes}"
    for holder in facts.known(seen.holders) or ():
        whose = "ours" if facts.ours(seen, holder) else "foreign"
        yield f"held by {facts.who(holder)} on GPU {facts.shown(seen.gpus, holder.gpus)} ({whose})"


def _units(seen: m.Observation) -> Iterator[str]:
    if isinstance(seen.units, m.Unreadable):
        yield f"cannot be read: {seen.units.cause}"
        return
    for unit in seen.units:
        leased = ", kept down by our lease" if unit.leased else ""
        yield f"{unit.name}: {unit.active}, {unit.file_state or 'no unit file'}{leased}"
    if not seen.units:
        yield "none"
