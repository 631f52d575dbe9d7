"""Holders: NVML's pids and open descriptors against a made-up /proc, and signals against real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sdbox import Box, until

from hsdaemon.core.model import Claim, Gpu, Holder, Unreadable
from hsdaemon.machine import cgroup
from hsdaemon.machine.notify import Notify
from hsdaemon.machine.procfs import Procfs, read_process

DOCKER = "a1" * 32


class Proc:
    """A made-up /proc."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "self/ns").mkdir(parents=True)
        (folder / "self/ns/pid").symlink_to("pid:[1]")

    def add(
        self, pid: int, group: str = "/system.slice/vllm.service", opens: tuple[str, ...] = (),
        namespace: str = "pid:[1]", pending: str = "0", state: str = "S", parent: int = 1,
    ) -> None:  # fmt: skip
        at = self.folder / str(pid)
        (at / "fd").mkdir(parents=True)
        (at / "ns").mkdir()
        (at / "stat").write_text(f"{pid} (a (b) c) {state} {parent} " + "0 " * 17 + f"{pid * 10} 0 0\n")
        (at / "status").write_text(f"Name:\tx\nSigPnd:\t{pending}\nShdPnd:\t0\n")
        (at / "cgroup").write_text(f"4:memory:/\n0::{group}\n")
        (at / "exe").symlink_to("/usr/bin/python3.11")
        (at / "ns/pid").symlink_to(namespace)
        for i, name in enumerate(opens):
            (at / f"fd/{i}").symlink_to(name)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


def gpu(index: int, *claims: Claim, used: int = 4) -> Gpu:
    return Gpu(f"GPU-{index}", index, used_mib=used, claims=claims, minor=index)


def holders(proc: Proc, *gpus: Gpu) -> tuple[Holder, ...]:
    seen = Procfs(proc.folder).holders(gpus)
    assert not isinstance(seen, Unreadable)
    return seen


def test_a_claim_is_attributed_to_process_unit_and_executable(proc: Proc) -> None:
    proc.add(40, opens=("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"))
    (held,) = holders(proc, gpu(0, Claim(40, "compute", 100)), gpu(1, Claim(40, "compute", 50)))
    assert held == Holder(
        "compute", 40, 400, ("GPU-0", "GPU-1"), 150, "vllm.service", "/system.slice/vllm.service",
        "/usr/bin/python3.11", "", "S", False,
    )  # fmt: skip


def test_ev_08_eight_gpus_with_eight_holders_give_eight_identities(proc: Proc) -> None:
    for i in range(8):
        proc.add(100 + i, f"/system.slice/h{i}.service", (f"/dev/nvidia{i}",))
    seen = holders(proc, *(gpu(i, Claim(100 + i, "compute", 1)) for i in range(8)))
    assert [(h.pid, h.start_ticks, h.unit) for h in seen] == [
        (100 + i, 1000 + 10 * i, f"h{i}.service") for i in range(8)
    ]


def test_gp_09_a_pid_that_is_not_here_is_an_invisible_holder(proc: Proc) -> None:
    (held,) = holders(proc, gpu(0, Claim(77, "compute", 76000), used=76004))
    assert (held.kind, held.pid, held.start_ticks, held.gpus, held.used_mib) == ("invisible", 77, 0, ("GPU-0",), 76000)


def test_gp_10_a_holder_in_another_namespace_is_found_by_its_descriptors_and_named_as_container(proc: Proc) -> None:
    proc.add(7, "/system.slice/cron.service")  # the number that NVML says belongs to somebody else here
    proc.add(50, f"/system.slice/docker-{DOCKER}.scope", ("/dev/nvidia0", "/dev/nvidia-uvm"), "pid:[9]")
    (held,) = holders(proc, gpu(0, Claim(7, "compute", 76000), used=76004))
    assert (held.kind, held.pid, held.container) == ("container", 50, DOCKER)


def test_gp_10_a_bare_pid_namespace_is_a_container_too(proc: Proc) -> None:
    proc.add(50, "/user.slice", ("/dev/nvidia0",), "pid:[9]")
    (held,) = holders(proc, gpu(0, Claim(50, "compute", 1)))
    assert (held.container, held.unit) == ("pid:[9]", "")


def test_ev_16_a_holder_in_a_docker_scope_is_named_as_its_container(proc: Proc) -> None:
    proc.add(50, f"/system.slice/docker-{DOCKER}.scope", ("/dev/nvidia0",))
    (held,) = holders(proc, gpu(0, Claim(50, "compute", 1)))
    assert (held.container, held.unit) == (DOCKER, f"docker-{DOCKER}.scope")


def test_ev_06_a_holder_outside_any_unit_has_none(proc: Proc) -> None:
    proc.add(50, "/elsewhere", ("/dev/nvidia0",))
    (held,) = holders(proc, gpu(0, Claim(50, "compute", 1)))
    assert (held.unit, held.exe) == ("", "/usr/bin/python3.11")


def test_ev_05_a_pending_sigkill_is_seen(proc: Proc) -> None:
    proc.add(50, pending="0000000000000100", state="R")
    (held,) = holders(proc, gpu(0, Claim(50, "compute", 1)))
    assert (held.kill_pending, held.state) == (True, "R")


def test_gp_11_memory_that_is_not_told_stays_unknown(proc: Proc) -> None:
    proc.add(50)
    (held,) = holders(proc, gpu(0, Claim(50, "compute", None)), gpu(1, Claim(50, "compute", 5)))
    assert held.used_mib is None


def test_descriptors_alone_make_a_holder_but_never_of_us_and_our_probes(proc: Proc) -> None:
    proc.add(50, opens=("/dev/nvidia1",))
    proc.add(51, opens=("/dev/nvidiactl", "/dev/null"))
    proc.add(52, opens=("/dev/nvidia0",), parent=os.getpid())
    (held,) = holders(proc, gpu(0), gpu(1))
    assert (held.kind, held.pid, held.gpus, held.used_mib) == ("fd", 50, ("GPU-1",), None)


def test_our_probe_s_descriptors_say_nothing_about_a_claim(proc: Proc) -> None:
    proc.add(40)
    proc.add(52, opens=("/dev/nvidia0",), parent=os.getpid())
    (held,) = holders(proc, gpu(0, Claim(40, "compute", 1)))
    assert (held.kind, held.pid) == ("compute", 40)


def test_the_scan_follows_changes_at_once_and_forgets_who_is_gone(proc: Proc) -> None:
    port = Procfs(proc.folder)
    assert port.holders([gpu(0)]) == ()
    proc.add(50, opens=("/dev/nvidia0",))
    assert port.holders([gpu(0)]) == ()  # nothing changed on the GPU: the next full look is due in 30 s
    seen = port.holders([gpu(0, used=500)])
    assert not isinstance(seen, Unreadable)
    assert [h.pid for h in seen] == [50]
    (proc.folder / "50/fd/0").unlink()
    assert port.holders([gpu(0, used=500)]) == ()


@pytest.mark.parametrize(
    ("path", "container", "unit"),
    [
        (f"/system.slice/docker-{DOCKER}.scope/init", DOCKER, f"docker-{DOCKER}.scope"),
        (f"/docker/{DOCKER}", DOCKER, ""),
        ("/lxc.payload.web/system.slice/x.service", "web", ""),
        ("/lxc/web/x", "web", ""),
        (f"/kubepods.slice/pod1.slice/cri-containerd-{DOCKER}.scope", DOCKER, f"cri-containerd-{DOCKER}.scope"),
        ("/machine.slice/systemd-nspawn@deb.service/payload", "deb", "systemd-nspawn@deb.service"),
        ("/user.slice/user-0.slice/session-3.scope", "", "session-3.scope"),
        ("/", "", ""),
        ("/system.slice/x.service/user.slice/hs-sglang.service", "", "x.service"),
        ("/user.slice/user-0.slice/user@0.service/app.slice/vllm.service", "", ""),
        (f"/system.slice/vllm.service/libpod-payload-{DOCKER}", "", "vllm.service"),
    ],
)
def test_cgroup_paths(path: str, container: str, unit: str) -> None:
    assert (cgroup.container_of(path), cgroup.unit_of(path)) == (container, unit)


def test_a_container_that_sees_the_names_around_it_has_its_units_below_its_own_root(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1/cgroup").write_text(f"0::/docker/{DOCKER}/init.scope\n")
    root = cgroup.own_root(tmp_path)
    path = cgroup.below(root, f"/docker/{DOCKER}/system.slice/x.service")
    assert (cgroup.container_of(path), cgroup.unit_of(path)) == ("", "x.service")
    other = cgroup.below(root, f"/docker/{DOCKER[::-1]}/system.slice/x.service")
    assert (cgroup.container_of(other), cgroup.unit_of(other)) == (DOCKER[::-1], "")
    assert cgroup.own_root(tmp_path / "none") == ""
    assert cgroup.below("", "/system.slice/x.service") == "/system.slice/x.service"


def test_a_unit_without_a_group_never_means_every_process() -> None:
    assert cgroup.pids("") == ()
    assert cgroup.pids("/") == ()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        yield child
        child.kill()


def test_ev_07_a_signal_hits_the_process_it_was_decided_on_and_no_other(sleeper: subprocess.Popen[bytes]) -> None:
    port, now = Procfs(), read_process(sleeper.pid)
    assert now is not None
    assert port.signal(sleeper.pid, now.start_ticks + 1, now.exe, "KILL").result == "moved-on"
    assert port.signal(sleeper.pid, now.start_ticks, "/usr/bin/other", "KILL").result == "moved-on"
    assert sleeper.poll() is None
    assert port.signal(sleeper.pid, now.start_ticks, now.exe, "TERM").result == "done"
    assert sleeper.wait(5) == -15
    assert port.signal(sleeper.pid, now.start_ticks, now.exe, "TERM").result == "moved-on"


@pytest.mark.root
def test_gp_10_a_real_namespace_is_seen_from_outside(box: Box) -> None:
    box.sh("touch /dev/nvidia0")
    box.start_unit("holder", "/bin/sh", "-c", "exec 3</dev/nvidia0; exec unshare --pid --fork sleep 60")
    outer = box.host_pid(box.show("holder", "MainPID"))
    children = Path(f"/proc/{outer}/task/{outer}/children")
    until(lambda: children.read_text().strip())
    inner = int(children.read_text())
    seen = Procfs().holders([gpu(0)])
    assert not isinstance(seen, Unreadable)
    (held,) = [h for h in seen if h.pid == inner]
    assert held.kind == "container"
    assert held.container.startswith("pid:[")
    assert held.unit == "", "the box's unit is none of this host"


def test_a_name_that_is_no_text_can_be_said(tmp_path: Path) -> None:
    """It ends up in the sentence of a turn, and systemd is told that: the supervisor would die of it at each turn."""
    program = os.fsencode(tmp_path) + b"/odd-\xff"
    shutil.copy(b"/bin/sleep", program)
    with subprocess.Popen([program, b"60"]) as process:
        found = read_process(process.pid)
        process.kill()
    assert found is not None
    assert found.exe.endswith("/odd-\N{REPLACEMENT CHARACTER}")
    Notify({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).status(f"{os.fsdecode(program)} holds GPU 0")
