"""NVML: devices, memory, processes, fabric, recovery action and Xid events, asked in a child that may hang.

The child keeps NVML open between looks (an init wakes every GPU) and is replaced after any failure of the library as a
whole: a process that has loaded the library of yesterday's driver never sees today's.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hsdaemon.core.model import Claim, Gpu, HolderKind, Unreadable, Xid
from hsdaemon.machine.child import Child, NoAnswer
from hsdaemon.machine.kmsg import KEPT, KernelLog

WAKE_S = 30.0  # a first look opens every GPU: without persistence mode each takes some seconds to wake up
RECOVERY_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, drivers from 565 on
RECOVERY = {0: "none", 1: "reset", 2: "reboot", 3: "drain", 4: "drain", 6: "reset", 7: "reboot"}
XID_EVENT = 8  # nvmlEventTypeXidCriticalError
NOT_SUPPORTED = (3, 13)  # the device, or the driver's age: the fact is absent, not unknown
LOST = (15, 999)
RESET_REQUIRED = 16
FABRIC = {0: "none", 1: "in-progress", 2: "in-progress", 3: "complete"}
# What NVML says of itself, as the codes that are decided on, and what it means to a person.
LIBRARY = {
    4: ("no-permission", "no permission to talk to the driver"),
    9: ("no-driver", "the driver is not loaded"),
    12: ("no-library", "libnvidia-ml.so.1 is not installed"),
    15: ("lost", "a GPU has fallen off the bus"),
    17: ("sandbox", "the device nodes cannot be opened: blocked by the unit's sandbox?"),
    18: ("mismatch", "library and loaded driver are of different versions: reboot, or reload the driver"),
    999: ("lost", "the driver answers with an unknown error"),
}


@dataclass(frozen=True)
class Device:
    """One device as NVML tells it. `error`: what its handle or its memory answered instead (0: fine)."""

    index: int
    uuid: str = ""
    name: str = ""
    pci: str = ""  # 0000:05:00, as the kernel log writes it
    minor: int | None = None  # N of /dev/nvidiaN
    total: int = 0  # bytes
    used: int | None = None  # bytes
    recovery: int | None = None
    fabric: tuple[int, int] | None = None  # state, status
    claims: tuple[tuple[HolderKind, int, int | None], ...] = ()  # kind, pid, bytes
    error: int = 0


@dataclass(frozen=True)
class Reply:
    """One look: all devices, and the Xid events since the last look as (uuid, code)."""

    driver: str = ""
    devices: tuple[Device, ...] = ()
    events: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Failure:
    """The library as a whole failed."""

    code: int
    function: str


def parse(reply: Reply) -> tuple[Gpu, ...] | Unreadable:
    """Facts from a reply: what is recorded in a file gives the same facts."""
    if not reply.devices:
        return Unreadable("nvml", "NVML answers and shows no GPU: blocked by the unit's sandbox?", "sandbox")
    return tuple(_gpu(device) for device in reply.devices)


def _gpu(d: Device) -> Gpu:
    recovery = "reset" if d.error == RESET_REQUIRED else RECOVERY.get(d.recovery, "") if d.recovery is not None else ""
    return Gpu(
        uuid=d.uuid,
        index=d.index,
        name=d.name,
        total_mib=d.total >> 20,
        used_mib=None if d.used is None else d.used >> 20,
        lost=d.error in LOST,
        recovery=recovery,
        fabric=_fabric(d.fabric),
        claims=tuple(_merged(d.claims)),
        minor=d.minor,
    )


def _fabric(seen: tuple[int, int] | None) -> str:
    """Completed with an error status is a fabric that will not come by itself."""
    state, status = seen or (0, 0)
    return "failed" if state == 3 and status else FABRIC.get(state, "failed")


def _merged(claims: tuple[tuple[HolderKind, int, int | None], ...]) -> Iterator[Claim]:
    """Each process once: an MPS client is listed as compute too, and 0 bytes means that nobody counted."""
    rank: dict[str, int] = {"mps": 0, "compute": 1, "graphics": 2}
    seen: dict[int, tuple[HolderKind, int | None]] = {}
    for kind, pid, used in sorted(claims, key=lambda c: rank[c[0]]):
        first, most = seen.get(pid, (kind, None))
        seen[pid] = (first, max((u for u in (most, used) if u), default=None))
    for pid, (kind, used) in sorted(seen.items()):
        yield Claim(pid, kind, None if used is None else used >> 20)


def unreadable(failure: Failure) -> Unreadable:
    """The library's failure in words, with the code that is decided on."""
    code, words = LIBRARY.get(failure.code, ("", "NVML failed"))
    return Unreadable("nvml", f"{words} ({failure.function} answers {failure.code})", code)


class Nvml:
    """The port Gpus over pynvml."""

    def __init__(self, deadline_s: float, log: KernelLog, wake_s: float = WAKE_S) -> None:
        self._deadline_s, self._wake_s = deadline_s, wake_s
        self._log = log
        self._child = Child("NVML", Session().serve)
        self._last: Reply | None = None
        self._last_at = 0.0
        self._events: list[Xid] = []

    def read(self) -> tuple[Gpu, ...] | Unreadable:
        """Every device; a lost one keeps the UUID that it had."""
        answer = self._child.ask("look", self._deadline_s, self._wake_s)
        if isinstance(answer, NoAnswer):
            code = {"hung": "hang", "stuck": "stuck"}.get(answer.kind, "")
            return Unreadable("nvml", f"{answer.detail}{self._age()}", code)
        if isinstance(answer, Failure):
            self._child.close()
            return unreadable(answer)
        reply = self._named(answer)
        now = time.monotonic()
        self._events = [*self._events, *(Xid(uuid, code, now) for uuid, code in reply.events)][-KEPT:]
        self._last, self._last_at = reply, now
        return parse(reply)

    def xids(self) -> tuple[Xid, ...]:
        """From the kernel log; from NVML's events where that cannot be read."""
        lines = self._log.xids()
        if isinstance(lines, Unreadable):
            return tuple(self._events)
        places = {d.pci: d.uuid for d in self._last.devices} if self._last else {}
        return tuple(Xid(places.get(line.pci, ""), line.code, line.at_s) for line in lines)

    def close(self) -> None:
        self._child.close()

    def _age(self) -> str:
        if self._last is None:
            return ""
        return f"; it last answered {time.monotonic() - self._last_at:.0f} s ago with {len(self._last.devices)} GPUs"

    def _named(self, reply: Reply) -> Reply:
        """A lost device does not tell its UUID: it is the one that was at this index before."""
        before = {d.index: d for d in self._last.devices} if self._last else {}
        devices = [
            replace(d, uuid=before[d.index].uuid, name=before[d.index].name, pci=before[d.index].pci)
            if d.error and not d.uuid and d.index in before
            else d
            for d in reply.devices
        ]
        return replace(reply, devices=tuple(devices))


class Session:
    """The child's side: NVML opened once, then one Reply a question."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._events: Any = None

    def serve(self, _question: object) -> Reply | Failure:
        import pynvml  # type: ignore[import-untyped]  # in the child alone: its tables take 6 MB that the supervisor need not carry

        try:
            if self._nvml is None:
                pynvml.nvmlInit()
                self._nvml = pynvml
            return self._look()
        except pynvml.NVMLError as error:
            return Failure(error.value, _function(error))

    def _look(self) -> Reply:
        n = self._nvml
        devices = tuple(self._device(i) for i in range(n.nvmlDeviceGetCount()))
        driver = n.nvmlSystemGetDriverVersion()
        return Reply(driver, devices, tuple(self._new_events(devices)))

    def _device(self, index: int) -> Device:
        n = self._nvml
        seen = Device(index)
        try:
            gpu = n.nvmlDeviceGetHandleByIndex(index)
            pci = n.nvmlDeviceGetPciInfo(gpu)
            seen = replace(
                seen,
                uuid=n.nvmlDeviceGetUUID(gpu),
                name=n.nvmlDeviceGetName(gpu),
                pci=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}",
                minor=self._optional(n.nvmlDeviceGetMinorNumber, gpu),
            )
            memory = n.nvmlDeviceGetMemoryInfo(gpu)
            return replace(
                seen,
                total=memory.total,
                used=memory.used,
                claims=tuple(self._claims(gpu)),
                recovery=self._recovery(gpu),
                fabric=self._fabric(gpu),
            )
        except n.NVMLError as error:
            if error.value in LOST or error.value == RESET_REQUIRED or seen.uuid:
                return replace(seen, error=error.value)
            raise

    def _claims(self, gpu: Any) -> Iterator[tuple[HolderKind, int, int | None]]:
        n = self._nvml
        lists: tuple[tuple[HolderKind, Any], ...] = (
            ("compute", n.nvmlDeviceGetComputeRunningProcesses),
            ("graphics", n.nvmlDeviceGetGraphicsRunningProcesses),
            ("mps", n.nvmlDeviceGetMPSComputeRunningProcesses),
        )
        for kind, ask in lists:
            for process in self._optional(ask, gpu) or ():
                yield kind, process.pid, process.usedGpuMemory

    def _recovery(self, gpu: Any) -> int | None:
        (field,) = self._optional(self._nvml.nvmlDeviceGetFieldValues, gpu, [RECOVERY_FIELD]) or (None,)
        return int(field.value.ullVal) if field is not None and field.nvmlReturn == 0 else None

    def _fabric(self, gpu: Any) -> tuple[int, int] | None:
        info = self._nvml.c_nvmlGpuFabricInfo_v2_t()
        if self._optional(self._nvml.nvmlDeviceGetGpuFabricInfoV, gpu, ctypes.byref(info)) is None:
            return None
        return int(info.state), int(info.status)

    def _optional(self, ask: Any, *args: Any) -> Any:
        """None where this device or driver does not know the question."""
        try:
            return ask(*args)
        except self._nvml.NVMLError as error:
            if error.value in NOT_SUPPORTED:
                return None
            raise

    def _new_events(self, devices: tuple[Device, ...]) -> Iterator[tuple[str, int]]:
        """Xid events since the last look. Without them (old GPUs) the kernel log is all there is."""
        n = self._nvml
        if self._events is None:
            self._events = n.nvmlEventSetCreate()
            for device in devices:
                self._register(device)
        with contextlib.suppress(n.NVMLError):  # timeout: no more; lost: said by the device itself
            while True:
                event = n.nvmlEventSetWait_v2(self._events, 0)
                yield n.nvmlDeviceGetUUID(event.device), int(event.eventData)

    def _register(self, device: Device) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            gpu = self._nvml.nvmlDeviceGetHandleByIndex(device.index)
            self._nvml.nvmlDeviceRegisterEvents(gpu, XID_EVENT, self._events)


def _function(error: BaseException) -> str:
    """The NVML call that failed, from the traceback: the library's own texts do not say."""
    names = []
    trace = error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return next((name for name in names if name.startswith("nvml")), "NVML")
