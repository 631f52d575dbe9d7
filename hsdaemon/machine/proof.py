"""The proof's two files in <paths.run>: what is to be proved, and the verdict. A reboot takes both with the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hsdaemon.core.model import Outcome, Proof, Unreadable
from hsdaemon.errors import HsError
from hsdaemon.machine import disk
from hsdaemon.wire import parse_json

ASKED, ANSWER = "prove.json", "proof.json"


class ProofFiles:
    """The supervisor asks (`prepare`, `read`), the proof's unit answers (`asked`, `answer`)."""

    def __init__(self, run: str) -> None:
        self._run = Path(run)

    def read(self) -> Proof | Unreadable | None:
        """The last verdict. A damaged file proves nothing, like a missing one, but says so."""
        try:
            fields = parse_json(disk.read_own(self._run / ANSWER))
            return Proof(
                invocation=_text(fields, "invocation"),
                ok=fields["ok"] is True,
                code=_text(fields, "code"),
                detail=_text(fields, "detail"),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            return Unreadable("proof", f"{self._run / ANSWER}: {error}", "damaged")

    def prepare(self, invocation: str) -> Outcome:
        """Ask for a proof of this start of the engine. A crash leaves the former question, which is asked again."""
        try:
            disk.replace(self._run / ASKED, json.dumps({"invocation": invocation}).encode())
        except (OSError, HsError) as error:
            return Outcome("failed", str(error))
        return Outcome("done")

    def asked(self) -> str:
        """The invocation to prove; "" when nobody asked (a person runs the proof)."""
        try:
            return _text(parse_json(disk.read_own(self._run / ASKED)), "invocation")
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def answer(self, proof: Proof, steps: Sequence[str]) -> None:
        """Write the verdict. A crash before it leaves an older one, about another invocation. A proof that could not be
        made takes nothing from a good verdict about the same start. Raises OSError."""
        last = self.read()
        if proof.code == "blocked" and isinstance(last, Proof) and last.ok and last.invocation == proof.invocation:
            return
        fields = {"invocation": proof.invocation, "ok": proof.ok, "code": proof.code, "detail": proof.detail}
        disk.replace(self._run / ANSWER, json.dumps({**fields, "steps": list(steps)}).encode())


def _text(fields: dict[str, object], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is not a text")
    return value
