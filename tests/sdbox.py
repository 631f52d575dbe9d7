"""sdbox: throw-away boxes with a real systemd as PID 1, for tests run as root.

A box is an overlay of the host's own /, so every program installed on the host is visible in it, while every write
lands in the box's own upper folder.  It has its own pid, mount, cgroup, network, uts and ipc namespaces, its own D-Bus,
logind and journald, and keeps its files over reboots (with a new boot id each time).

    with Box(disk=128, raw=["/data"], bind=["/path/of/checkout"]) as box:
        box.exec("systemctl", "enable", "--now", "hs-extract")
        box.reboot()                    # clean: systemctl reboot, then boot again
        box.power_cut()                 # dirty: everything SIGKILLed, and what was not synced to the disk is lost
        box.boot()

Needs root, Python 3.11, systemd, dbus, util-linux, iproute2 and (disk=) e2fsprogs.  On the host nothing changes outside
the box's folder and the cgroup "sdbox-NAME".  `python3 sdbox.py clean` ends the boxes that killed test runs have left.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

CGROUP2 = Path("/sys/fs/cgroup/unified" if os.path.isdir("/sys/fs/cgroup/unified") else "/sys/fs/cgroup")
FS_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32): ext4, xfs
FITHAW = 0xC0045878  # _IOWR('X', 120, int)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The clock, modules and raw hardware are shared with the host: out of reach from inside.
CONFINE = ["setpriv", "--bounding-set=-sys_time,-sys_module,-sys_rawio,-syslog,-mknod", "--inh-caps=-all"]
# Vendor units that only cost time, or make no sense in a box.
MASKED = [
    "getty@tty1.service",
    "console-getty.service",
    "systemd-timesyncd.service",
    "remote-fs.target",
    "quota.service",
    "quotaon.service",
    "systemd-update-utmp.service",
    "systemd-update-utmp-runlevel.service",
    "systemd-firstboot.service",
    "systemd-hwdb-update.service",
    "ldconfig.service",
    "systemd-pstore.service",
    "systemd-journal-catalog-update.service",
    "systemd-binfmt.service",
    "proc-sys-fs-binfmt_misc.automount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "sys-kernel-config.mount",
    "dev-hugepages.mount",
]

# Run by bash as PID 1 of the new namespaces: DIR NAME [SOURCE TARGET ro|rw]...
SETUP = r"""
B=$1 NAME=$2; R=$B/merged; shift 2
mount -t overlay "sdbox-$NAME" -o "lowerdir=/,upperdir=$B/fs/upper,workdir=$B/fs/work" "$R"
mount -t proc -o nosuid,nodev,noexec proc "$R/proc"
mount --bind "$R/proc/sys" "$R/proc/sys"; mount -o remount,bind,ro "$R/proc/sys"
mount -t sysfs -o nosuid,nodev,noexec,ro sysfs "$R/sys"
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$R/sys/fs/cgroup"
mount -t tmpfs -o mode=755,nosuid,size=8m dev "$R/dev"
for n in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0 fuse:10:229 loop-control:10:237; do
  IFS=: read -r d a b <<<"$n"; mknod -m 666 "$R/dev/$d" c "$a" "$b"; done
for i in {0..31}; do mknod -m 660 "$R/dev/loop$i" b 7 "$i"; done
mkdir "$R/dev/pts" "$R/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$R/dev/pts"; ln -s pts/ptmx "$R/dev/ptmx"
mount -t tmpfs -o nosuid,nodev,mode=1777 shm "$R/dev/shm"
ln -s /proc/self/fd "$R/dev/fd"; ln -s fd/0 "$R/dev/stdin"; ln -s fd/1 "$R/dev/stdout"; ln -s fd/2 "$R/dev/stderr"
touch "$R/dev/console"; mount --bind /dev/null "$R/dev/console"
mount -t tmpfs -o mode=755,nosuid,nodev run "$R/run"
mount -t tmpfs -o mode=1777,nosuid,nodev tmp "$R/tmp"
while [ $# -gt 0 ]; do
  if [ -d "$1" ]; then mkdir -p "$R$2"; else mkdir -p "$(dirname "$R$2")"; touch "$R$2"; fi
  mount --bind "$1" "$R$2"; [ "$3" = rw ] || mount -o remount,bind,ro "$R$2"; shift 3; done
cat /proc/sys/kernel/random/uuid > "$R/run/.boot_id"
mount --bind "$R/run/.boot_id" "$R/proc/sys/kernel/random/boot_id"
hostname "$NAME"; ip link set lo up
cd "$R"; pivot_root . mnt; umount -l /mnt
# As systemd has it on a host: what is unmounted goes from the namespaces of sandboxed services, too.
mount --make-rshared /
"""


class BoxError(RuntimeError):
    """A box did not boot, did not go down, or a command in it failed."""


def shutdown_fs(mountpoint: str | os.PathLike[str]) -> None:
    """Cut the power of an ext4 or xfs: from now on it answers EIO, and what was not synced is lost at the next mount.

    Raises OSError when the file system knows no shutdown."""
    fd = os.open(mountpoint, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, FS_IOC_SHUTDOWN, (2).to_bytes(4, sys.byteorder))  # 2 = NOLOGFLUSH
    finally:
        os.close(fd)


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait for a condition.  Raises AssertionError when it does not come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


def _pids(cgroup: Path) -> list[int]:
    found: list[int] = []
    for folder, _, _ in os.walk(cgroup):
        with contextlib.suppress(OSError):
            found += map(int, Path(folder, "cgroup.procs").read_text().split())
    return [p for p in found if p]


class Box:
    """One box.  As a context manager: create() and boot(), at the end destroy().

    name:  hostname and cgroup suffix; two running boxes must not share one (default: unique).
    root:  folder below which the box keeps its files (default: a temporary one, removed by destroy()).
    bind:  "HOST[:INSIDE[:rw]]" folders or files to show inside, read-only unless rw.  Needed for everything below /tmp,
           /run and /dev, which are fresh in the box, and for other mounts than the host's /.
    disk:  size in MiB of an ext4 that takes all writes of the box, so that power_cut() can lose what was not synced
           (0: writes go to `root` and survive).
    raw:   folders that lie directly on that disk instead of on the overlay, such as "/data".
    mask:  more units to mask.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
        bind: Iterable[str | Path] = (),
        disk: int = 0,
        raw: Iterable[str] = (),
        mask: Iterable[str] = (),
    ) -> None:
        self.name = name or f"box-{os.urandom(4).hex()}-{os.getpid()}"
        self._temporary = None if root else tempfile.mkdtemp(prefix="sdbox-")
        self.dir = Path(root or self._temporary or "").resolve() / f"sdbox-{self.name}"
        self.bind, self.disk, self.raw, self.mask = [str(b) for b in bind], disk, list(raw), list(mask)
        self.cgroup = CGROUP2 / f"sdbox-{self.name}"
        self.pid1 = 0  # as the host counts; 0 while the box is down
        self.state = "down"  # what `systemctl is-system-running` said after the last boot
        self._proc: subprocess.Popen[bytes] | None = None

    # ---- files -----------------------------------------------------------------------------------------------------
    @property
    def upper(self) -> Path:
        """The host folder with every file the box has written, except below `raw` and on its tmpfs."""
        return self.dir / "fs" / "upper"

    def create(self) -> Box:
        """Prepare the files, without booting; removes what an earlier box of this name has left.  Returns the box."""
        self.destroy()
        atexit.register(self.destroy)
        (self.dir / "fs").mkdir(parents=True)
        if self.disk:
            subprocess.run(
                [
                    "mkfs.ext4",
                    "-q",
                    "-m0",
                    "-E",
                    "lazy_itable_init=1,lazy_journal_init=1",
                    self.dir / "disk.img",
                    f"{self.disk}M",
                ],
                check=True,
                capture_output=True,
            )
        self._mount_disk()
        units = self.upper / "etc/systemd/system"
        for folder in (units, self.upper / "var/log/journal", self.dir / "fs/work", self.dir / "merged"):
            folder.mkdir(parents=True)
        os.setxattr(units, "trusted.overlay.opaque", b"y")  # hides every unit that the host has enabled
        for unit in MASKED + self.mask:
            (units / unit).symlink_to("/dev/null")
        self.put("/etc/machine-id", "5d" * 16 + "\n")  # fixed: no first-boot logic
        self.put("/etc/hostname", self.name + "\n")
        self.put("/etc/fstab", "")
        self.put(
            "/etc/systemd/journald.conf.d/50-sdbox.conf",
            "[Journal]\nStorage=persistent\nSyncIntervalSec=1s\nRateLimitIntervalSec=0\nSystemMaxFileSize=8M\n",
        )
        return self

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file, while the box is down or up (then run daemon-reload yourself)."""
        if self.pid1:
            self.exec("install", "-D", "-m", f"{mode:o}", "/dev/stdin", path, stdin=text)
            return
        self._mount_disk()
        in_raw = any(path.startswith(r.rstrip("/") + "/") for r in self.raw)
        target = (self.dir / "fs/raw" if in_raw else self.upper) / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def _mount_disk(self) -> None:
        if self.disk and not os.path.ismount(self.dir / "fs"):
            subprocess.run(["mount", "-o", "loop,discard", self.dir / "disk.img", self.dir / "fs"], check=True)

    def _umount_disk(self) -> None:
        end = time.monotonic() + 5
        while self.disk and os.path.ismount(self.dir / "fs"):
            if subprocess.run(["umount", self.dir / "fs"], capture_output=True).returncode == 0:
                return
            if time.monotonic() > end:
                raise BoxError("the disk stays busy")
            time.sleep(0.02)

    def _free_disk(self) -> None:
        """After a power cut. Whoever made a mount namespace meanwhile has a copy of our mount: the file system stays
        alive, cut off, and mounting the disk again would give that one. A copy of the disk is another one."""
        end = time.monotonic() + 2
        while self.disk and self._attached():
            if time.monotonic() > end:
                copy = self.dir / "disk.copy"
                subprocess.run(["cp", "--sparse=always", self.dir / "disk.img", copy], check=True)
                copy.replace(self.dir / "disk.img")
                return
            time.sleep(0.02)

    def _attached(self) -> bool:
        """Whether a loop device has the disk."""
        image = f"{self.dir / 'disk.img'}\n"
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):
                if backing.read_text() == image:
                    return True
        return False

    # ---- up and down -----------------------------------------------------------------------------------------------
    def boot(self, timeout: float = 30) -> Box:
        """Boot and wait until systemd has settled; after a power cut the disk's journal is replayed first.

        Returns the box; `state` is "running" or "degraded".  Raises BoxError with the console's end."""
        if self._proc:
            raise BoxError("the box is up already")
        self._mount_disk()
        mounts = [word for spec in self.bind for word in _mount(*spec.split(":"))]
        for folder in self.raw:
            Path(f"{self.dir}/fs/raw{folder}").mkdir(parents=True, exist_ok=True)
            mounts += _mount(f"{self.dir}/fs/raw{folder}", folder, "rw")
        self.cgroup.mkdir(exist_ok=True)
        init = [
            "exec",
            *CONFINE,
            "env",
            "-i",
            f"PATH={PATH}",
            "container=sdbox",
            "TERM=dumb",
            "/lib/systemd/systemd",
            "--system",
            "--log-target=journal",
        ]
        command: list[str | Path] = [
            "bash",
            "-ec",
            'echo $$ >"$0/cgroup.procs"; exec "$@"',
            self.cgroup,
            "unshare",
            "--pid",
            "--fork",
            "--kill-child=SIGKILL",
            "--mount",
            "--propagation",
            "private",
            "--uts",
            "--ipc",
            "--net",
            "--cgroup",
            "bash",
            "-ec",
            SETUP + " ".join(init),
            "sdbox",
            self.dir,
            self.name,
            *mounts,
        ]
        with (self.dir / "console.log").open("ab") as log:  # this process must be the parent: it reaps the box
            self._proc = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                env={"PATH": PATH, "LANG": "C.UTF-8"},
            )
        end = time.monotonic() + timeout
        while not self.pid1:
            if self._proc.poll() is not None or time.monotonic() > end:
                self._kill()
                raise BoxError(f"no systemd: {self.console()[-2000:]}")
            time.sleep(0.01)
            with contextlib.suppress(BoxError, OSError):
                pid = self.host_pid(1)
                if Path(f"/proc/{pid}/comm").read_text() == "systemd\n" and os.stat(
                    f"/proc/{pid}/root/run/systemd/private"
                ):
                    self.pid1 = pid
        ask = ("systemctl", "is-system-running", "--wait")
        while not (state := self.exec(*ask, check=False, timeout=timeout).stdout.strip()):  # it does not answer yet
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        self.state = state
        if self.state not in ("running", "degraded"):
            raise BoxError(f"state {self.state!r}: {self.console()[-2000:]}")
        return self

    def wait_down(self, timeout: float = 30) -> str:
        """Wait until the box has gone down by itself, for instance because a program inside asked for a reboot.

        Returns "reboot", "off" or "killed".  Raises BoxError (and kills the box) when it does not go down in time."""
        if self._proc is None:
            raise BoxError("the box was not booted")
        try:
            code = self._proc.wait(timeout)
        except subprocess.TimeoutExpired:
            self._kill()
            raise BoxError("the box did not go down in time") from None
        self._settle()
        return {-signal.SIGHUP: "reboot", -signal.SIGINT: "off"}.get(code, "killed")

    def _settle(self) -> None:
        """All processes are gone or dying: remove the cgroup (busy for a moment) and unmount the disk."""
        end, next_thaw = time.monotonic() + 20, time.monotonic() + 1
        while self.cgroup.exists():
            for folder, _, _ in os.walk(self.cgroup, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            if time.monotonic() > end:
                raise BoxError(f"processes left over: {_pids(self.cgroup)}")
            if time.monotonic() > next_thaw:
                self._thaw()
                next_thaw += 1
            time.sleep(0.01)
        self.pid1, self._proc, self.state = 0, None, "down"
        self._umount_disk()

    def _thaw(self) -> None:
        """A process in D on a frozen file system outlives SIGKILL and pins the box: thaw all its file systems."""
        for pid in _pids(self.cgroup):
            with contextlib.suppress(OSError):
                for mount in {line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()}:
                    with contextlib.suppress(OSError):
                        fd = os.open(f"/proc/{pid}/root{mount}", os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECTORY)
                        with contextlib.suppress(OSError):
                            fcntl.ioctl(fd, FITHAW, 0)
                        os.close(fd)
                return  # they share their mounts

    def _kill(self) -> None:
        if self.pid1 and self._proc and self._proc.poll() is None:
            os.kill(self.pid1, signal.SIGKILL)  # the kernel then kills the whole pid namespace
        with contextlib.suppress(OSError):
            (self.cgroup / "cgroup.kill").write_text("1")
        if self._proc:
            try:
                self._proc.wait(2)
            except subprocess.TimeoutExpired:
                self._thaw()
                self._proc.wait(10)
        self._settle()

    def reboot(self, timeout: float = 30) -> Box:
        """`systemctl reboot`, then boot().  Returns the box.  Raises BoxError as wait_down() and boot() do."""
        self.exec("systemctl", "reboot", check=False)
        self.wait_down(timeout)
        return self.boot(timeout)

    def off(self, timeout: float = 30) -> None:
        """`systemctl poweroff`; boot() starts the box again.  Raises BoxError as wait_down() does."""
        self.exec("systemctl", "poweroff", check=False)
        self.wait_down(timeout)

    def power_cut(self) -> None:
        """Every process dies at once and, with disk=, what was not synced is lost.  boot() starts the box again."""
        if self.disk and os.path.ismount(self.dir / "fs"):
            shutdown_fs(self.dir / "fs")
        self._kill()
        self._free_disk()

    def destroy(self) -> None:
        """Kill the box and remove its files and cgroup.  May be called at any time and more than once."""
        atexit.unregister(self.destroy)
        self._kill()
        if os.path.ismount(self.dir / "fs"):
            subprocess.run(["umount", "-l", self.dir / "fs"], check=False)
        shutil.rmtree(self.dir, ignore_errors=True)
        if self._temporary:
            with contextlib.suppress(OSError):
                os.rmdir(self._temporary)

    def __enter__(self) -> Self:
        self.create().boot()
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    # ---- inside ----------------------------------------------------------------------------------------------------
    def argv(self, *cmd: Any) -> list[str]:
        """The host command line that runs `cmd` inside, for Popen.  Raises BoxError while the box is down.

        Do not kill that process: its child becomes an orphan outside, and the next shutdown waits 10 s for it."""
        if not self.pid1:
            raise BoxError("the box is down")
        return [
            "nsenter",
            "-t",
            str(self.pid1),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--cgroup",
            "--root",
            "--wd",
            *CONFINE,
            "env",
            "-i",
            f"PATH={PATH}",
            "HOME=/root",
            "LANG=C.UTF-8",
            "TERM=dumb",
            "SYSTEMD_PAGER=",
            *map(str, cmd),
        ]

    def exec(
        self, *cmd: Any, check: bool = True, timeout: float = 60, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, in no unit at all (GetUnitByPID answers NoUnitForPID).

        Returns the completed process with text output.  Raises BoxError when it fails (unless check=False) and
        subprocess.TimeoutExpired when it, or what it started, had to be killed."""
        end = time.monotonic() + timeout
        done = subprocess.run(
            self.argv("timeout", "-s", "KILL", timeout, *cmd),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout + 5,
        )
        if done.returncode and time.monotonic() >= end:
            raise subprocess.TimeoutExpired(cmd, timeout, done.stdout, done.stderr)
        if check and done.returncode:
            raise BoxError(f"{cmd}: {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def sh(self, script: str, check: bool = True, timeout: float = 60) -> str:
        """Run a bash script (-e) inside, like exec().  Returns its stripped standard output."""
        return self.exec("bash", "-ec", script, check=check, timeout=timeout).stdout.strip()

    def unit(
        self,
        *cmd: Any,
        props: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside as a transient unit, with props such as "MemoryMax=1G", and wait.  Returns as exec()."""
        return self.exec(
            "systemd-run",
            "--quiet",
            "--pipe",
            "--wait",
            "--collect",
            *_options(props, env),
            "--",
            *cmd,
            check=check,
            timeout=timeout,
        )

    def start_unit(self, name: str, *cmd: Any, props: Iterable[str] = (), env: Mapping[str, str] | None = None) -> None:
        """Start a transient unit in the background.  Raises BoxError when systemd-run fails."""
        self.exec("systemd-run", "--quiet", f"--unit={name}", *_options(props, env), "--", *cmd)

    def show(self, unit: str, prop: str) -> str:
        """One property of a unit, such as show("hs-extract", "NRestarts")."""
        return self.exec("systemctl", "show", "--value", "-p", prop, unit).stdout.strip()

    def journal(self, *args: str) -> str:
        """The journal's messages, "" for none; args as for journalctl, such as ("-u", "hs-extract", "-b", "-1")."""
        return self.exec("journalctl", "--no-pager", "-q", "-o", "cat", *args, check=False).stdout

    def host_pid(self, pid: int | str) -> int:
        """The host's number of the process that the box calls `pid`.  Raises BoxError when there is none."""
        for number in _pids(self.cgroup):
            with contextlib.suppress(OSError):
                numbers = Path(f"/proc/{number}/status").read_text().split("NSpid:")[1].split("\n")[0].split()
                if len(numbers) > 1 and numbers[-1] == str(pid):
                    return number
        raise BoxError(f"no process {pid}")

    def console(self) -> str:
        """What the set-up and systemd wrote before the journal took over."""
        path = self.dir / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def bus_address(self) -> str:
        """The box's system bus for clients outside: DBUS_SYSTEM_BUS_ADDRESS, or busctl --address=."""
        return f"unix:path=/proc/{self.pid1}/root/run/dbus/system_bus_socket"


def _mount(source: str, target: str = "", mode: str = "ro") -> list[str]:
    return [source, target or source, mode]


def _options(props: Iterable[str], env: Mapping[str, str] | None) -> list[str]:
    return [f"--property={p}" for p in props] + [f"--setenv={key}={value}" for key, value in (env or {}).items()]


def _owned(name: str) -> bool:
    """Whether the process that made a box of this name, which ends in its pid, is there."""
    pid = name.rpartition("-")[2]
    return pid.isdecimal() and Path(f"/proc/{pid}").exists()


def clean() -> None:
    """Kill the boxes whose makers are gone, and unmount their disks; their folders stay."""
    for cgroup in CGROUP2.glob("sdbox-*"):
        if not _owned(cgroup.name):
            Box(cgroup.name.removeprefix("sdbox-")).destroy()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount = line.split()[4]
        if "/sdbox-" in mount and mount.endswith("/fs") and not _owned(Path(mount).parent.name):
            subprocess.run(["umount", "-l", mount], check=False)


if __name__ == "__main__":
    if sys.argv[1:] != ["clean"]:
        sys.exit("usage: sdbox.py clean")
    clean()
