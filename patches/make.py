"""Write the patch of a release: `python -m patches.make RELEASE FOLDER`, FOLDER holding the release's package `sglang`.

Finds the places by their text, so that a new release needs no hand work as long as they look as before; then read
the diff, run `make patch-check`, and run a server of that release once.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

from hsdaemon.engine import diff

VERSION = 1
SCHEDULER = "sglang/srt/managers/scheduler.py"
BATCH = "sglang/srt/model_executor/forward_batch_info.py"
WORKER_BATCH = "sglang/srt/managers/schedule_batch.py"

ARM = """\
    if os.environ.get("HSDAEMON_CAPTURE"):
        try:
            from hsdaemon.capture import from_patch

            from_patch()
        except Exception:
            logger.exception("hsdaemon: no capture in this process")
"""
NAME = """\
        ret.rids = [getattr(r, "rid", None) for r in getattr(batch, "reqs", None) or ()]
"""
FIELD = """\
    reqs: Optional[List[Req]] = None
"""
ARGUMENT = """\
            reqs=self.reqs,
"""


def main() -> None:
    release, folder = sys.argv[1], Path(sys.argv[2])
    Path(__file__).with_name(f"sglang-{release}.diff").write_text(make(release, folder))


def make(release: str, folder: Path) -> str:
    """The patch of the release whose package is in `folder`."""
    paths = (SCHEDULER, BATCH, WORKER_BATCH)
    return patch_text(release, {path: diff.decode((folder / path).read_bytes()) for path in paths})


def patch_text(release: str, old: dict[str, str]) -> str:
    """The patch of the release with these files."""
    new = {SCHEDULER: _arm(old[SCHEDULER])}
    if "rids" not in old[BATCH]:
        new[BATCH] = _name(old[BATCH])
        if not re.search(r"^    reqs: ", _worker_batch(old[WORKER_BATCH])[0], re.MULTILINE):
            new[WORKER_BATCH] = _hand_on(old[WORKER_BATCH])
    return _patch(release, old, new)


def _arm(text: str) -> str:
    """The first statement of every scheduler process."""
    start = re.search(r"^def run_scheduler_process\(.*?^\).*?:\n", text, re.MULTILINE | re.DOTALL)
    return _insert(text, start, diff.mark(VERSION, diff.lines_of(ARM), "    ", "inert unless HSDAEMON_CAPTURE is set"))


def _name(text: str) -> str:
    """Behind the making of a ForwardBatch."""
    start = re.search(r"^        ret = cls\(\n.*?^        \)\n", text, re.MULTILINE | re.DOTALL)
    return _insert(text, start, diff.mark(VERSION, diff.lines_of(NAME), "        ", "request ids, as 0.5.10 has them"))


def _hand_on(text: str) -> str:
    """The requests, from the scheduler's batch to the worker's: at the end of its fields, and of its making."""
    block = diff.mark(VERSION, diff.lines_of(FIELD), "    ", "the requests, as 0.5.6 has them")
    text = _insert(text, _worker_batch(text), block)
    start = re.search(r"^        return ModelWorkerBatch\(\n.*?(?=^        \)\n)", text, re.MULTILINE | re.DOTALL)
    block = diff.mark(VERSION, diff.lines_of(ARGUMENT), "            ", "the requests, as 0.5.6 has them")
    return _insert(text, start, block)


def _worker_batch(text: str) -> re.Match[str]:
    """The whole class."""
    found = re.search(r"^class ModelWorkerBatch:\n(?:(?:    .*)?\n)*    .*\n", text, re.MULTILINE)
    return found or sys.exit("cannot make the patch: no ModelWorkerBatch")


def _insert(text: str, after: re.Match[str] | None, block: list[str]) -> str:
    if after is None:
        sys.exit("cannot make the patch: its place is not in this release; read the file and write it by hand")
    return text[: after.end()] + "".join(block) + text[after.end() :]


def _patch(release: str, old: dict[str, str], new: dict[str, str]) -> str:
    body = "".join(
        line
        for path in new
        for line in difflib.unified_diff(diff.lines_of(old[path]), diff.lines_of(new[path]), f"a/{path}", f"b/{path}")
    )
    files = "".join(f"file: {path} {diff.sha256(old[path])} {diff.sha256(new[path])}\n" for path in new)
    return f"hsdaemon-patch: {VERSION}\nrelease: {release}\ndigest: {diff.sha256(body)}\n{files}\n{body}"


if __name__ == "__main__":
    main()
