"""The verbs about the supervisor, by hand and without systemd: what they see, what they say, what they leave alone."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from outputs import config_for, lines
from sdbox import until

from hsdaemon.cli import main, run
from hsdaemon.config import Config
from hsdaemon.core import model as m
from hsdaemon.engine import leftovers
from hsdaemon.host import build, solo
from hsdaemon.host.board import Board
from hsdaemon.host.wishes import WishFiles
from hsdaemon.machine.notify import Notify
from hsdaemon.machine.process_units import Processes

ROOT = Path(__file__).parents[1]
TEXT = '[engine]\ndevice = "cpu"\nport = 31000\n[supervisor]\ntick_s = 1\n'


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A job whose configuration is the default one, on a host without systemd."""
    folder = tmp_path / "a job"  # with a space
    folder.mkdir()
    config = config_for(folder, lines(4), text=TEXT)
    volume = folder / "volume"
    (folder / "c.toml").write_text(
        f'[data]\npath = "{config.data.path}"\n[model]\npath = "{config.model.path}"\n'
        f'[output]\npath = "{volume / "states"}"\nreserve_mib = 1\nballast_mib = 1\n'
        f'[paths]\nrun = "{folder}/run"\nstate = "{folder}/state"\nlog = "{folder}/log"\n'
        f'[spool]\npath = "{folder}/spool"\n{TEXT}'
    )
    monkeypatch.setenv("HS_EXTRACT_CONFIG", str(folder / "c.toml"))
    monkeypatch.setattr(build, "SYSTEMD", tmp_path / "no-systemd")
    return config


@contextmanager
def supervisor(*words: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """`hs-extract run` as a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    process = subprocess.Popen(
        [sys.executable, "-m", "hsdaemon", "run", *(words or ("--foreground",))],
        env=env, stdout=-1, stderr=-1, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def unmarked(config: Config) -> None:
    """It waits for its volume, and starts nothing."""
    Path(config.output.path).parent.joinpath(".hs-extract-volume").unlink()


def waits(config: Config, reason: str = "volume-unmarked") -> None:
    until(lambda: (Board(config.paths.run).read() or {}).get("reason") == reason, 20)


# --- nobody is there --------------------------------------------------------------------------------------------------


def test_without_a_supervisor_each_verb_says_so(job: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reload"]) == 75
    assert main(["reset"]) == 0
    Path(job.paths.state).mkdir()
    assert main(["reset"]) == 0
    assert main(["stop"]) == 0
    assert main(["release"]) == 0
    assert main(["release", "vllm.service"]) == 1
    out, err = capsys.readouterr()
    assert "no supervisor runs" in err
    assert "nothing to clear" in out
    assert "the next one does it" in out
    assert "stop: ok" in out
    assert "no lease on vllm.service; leased: nothing" in out


def test_plan_shows_the_next_act_and_does_nothing(
    job: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leftovers, "find", lambda _folders: [])  # of others on this machine
    before = sorted(path for path in Path(job.paths.run).parent.rglob("*"))
    assert main(["plan"]) == 0
    out = capsys.readouterr().out
    assert "would do: StartEngine(after='', port=31000" in out
    assert sorted(path for path in Path(job.paths.run).parent.rglob("*")) == before
    assert main(["run", "--dry-run", "--foreground"]) == 0
    assert capsys.readouterr().out == out


def test_run_by_hand_wants_to_be_told_that_there_is_no_systemd(job: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 70
    assert "--foreground" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[engine", "[engine]\ntpp = 1\n", "\xff"])
def test_by_hand_a_broken_configuration_ends_it_at_once(job: Config, text: str) -> None:
    Path(os.environ["HS_EXTRACT_CONFIG"]).write_text(text, encoding="latin-1")
    for verb in (["run", "--foreground"], ["plan"], ["stop"], ["reload"], ["release"], ["reset"], ["assess"]):
        assert main(verb) == 78


# --- one is there -----------------------------------------------------------------------------------------------------


def test_a_supervisor_by_hand_is_reloaded_reset_and_stopped(job: Config, capsys: pytest.CaptureFixture[str]) -> None:
    unmarked(job)
    file = Path(os.environ["HS_EXTRACT_CONFIG"])
    with supervisor() as process:
        waits(job)
        assert solo.holder(job.paths.run) == process.pid
        assert main(["run", "--foreground"]) == 75, "one is enough"
        assert f"pid {process.pid}" in capsys.readouterr().err
        whole = file.read_text()
        file.write_text(whole.replace("tick_s = 1", "tick_s = 2"))
        assert main(["reload"]) == 0
        file.write_text("[broken")
        process.send_signal(signal.SIGHUP)  # what `reload` would have refused
        time.sleep(1.5)
        file.write_text(whole)
        assert main(["reset"]) == 0
        until(lambda: not (Path(job.paths.state) / "reset").exists(), 10)
        assert main(["stop"]) == 0
        said = process.communicate(timeout=10)[1]
    assert "read again" in said
    assert "the former one stays" in said
    assert "ends; engine and worker go on" in said
    assert "Traceback" not in said
    assert process.returncode == 0


def test_sy_13_stop_ends_what_a_supervisor_by_hand_left_also_where_systemd_is_the_init(
    job: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its engine and worker are processes: systemd knows nothing of them."""
    monkeypatch.setattr(build, "SYSTEMD", tmp_path)
    commands = dict.fromkeys(build.VERBS, ("/bin/sleep", "60"))
    here = Processes(commands, Path(job.paths.run))
    Path(job.paths.run).mkdir()
    assert not build.foreground(job)
    assert here.start(m.ENGINE_UNIT, "").result == "done"
    assert here.start(m.WORKER_UNIT, "").result == "done"
    assert build.foreground(job)
    assert main(["stop"]) == 0
    units = here.read((m.ENGINE_UNIT, m.WORKER_UNIT))
    assert isinstance(units, tuple)
    assert all(unit.gone for unit in units)
    assert not build.foreground(job)
    assert "stopping hs-worker.service\nstopping hs-sglang.service" in capsys.readouterr().out


def test_a_port_of_the_metrics_that_is_taken_costs_the_metrics_alone(job: Config) -> None:
    import socket

    unmarked(job)
    file = Path(os.environ["HS_EXTRACT_CONFIG"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(file.read_text().replace("tick_s = 1", f"tick_s = 1\nmetrics_port = {port}"))
        with supervisor() as process:
            waits(job)
            process.terminate()
            said = process.communicate(timeout=10)[1]
    assert "the metrics cannot be served" in said
    assert process.returncode == 0


def test_metrics_are_served_on_loopback(job: Config) -> None:
    import socket
    import urllib.request

    unmarked(job)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = Path(os.environ["HS_EXTRACT_CONFIG"])
    file.write_text(file.read_text().replace("tick_s = 1", f"tick_s = 1\nmetrics_port = {port}"))
    with supervisor():
        waits(job)
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert 'hs_rung{rung="volume_ready"} 1.0' in page
    assert 'hs_ticks_total{reason="volume-unmarked",severity="hold"}' in page


@pytest.mark.root
def test_a_supervisor_of_another_user_is_not_signalled_and_that_is_said(
    job: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_pid: int, _number: int) -> None:
        raise PermissionError

    with solo.only_one(job.paths.run):
        monkeypatch.setattr(os, "kill", refused)
        for verb in ("reload", "stop", "reset"):
            Path(job.paths.state).mkdir(exist_ok=True)
            assert main([verb]) == 70
            assert "run this as root" in capsys.readouterr().err


def test_whoever_sees_the_wish_to_reload_now_knows_of_the_new_configuration(
    job: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a turn that began with the old one would find nothing to do and take the wish as fulfilled."""
    from fakes import ports
    from world import CONFIG, World

    from hsdaemon.observe import observe

    order: list[str] = []

    def note(what: str) -> int:
        order.append(what)
        return 1

    monkeypatch.setattr(solo, "holder", lambda _run: 1)
    monkeypatch.setattr(solo, "tell", lambda _run, _number: note("told"))
    monkeypatch.setattr(WishFiles, "ask_reload", lambda _self: note("wish"))
    assert main(["reload", "--now"]) == 0
    assert order == ["told", "wish", "told"]
    hands = ports(World(1))
    wishes, engine = hands.wishes.read, hands.engine.read
    hands.wishes.read = lambda: wishes() if note("sees wishes") else m.Wishes()  # type: ignore[method-assign]
    hands.engine.read = lambda unit: engine(unit) if note("sees engine") else m.Engine(unit)  # type: ignore[method-assign]
    observe(hands, CONFIG)
    assert order[3:] == ["sees wishes", "sees engine"]


def test_a_signal_in_the_middle_of_a_turn_is_the_next_turns(job: Config) -> None:
    """A port reads the configuration, too: what it took would leave a wish to wait for a whole tick."""
    from hsdaemon.host.clock import HostClock

    clock = HostClock()
    current = run.Current(argparse.Namespace(config=os.environ["HS_EXTRACT_CONFIG"]), job, clock)
    with clock.listening(signal.SIGHUP):
        signal.raise_signal(signal.SIGHUP)
        assert current.now() == job
        began = time.monotonic()
        clock.wait(30)
        assert time.monotonic() - began < 20
        assert signal.SIGHUP in clock.asked
        assert current.get() is current.now()
        assert clock.asked == []


def test_a_wish_that_cannot_be_taken_away_does_not_end_the_supervisor(
    job: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scenes import rest

    wishes = WishFiles(job.paths.run)
    Path(job.paths.run).mkdir()
    wishes.ask_reload()
    seen = rest(wishes=wishes.read())
    assert seen.wishes.reload_now

    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    from hsdaemon.core.budget import Past

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        wishes.settle(seen, Past())
    wishes.settle(seen, Past())
    assert not wishes.read().reload_now


# --- under systemd, without one ---------------------------------------------------------------------------------------


def test_under_systemd_a_start_that_fails_waits_says_why_once_and_goes_on_by_itself(
    job: Config, tmp_path: Path
) -> None:
    import socket

    unmarked(job)
    file = Path(os.environ["HS_EXTRACT_CONFIG"])
    whole = file.read_text()
    file.write_text(whole.replace("tick_s", "tik_s"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(20)

        def until_heard(words: str) -> None:
            while words not in heard.recv(8192).decode():
                pass

        with supervisor("--foreground", NOTIFY_SOCKET=str(tmp_path / "notify")) as process:
            until_heard("READY=1")
            until_heard("tik_s: no such setting")
            until_heard("WATCHDOG=1")
            until_heard("WATCHDOG=1")
            file.write_text(whole)
            waits(job)
            process.terminate()
            said = process.communicate(timeout=10)[1]
    assert said.count("cannot begin") == 1
    assert process.returncode == 0


def test_a_supervisor_that_waits_to_begin_is_in_status_and_takes_no_other_ones_place(
    job: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import json
    import socket

    unmarked(job)
    Path(job.paths.run).mkdir()
    Path(job.paths.state).write_text("a file where the folder should be")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        with supervisor("--foreground", NOTIFY_SOCKET=str(tmp_path / "notify")) as process:
            waits(job, "not-started")
            assert main(["status", "--json"]) == 0
            seen = json.loads(capsys.readouterr().out)["supervisor"]
            assert (seen["pid"], "paths.state" in seen["board"]["sentence"]) == (process.pid, True)
            assert main(["status"]) == 0
            assert f"supervisor  pid {process.pid}, looked" in capsys.readouterr().out
            Path(job.paths.state).unlink()
            waits(job)
        with solo.only_one(job.paths.run), supervisor("--foreground", NOTIFY_SOCKET=str(tmp_path / "notify")):
            time.sleep(3)
            assert (Board(job.paths.run).read() or {})["reason"] == "volume-unmarked"


def test_a_state_folder_without_a_parent_is_one_clear_line(job: Config, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(os.environ["HS_EXTRACT_CONFIG"])
    file.write_text(file.read_text().replace("/state", "/not/there/state"))
    assert main(["run", "--foreground"]) == 73
    assert "see to paths.state" in capsys.readouterr().err


def test_notify_without_systemd_is_heard_by_nobody() -> None:
    assert not Notify({}).heard


def test_a_kept_tick_is_decided_again(job: Config, capsys: pytest.CaptureFixture[str]) -> None:
    unmarked(job)
    with supervisor():
        waits(job)
    ticks = Path(job.paths.state) / "ticks.jsonl"
    assert main(["plan", "--from", str(ticks)]) == 0
    assert "does not carry our marker" in capsys.readouterr().out
    assert main(["plan", "--from", str(ticks), "--tick", "99"]) == 65
    assert main(["plan", "--from", str(Path(job.data.path))]) == 65
    assert main(["plan", "--from", str(ticks) + ".none"]) == 65
    assert capsys.readouterr().err.count("cannot read a tick") == 3


def test_a_history_that_cannot_be_read_costs_people_lines_and_nothing_else(
    job: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hsdaemon.errors import StoreError
    from hsdaemon.history import History
    from hsdaemon.machine import disk

    record = History(Path(job.paths.state))

    def broken(*_: object) -> list[bytes]:
        raise StoreError("cannot read: Input/output error; check the volume")

    monkeypatch.setattr(disk, "read_lines", broken)
    assert record.events() == []


def test_whoever_looks_at_the_lock_keeps_no_supervisor_from_it(job: Config) -> None:
    import threading

    with solo.only_one(job.paths.run):
        pass
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            solo.holder(job.paths.run)

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(20):
            with solo.only_one(job.paths.run):
                assert solo.holder(job.paths.run) == os.getpid()
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()


@pytest.mark.root
def test_init_gives_what_it_makes_to_the_account_of_the_worker_and_names_what_stays(
    job: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pwd

    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    account = pwd.struct_passwd(("hs-extract", "x", 54321, 54322, "", "/", "/bin/false"))
    monkeypatch.setattr(pwd, "getpwnam", lambda _name: account)
    output = Path(job.output.path)
    assert main(["init"]) == 0
    assert [path.stat().st_uid for path in (output, *output.iterdir())] == [54321] * (1 + len(list(output.iterdir())))
    assert "chown" not in capsys.readouterr().out
    (output / "rows_0-2000").mkdir()
    (output / "lost+found").mkdir()
    assert main(["init"]) == 0
    said = capsys.readouterr().out
    assert f"chown -R hs-extract: '{output}'" in said
    assert "rows_0-2000" in said
    assert (output / "rows_0-2000").stat().st_uid == 0, "what was there before is not taken over unasked"
