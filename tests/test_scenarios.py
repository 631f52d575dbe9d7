"""What an operator reads: a scene by name, and the words of `hs-extract plan` in tests/scenarios/NAME.txt.

A new story is a scene here and an empty file there; WRITE=1 fills the files, a person reads what changed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from scenes import NOW, VLLM_UP, acted, busy, crashes, gpus, holder, loading, past_of, rest
from world import CONFIG

from hsdaemon.core import budget
from hsdaemon.core import model as m
from hsdaemon.host.preview import decided, words

FOLDER = Path(__file__).parent / "scenarios"
ROGUE = rest(gpus=gpus(75_805), holders=(holder(),), units=(VLLM_UP,))
STRANGER = holder(unit="jupyter.service")
IDLE = m.Worker(m.Unit(m.WORKER_UNIT, invocation="w1"))
SCENES: dict[str, tuple[m.Observation, list[budget.Event]]] = {
    "a fresh host": (rest(), []),
    "a rogue that the policy names": (ROGUE, []),
    "a stranger on the GPUs": (rest(gpus=gpus(75_805), holders=(STRANGER,)), []),
    "another volume": (replace(busy(), volume=m.Volume("foreign", "the volume is A, the manifest's is B")), []),
    "a full volume": (replace(busy(), volume=m.Volume("ok", "", 1 << 20, 1 << 44, "uuid")), []),
    "nvml hangs beside a running engine": (busy(gpus=m.Unreadable("nvml", "no answer in 10 s", "hang")), []),
    "the engine loads": (loading(100), []),
    "the engine died three times": (rest(), list(crashes(3))),
    "another model": (
        busy(proof=m.Proof("e1", False, "continuity", "row 7: median cosine 0.5000"), worker=IDLE),
        [acted(m.RunProof("e1", "p0"), 50)],
    ),
    "extracting": (busy(), []),
    "done": (rest(progress=m.Progress(100, 98, 1, 1, True)), []),
}


@pytest.mark.parametrize("name", SCENES)
def test_an_operator_reads(name: str) -> None:
    seen, events = SCENES[name]
    said = words(decided(CONFIG, replace(seen, now=NOW), past_of(seen, events=events))) + "\n"
    path = FOLDER / f"{name}.txt"
    if os.environ.get("WRITE"):
        path.write_text(said)
    assert path.read_text() == said


def test_every_file_has_its_scene() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(SCENES)
