"""How far the work is and what the supervisor says: rows, speed, time left; ladder, GPUs, proof; engine, worker, disk.

Everything comes from the manifest and the small files of paths.run: neither root nor systemd nor a GPU nor a running
supervisor is needed, it takes less than a second with a million samples, and nothing is written, also on a full disk.
What cannot be seen is said and left out. Rates are those of the worker's present run.

  hs-extract status
  hs-extract status --watch             (the same as: hs-extract watch)
  hs-extract status --json | jq .done
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from hsdaemon.cli.settings import add_config, load
from hsdaemon.config import Config
from hsdaemon.data import lock
from hsdaemon.data.backup import manifest_folder, manifest_path
from hsdaemon.data.manifest import State
from hsdaemon.data.room import stored_bytes
from hsdaemon.data.sqlite import SqliteManifest, open_reader
from hsdaemon.engine import endpoint
from hsdaemon.errors import EXIT_FINDINGS, EXIT_OK, ConfigError, HsError, StoreError
from hsdaemon.host import screen, solo
from hsdaemon.host.board import NOT_STARTED, WAITING_S, Board
from hsdaemon.machine import disk
from hsdaemon.machine.checkpoint import read_model
from hsdaemon.machine.child import Child, NoAnswer

WINDOWS = {"minute": 60.0, "ten_minutes": 600.0, "hour": 3600.0}
REFRESH_S = 2.0
VOLUME_S = 10.0  # a healthy volume answers in milliseconds, a dead one never
EXITS = {
    1: "there are failed rows: hs-extract errors lists them",
    73: "there is a manifest and it cannot be read; the screen says why",
}


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument("--watch", action="store_true", help="look again and again, until all is done")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What status and watch share."""
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a look instead of a screen")


def run(args: argparse.Namespace) -> int:
    config = load(args)
    with contextlib.closing(Child("output", lambda _question: output_facts(config))) as child:
        last = _show(lambda: look(config, child), watch=args.watch, as_json=args.json)
    if last.get("failed"):
        return EXIT_FINDINGS
    return EXIT_OK if last["manifest"] in ("ok", "none") else StoreError.exit_code


def _show(looks: Callable[[], dict[str, Any]], *, watch: bool, as_json: bool) -> dict[str, Any]:
    """One look, or looks until the work is finished. Gives the last."""
    console = Console()
    with Live(console=console, auto_refresh=False) if watch and not as_json else contextlib.nullcontext() as live:
        while True:
            facts = looks()
            if as_json:
                print(json.dumps(facts), flush=True)
            elif live is None:
                console.print(screen.table(facts))
            else:
                live.update(screen.table(facts), refresh=True)
            if not watch or facts.get("finished"):
                return facts
            time.sleep(REFRESH_S)  # a screen for people, until they interrupt it or the work is finished


def look(config: Config, child: Child) -> dict[str, Any]:
    """Every fact of the screen, ready for JSON. Bytes, seconds, tokens. The volume is asked in a child: it may hang."""
    answer = child.ask(None, VOLUME_S)
    found = {"manifest": answer.detail} if isinstance(answer, NoAnswer) else answer
    return {
        **found,
        "output": config.output.path,
        "engine": _engine(config),
        "supervisor": _supervisor(config.paths.run),
    }


def output_facts(config: Config) -> dict[str, Any]:
    """What lies on the volume. `manifest`: ok, none, or why it cannot be read; the counts are there when it is ok."""
    try:
        worker = {"pid": lock.living_holder(manifest_folder(config.output))}
        if not manifest_path(config.output).exists():
            return {"manifest": "none", "worker": worker}
        with contextlib.closing(open_reader(manifest_path(config.output))) as manifest:
            return {"manifest": "ok", "worker": worker, **_work(config, manifest)}
    except OSError as error:
        return {"manifest": f"cannot read {config.output.path}: {error.strerror}; see to its mode and its disk"}
    except HsError as error:
        return {"manifest": str(error)}


def _work(config: Config, manifest: SqliteManifest) -> dict[str, Any]:
    counts = manifest.counts()
    rates = {name: dataclasses.asdict(manifest.rate(seconds)) for name, seconds in WINDOWS.items()}
    return {
        **dataclasses.asdict(counts),
        "open": counts.open,
        "finished": counts.finished,
        "eta_s": _eta(counts.open, counts.open_tokens, rates["ten_minutes"]),
        "rates": rates,
        "reasons": _reasons(manifest),
        "identity": dataclasses.asdict(manifest.identity()),
        "disk": _disk(config, counts.open, counts.open_tokens),
    }


def _eta(rows: int, tokens: int, rate: dict[str, float]) -> float | None:
    if rows == 0:
        return 0.0
    if rate["tokens_s"] > 0 and tokens:
        return tokens / rate["tokens_s"]
    return rows / rate["samples_s"] if rate["samples_s"] > 0 else None


def _reasons(manifest: SqliteManifest) -> dict[str, int]:
    """Failed and skipped rows by reason, of the first thousand."""
    found: dict[str, int] = {}
    for fault in manifest.faults([State.failed, State.skipped]):
        found[fault.code] = found.get(fault.code, 0) + 1
    return found


def _disk(config: Config, rows: int, tokens: int) -> dict[str, int | None]:
    try:
        free: int | None = disk.free_bytes(Path(config.output.path))
    except OSError:
        free = None
    try:
        needed: int | None = stored_bytes(config, read_model(config.model.path), rows, tokens)
    except ConfigError:
        needed = None
    return {"free": free, "needed": needed, "reserve": config.output.reserve_mib * 2**20}


def _engine(config: Config) -> dict[str, Any] | None:
    found = endpoint.read(config.paths.run)
    if found is None:
        return None
    attests = list((Path(config.paths.run) / "attest").glob(f"attest-{found.launch}-*.json"))
    return {
        "alive": endpoint.alive(found),
        "pid": found.pid,
        "url": found.url,
        "release": found.release,
        "ranks_attested": len(attests),
        "log": found.log,
    }


def _supervisor(run: str) -> dict[str, Any]:
    """`pid`: of the one that runs or waits to begin, None when none does; `age_s`, `board`: what the last tick of this
    boot showed."""
    board = Board(run).read()
    shown = board and board.get("wall_s")
    age = time.time() - shown if isinstance(shown, int | float) else None
    pid = solo.holder(run)
    if pid is None and board and board.get("reason") == NOT_STARTED and age is not None and age < WAITING_S:
        pid = board.get("pid")
    return {"pid": pid, "age_s": age, "board": board}
