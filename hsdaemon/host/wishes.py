"""What people ask of a running supervisor, as files in <paths.run>/wishes: a verb makes one, the supervisor takes it
away when it is fulfilled. A wish that cannot be read asks for nothing. A reboot forgets wishes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from hsdaemon.core import model as m
from hsdaemon.core.budget import Past
from hsdaemon.errors import StoreError
from hsdaemon.machine import disk

RELOAD, RELEASE = "reload-now", "release"


class WishFiles:
    """The port WishPort, and the side of the verbs."""

    def __init__(self, run: str) -> None:
        self._folder = Path(run) / "wishes"

    def read(self) -> m.Wishes:
        return m.Wishes(reload_now=(self._folder / RELOAD).exists(), release=self._release())

    def _release(self) -> tuple[str, ...]:
        try:
            return msgspec.json.decode(disk.read_own(self._folder / RELEASE), type=tuple[str, ...])
        except (OSError, msgspec.MsgspecError, RecursionError):
            return ()

    def ask_reload(self) -> None:
        """Apply a changed argument line at once. Raises StoreError."""
        self._leave(RELOAD, b"")

    def ask_release(self, names: tuple[str, ...]) -> None:
        """Give these evicted units back. Raises StoreError."""
        self._leave(RELEASE, msgspec.json.encode(names))

    def _leave(self, name: str, content: bytes) -> None:
        try:
            self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            disk.replace(self._folder / name, content)
        except OSError as error:
            raise StoreError(f"cannot ask the supervisor: {self._folder}: {error.strerror}; run it as root") from None

    def settle(self, seen: m.Observation, past: Past) -> None:
        """Take away what is fulfilled: an engine with today's arguments, or none; units that are leased no more. One
        that cannot be taken away is looked at again each turn, and asks for what is done already."""
        if seen.wishes.reload_now and _reloaded(seen):
            self._take(RELOAD)
        if seen.wishes.release and not {lease.name for lease in past.leases} & set(seen.wishes.release):
            self._take(RELEASE)

    def _take(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()


def _reloaded(seen: m.Observation) -> bool:
    if isinstance(seen.engine, m.Unreadable):
        return False
    end = seen.engine.endpoint
    same = isinstance(end, m.Endpoint) and end.fingerprint == seen.engine.wanted
    return not seen.engine.unit.up or same
