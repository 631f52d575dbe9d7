"""The command line as a person meets it: help that teaches, exit codes, errors in one line, completion."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hsdaemon import cli, errors
from hsdaemon.cli import settings
from hsdaemon.errors import ConfigError

ROOT = Path(__file__).parent.parent
HS = [sys.executable, "-m", "hsdaemon"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*HS, *words], capture_output=True, text=True, env=env, timeout=60, cwd="/")


def all_classes(base: type[errors.HsError]) -> list[type[errors.HsError]]:
    return [base, *(c for sub in base.__subclasses__() for c in all_classes(sub))]


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [a for a in parser._actions if not isinstance(a, argparse._HelpAction | argparse._SubParsersAction)]


def test_every_exit_code_of_an_error_has_words() -> None:
    assert {c.exit_code for c in all_classes(errors.HsError)} <= cli.EXITS.keys()


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_teaches(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    text = capsys.readouterr().out
    assert "exit codes:" in text
    module = cli.verb_module(verb)
    assert module.__doc__ is not None
    assert len(module.__doc__.split()) >= 15, "a verb's help says what it does, when to use it and what it leaves"
    assert module.__doc__.splitlines()[0] in text


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_option_has_help(verb: str) -> None:
    parser = argparse.ArgumentParser()
    cli.verb_module(verb).add(parser)
    assert [a.dest for a in options(parser) if not a.help and not a.choices] == []


def test_every_verb_is_listed_with_its_line() -> None:
    done = run("--help")
    assert done.returncode == 0
    for verb, text in cli.VERBS.items():
        assert verb in done.stdout
        assert text.split()[0] in done.stdout


def test_no_verb_is_a_usage_error_that_helps() -> None:
    done = run()
    assert done.returncode == errors.EXIT_USAGE
    assert "start here" in done.stdout


def test_an_unknown_verb_is_a_usage_error() -> None:
    done = run("extrcat")
    assert done.returncode == errors.EXIT_USAGE
    assert "extrcat" in done.stderr


def test_the_page_of_exit_codes_is_complete() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text().splitlines()
    ours = {f"| {code} | {text} |" for code, text in cli.EXITS.items()}
    for verb in cli.VERBS:
        ours |= {f"| {verb} | {code} | {text} |" for code, text in getattr(cli.verb_module(verb), "EXITS", {}).items()}
    rows = {line for line in page if line.startswith("| ") and "---" not in line and "code |" not in line}
    assert rows == ours


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_verb(shell: str) -> None:
    done = run("completion", shell)
    assert done.returncode == 0
    for verb in cli.VERBS:
        assert verb in done.stdout


def test_bash_takes_the_completion(tmp_path: Path) -> None:
    script = run("completion", "bash").stdout
    ask = 'COMP_WORDS=(hs-extract compl); COMP_CWORD=1; _shtab_hs_extract 2>/dev/null; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=20)
    assert done.stdout.split() == ["completion"]


def test_a_reader_that_leaves_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*HS, "completion", "bash"], stdout=write, stderr=subprocess.PIPE, env=env, timeout=60)
    os.close(write)
    assert done.returncode == cli.EXIT_PIPE
    assert done.stderr == b""


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_args: argparse.Namespace) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(cli.verb_module("completion"), "run", interrupted)
    assert cli.main(["completion", "bash"]) == cli.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "hs-extract: interrupted\n"


@pytest.mark.parametrize("verb", ["extract", "prove", "verify"])
def test_a_bug_is_a_traceback_and_no_finding(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 would say that every row is settled, that the engine must not be trusted, that a file is damaged."""

    def broken(_args: argparse.Namespace) -> int:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(cli.verb_module(verb), "run", broken)
    assert cli.main([verb]) == cli.EXIT_FAULT
    assert "nobody thought of this" in capsys.readouterr().err


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    settings.add_config(parser)
    return parser.parse_args(words)


def test_the_config_is_named_by_option_then_variable_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.VARIABLE, raising=False)
    assert parsed().config == settings.DEFAULT_FILE
    monkeypatch.setenv(settings.VARIABLE, "/x.toml")
    assert parsed().config == "/x.toml"
    assert parsed("-c", "/y.toml").config == "/y.toml"


def test_a_missing_config_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; write one with: hs-extract init"):
        settings.load(parsed("-c", str(tmp_path / "none.toml")))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[", b""], ids=["not UTF-8", "not TOML", "empty"])
def test_a_broken_config_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hs.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        settings.load(parsed("-c", str(path)))
    assert str(caught.value).startswith(f"cannot use {path}: ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_as_config_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory"):
        settings.load(parsed("-c", str(tmp_path)))
