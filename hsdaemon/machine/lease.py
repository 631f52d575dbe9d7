"""The files of a lease: what keeps an evicted unit down, and how to give it back as it was.

A lease is two files. The undo record in the state folder is written first; the drop-in, whose condition is false as
long as it exists, keeps the unit down against sockets, timers, other units, `Restart=` and reboots. The drop-in carries
the record too, so that a lost state folder does not make an eviction permanent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from hsdaemon.machine import disk

DROP_IN = "50-hs-extract-lease.conf"
UNDO = "# undo: "


class Record(Struct, frozen=True):
    """What a unit was before us. `links`: every (link, target) below the unit folder that enables or names it."""

    name: str
    file_state: str
    was_up: bool
    links: tuple[tuple[str, str], ...] = ()


class Leases:
    """Leases under one unit folder. Methods raise OSError and the errors of machine.disk."""

    def __init__(self, units: Path, state: Path) -> None:
        self._units = units
        self._records = state / "leases"

    def drop_in(self, name: str) -> Path:
        return self._units / f"{name}.d" / DROP_IN

    def held(self, name: str) -> bool:
        return self.drop_in(name).is_file()

    def names(self) -> tuple[str, ...]:
        """Every unit with a lease or an undo record, by name."""
        drop_ins = (path.parent.name.removesuffix(".d") for path in self._units.glob(f"*.d/{DROP_IN}"))
        return tuple(sorted({*drop_ins, *(path.stem for path in self._records.glob("*.json"))}))

    def record(self, name: str) -> Record | None:
        """The undo record, from its file or, where that is lost or damaged, from the drop-in."""
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            data = disk.read(self._record(name)) if self._own() else None
            if data is not None:
                return msgspec.json.decode(data, type=Record)
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            for line in (disk.read(self.drop_in(name)) or b"").decode(errors="replace").splitlines():
                if line.startswith(UNDO):
                    return msgspec.json.decode(line.removeprefix(UNDO), type=Record)
        return None

    def write(self, name: str, file_state: str, was_up: bool) -> None:
        """Both files, synced. A crash after the first leaves a record of a unit that nothing has happened to."""
        record = self.record(name) or Record(name, file_state, was_up, tuple(self._links(name)))
        data = msgspec.json.encode(record)
        disk.make_folder(self._records.parent)
        disk.make_folder(self._records)
        disk.replace(self._record(name), data, 0o644)
        path = self.drop_in(name)
        disk.make_folder(path.parent)
        disk.replace(path, self._text(path, data), 0o644)

    def lift(self, name: str) -> None:
        """Remove the drop-in, synced. A crash after it leaves the record, from which the release goes on."""
        path = self.drop_in(name)
        if path.exists():
            path.unlink()
            disk.sync_folder(path.parent)
        with contextlib.suppress(OSError):  # somebody else's drop-ins stay
            path.parent.rmdir()

    def remove_links(self, name: str) -> None:
        """Take the unit out of the boot: every recorded link that enables it goes, synced. A crash leaves some, which
        the next try removes."""
        record = self.record(name)
        for link, _ in record.links if record else ():
            path = Path(link)
            if path.is_symlink() and path != self._units / name:  # the unit itself may be a link
                path.unlink()
                disk.sync_folder(path.parent)

    def restore_links(self, record: Record) -> None:
        """Every link that was there before us and is missing now, synced."""
        for link, target in record.links:
            path = Path(link)
            if not os.path.lexists(path):
                disk.make_folder(path.parent)
                path.symlink_to(target)
                disk.sync_folder(path.parent)

    def forget(self, name: str) -> None:
        """The unit is as it was: the record goes last."""
        self._record(name).unlink(missing_ok=True)
        disk.sync_folder(self._records)

    def _own(self) -> bool:
        """Whether the records can be ours: whoever owns their folder could name links that root then makes."""
        try:
            return self._records.lstat().st_uid == os.geteuid()
        except FileNotFoundError:
            return False

    def _record(self, name: str) -> Path:
        return self._records / f"{name}.json"

    def _links(self, name: str) -> Iterator[tuple[str, str]]:
        """Links in the unit folder and its .wants, .requires, .upholds: what a disable removes."""
        for path in sorted([*self._units.glob("*"), *self._units.glob("*.*/*")]):
            with contextlib.suppress(OSError):
                target = path.readlink()
                if name in (path.name, target.name):
                    yield str(path), str(target)

    def _text(self, path: Path, record: bytes) -> bytes:
        shown = str(path).replace("%", "%%")  # a unit's name may hold what systemd would expand
        lines = (
            "# hs-extract keeps this unit down because it held GPUs that are needed. Give it back with",
            "#   hs-extract release",
            UNDO + record.decode(),
            "[Unit]",
            f"ConditionPathExists=!{shown}",
        )
        return "\n".join(lines).encode() + b"\n"
