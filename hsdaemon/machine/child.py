"""A forked process that may hang in our place.

What can block in the kernel for ever (NVML, statvfs on a dead mount, a write to a frozen disk) is asked of a child.
When it misses its deadline it is killed; when not even that helps, it is left alone and no second one is made beside
it: a probe leaves at most one stuck process behind, however long the trouble lasts.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal

REAP_S = 0.5  # how long a killed child may take to go; in D state it never does


@dataclass(frozen=True)
class NoAnswer:
    """Why a child said nothing, in words for the operator."""

    kind: Literal["hung", "stuck", "died"]
    detail: str


class Child:
    """Answers questions by calling `serve` in a process of its own, made at the first question and kept."""

    def __init__(self, name: str, serve: Callable[[Any], Any]) -> None:
        self.name = name
        self._serve = serve
        self._pid = 0
        self._line: Connection | None = None
        self._asked_at = 0.0
        self._stuck_since = 0.0
        self._late = False  # a question is out whose answer is still waited for

    def ask(self, question: object, deadline_s: float, patience_s: float = 0.0) -> Any:
        """The answer, or a NoAnswer after at most `deadline_s` (and a moment to reap). patience_s: the next calls wait
        for an answer that is late, until so long after the question the child is given up."""
        return self.begin(question) or self.end(deadline_s, patience_s)

    def begin(self, question: object) -> NoAnswer | None:
        """Put a question, so that several children think at once. None: call end()."""
        if self._late:
            return None
        for last in (False, True):  # it may have died since the last answer: one new child, one more try
            if self._stuck_since and not self._reaped():
                age = time.monotonic() - self._stuck_since
                return NoAnswer(
                    "stuck", f"{self.name} probe {self._pid} sits in the kernel for {age:.0f} s, unkillable"
                )
            self._stuck_since = 0.0
            try:
                self._open().send(question)
                break
            except OSError as error:  # of a fork, too: no memory, no process left to be had
                self.close()
                if last:
                    return NoAnswer("died", f"{self.name} probe cannot be asked: {error}")
        self._asked_at = time.monotonic()
        return None

    def end(self, deadline_s: float, patience_s: float = 0.0) -> Any:
        """The answer to begin(), or a NoAnswer once `deadline_s` have passed since."""
        line = self._line
        assert line is not None, "end() without begin()"
        try:
            if line.poll(deadline_s if self._late else max(0.0, self._asked_at + deadline_s - time.monotonic())):
                self._late = False
                return line.recv()
        except (EOFError, OSError):
            status = self.close()
            return NoAnswer("died", f"{self.name} probe ended without an answer ({_words(status)})")
        age = time.monotonic() - self._asked_at
        waited = f"{age:.0f}" if self._late else f"{deadline_s:g}"
        self._late = age < patience_s
        if not self._late:
            self.close()
        return NoAnswer("hung", f"{self.name} did not answer within {waited} s")

    def close(self) -> int | None:
        """End the child. Gives its exit code (negative: signal), None when it cannot be killed."""
        self._late = False
        if self._line is not None:
            self._line.close()
            self._line = None
        if not self._pid:
            return 0
        os.kill(self._pid, signal.SIGKILL)  # ours and not reaped: the number cannot be another's
        pidfd = os.pidfd_open(self._pid)
        try:
            status = _reap(pidfd, self._pid)
        finally:
            os.close(pidfd)
        if status is None:
            self._stuck_since = time.monotonic()
            return None
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def _reaped(self) -> bool:
        """Has the stuck child gone by now?"""
        if os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            return False
        self._pid = 0
        return True

    def _open(self) -> Connection:
        if self._line is None:
            ours, theirs = Pipe()
            self._pid = os.fork()
            if self._pid == 0:
                _live(theirs, self._serve)
            theirs.close()
            self._line = ours
        return self._line


def _reap(pidfd: int, pid: int) -> int | None:
    """The wait status of `pid`, None when it does not go within REAP_S."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(REAP_S * 1000):
        return None
    return os.waitpid(pid, 0)[1]


def _words(status: int | None) -> str:
    if status is None:
        return "and cannot be killed"
    return f"signal {-status}" if status < 0 else f"exit code {status}"


def _live(line: Connection, serve: Callable[[Any], Any]) -> None:
    """The child: answer until the parent goes. Never returns."""
    code = 1
    try:
        _forget_the_parent(line.fileno())
        while True:
            question = line.recv()
            line.send(serve(question))
    except EOFError:
        code = 0  # the parent closed its end, or died
    finally:
        try:
            if code:  # a bug in `serve`: said on stderr, seen by the parent as "died"
                os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)  # whatever happens, never back into the parent's code


def _forget_the_parent(keep: int) -> None:
    """No descriptor, handler or finalizer of the parent: a stuck child must not hold its lock, bus or terminal."""
    gc.freeze()  # what is the parent's is never collected here; what the child makes is: it lives for weeks
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.pop("NOTIFY_SOCKET", None)  # it must never speak for the service
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, keep):
            with contextlib.suppress(OSError):  # the listing's own descriptor is gone already
                os.close(int(name))
