"""make test-kill N=50: the worker killed N times, the engine N/5 times, at random instants; then every file is judged.

The demonstration's engine, worker and judge, with more and shorter samples. Last line:
test-kill: ok worker_kills= engine_kills= done= redone= lost= duplicated= corrupt= max_abs_err=
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from msgspec import structs

from hsdaemon.demo import run, stage
from hsdaemon.errors import HsError

KIND = structs.replace(
    stage.TINY,
    name="test-kill",
    rows=600,
    lengths=(8, 300),
    about="a tiny Kimi-K2.5 and 600 samples of 8 to 300 tokens",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="of the worker; a fifth of it of the engine")
    parser.add_argument("--folder", type=Path, default=Path("build/test-kill"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engines = max(1, args.kills // 5)
    try:
        made = stage.build(KIND, args.folder.resolve(), args.seed)
        kills = run.schedule(KIND.rows, engines, args.kills, args.seed)
        story, verdict = run.run(made, kills, lambda line: print(line, flush=True))
    except HsError as error:
        print(f"test-kill: FAILED {error}")
        return 1
    problems = story.problems(verdict)
    print(*problems, sep="\n", end="\n" if problems else "")
    print(
        f"test-kill: {'FAILED' if problems else 'ok'} worker_kills={args.kills} engine_kills={engines} "
        f"done={story.done} redone={story.redone} lost={len(verdict.lost)} "
        f"duplicated={len(verdict.twice) + len(story.moved)} corrupt={len(verdict.corrupt)} "
        f"max_abs_err={verdict.max_abs_err:.1e}"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
