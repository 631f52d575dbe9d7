"""Compare the stored files with the manifest: presence and size, and with --deep the digest of every byte.

Finds files that are gone, cut, longer, changed by one bit, zeroed in part or swapped. A deep run reads at most --rate
MB/s, may be interrupted and goes on where it was; a worker may be at work meanwhile. Nothing is changed, unless with
--repair: then each bad file is put aside into the quarantine folder and its row alone is extracted again.

  hs-extract verify
  hs-extract verify --deep --rate 300
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hsdaemon.cli.settings import add_config, load
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.sqlite import open_manifest
from hsdaemon.data.verify import MARK, Finding, Pace, repair, verify
from hsdaemon.data.volume import Guard
from hsdaemon.errors import EXIT_FINDINGS, EXIT_OK

EXITS = {1: "a stored file is not what it should be"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--deep", action="store_true", help="read every byte and compare digests")
    parser.add_argument("--rate", type=float, default=500.0, metavar="MB/s", help="of a deep run (default: 500)")
    parser.add_argument("--from-start", action="store_true", help="a deep run forgets where the last one was stopped")
    parser.add_argument("--repair", action="store_true", help="put bad files aside and queue their rows")
    parser.add_argument("--json", action="store_true", help="one JSON object a finding")


def run(args: argparse.Namespace) -> int:
    config = load(args)
    root = Path(config.output.path)
    manifest = open_manifest(manifest_path(config.output))
    guard = Guard(config.output)
    guard.uuid = manifest.volume()
    guard.check()
    seen = repaired = found = 0
    bytes_seen = 0

    def count(stored: object) -> None:
        nonlocal seen, bytes_seen
        seen += 1
        bytes_seen += getattr(stored, "size", 0)

    try:
        if args.deep and args.from_start:
            manifest.mark(MARK, 0)
        pace = Pace(max(args.rate, 0.001) * 1e6)
        for finding in verify(root, manifest, count, is_deep=args.deep, pace=pace):
            guard.present()
            found += 1
            _print(finding, as_json=args.json)
            if args.repair:
                repaired += repair(guard, manifest, finding)
    finally:
        manifest.close()
    print(f"verify: seen={seen} bad={found} queued={repaired} mb={bytes_seen / 1e6:.0f} deep={int(args.deep)}")
    return EXIT_FINDINGS if found else EXIT_OK


def _print(finding: Finding, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"row": finding.row, "path": finding.path, "code": finding.code, "reason": finding.reason}))
    else:
        print(f"row {finding.row}: {finding.path}: {finding.code}: {finding.reason}")
