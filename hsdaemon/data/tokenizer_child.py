"""The child of ChildTokenizer: python -m hsdaemon.data.tokenizer_child FOLDER TRUST.

Loads the tokenizer with transformers, says {} or {"error": ...}, then answers each JSON text on stdin with a line.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main() -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the model's code prints is for people, not an answer

    def say(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    # Whatever the model's own code raises, while loading or for one text, is the answer: the parent knows the row.
    try:
        # By name: the package itself stays free of transformers, only this process has it.
        auto = importlib.import_module("transformers").AutoTokenizer
        tokenizer = auto.from_pretrained(sys.argv[1], trust_remote_code=sys.argv[2] == "1", local_files_only=True)
    except Exception as error:  # noqa: BLE001
        say(_words(error))
        return 1
    say({})
    for line in sys.stdin:
        try:
            say({"ids": list(tokenizer(json.loads(line), add_special_tokens=False)["input_ids"])})
        except Exception as error:  # noqa: BLE001
            say(_words(error))
    return 0


def _words(error: Exception) -> dict[str, str]:
    """An error of the model's code as one line."""
    return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


if __name__ == "__main__":
    sys.exit(main())
