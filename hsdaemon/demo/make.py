"""python -m hsdaemon.demo.make tiny|smollm2 FOLDER: write the model of a demonstration. A process of its own, so that
what only watches has no torch in it."""

from __future__ import annotations

import sys
from pathlib import Path

from hsdaemon.demo import models, smollm2


def main(kind: str, folder: Path) -> int:
    if kind == "tiny":
        models.make(str(folder), models.Tiny())
    else:
        smollm2.make(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
