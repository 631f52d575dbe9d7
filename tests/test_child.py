"""A probe child: answers, deadlines, deaths, and a process that nothing can kill."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hsdaemon.machine.child import Child, NoAnswer


def serve(question: Any) -> Any:
    match question:
        case "pid":
            return os.getpid()
        case "fds":
            return len(os.listdir("/proc/self/fd"))
        case "litter":
            return [litter() for _ in range(200)][-1]
        case "env":
            return os.environ.get("NOTIFY_SOCKET")
        case "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "bug":
            raise RuntimeError("a bug")
        case ("sleep", seconds):
            time.sleep(seconds)
        case ("leave", path):
            signal.signal(signal.SIGALRM, lambda *_: leave(Path(path)))
            signal.setitimer(signal.ITIMER_REAL, 0.3)  # the answer goes first
        case ("wait", path):
            while not Path(path).exists():
                time.sleep(0.01)
        case ("write", path):
            Path(path).write_text("x")
    return question


def litter() -> int:
    """Make a megabyte of garbage that only a collector finds, and some objects to wake one; gives our kilobytes."""
    cycle: list[Any] = [bytearray(1 << 20)]
    cycle.append(cycle)
    [[] for _ in range(1000)]
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10


def leave(path: Path) -> None:
    """Close the line and hang in the kernel: as a process does on its way out when a driver keeps it."""
    os.closerange(3, 100)
    path.write_text("x")


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child("test", serve)
    yield child
    child.close()


def test_it_answers_from_one_process_that_is_kept(child: Child) -> None:
    first = child.ask("pid", 5)
    assert first == child.ask("pid", 5)
    assert first != os.getpid()


def test_it_holds_none_of_our_descriptors_and_no_notify_socket(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    with Path("/dev/null").open():
        assert child.ask("fds", 5) == 5  # 0, 1, 2, the line, the listing itself
    assert child.ask("env", 5) is None


def test_it_collects_its_own_garbage(child: Child) -> None:
    before = child.ask("litter", 60)
    assert child.ask("litter", 60) < before + (64 << 10)


def test_a_hang_ends_at_the_deadline_and_the_next_question_has_a_new_process(child: Child) -> None:
    first = child.ask("pid", 5)
    answer = child.ask(("sleep", 60), 0.1)
    assert isinstance(answer, NoAnswer)
    assert answer.kind == "hung"
    assert child.ask("pid", 5) != first


def test_a_late_answer_is_waited_for_as_long_as_patience_lasts(child: Child) -> None:
    first = child.ask("pid", 5)
    assert [child.ask(("sleep", 1), 0.4, 30) for _ in range(2)] == [
        NoAnswer("hung", "test did not answer within 0.4 s"), NoAnswer("hung", "test did not answer within 1 s"),
    ]  # fmt: skip
    assert child.ask("pid", 30, 30) == ("sleep", 1)
    assert child.ask("pid", 5) == first
    assert [getattr(child.ask(("sleep", 60), 0.2, 0.3), "kind", "") for _ in range(2)] == ["hung", "hung"]
    assert child.ask("pid", 5) != first


@pytest.mark.parametrize(("question", "words"), [("die", "signal 11"), ("bug", "exit code 1")])
def test_a_death_is_a_value_with_its_cause(child: Child, question: str, words: str) -> None:
    answer = child.ask(question, 5)
    assert isinstance(answer, NoAnswer)
    assert answer.kind == "died"
    assert words in answer.detail
    assert child.ask("again", 5) == "again"


def test_one_killed_between_two_questions_is_replaced(child: Child) -> None:
    os.kill(child.ask("pid", 5), signal.SIGKILL)
    assert child.ask("still there", 5) in (
        "still there",
        NoAnswer("died", "test probe ended without an answer (signal 9)"),
    )
    assert child.ask("still there", 5) == "still there"


def test_two_children_think_at_once(tmp_path: Path) -> None:
    both = [Child("a", serve), Child("b", serve)]
    questions = (("wait", str(tmp_path / "x")), ("write", str(tmp_path / "x")))  # the first waits for the second
    assert [c.begin(q) for c, q in zip(both, questions, strict=True)] == [None, None]
    assert [c.end(30) for c in both] == list(questions)
    for child in both:
        child.close()


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A frozen file system on a loop device; thawed and unmounted at the end."""
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["truncate", "-s", "16M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    subprocess.run(["fsfreeze", "-f", mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["fsfreeze", "-u", mount], check=False, capture_output=True)
        time.sleep(0.2)
        subprocess.run(["umount", mount], check=True)


@pytest.mark.root
def test_gp_07_at_most_one_stuck_child_and_probing_resumes_once_it_is_gone(child: Child, frozen: Path) -> None:
    stuck = child.ask("pid", 5)
    first = child.ask(("write", str(frozen / "x")), 0.1)
    second = child.ask("pid", 5)
    third = child.ask("pid", 5)
    assert [a.kind for a in (first, second, third)] == ["hung", "stuck", "stuck"]
    assert f"probe {stuck} " in second.detail
    subprocess.run(["fsfreeze", "-u", frozen], check=True)
    end = time.monotonic() + 10
    while isinstance(answer := child.ask("pid", 5), NoAnswer):
        assert time.monotonic() < end
    assert answer != stuck


@pytest.mark.root
def test_gp_07_a_child_that_has_left_and_cannot_be_killed_is_not_doubled(child: Child, frozen: Path) -> None:
    stuck = child.ask("pid", 5)
    child.ask(("leave", str(frozen / "x")), 5)
    time.sleep(1)
    assert [child.ask("pid", 5).kind for _ in range(2)] == ["stuck", "stuck"]
    assert f"probe {stuck} " in child.ask("pid", 5).detail
    subprocess.run(["fsfreeze", "-u", frozen], check=True)
    end = time.monotonic() + 10
    while isinstance(child.ask("pid", 5), NoAnswer):
        assert time.monotonic() < end


def test_no_process_to_be_had_is_no_answer(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", none_left)
        assert child.ask("pid", 5).kind == "died"
    assert child.ask("again", 5) == "again"
