"""What makes a process number unique: the boot it is of, and when the process started."""

from __future__ import annotations

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The id of this boot of the host."""
    return BOOT_ID.read_text(encoding="ascii").strip()


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(fields[18])
