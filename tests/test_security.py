"""What the product never does: run a pickle, a shell or generated code; write where or as nobody asked."""

from __future__ import annotations

import ast
import os
import pickle
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import scenes
from outputs import config_for, extract, lines, ready
from samples import EPOCH

from hsdaemon.config import Config
from hsdaemon.core import budget
from hsdaemon.core import model as m
from hsdaemon.data.backup import manifest_path
from hsdaemon.data.spool import Spool
from hsdaemon.engine import endpoint, leftovers, probe
from hsdaemon.errors import StoreError
from hsdaemon.history import History, Tick
from hsdaemon.host.board import Board
from hsdaemon.machine.proof import ProofFiles
from hsdaemon.work.probe import WorkerProbe

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "hsdaemon").rglob("*.py"))
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
RUN_TEXT = {"eval", "exec", "compile", "__import__"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the dotted name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def given(call: ast.Call, name: str) -> str:
    return next((ast.unparse(word.value) for word in call.keywords if word.arg == name), "")


def forbidden(source: str) -> list[str]:
    """What no file of the product may hold."""
    tree = ast.parse(source)
    names = [
        *(alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names),
        *(node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)),
    ]
    found = [name for name in names if name.partition(".")[0] in UNPICKLERS]
    for name, call in calls(tree):
        bad = (
            name in RUN_TEXT
            or name in ("os.system", "os.popen")
            or (name == "torch.load" and given(call, "weights_only") != "True")
            or (name.endswith(("np.load", "numpy.load")) and given(call, "allow_pickle") != "False")
            or given(call, "shell") not in ("", "False")
        )
        found += [ast.unparse(call)] * bad
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_of_the_product_runs_a_pickle_a_shell_or_a_text(path: Path) -> None:
    assert forbidden(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from _pickle import loads", "torch.load(f)", "torch.load(f, weights_only=False)"),
        *("eval(x)", "subprocess.run(x, shell=True)", "os.system(x)", "np.load(f, allow_pickle=True)"),
    ],
)
def test_the_search_would_find_it(source: str) -> None:
    assert forbidden(source) != []


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, at: Path) -> None:
        self._at = at

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._at),)


SCAN = """
import sys
def hook(event, args):
    if event.startswith(("pickle.", "marshal.loads")) and "hsdaemon" in str(sys._getframe(1).f_code.co_filename):
        print("UNPICKLED", args); sys.stdout.flush()
sys.addaudithook(hook)
from hsdaemon.cli import main
for words in (["scan"], ["verify", "--deep", "--repair"], ["scan"]):
    main([*words, "-c", sys.argv[1]])
"""


@pytest.mark.parametrize("known", [False, True], ids=["adopted", "recorded"])
def test_a_planted_pickle_is_never_run(tmp_path: Path, known: bool) -> None:
    """A sample's file with code in it, in a tree that is scanned and verified."""
    config = config_for(tmp_path, lines(3))
    store = ready(config)
    extract(store, tmp_path)
    store.close()
    path, ran = Path(config.output.path) / "rows_0-2000/data_1.ckpt", tmp_path / "ran"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"hidden_state": Planted(ran)}, 2))
        archive.writestr("archive/version", b"3\n")
    if not known:
        manifest_path(config.output).unlink()
    words = [sys.executable, "-c", SCAN, str(written(tmp_path, config))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "UNPICKLED" not in done.stdout
    assert not ran.exists()
    assert "bad=1" in done.stdout
    pickle.loads((zipfile.ZipFile(next((path.parents[1] / "quarantine").iterdir()))).read("archive/data.pkl"))
    assert ran.exists(), "it would have run"


def written(folder: Path, config: Config) -> Path:
    """The config as a file."""
    path = folder / "hs.toml"
    path.write_text(
        f'[data]\npath = "{config.data.path}"\n[model]\npath = "{config.model.path}"\n'
        f'[output]\npath = "{config.output.path}"\nreserve_mib = 1\nballast_mib = 1\n'
        f'[paths]\nrun = "{folder}/run"\nstate = "{folder}/state"\nlog = "{folder}/log"\n'
    )
    return path


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_others_may_at_most_read_what_we_write(tmp_path: Path, umask: int) -> None:
    config = config_for(tmp_path, lines(2))
    store = ready(config)
    extract(store, tmp_path)
    store.close()
    run = tmp_path / "run"
    run.mkdir()
    endpoint.write(str(run), endpoint.Endpoint("l", 1, 2, "b", "::1", 30000, "r", "plugin", "f", (), "/l"))
    ProofFiles(str(run)).answer(m.Proof("i", True), [])
    History.open(tmp_path / "state").append(budget.Reset(m.Now(1.0, 2.0, "b")))
    files = [p for top in ("volume", "run", "state") for p in (tmp_path / top).rglob("*") if p.is_file()]
    assert {p.name for p in files} >= {"data_0.ckpt", "manifest.db", "engine.json", "proof.json", "history.jsonl"}
    assert [p.name for p in files if mode(p) & (0o022 | umask)] == []
    assert {mode(p) for p in files if p.suffix == ".ckpt"} == {0o666 & ~umask}


def test_the_spool_is_closed_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    spool = Spool.open(tmp_path / "spool", EPOCH, 1 << 20)
    spool.close()
    assert mode(tmp_path / "spool") == 0o700


def test_links_planted_where_others_write_are_not_followed(tmp_path: Path) -> None:
    """The engine's account may write beside what the supervisor, who is root, reads, appends to and sweeps."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine\n")
    state, log, cache = tmp_path / "state", tmp_path / "log", tmp_path / "cache"
    for folder in (state, log, cache):
        folder.mkdir()
    for name in ("state/history.jsonl", "state/ticks.jsonl", "log/engine-hs-1.log", "cache/lock", "state/proof.json"):
        (tmp_path / name).symlink_to(victim)
    history = History(state)
    with pytest.raises(StoreError):
        history.append(budget.Reset(m.Now(1.0, 2.0, "b")))
    history.tick(Tick(scenes.busy(), budget.Past(), scenes.plan_of(scenes.busy())))
    assert probe._last_words(str(log)) == ()
    assert leftovers.find([cache], state) == []
    assert isinstance(ProofFiles(str(state)).read(), m.Unreadable)
    assert victim.read_bytes() == b"mine\n"
    (cache / "lock").unlink()
    (cache / "lock").touch()
    assert leftovers.find([cache], state) == [str(cache / "lock")]


@pytest.mark.timeout(20)
def test_a_pipe_planted_where_others_write_holds_nobody_up(tmp_path: Path) -> None:
    for name in ("engine.json", "status.json", "worker.json", "proof.json", "start.json", "history.jsonl"):
        os.mkfifo(tmp_path / name)
    run = str(tmp_path)
    assert endpoint.read(run) is None
    assert Board(run).read() is None
    assert probe.ordered_port(run) is None
    assert isinstance(ProofFiles(run).read(), m.Unreadable)
    assert "cannot be read" in str(WorkerProbe(run).read(m.Unit(m.WORKER_UNIT)))
    with pytest.raises(StoreError):
        History.peek(tmp_path)
