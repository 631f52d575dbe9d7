"""The engine's argument line, environment, endpoint and port: what a start is made of, before any weight is read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import engines
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsdaemon import wire
from hsdaemon.config import Config, parse
from hsdaemon.engine import argline, endpoint, environment, ports, releases, weights
from hsdaemon.errors import ConfigError, EngineError
from hsdaemon.machine.checkpoint import eagle3_layers, read_model
from hsdaemon.machine.identity import boot_id, start_ticks

HEAD = '[data]\npath = "/d.jsonl"\n[model]\npath = "/m"\n[output]\npath = "/o"\n'
CORES = (0, 1, 2, 3)


def product(table: str = "", **engine: object) -> Config:
    """A configuration. table: more lines of [output]; engine: keys of [engine], a mapping as one variable."""
    lines = "\n".join(f"{key} = {toml(value)}" for key, value in engine.items())
    return parse(f"{HEAD}{table}\n[engine]\n{lines}", "hs.toml")


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


@pytest.mark.parametrize("version", releases.known())
def test_every_release_has_one_entry_for_each_question_and_a_reason(version: str) -> None:
    known = releases.release(version)
    assert known.ways[-1] == "patch"
    assert ("plugin" in known.ways) == (int(version.rsplit(".", 1)[1]) >= 11)
    assert {"--disable-radix-cache", "--skip-tokenizer-init"} <= {row.value for row in known.flags}
    assert all(row.why for row in (*known.flags, *known.refused))
    assert known.reserve_tokens == 7


def test_a_hot_fix_release_is_its_parent_and_strange_ones_are_refused() -> None:
    assert releases.release("0.5.10.post1").ways == ("patch",)
    with pytest.raises(EngineError, match=r"cannot use SGLang 0\.5\.23rc1"):
        releases.release("0.5.23rc1")


def test_plugins_cannot_be_asked_of_a_release_without_them() -> None:
    config = product(capture="plugin")
    (problem,) = releases.problems(config, releases.release("0.5.10"))
    assert problem.key == "engine.capture"
    assert not list(releases.problems(config, releases.release("0.5.11")))
    with pytest.raises(EngineError, match=r"hs\.toml: engine\.capture = 'plugin'"):
        releases.check(config, releases.release("0.5.10"), "hs.toml")


def test_chunks_smaller_than_their_groups_are_refused() -> None:
    (problem,) = releases.problems(product(tp=8, dp_attention=8, chunk_tokens=4), releases.release("0.5.23"))
    assert problem.key == "engine.chunk_tokens"


def test_the_production_line_says_what_it_must() -> None:
    known = releases.release("0.5.23")
    line = argline.command(product(tp=8, trust_remote_code=True), known, "hs-1", 30001)
    words = " ".join(line)
    for part in (
        "-m sglang.launch_server --host 127.0.0.1 --port 30001 --served-model-name hs-1",
        "--model-path /m --device cuda",
        "--tp-size 8",
        "--chunked-prefill-size 16384 --max-prefill-tokens 16384",
        "--disable-prefill-cuda-graph",
        "--watchdog-timeout 600",
        "--trust-remote-code",
    ):
        assert part in words
    assert "--chunked-prefill-size -1" in " ".join(argline.options(product(chunk_tokens=0), known))
    assert "--dp-size 4 --enable-dp-attention" in " ".join(argline.options(product(tp=8, dp_attention=4), known))


@pytest.mark.engine
def test_sglang_itself_accepts_every_line() -> None:
    """Its own parser, for each option that we or a user may set."""
    known = releases.release("0.5.23")
    many = product(tp=8, dp_attention=8, max_total_tokens=9, trust_remote_code=True)
    lines = [argline.command(config, known, "hs-1", 30001) for config in (many, product(device="cpu", chunk_tokens=0))]
    code = (
        "import argparse, json, sys; from sglang.srt.server_args import ServerArgs\n"
        "p = argparse.ArgumentParser(); ServerArgs.add_cli_args(p)\n"
        "for line in json.loads(sys.argv[1]): p.parse_args(line[3:])\n"
        "print('accepted')"
    )
    standins = str(engines.REPOSITORY / "hsdaemon" / "engine" / "cpu" / "standins")
    path = {"PYTHONPATH": standins, "SGLANG_USE_CPU_ENGINE": "1"}
    words = [sys.executable, "-c", code, json.dumps(lines)]
    done = subprocess.run(words, env=os.environ | path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip().endswith("accepted"), done.stderr[-2000:]


def make_environment(config: Config, base: dict[str, str], kind: str = "llama") -> dict[str, str]:
    return environment.environment(config, releases.release("0.5.23"), "hs-1", base, CORES, kind)


def test_sy_01_the_engine_cannot_speak_for_the_service() -> None:
    base = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1", "SGLANG_PLUGINS": "other", "PATH": "/bin"}
    made = make_environment(product(), base)
    assert made["PATH"] == "/bin"
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "SGLANG_PLUGINS"} & made.keys()


def test_the_capture_is_told_everything_it_needs() -> None:
    config = product()
    told = wire.capture_config(make_environment(config, {})[wire.CAPTURE_ENV])
    assert (told.launch, told.way, told.spool) == ("hs-1", "plugin", config.spool.path)
    assert (told.attest, told.budget) == ("/run/hs-extract/attest", 16384 << 20)
    assert (told.norm, told.dtype, told.interleaved, told.layers) == ("post", "bfloat16", False, ())


def test_the_engine_loads_this_very_package_first() -> None:
    path = make_environment(product(), {"PYTHONPATH": "/theirs"})["PYTHONPATH"].split(":")
    assert path == [str(engines.REPOSITORY), "/theirs"]
    path = make_environment(product(device="cpu"), {})["PYTHONPATH"].split(":")
    assert [Path(p).name for p in path[:2]] == ["standins", "plugin"]


def test_a_cpu_engine_gets_its_stand_ins_and_one_core_list_a_rank() -> None:
    made = make_environment(product(device="cpu", tp=2), {}, kind="kimi_k25")
    assert made["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert (made["HS_CPU_NO_MM"], made["SGLANG_USE_CPU_ENGINE"]) == ("1", "1")
    assert "HS_CPU_NO_MM" not in make_environment(product(device="cpu"), {}, kind="llama")
    assert "SGLANG_USE_CPU_ENGINE" not in make_environment(product(), {}, kind="kimi_k25")


@pytest.mark.parametrize("name", ["PYTHONPATH", wire.CAPTURE_ENV, "SGLANG_PLUGINS", "HF_HUB_OFFLINE"])
def test_what_we_set_or_remove_cannot_be_set_by_hand(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_environment(product(environment={name: "x"}), {})
    assert make_environment(product(environment={"NCCL_DEBUG": "INFO"}), {})["NCCL_DEBUG"] == "INFO"


def print_of(config: Config, version: str = "0.5.23") -> str:
    return environment.fingerprint(config, releases.release(version), CORES, "llama")


def test_the_fingerprint_knows_every_change_and_no_start() -> None:
    first = print_of(product())
    assert print_of(product(port=31000, port_span=3)) == first
    changed = [
        print_of(product(), "0.5.22"),
        print_of(product(tp=8)),
        print_of(product(chunk_tokens=64)),
        print_of(product(capture="patch")),
        print_of(product(environment={"NCCL_DEBUG": "INFO"})),
        print_of(product(extra_args=["--load-format", "dummy"])),
        print_of(product('dtype = "float32"')),
    ]
    assert len({first, *changed}) == len(changed) + 1


HERE = endpoint.Endpoint("hs-1", 1, 2, "boot", "127.0.0.1", 30000, "0.5.23", "plugin", "f", ("a",), "/log")


def test_the_endpoint_is_read_back_and_rubbish_is_none(tmp_path: Path) -> None:
    assert endpoint.read(str(tmp_path)) is None
    endpoint.write(str(tmp_path), HERE)
    assert endpoint.read(str(tmp_path)) == HERE
    assert [p.name for p in tmp_path.iterdir()] == ["engine.json"]
    for rubbish in (b"", b"{}", b"\xff", b"[1]", (tmp_path / "engine.json").read_bytes()[:-1]):
        (tmp_path / "engine.json").write_bytes(rubbish)
        assert endpoint.read(str(tmp_path)) is None


def test_an_engine_is_alive_only_as_the_very_process_of_this_boot() -> None:
    pid, boot = os.getpid(), boot_id()
    ticks = start_ticks(pid)
    assert ticks
    here = HERE
    for changes, alive in (
        ({"pid": pid, "start_ticks": ticks, "boot_id": boot}, True),
        ({"pid": pid, "start_ticks": ticks + 1, "boot_id": boot}, False),
        ({"pid": pid, "start_ticks": ticks, "boot_id": "another"}, False),
        ({"pid": 2**22 + 1, "start_ticks": ticks, "boot_id": boot}, False),
    ):
        fields = {f: getattr(here, f) for f in here.__struct_fields__} | changes
        assert endpoint.alive(endpoint.Endpoint(**fields)) is alive


@pytest.fixture
def listener() -> socket.socket:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.listen()
    return held


def at(port: int) -> endpoint.Endpoint:
    fields = {f: getattr(HERE, f) for f in HERE.__struct_fields__} | {"port": port}
    return endpoint.Endpoint(**fields)


def test_en_04_a_taken_port_is_refused_and_its_owner_named(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(EngineError, match=f"port {port} is held by pid {os.getpid()}"):
        ports.choose(product(port=port), None)
    listener.close()
    assert ports.choose(product(port=port), None) == port


def test_en_03_the_ports_that_the_engine_derives_are_looked_at_too(listener: socket.socket) -> None:
    taken = listener.getsockname()[1]
    base = taken - ports.DELTA - 2
    assert ports.choose(product(port=base), None) == base
    with pytest.raises(EngineError, match=f"port {taken} is held"):
        ports.choose(product(port=base, tp=2, dp_attention=2), None)
    listener.close()


def test_en_02_after_a_former_start_another_port_is_taken(listener: socket.socket) -> None:
    taken = listener.getsockname()[1]
    config = product(port=taken - 1, port_span=3)
    assert ports.choose(config, at(taken - 1)) == taken + 1, "the next one is held by somebody: skipped"
    assert ports.choose(config, at(taken + 1)) == taken - 1, "round the span"
    assert ports.choose(config, at(5)) == taken - 1, "a port of another span says nothing"
    listener.close()


def test_the_model_folder_is_read_without_a_weight(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840, "max_position_embeddings": 262144}
    top = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(top))
    seen = read_model(str(tmp_path))
    assert (seen.kind, seen.layers, seen.hidden, seen.vocab, seen.context) == ("kimi_k25", 61, 7168, 163840, 262144)
    assert eagle3_layers(61) == (1, 29, 57)


@given(st.integers(0, 100))
def test_the_default_names_three_layers_or_says_that_it_cannot(n: int) -> None:
    if n < 7:
        with pytest.raises(ConfigError, match=r"set model\.layers"):
            eagle3_layers(n)
    else:
        a, b, c = eagle3_layers(n)
        assert 0 < a < b < c < n - 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_hidden_layers": "61"}', '{"num_hidden_layers": true}', "\x00"])
def test_a_model_folder_that_says_too_little_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot read the model"):
        read_model(str(tmp_path))


def serve(config: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [*engines.serve_command(config), *more]
    environ = engines.child_environment()
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)


def write_model(folder: Path, layers: int = 8) -> str:
    folder.mkdir()
    sizes = {"num_hidden_layers": layers, "hidden_size": 8, "vocab_size": 9, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(sizes | {"model_type": "llama"}))
    return str(folder)


@pytest.mark.engine
def test_serve_shows_what_it_would_run_and_touches_nothing(tmp_path: Path) -> None:
    path = engines.write_config(tmp_path, write_model(tmp_path / "m"), 32020, tmp_path / "spool")
    done = serve(path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "--port 32020" in done.stdout
    assert "HSDAEMON_CAPTURE=" in done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"m", "hs-extract.toml"}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"model_layers": [1, 3, 7]}, 78, "layer 7 of 8 has no later layer"),
        ({"extra_args": ["--allow-auto-truncate"]}, 78, "--allow-auto-truncate"),
        ({"tp": 3, "dp_attention": 2}, 78, "engine.dp_attention"),
    ],
)
def test_serve_refuses_before_anything_starts(
    tmp_path: Path, changes: dict[str, object], code: int, words: str
) -> None:
    path = engines.write_config(tmp_path, write_model(tmp_path / "m"), 32020, tmp_path / "spool", **changes)
    done = serve(path)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.engine
def test_serve_names_weights_that_are_cut_short(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    head = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    Path(model, "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    done = serve(engines.write_config(tmp_path, model, 32020, tmp_path / "spool"))
    assert (done.returncode, "model.safetensors (1 files) is missing or cut short" in done.stderr) == (69, True)


@pytest.mark.root
def test_weights_that_the_account_may_not_read_are_named() -> None:
    """As it is when root made the checkpoint: the engine itself would say that there is no such file."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others altogether
        Path(folder).chmod(0o755)
        Path(folder, "model.safetensors").touch(0o600)
        child = os.fork()
        if child == 0:
            os.seteuid(65534)
            try:
                weights.require(Path(folder))
            except EngineError as error:
                os._exit(7 if "closed to uid 65534" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
