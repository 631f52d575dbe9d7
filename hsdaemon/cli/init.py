"""Write a configuration with every setting explained, and mark the volume that the samples go to.

The marker is what tells the volume from the empty folder under an unmounted one: nothing is ever written where it is
missing, and nothing but this command makes it. Mount the volume first. What is there already stays: an old
configuration is never overwritten, an old marker keeps its identity.

  hs-extract init --data /data/train.jsonl --model /models/kimi --output /data/states -c /etc/hs-extract.toml
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import shlex
from pathlib import Path

from hsdaemon.cli.settings import add_config, load
from hsdaemon.config import Config, parse
from hsdaemon.data import lock
from hsdaemon.data.backup import ballast_path, manifest_folder
from hsdaemon.data.volume import MIB, init_volume, volume_root
from hsdaemon.errors import EXIT_OK, ConfigError, StoreError
from hsdaemon.machine import disk
from hsdaemon.machine.checkpoint import read_model

TEMPLATE = """\
# hs-extract: this file says what is extracted, from which model, to where. What is not here has its default.

[data]
# .jsonl or .parquet; each row has input_ids, and may have loss_mask and id. `hs-extract prepare` makes one from chats.
path = {data}
# A row that cannot be used (no ids, ids out of the vocabulary, mask of another length, ...): "refuse" stops and names
# it, "skip" counts it and goes on.
on_bad_row = "refuse"
# A row longer than the model's context, never truncated: "skip" or "refuse".
on_long_row = "skip"

[model]
path = {model}
# Physical layers, 0-based, ascending; [] = the EAGLE-3 default 1, n//2 - 1, n - 4.
layers = []
# The final state "post" or "pre" the final norm; speculators needs "pre".
norm = {norm}

[output]
path = {output}
# "specforge", "modelopt" or "speculators": the trainer that will load the files.
format = {format}
dtype = "bfloat16"
# The folder that carries the marker; nothing is written while it is missing.
volume = {volume}
# true: the volume must be a mount point, too.
volume_is_mount = {mount}
# MiB of free space that stay free: below them the work pauses, and goes on by itself.
reserve_mib = 2048

[engine]
# Ranks, that is GPUs.
tp = {tp}

[spool]
# MiB of dumps on their way from the engine to the worker, on a tmpfs: at least two of the longest samples.
budget_mib = 16384
"""

ACCOUNT = "hs-extract"  # as in systemd/hs-extract.sysusers.conf


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--data", type=Path, help="the data set, .jsonl or .parquet")
    parser.add_argument("--model", type=Path, help="the model's folder")
    parser.add_argument("--output", type=Path, help="folder of the samples")
    parser.add_argument("--volume", type=Path, help="folder that is marked (default: the one above --output)")
    parser.add_argument("--format", choices=["specforge", "modelopt", "speculators"], default="specforge")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the engine (default: 1)")


def run(args: argparse.Namespace) -> int:
    file = Path(args.config)
    if os.path.lexists(file):
        config = load(args)
    else:
        text = _text(args)
        config = parse(text, str(file))
        read_model(config.model.path)
        _write(file, text)
    uuid = _mark(config)
    if stays := _hand_over(config):
        print(
            f"init: {stays} belongs to another account than the worker's; give it the tree: chown -R "
            f"{ACCOUNT}: {shlex.quote(config.output.path)}"
        )
    print(f"init: config={file} volume={volume_root(config.output)} uuid={uuid}")
    return EXIT_OK


def _text(args: argparse.Namespace) -> str:
    missing = [f"--{name}" for name in ("data", "model", "output") if getattr(args, name) is None]
    if missing:
        raise ConfigError(f"cannot write {args.config}: {', '.join(missing)} not given; name them")
    output = args.output.absolute()
    volume = (args.volume or output.parent).absolute()
    return TEMPLATE.format(
        data=json.dumps(str(args.data.absolute())),
        model=json.dumps(str(args.model.absolute())),
        output=json.dumps(str(output)),
        volume=json.dumps(str(volume)),
        mount=json.dumps(volume.is_mount()),
        format=json.dumps(args.format),
        norm=json.dumps("pre" if args.format == "speculators" else "post"),
        tp=args.tp,
    )


def _write(file: Path, text: str) -> None:
    try:
        disk.make_folder(file.parent)
        disk.replace(file, text.encode(), 0o644)
    except OSError as error:
        raise StoreError(f"cannot write {file}: {error.strerror}; name another with -c") from None


def _mark(config: Config) -> str:
    """Marker, lock file and ballast: everything that a full disk would be in the way of later."""
    root = volume_root(config.output)
    if not root.is_dir():
        raise StoreError(f"cannot mark {root}: no such folder; mount the volume, or make the folder")
    if config.output.volume_is_mount and not root.is_mount():
        raise StoreError(f"cannot mark {root}: nothing is mounted there; mount the volume first")
    try:
        uuid = init_volume(root)
        folder = manifest_folder(config.output)
        disk.make_folder(folder)
        disk.make_folder(Path(config.output.path))
        lock.create(folder)
        disk.make_ballast(ballast_path(config), config.output.ballast_mib * MIB)
    except OSError as error:
        raise disk.explain(error, root) from None
    return uuid


def _hand_over(config: Config) -> Path | None:
    """What root has made here goes to the account of engine and worker, where `make install` made one. Gives the first
    stored folder that is somebody else's: samples that were there before are not touched without being told to."""
    if os.geteuid() != 0:
        return None
    try:
        account = pwd.getpwnam(ACCOUNT)
    except KeyError:
        return None
    output, folder = Path(config.output.path), manifest_folder(config.output)
    for path in (output, folder, folder / lock.LOCK_NAME, ballast_path(config)):
        if path.exists() and path.lstat().st_uid == 0:
            os.chown(path, account.pw_uid, account.pw_gid)
    others = (path for path in (output, *sorted(output.glob("rows_*"))) if path.lstat().st_uid != account.pw_uid)
    return next(others, None)
