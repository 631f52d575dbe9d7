"""Field cases of the capture, by their ids. First with a fake of the engine's names, which can be made to do anything;
then with a real SGLang."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from engines import Dump, Engine
from fake_sglang import AUX, EPOCH, HIDDEN, LAYERS, Part, Sglang, config, expected
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdaemon import wire
from hsdaemon.capture import hooks
from hsdaemon.capture.store import Store
from hsdaemon.config import Config, parse
from hsdaemon.engine import argline, inplace, releases
from hsdaemon.errors import ConfigError, EngineError
from hsdaemon.machine.checkpoint import RESERVE_TOKENS


class Captured:
    """A fake engine with the capture armed in it, and its spool."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.folder, self.told = folder, config(folder, **changes)
        self.sglang = Sglang(monkeypatch)
        hooks.install(wire.to_json(self.told), self.told.way)
        self.runner = self.sglang.load()
        self.spool = folder / "spool"
        self.rows = 0

    def rid(self, tokens: int, epoch: str = EPOCH) -> wire.RequestId:
        self.rows += 1
        return wire.RequestId(epoch, self.rows, 1, tokens)

    def wait(self, name: str) -> Path:
        until = time.monotonic() + 20
        while not (self.spool / name).exists():
            assert time.monotonic() < until, f"no {name}: {self.names()} {self.attest()}"
            time.sleep(0.005)
        return self.spool / name

    def dump(self, rid: wire.RequestId) -> Dump:
        return engines.read_dump(self.wait(wire.dump_name(rid)))

    def error(self, rid: wire.RequestId) -> wire.DumpError:
        return wire.dump_error(self.wait(wire.error_name(rid)).read_text(encoding="utf-8"))

    def names(self) -> set[str]:
        return {path.name for path in self.spool.iterdir()} - {wire.EPOCH_FILE}

    def attest(self) -> wire.Attest:
        (path,) = (self.folder / "attest").glob("attest-*.json")
        return wire.attest(path.read_text(encoding="utf-8"))

    def good(self) -> None:
        """One sample through, whole and right: the capture still works."""
        ids = [5, 6, 7]
        rid = self.rid(3)
        self.sglang.forward([Part(rid, ids)])
        check_rows(self.dump(rid), ids)


def check_rows(dump: Dump, ids: list[int]) -> None:
    """Row t of every state belongs to token t of the prompt."""
    assert dump.ids.tolist() == ids
    assert torch.equal(torch.tensor(dump.aux), torch.cat([expected(ids, k) for k in AUX], dim=1))
    assert torch.equal(torch.tensor(dump.final), expected(ids, LAYERS))


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Captured]]:
    made: list[Captured] = []

    def make(**changes: Any) -> Captured:
        made.append(Captured(tmp_path, monkeypatch, **changes))
        return made[-1]

    yield make
    for one in made:
        writer = one.sglang.rank()._writer if hasattr(one.sglang.runner_class, hooks.MARK) else None
        if writer:
            writer.stop()


Make = Callable[..., Captured]


# --- with a fake of the engine's names


def test_the_attest_says_what_this_rank_is_and_when_it_has_seen_states(captured: Make) -> None:
    one = captured()
    said = one.attest()
    assert (said.stage, said.layers, said.loop_ids, said.pid) == ("armed", AUX, (2, 4, 5), os.getpid())
    one.good()
    said = one.attest()
    assert (said.stage, said.errors, said.way, said.release, said.model) == ("seen", 0, "plugin", "0.5.23", "Model")


def test_both_ways_in_hook_once_and_only_the_configured_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Sglang(monkeypatch)
    told = wire.to_json(config(tmp_path, way="patch"))
    bare = fake.processor.forward
    hooks.install(told, "plugin")
    assert fake.processor.forward is bare
    hooks.install(told, "patch")
    hooked = fake.processor.forward
    assert hooked is not bare
    hooks.install(told, "patch")
    assert fake.processor.forward is hooked


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_ca_12_any_batch_gives_exactly_the_rows_of_our_requests(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Batches mix our pieces with strangers' in any order, with padding rows at the end."""
    with pytest.MonkeyPatch.context() as patch:
        one = Captured(tmp_path_factory.mktemp("ca12"), patch, interleaved=data.draw(st.booleans()))
        prompts = data.draw(st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=12), min_size=1, max_size=4))
        rids = [one.rid(len(prompt)) for prompt in prompts]
        at = [0] * len(prompts)
        while any(at[i] < len(prompts[i]) for i in range(len(prompts))):
            parts: list[Part] = []
            for i, prompt in enumerate(prompts):
                if at[i] < len(prompt) and not data.draw(st.booleans()):
                    count = len(prompt) - at[i] - data.draw(st.integers(0, len(prompt) - at[i] - 1))
                    parts.append(Part(rids[i], prompt, at[i], count))
                    at[i] += count
                if data.draw(st.integers(0, 3)) == 1:
                    parts.append(Part("stranger", [9, 9, 9]))
            if parts:
                one.sglang.forward(parts, padding=data.draw(st.integers(0, 3)))
        for rid, prompt in zip(rids, prompts, strict=True):
            check_rows(one.dump(rid), prompt)
        assert one.names() == {wire.dump_name(rid) for rid in rids}
        writer = one.sglang.rank()._writer
        assert writer
        writer.stop()


def test_ca_03_two_of_three_layers_fail_the_sample_and_the_engine_lives(captured: Make) -> None:
    one = captured()
    ids, rid = [5, 6, 7], one.rid(3)
    one.sglang.forward([Part(rid, ids)], aux=torch.zeros(3, 2 * HIDDEN))
    assert "3 aux states and one of 8 columns are due, not [16, 8]" in one.error(rid).reason
    rid = one.rid(3)
    one.sglang.forward([Part(rid, ids)], aux=[torch.zeros(3, HIDDEN), torch.zeros(3, HIDDEN)])
    assert one.error(rid).code == "layers"  # the worker stops: the next sample would lack the same
    assert one.attest().errors == 2
    one.good()


def test_ca_19_no_final_state_or_no_aux_fails_the_sample_and_the_engine_lives(captured: Make) -> None:
    one = captured()
    for lacking in ("final", "aux"):
        rid = one.rid(3)
        one.sglang.forward([Part(rid, [5, 6, 7])], **{lacking: None})  # type: ignore[arg-type]  # mypy fears that it is `padding`
        assert f"no {lacking} state" in one.error(rid).reason
    assert one.attest().errors == 2
    assert one.sglang.answered == 2
    one.good()


def test_ca_19_pre_norm_without_the_norm_having_run_is_an_error_not_a_stale_state(captured: Make) -> None:
    one = captured(norm="pre")
    body = one.runner.model.model
    ids, rid = [5, 6, 7], one.rid(3)
    body.norm(expected(ids, LAYERS) - 1, torch.ones(3, HIDDEN))
    one.sglang.forward([Part(rid, ids)], final=torch.full((3, HIDDEN), 77.0))
    check_rows(one.dump(rid), ids)
    rid = one.rid(3)
    one.sglang.forward([Part(rid, ids)])
    assert "no final state" in one.error(rid).reason


def test_ca_05_rows_that_a_replayed_graph_left_out_fail_the_sample(captured: Make) -> None:
    one = captured()
    rid = one.rid(3)
    one.sglang.forward([Part(rid, [5, 6, 7])], aux=torch.zeros(2, 3 * HIDDEN))
    assert "2 rows came for 3 tokens" in one.error(rid).reason
    for version in releases.known()[5:]:
        known = releases.release(version)
        flags = {row.value for row in known.flags if row.why}
        assert flags & {"--disable-prefill-cuda-graph", "--disable-piecewise-cuda-graph"}, version


def test_layers_changed_behind_our_back_break_the_capture(captured: Make) -> None:
    one = captured()
    one.runner.model.model.layers_to_capture = [3, 4, 5]
    reasons = set()
    for _ in range(60):
        rid = one.rid(3)
        one.sglang.forward([Part(rid, [5, 6, 7])])
        reasons.add(one.error(rid).reason)
    assert reasons == {"the engine captures loop ids [3, 4, 5], not layers [1, 3, 4]"}
    assert one.attest().stage == "broken"


def test_ca_09_an_exception_in_the_capture_costs_one_sample(captured: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = captured()
    one.good()
    one.good()
    from hsdaemon.capture import gather

    def burst(*_args: object) -> None:
        raise RuntimeError("the third request")

    with monkeypatch.context() as patch:
        patch.setattr(gather, "fill", burst)
        rid = one.rid(3)
        one.sglang.forward([Part(rid, [5, 6, 7])])
    assert one.sglang.answered == 3
    error = one.error(rid)
    assert (error.code, error.reason) == ("capture", "RuntimeError: the third request")
    assert (one.attest().errors, "the third request" in one.attest().last_error) == (1, True)
    one.good()


def test_ca_07_a_release_with_other_names_attests_broken_and_the_engine_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Sglang(monkeypatch)

    def renamed(self: object, input_ids: object, states: object, lm_head: object, logits_metadata: object) -> str:
        return "logits"

    fake.processor.forward = renamed  # type: ignore[method-assign,assignment]  # that is the fault
    told = config(tmp_path)
    hooks.install(wire.to_json(told), "plugin")
    fake.load()
    (path,) = (tmp_path / "attest").glob("attest-*.json")
    said = wire.attest(path.read_text())
    assert said.stage == "broken"
    assert "no argument hidden_states" in said.last_error


def test_ca_07_a_model_without_a_setter_attests_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fake_sglang

    monkeypatch.delattr(fake_sglang.Model, "set_dflash_layers_to_capture")
    one = Captured(tmp_path, monkeypatch)
    assert (one.attest().stage, "does not take" in one.attest().last_error) == ("broken", True)
    rid = one.rid(3)
    one.sglang.forward([Part(rid, [5, 6, 7])])
    assert one.sglang.answered == 1


def eagle3(plus_one: Callable[[list[int]], bool]) -> Callable[[Any, list[int]], None]:
    """A setter as releases have it: adds 1 where `plus_one` says so, else takes the ids verbatim."""

    def setter(self: Any, ids: list[int]) -> None:
        self.model.layers_to_capture = [k + 1 for k in ids] if plus_one(ids) else list(ids)

    return setter


@pytest.mark.parametrize("layers", [(1, 3, 4), (2, 3, 4), (0, 3, 4)])
@pytest.mark.parametrize("rule", ["always", "first is 1", "never"])
def test_ca_02_every_setter_convention_is_led_to_the_physical_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...], rule: str
) -> None:
    import fake_sglang

    plus = {"always": lambda ids: True, "first is 1": lambda ids: ids[0] == 1, "never": lambda ids: False}[rule]
    monkeypatch.delattr(fake_sglang.Model, "set_dflash_layers_to_capture")
    monkeypatch.setattr(fake_sglang.Model, "set_eagle3_layers_to_capture", eagle3(plus), raising=False)
    one = Captured(tmp_path, monkeypatch, layers=layers)
    if rule == "first is 1" and layers[0] == 0:  # 1 more is given, the rule adds another one: nothing leads there
        assert one.attest().stage == "broken"
    else:
        assert one.attest().loop_ids == tuple(k + 1 for k in layers)


def test_ca_11_strangers_dead_epochs_and_other_ids_leave_nothing(captured: Make) -> None:
    one = captured()
    dead = one.rid(3, epoch="00000000000000ff")
    for rid in ("HEALTH_CHECK_1", "0123456789abcdef", str(dead), f"{one.rid(3)}x", "../../etc/passwd", "x" * 600):
        one.sglang.forward([Part(rid, [5, 6, 7])])
    one.good()
    assert one.names() == {wire.dump_name(wire.RequestId(EPOCH, one.rows, 1, 3))}
    assert one.attest().errors == 0


def test_ca_14_only_the_first_rank_of_a_group_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Sglang(monkeypatch)
    fake.parallel.attn_tp_rank = fake.parallel.tp_rank = 1
    hooks.install(wire.to_json(config(tmp_path)), "plugin")
    fake.load()
    rid = wire.RequestId(EPOCH, 1, 1, 3)
    fake.forward([Part(rid, [5, 6, 7])])
    assert fake.rank()._writer is None
    (path,) = (tmp_path / "attest").glob("attest-*-tp001-*.json")
    assert wire.attest(path.read_text()).stage == "seen"
    assert {p.name for p in (tmp_path / "spool").iterdir()} == {wire.EPOCH_FILE}


def test_ca_15_staging_is_bounded_by_the_pool_while_the_writer_stands_still(
    captured: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 5_000
    one = captured(budget=1 << 30, wait_s=0.01, buffers=2)
    go, write = threading.Event(), Store.write
    monkeypatch.setattr(Store, "write", lambda *args: go.wait(60) and write(*args))
    ids, rids = list(range(tokens)), [one.rid(tokens) for _ in range(200)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for rid in rids:
        one.sglang.forward([Part(rid, ids)])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    go.set()
    for rid in rids[:2]:
        check_rows(one.dump(rid), ids)
    assert {one.error(rid).code for rid in rids[2:]} == {"stalled"}
    assert one.sglang.answered == 200
    size = wire.Layout(tokens, HIDDEN, 3, "float32", False).total
    assert grown < 40 * size, f"{grown} bytes for 200 forwards of {size}"


def test_ca_16_at_the_bound_the_sample_fails_and_the_engine_lives(captured: Make) -> None:
    size = wire.Layout(3, HIDDEN, 3, "float32", False).total
    one = captured(budget=size, wait_s=0.2, buffers=1)
    first = one.rid(3)
    one.sglang.forward([Part(first, [5, 6, 7])])
    one.dump(first)
    late = [one.rid(3) for _ in range(3)]
    for rid in late:
        one.sglang.forward([Part(rid, [5, 6, 7])])
    assert one.sglang.answered == 4
    for rid in late:
        assert one.error(rid).code in ("spool-full", "stalled")
    (one.spool / wire.dump_name(first)).unlink()
    one.good()


def test_ca_13_a_dump_has_the_size_of_the_formula_and_logits_are_never_asked_for(captured: Make) -> None:
    one = captured()
    rid = one.rid(3)
    one.sglang.forward([Part(rid, [5, 6, 7])])
    path = one.wait(wire.dump_name(rid))
    assert path.stat().st_size == wire.Layout(3, HIDDEN, 3, "float32", False).total == 4 * 4096
    rid = one.rid(3)
    one.sglang.forward([Part(rid, [5, 6, 7])], final=torch.zeros(3, 24 * HIDDEN))
    assert one.error(rid).code == "layers"


# --- releases, argument line, environment


def product(**engine: object) -> Config:
    lines = "\n".join(
        f"{key} = {str(value).lower() if isinstance(value, bool) else value!r}" for key, value in engine.items()
    )
    head = '[data]\npath = "/d.jsonl"\n[model]\npath = "/m"\n[output]\npath = "/o"\n[engine]\n'
    return parse(head + lines, "hs.toml")


def test_ca_07_an_unknown_release_is_refused_before_anything_is_loaded() -> None:
    for version in ("0.9.99", "0.5.24", "0.5.4", "0.6.0", "", "0.5.x", "0.5.٣"):
        with pytest.raises(EngineError, match="never looked at"):
            releases.release(version)


@pytest.mark.parametrize("minor", range(5, 24))
def test_ca_06_no_release_captures_partial_sums(minor: int) -> None:
    known, many = releases.release(f"0.5.{minor}"), product(tp=8)
    refused = list(releases.problems(many, known))
    flag = "--enforce-disable-flashinfer-allreduce-fusion"
    assert bool(refused) == (minor < 10)
    assert (flag in argline.options(many, known)) == (10 <= minor <= 13)
    assert flag not in argline.options(product(tp=1), known)
    assert not list(releases.problems(product(tp=1), known))
    assert not list(releases.problems(product(tp=8, dp_attention=8), known))


@pytest.mark.parametrize("key", ["pipeline = 2", "two_batch_overlap = true", 'disaggregation = "prefill"'])
def test_ca_18_modes_that_hide_rows_are_refused_by_name(key: str) -> None:
    head = '[data]\npath = "/d.jsonl"\n[model]\npath = "/m"\n[output]\npath = "/o"\n[engine]\n'
    with pytest.raises(ConfigError, match=f"engine.{key.split()[0]}"):
        parse(head + key, "hs.toml")


@pytest.mark.parametrize(
    "words",
    [
        ("--enable-two-batch-overlap",),
        ("--pp-size", "2"),
        ("--pp", "2"),
        ("--disaggregation-mode=prefill",),
        ("--enable-mixed-chunk",),
        ("--allow-auto-truncate",),
        ("--allow-auto",),
        ("--disable-radix",),
        ("--tp", "2"),
        ("--port", "1"),
        ("--speculative-algorithm", "EAGLE3"),
        ("--config", "x.yaml"),
    ],
)
def test_ca_18_extra_arguments_cannot_bring_them_back_in(words: tuple[str, ...]) -> None:
    known = releases.release("0.5.23")
    bad = product(extra_args=list(words))
    with pytest.raises(ConfigError, match=r"engine\.extra_args"):
        argline.options(bad, known)
    fine = product(extra_args=["--load-format", "dummy", "--attention-backend", "triton"])
    assert argline.options(fine, known)[-4:] == ("--load-format", "dummy", "--attention-backend", "triton")


# --- with the engine's own plugin loader, without a server

LOADER = "from sglang.srt.plugins import load_plugins; load_plugins(); print('lives')"


def load_plugins(path: list[Path], **more: str) -> subprocess.CompletedProcess[str]:
    here = Path(inplace.__file__).parent / "cpu" / "standins"
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, [*path, here])), "SGLANG_USE_CPU_ENGINE": "1"} | more
    words = [sys.executable, "-c", LOADER]
    return subprocess.run(words, env=environment, cwd=path[0], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.engine
def test_ca_10_a_syntax_error_in_the_plugin_leaves_no_attest(tmp_path: Path) -> None:
    """SGLang only logs it and lives: the missing attest file is what a proof goes by."""
    (tmp_path / "hsdaemon" / "capture").mkdir(parents=True)
    (tmp_path / "hsdaemon" / "__init__.py").write_text("")
    (tmp_path / "hsdaemon" / "capture" / "__init__.py").write_text("def register(:\n")
    told = wire.to_json(config(tmp_path))
    done = load_plugins([tmp_path], **{wire.CAPTURE_ENV: told})
    assert done.stdout.strip().endswith("lives"), done.stderr
    assert "SyntaxError" in done.stderr
    assert not (tmp_path / "attest").exists()


@pytest.mark.engine
def test_ca_04_without_its_environment_the_capture_is_inert(tmp_path: Path) -> None:
    done = load_plugins([engines.REPOSITORY])
    assert done.stdout.strip().endswith("lives"), done.stderr
    check = "import sys; from hsdaemon import capture; capture.from_patch(); print('torch' in sys.modules)"
    environment = {k: v for k, v in engines.child_environment().items() if k != wire.CAPTURE_ENV}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr


def test_ca_04_an_engine_that_would_not_load_the_capture_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    inplace.check("plugin")
    monkeypatch.setattr(inplace, "NAME", "another")
    with pytest.raises(EngineError, match="would capture nothing"):
        inplace.check("plugin")


# --- with a real SGLang: kimi_k25, TP 1, chunks of 64

CHUNK = 64
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 300, 5 * CHUNK)
LONGEST = 2048 - RESERVE_TOKENS


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(n) for n in np.random.default_rng(1000 * seed + length).integers(4, 512, length)]


class Reference:
    """States that transformers computes, each prompt once."""

    def __init__(self, model: str) -> None:
        from hsdaemon.demo import reference

        self.model, self.states = reference.load(model), reference.states

    def compare(self, dump: Dump, ids: list[int]) -> float:
        """Largest absolute difference between a dump and the reference; the token ids must be equal."""
        assert dump.ids.tolist() == ids
        aux, pre, post = self.states(self.model, ids, dump.header.layers)
        final = pre if dump.header.norm == "pre" else post
        return float(max(np.abs(dump.aux - aux.numpy()).max(), np.abs(dump.final - final.numpy()).max()))


@pytest.fixture(scope="session")
def reference(kimi: str) -> Reference:
    return Reference(kimi)


def capture_many(engine: Engine, prompts: list[list[int]]) -> list[Dump]:
    """All at once, so that the engine mixes them in its batches."""
    with ThreadPoolExecutor(8) as pool:
        rids = [engine.rid(ids) for ids in prompts]
        replies = list(pool.map(engine.ask, prompts, rids))
    assert [status for status, _ in replies] == [200] * len(prompts), replies
    return [engine.take(rid) for rid in rids]


@pytest.mark.engine
def test_ca_17_every_length_around_the_chunk_equals_the_reference(engine: Engine, reference: Reference) -> None:
    prompts = [prompt(n) for n in LENGTHS]
    dumps = capture_many(engine, prompts)
    assert max(reference.compare(dump, ids) for dump, ids in zip(dumps, prompts, strict=True)) < 1e-5


@pytest.mark.engine
def test_the_longest_prompt_that_the_engine_allows_and_one_more(engine: Engine, reference: Reference) -> None:
    ids = prompt(LONGEST)
    assert reference.compare(engine.capture(ids), ids) < 1e-5
    ids = prompt(LONGEST + 1)
    assert engine.ask(ids, engine.rid(ids))[0] == 400


@pytest.mark.engine
def test_rr_03_a_prompt_that_begins_another_is_computed_whole(engine: Engine, reference: Reference) -> None:
    long = prompt(200, seed=1)
    prompts = [long, long[:130], long, long[:64], long[:1]]
    dumps = [engine.capture(ids) for ids in prompts]
    assert max(reference.compare(dump, ids) for dump, ids in zip(dumps, prompts, strict=True)) < 1e-5


@pytest.mark.engine
def test_rr_02_prompts_of_one_length_are_told_apart_by_values(engine: Engine, reference: Reference) -> None:
    prompts = [prompt(70, seed=n) for n in range(6)]
    dumps = capture_many(engine, prompts)
    assert max(reference.compare(dump, ids) for dump, ids in zip(dumps, prompts, strict=True)) < 1e-5
    with pytest.raises(AssertionError):
        reference.compare(dumps[0], prompts[1])
    swapped = Dump(dumps[0].header, dumps[0].ids, dumps[1].aux, dumps[1].final)
    assert reference.compare(swapped, prompts[0]) > 0.01


@pytest.mark.engine
def test_ca_11_the_spool_holds_our_requests_only(engine: Engine) -> None:
    before = {path.name for path in engine.spool.iterdir()}
    for _ in range(5):
        assert engine.health() == 200
    engine.ask([5, 6, 7], "0123456789abcdef")
    engine.ask([5, 6, 7], engine.rid([5, 6, 7], epoch="00000000000000aa"))
    engine.capture([5, 6, 7])
    assert {path.name for path in engine.spool.iterdir()} == before


@pytest.mark.engine
def test_ca_09_a_sample_that_cannot_be_written_fails_alone(engine: Engine) -> None:
    ids = prompt(9)
    blocked, short = engine.rid(ids), wire.RequestId(engines.EPOCH, 10**9, 1, 5)
    folder = engine.spool / wire.part_name(blocked)
    folder.mkdir()
    assert engine.ask(ids, blocked)[0] == 200
    assert engine.ask(ids, short)[0] == 200
    assert "prompt of 5 tokens" in engine.failure(short).reason
    until = time.monotonic() + 20
    while str(blocked) not in engine.attests()[0].last_error + str([a.errors for a in engine.attests()]):
        if engine.attests()[0].errors >= 2:
            break
        assert time.monotonic() < until, engine.attests()
        time.sleep(0.05)
    folder.rmdir()
    engine.capture(ids)
    assert engine.process.poll() is None


@pytest.mark.engine
def test_sp_05_a_client_that_hangs_up_leaves_nothing_that_lasts(engine: Engine) -> None:
    ids = prompt(LONGEST)
    rid = engine.rid(ids)
    with pytest.raises(OSError, match="timed out"):
        engine.post("/generate", {"rid": str(rid), "input_ids": ids, "sampling_params": {"max_new_tokens": 0}}, 0.2)
    (engine.spool / wire.EPOCH_FILE).write_text("00000000000000e9")
    try:
        until = time.monotonic() + 30
        while left := {p.name for p in engine.spool.iterdir()} - {wire.EPOCH_FILE, wire.dump_name(rid)}:
            assert time.monotonic() < until, left
            time.sleep(0.1)
    finally:
        (engine.spool / wire.EPOCH_FILE).write_text(engines.EPOCH)
    (engine.spool / wire.dump_name(rid)).unlink(missing_ok=True)
    engine.capture(ids[:70])


@pytest.mark.engine
def test_a_second_engine_and_a_taken_port_are_refused_in_seconds(engine: Engine, tmp_path: Path, kimi: str) -> None:
    def serve(path: Path) -> subprocess.CompletedProcess[str]:
        words, environment = engines.serve_command(path), engines.child_environment()
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)

    again = serve(engine.config)
    assert (again.returncode, f"pid {engine.here.pid}" in again.stderr) == (69, True), again.stderr
    other = engines.write_config(tmp_path, kimi, engine.here.port, tmp_path / "spool")
    taken = serve(other)
    assert taken.returncode == 69, taken.stderr
    assert f"port {engine.here.port} is held by pid" in taken.stderr


# --- with a real SGLang: TP 2 without chunks, and a model whose layer k adds k + 1


@pytest.mark.engine
def test_ca_14_two_ranks_without_chunks_give_the_states_of_one_rank_in_chunks(
    engine: Engine, reference: Reference, tmp_path_factory: pytest.TempPathFactory, kimi: str
) -> None:
    folder, spool = tmp_path_factory.mktemp("tp2"), tmp_path_factory.mktemp("tp2-spool")
    path = engines.write_config(folder, kimi, port=engines.free_port(), spool=spool, tp=2, chunk_tokens=0)
    prompts = [prompt(n, seed=2) for n in (1, 63, 64, 65, 300)]
    ones = capture_many(engine, prompts)
    with engines.running(path, spool) as two:
        twos = capture_many(two, prompts)
        assert {path.name for path in spool.iterdir()} == {wire.EPOCH_FILE}, "one file per sample, from one rank"
        assert sorted((a.tp_rank, a.tp_size, a.stage) for a in two.attests()) == [(0, 2, "seen"), (1, 2, "seen")]
    for one, other, ids in zip(ones, twos, prompts, strict=True):
        assert other.ids.tolist() == ids
        assert max(np.abs(one.aux - other.aux).max(), np.abs(one.final - other.final).max()) < 1e-5


@pytest.mark.engine
def test_ca_01_ca_02_values_name_the_layer_and_the_row(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: Path
) -> None:
    """Layer k adds k + 1 to columns 2 and up, column 1 is the token id; stored pre-norm, interleaved, ids 2 3 4."""
    model = engines.tiny(tiny_models, "llama", steps=True)
    folder, spool = tmp_path_factory.mktemp("steps"), tmp_path_factory.mktemp("steps-spool")
    path = engines.write_config(
        folder,
        model,
        port=engines.free_port(),
        spool=spool,
        chunk_tokens=64,
        model_layers=[2, 3, 4],
        model_norm="pre",
        output_format="speculators",
    )
    with engines.running(path, spool) as running:
        ids = list(range(1, 201))  # row t encodes t + 1
        dump = running.capture(ids)
    assert dump.header.layers == (2, 3, 4)
    states = np.concatenate([dump.aux, dump.final], axis=1).reshape(200, 4, 128)
    assert (states[:, :, 1] == np.array(ids)[:, None]).all(), "row t belongs to token t"
    for place, layer in enumerate((2, 3, 4, 7)):
        total = (layer + 1) * (layer + 2) / 2  # 1 + 2 + ... + (layer + 1)
        assert np.allclose(states[:, place, 2:], total, rtol=0.01), layer
    shift = dump.ids[1:]  # what a trainer does: state t predicts token t + 1
    assert (states[:-1, 3, 1] + 1 == shift).all()
