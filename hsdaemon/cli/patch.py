"""Show, put in or take out the capture's lines in SGLang's sources.

  hs-extract patch status            what the SGLang of this environment is
  hs-extract patch apply             put our lines in; does nothing where they are in
  hs-extract patch revert            take them out: the files are byte for byte what they were

Needed only where SGLang has no plugins (before 0.5.11) or engine.capture = "patch". The lines are inert unless
`hs-extract serve` starts the engine. All files change or none; edits of others are kept; a tree where our lines do not
fit, or where somebody changed them, is left as it is.

States: ours, ours-with-foreign-edits (both ready); pristine, foreign-edits, partial, older (apply helps); newer,
modified, conflict, missing (a person must look).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hsdaemon.engine import patch
from hsdaemon.errors import EXIT_FINDINGS, EXIT_OK

EXITS = {
    0: "the lines are in (status), or the change is done",
    1: "the lines are not, or not all, in",
    69: "refused, nothing was changed: the release is unknown, or the patch does not fit",
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("status", "apply", "revert"), help="what to do")
    parser.add_argument(
        "--root",
        type=Path,
        metavar="FOLDER",
        help="site-packages, a source checkout, or the package itself; default: the SGLang of this environment",
    )


def run(args: argparse.Namespace) -> int:
    tree = patch.find(args.root)
    seen = {"status": patch.status, "apply": patch.apply, "revert": patch.revert}[args.what](tree)
    for path, verdict in seen.verdicts.items():
        print(f"{verdict.state.value:24} {path}" + (f"  ({verdict.reason})" if verdict.reason else ""))
    if seen.interrupted:
        print("a change was cut short; apply or revert finishes it")
    print(
        f"patch: release={tree.patch.release} version={tree.patch.version} state={seen.state.value}"
        f" files={len(seen.verdicts)} root={tree.folder}"
    )
    return EXIT_OK if seen.ready or args.what == "revert" else EXIT_FINDINGS
