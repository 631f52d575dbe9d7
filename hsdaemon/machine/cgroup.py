"""Control groups: which processes are really in one, and which unit or container a path belongs to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

_CONTAINER = (
    re.compile(r"(?:docker|cri-containerd|crio|libpod|podman)-([0-9a-f]{64})\.scope"),
    re.compile(r"/docker/([0-9a-f]{64})"),
    re.compile(r"/(?:lxc\.payload|lxc\.monitor|lxc)[./]([^/]+)"),
    re.compile(r"/kubepods[^/]*/.*?([0-9a-f]{64})"),
    re.compile(r"/machine\.slice/(?:machine-|systemd-nspawn@)(.+?)\.(?:scope|service)"),
)


def mount() -> Path:
    """Where the unified hierarchy is: its own mount on a hybrid host."""
    hybrid = Path("/sys/fs/cgroup/unified")
    return hybrid if hybrid.is_dir() else Path("/sys/fs/cgroup")


def path_of(pid: int, proc: Path = Path("/proc")) -> str:
    """The process's path in the unified hierarchy. Raises OSError when it is gone."""
    for line in (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::")
    return ""


def own_root(proc: Path = Path("/proc")) -> str:
    """The path of this host's own root, "" almost everywhere: a container that sees the names of the host around it has
    its systemd below one of them."""
    try:
        return path_of(1, proc).removesuffix("/init.scope").rstrip("/")
    except OSError:
        return ""


def below(root: str, path: str) -> str:
    """The path as our own systemd would write it; as it is when it is not ours."""
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def unit_of(path: str) -> str:
    """The service or scope of this host's systemd that a path belongs to, "" for none. Below it somebody else gives the
    names: units inside a container or of a user's own systemd are not the host's of the same name."""
    parts = path.strip("/").split("/")
    name = next((part for part in parts if not part.endswith(".slice")), "")
    return name if name.endswith((".service", ".scope")) and not name.startswith("user@") else ""


def container_of(path: str) -> str:
    """The id or name of the container that a path belongs to, "" for none."""
    for pattern in _CONTAINER:
        if found := pattern.search(path):
            return found[1]
    return ""


def pids(path: str, root: Path | None = None) -> tuple[int, ...]:
    """Every process below a path, ascending; () when there is no such group."""
    found: set[int] = set()
    if path.strip("/"):  # a unit without a group of its own never means all processes of the host
        for folder, _, _ in os.walk((root or mount()) / path.strip("/")):
            with contextlib.suppress(OSError):
                found.update(map(int, Path(folder, "cgroup.procs").read_text().split()))
    return tuple(sorted(found))


def signal_members(path: str, wanted: tuple[int, ...], number: int, root: Path | None = None) -> tuple[int, ...]:
    """Signal those of `wanted` that are in the group now; gives them. The pidfd comes first, so none is mistaken."""
    hit = []
    for pid in wanted:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if pid in pids(path, root):
                signal.pidfd_send_signal(fd, number)
                hit.append(pid)
        except OSError:
            continue  # it went by itself
        finally:
            os.close(fd)
    return tuple(hit)
