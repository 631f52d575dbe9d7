"""Prove the running engine: attests of every rank, canaries through the real path, continuity with stored samples.

The supervisor runs this for every start of the engine and lets no worker start without it. By hand it says whether the
engine that runs now can be trusted with this output; no worker may run meanwhile. It stores nothing.

  hs-extract prove
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import structlog

from hsdaemon.cli.settings import add_config, load
from hsdaemon.config import Config
from hsdaemon.core.model import Proof
from hsdaemon.data import lock, room, sqlite
from hsdaemon.data.backup import backup_path, manifest_folder, manifest_path
from hsdaemon.data.connect import Damaged
from hsdaemon.data.dataset import DataSet, open_dataset
from hsdaemon.data.identity import RunIdentity, require_same, row_limits, run_identity
from hsdaemon.data.spool import Spool, new_epoch
from hsdaemon.data.sqlite import SqliteManifest
from hsdaemon.errors import EXIT_FINDINGS, EXIT_OK, HsError, Transient
from hsdaemon.machine.checkpoint import ModelFacts, read_model
from hsdaemon.machine.log import setup
from hsdaemon.machine.proof import ProofFiles
from hsdaemon.work.checks import wanted_by
from hsdaemon.work.evidence import gather
from hsdaemon.work.proof import Case, Proved, prove
from hsdaemon.work.verdict import Refuted

EXITS = {EXIT_FINDINGS: "the engine must not be trusted; the last line says why"}
Opens = Callable[[Path], SqliteManifest]
_log = structlog.get_logger()


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    config = load(args)
    setup()
    files = ProofFiles(config.paths.run)
    invocation = files.asked()
    try:
        verdict = _prove(config)
        if isinstance(verdict, Refuted) and verdict.code == "blocked":
            raise Transient(f"cannot prove the engine: {verdict.detail}")
    except HsError as error:  # it is about the output, the data set or the spool: the engine is neither good nor bad
        files.answer(Proof(invocation, False, "blocked", str(error)), ())
        raise
    if isinstance(verdict, Proved):
        files.answer(Proof(invocation, True), verdict.steps)
        print(f"prove: ok launch={verdict.launch} steps={len(verdict.steps)}")
        return EXIT_OK
    files.answer(Proof(invocation, False, verdict.code, verdict.detail), ())
    print(f"prove: refuted code={verdict.code} {verdict.detail}")
    return EXIT_FINDINGS


def _prove(config: Config) -> Proved | Refuted:
    facts = read_model(config.model.path)
    with contextlib.ExitStack() as stack:
        stack.callback(lock.acquire(manifest_folder(config.output)).release)
        dataset = stack.enter_context(contextlib.closing(open_dataset(config.data, row_limits(config, facts))))
        spool = Spool.open(Path(config.spool.path), new_epoch(), config.spool.budget_mib << 20)
        stack.callback(spool.close)
        case = _case(config, facts, dataset, _most_tokens(config, facts, spool))
        return asyncio.run(prove(config, case, wanted_by(case.identity), spool))


def _most_tokens(config: Config, facts: ModelFacts, spool: Spool) -> int:
    """Of a prompt whose dump the spool can hold now: longer rows wait for a larger one, and hold up no proof. Raises
    Transient where there is room for none."""
    most = room.most_tokens(functools.partial(room.layout, config, facts), spool.budget.total)
    if not most:
        raise Transient(
            f"cannot prove the engine: the spool {spool.root} has room for {spool.budget.total >> 10} KiB; "
            "make room in its tmpfs, or enlarge it"
        )
    return most


def _case(config: Config, facts: ModelFacts, dataset: DataSet, most: int) -> Case:
    """From the manifest; where it is damaged from its last copy, which the worker restores only after this proof. most:
    tokens of a prompt."""
    offered = run_identity(config, facts, "")

    def gathered(manifest: SqliteManifest | None) -> Case:
        identity = _same(manifest.identity(), offered) if manifest else offered
        return gather(dataset, manifest, identity, config.proof.continuity_samples, most)

    path, copy = manifest_path(config.output), backup_path(config)
    if not sqlite.exists(path):
        return gathered(None)
    places: tuple[tuple[Opens, Path], ...] = ((sqlite.open_manifest, path), (sqlite.open_reader, copy))
    for opens, place in places if copy.exists() else places[:1]:
        try:
            with contextlib.closing(opens(place)) as manifest:
                return gathered(manifest)
        except Damaged as error:
            _log.warning("the proof does without a damaged manifest", reason=str(error))
    return gathered(None)


def _same(pinned: RunIdentity, offered: RunIdentity) -> RunIdentity:
    """A configuration that this output would refuse speaks of no engine. The data set is the worker's to judge. Raises
    IdentityMismatch."""
    require_same(pinned, dataclasses.replace(offered, dataset=pinned.dataset))
    return pinned
