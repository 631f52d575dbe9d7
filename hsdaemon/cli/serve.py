"""Start SGLang with the capture in it, in place of this process.

Everything that can be known before 600 GB of weights are read is checked first: the configuration against this
release of SGLang, the way of capture, the port, whether the weights are whole and open to this account. Then
engine.json is written to paths.run and SGLang takes over this process; its output goes to a file of its own in
paths.log. Stop it with SIGTERM to this one process.

  hs-extract serve
  hs-extract serve --dry-run      the argument line and the environment, and nothing else
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from hsdaemon import wire
from hsdaemon.cli.settings import add_config, load
from hsdaemon.config import Config
from hsdaemon.engine import argline, endpoint, environment, inplace, ports, releases, weights
from hsdaemon.engine.probe import ordered_port
from hsdaemon.errors import EngineError, HsError, StoreError
from hsdaemon.machine.checkpoint import physical_layers, read_model
from hsdaemon.machine.identity import boot_id, start_ticks

KEEP_LOGS = 20
EXITS = {69: "the release, its environment or the weights cannot be used, or the port is taken"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be run, run nothing")


def run(args: argparse.Namespace) -> int:
    config = load(args)
    try:
        return _serve(args, config)
    except HsError as error:
        if not args.dry_run:
            _leave_word(config, error)
        raise


def _leave_word(config: Config, error: HsError) -> None:
    """As this start's log, so that whoever reads the last lines of the newest one learns why there was no start."""
    with contextlib.suppress(OSError):
        Path(config.paths.log).mkdir(mode=0o755, parents=True, exist_ok=True)
        _log(config, f"hs-{secrets.token_hex(8)}").write_text(f"hs-extract serve: {error}\n", encoding="utf-8")


def _serve(args: argparse.Namespace, config: Config) -> int:
    known = releases.release(releases.installed())
    releases.check(config, known, args.config)
    model = read_model(config.model.path)
    physical_layers(config.model.layers, model)
    weights.require(Path(config.model.path))
    inplace.check(releases.way_of(config, known), mend=not args.dry_run)
    launch = f"hs-{secrets.token_hex(8)}"
    cores = sorted(os.sched_getaffinity(0))
    env = environment.environment(config, known, launch, os.environ, cores, model.kind)
    if args.dry_run:
        return _show(argline.command(config, known, launch, config.engine.port), env)
    port = ports.choose(config, _former(config), ordered_port(config.paths.run))
    argv = argline.command(config, known, launch, port)
    try:
        _folders(config)
    except OSError as error:
        raise StoreError(
            f"cannot use {error.filename}: {error.strerror}; mend it, or set [paths] and spool.path"
        ) from None
    log = _log(config, launch)
    mark = environment.fingerprint(config, known, cores, model.kind)
    here = _here(config, known, launch, port, mark, argv, log, config.model.revision or model.revision)
    endpoint.write(config.paths.run, here)
    print(f"serve: launch={launch} pid={here.pid} port={port} release={known.version} log={log}", flush=True)
    return _become(argv, env, log)


def _here(
    config: Config,
    known: releases.Release,
    launch: str,
    port: int,
    mark: str,
    argv: tuple[str, ...],
    log: Path,
    model: str,
) -> endpoint.Endpoint:
    """This process, which exec turns into the engine: pid and start time stay."""
    return endpoint.Endpoint(
        launch=launch,
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        boot_id=boot_id(),
        host=config.engine.host,
        port=port,
        release=known.version,
        way=releases.way_of(config, known),
        fingerprint=mark,
        argv=argv,
        log=str(log),
        model=model,
    )


def _former(config: Config) -> endpoint.Endpoint | None:
    """The former start of this boot. Raises EngineError when it still runs."""
    last = endpoint.read(config.paths.run)
    if last is None or last.boot_id != boot_id():
        return None
    if endpoint.alive(last) and last.pid != os.getpid():
        raise EngineError(
            f"cannot start the engine: one already runs, pid {last.pid} on port {last.port}; stop it first"
        )
    return last


def _folders(config: Config) -> None:
    """Make what the engine writes to. Attests of former starts go: they speak of processes that are gone."""
    for folder, mode in ((config.paths.run, 0o755), (config.paths.log, 0o755), (config.spool.path, 0o700)):
        Path(folder).mkdir(mode=mode, parents=True, exist_ok=True)
    attests = Path(config.paths.run) / "attest"
    attests.mkdir(mode=0o755, exist_ok=True)
    for old in attests.glob("attest-*.json"):
        old.unlink(missing_ok=True)


def _log(config: Config, launch: str) -> Path:
    """A new file for the engine's output; the oldest beyond KEEP_LOGS go."""
    folder = Path(config.paths.log)
    old = sorted(folder.glob("engine-hs-*.log"), key=lambda p: p.stat().st_mtime)
    for path in old[: max(0, len(old) - KEEP_LOGS + 1)]:
        path.unlink(missing_ok=True)
    return folder / f"engine-{launch}.log"


def _become(argv: tuple[str, ...], env: dict[str, str], log: Path) -> NoReturn:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.execve(argv[0], argv, env)  # noqa: S606  # a list, no shell


def _show(argv: tuple[str, ...], env: dict[str, str]) -> int:
    for name in sorted(env):
        if name == wire.CAPTURE_ENV or os.environ.get(name) != env[name]:
            print(f"{name}={shlex.quote(env[name])}")
    print(shlex.join(argv))
    sys.stdout.flush()
    return 0
