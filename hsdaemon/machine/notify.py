"""sd_notify: what a service tells systemd. Without NOTIFY_SOCKET it tells nobody.

The variables are taken out of the environment when the adapter is made, so that no child speaks for the service.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

SEND_S = 1.0


class Notify:
    """The Notifier of this process. watchdog_s: how often systemd wants to hear of us; None: never."""

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        env = os.environ if environ is None else environ
        self._address = env.pop("NOTIFY_SOCKET", "")
        usec, pid = env.pop("WATCHDOG_USEC", ""), env.pop("WATCHDOG_PID", "")
        ours = not pid or pid == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isdecimal() and ours else None

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._address)

    def ready(self) -> None:
        self._send("READY=1")

    def status(self, sentence: str) -> None:
        self._send("STATUS=" + sentence.replace("\n", " "))

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def patience(self, seconds: float) -> None:
        """Have the watchdog wait at least so long, where the unit's own would bite sooner."""
        if self.watchdog_s is not None and self.watchdog_s < seconds:
            self._send(f"WATCHDOG_USEC={int(seconds * 1e6)}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def extend(self, seconds: float) -> None:
        """Starting or stopping takes this much longer."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _send(self, text: str) -> None:
        """systemd that does not listen is no reason to stop."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.settimeout(SEND_S)
            line.sendto(text.encode(errors="replace"), address)  # names of files are any bytes
