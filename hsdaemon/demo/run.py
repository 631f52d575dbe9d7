"""The main job on one machine without a GPU, killed half-way again and again, and judged by transformers.

Nothing here is a mock: the engine is SGLang as `hs-extract serve` starts it, the worker is `hs-extract extract`.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from hsdaemon.data.manifest import every_stored
from hsdaemon.data.sqlite import exists, open_reader
from hsdaemon.demo.actor import HS, Actor, environment
from hsdaemon.demo.stage import Stage
from hsdaemon.demo.verdict import Story, Verdict
from hsdaemon.errors import EngineError, Transient

RUN_S = 300.0  # the whole extraction without kills; 20 to 60 s on 2 cores
START_S = 120.0  # what a kill may cost: an engine starts in 20 s on quiet cores
JUDGE_S = 400.0  # computing the reference, when it is not ready yet, and reading the files
LOOK_S = 0.05  # between two looks at what is stored
AGAIN = Transient.exit_code  # the worker's "not now"


class Kill(Struct, frozen=True):
    """SIGKILL for `who`, `delay_s` after `stored` samples are seen."""

    who: str
    stored: int
    delay_s: float


def schedule(rows: int, engines: int, workers: int, seed: int) -> list[Kill]:
    """So many kills of each, at random instants between the first and the last samples."""
    draw = random.Random(seed)  # noqa: S311  # instants, no secret
    who = ["engine"] * engines + ["worker"] * workers
    draw.shuffle(who)
    at = sorted(draw.sample(range(rows // 16, rows * 3 // 4), len(who)))
    return [Kill(name, stored, draw.uniform(0.0, 0.2)) for name, stored in zip(who, at, strict=True)]


def run(stage: Stage, kills: Sequence[Kill], say: Callable[[str], None]) -> tuple[Story, Verdict]:
    """Extract everything under `kills`, then compare. Raises EngineError when it does not come to its end."""
    play = Play(stage, kills, say)
    judge = start_judge(stage)
    try:
        play.extract()
        say("comparing every stored state with transformers")
        return play.story(), ask(judge, stage)
    finally:
        play.stop()
        judge.kill()
        judge.wait()
        shutil.rmtree(stage.spool, ignore_errors=True)


def start_judge(stage: Stage) -> subprocess.Popen[bytes]:
    """transformers computes its states while SGLang computes ours, at a lower priority."""
    words = (str(stage.model), str(stage.data), str(stage.output), json.dumps(stage.layers))
    with (stage.folder / "compare.log").open("wb") as log:
        return subprocess.Popen(
            ("nice", "-n", "5", sys.executable, "-m", "hsdaemon.demo.compare", *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(),
        )


def ask(judge: subprocess.Popen[bytes], stage: Stage) -> Verdict:
    """Raises EngineError when the judge gives no verdict."""
    try:
        out, _ = judge.communicate(b"compare\n", JUDGE_S)
        return msgspec.json.decode(out, type=Verdict)
    except (subprocess.TimeoutExpired, BrokenPipeError, msgspec.DecodeError) as error:
        log = stage.folder / "compare.log"
        raise EngineError(f"cannot compare with transformers: {error}; see {log}") from None


class Play:
    """Engine and worker on the stage, and what happened to them."""

    def __init__(self, stage: Stage, kills: Sequence[Kill], say: Callable[[str], None]) -> None:
        self.stage, self._say = stage, say
        config = str(stage.config)
        self._actors = {
            "engine": Actor("engine", (*HS, "serve", "-c", config), stage.folder / "engine.log"),
            "worker": Actor("worker", (*HS, "extract", "-c", config), stage.folder / "worker.log"),
        }
        self._kills = list(kills)
        self._patience_s = RUN_S + START_S * len(kills)
        self._files: dict[int, tuple[Path, int, int]] = {}  # done at a kill: file, inode, time of its last change
        self._in_flight = 0

    def extract(self) -> None:
        """Until the worker says that nothing is left. Raises EngineError with the last words of whoever fails."""
        began = time.monotonic()
        self._say("starting the engine, SGLang on the CPU (hs-extract serve), and the worker (hs-extract extract)")
        for actor in self._actors.values():
            actor.start()
        while not self._finished():
            if time.monotonic() - began > self._patience_s:
                raise self._failure(f"not done after {self._patience_s:g} s, {self._stored()} stored", "worker")
            if self._kills and self._stored() >= self._kills[0].stored:
                self._kill(self._kills.pop(0))
        if self._kills:
            raise self._failure(f"done before {len(self._kills)} of the kills could happen", "worker")
        rows = self.stage.kind.rows
        self._say(f"{rows:>5} of {rows} stored after {time.monotonic() - began:.0f} s")

    def stop(self) -> None:
        for actor in reversed(self._actors.values()):
            actor.stop()

    def story(self) -> Story:
        manifest = open_reader(self.stage.output / "manifest.db")
        try:
            done, claims = manifest.counts().done, manifest.claims()
        finally:
            manifest.close()
        return Story(
            name=self.stage.kind.name,
            relative=self.stage.kind.relative,
            done=done,
            redone=claims - done,
            in_flight=self._in_flight,
            moved=[row for row, (path, *_) in self._files.items() if _identity(path) != self._files[row]],
        )

    def _finished(self) -> bool:
        """Look at both, for at most LOOK_S; whoever ended for a passing reason is started again, as systemd would."""
        engine, worker = self._actors["engine"], self._actors["worker"]
        code = worker.ended(LOOK_S)
        if code == AGAIN:
            worker.start()
        elif code:
            raise self._failure(f"the worker ended with {code}", "worker")
        if (ended := engine.ended()) is not None:
            raise self._failure(f"the engine ended with {ended}", "engine")
        return code == 0

    def _stored(self) -> int:
        return sum(1 for _ in self.stage.output.rglob("*.ckpt"))

    def _kill(self, kill: Kill) -> None:
        """Kill, remember what was done and what was in flight, start again."""
        actor = self._actors[kill.who]
        actor.ended(kill.delay_s)
        actor.kill()
        self._remember()
        again = "it loads the model again" if kill.who == "engine" else "it goes on from the manifest"
        self._say(f"{self._stored():>5} of {self.stage.kind.rows} stored: {kill.who} killed (SIGKILL); {again}")
        actor.start()

    def _remember(self) -> None:
        path = self.stage.output / "manifest.db"
        if not exists(path):
            return
        manifest = open_reader(path)
        try:
            self._in_flight += manifest.counts().leased
            done = [(stored.row, self.stage.output / stored.path) for stored in every_stored(manifest)]
        finally:
            manifest.close()
        for row, file in done:
            self._files.setdefault(row, _identity(file))

    def _failure(self, cause: str, who: str) -> EngineError:
        actor = self._actors[who]
        return EngineError(f"cannot finish: {cause}; see {actor.log}. Its last words:\n{actor.last_words()}")


def _identity(path: Path) -> tuple[Path, int, int]:
    """Tells a file from one written later under the same name. A missing file is nobody's."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return path, 0, 0
    return path, stat.st_ino, stat.st_mtime_ns
