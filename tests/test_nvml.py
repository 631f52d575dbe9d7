"""NVML through the real pynvml on a scripted library, and recorded replies to facts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from fake_nvml import write_state

from hsdaemon.core.model import Claim, Gpu, Unreadable, Xid
from hsdaemon.machine.kmsg import KernelLog, XidLine
from hsdaemon.machine.kmsg import parse as parse_kmsg
from hsdaemon.machine.nvml import Failure, Nvml, Reply, parse, unreadable

REPLIES = sorted((Path(__file__).parent / "nvml" / "replies").glob("*.json"))
GPU0 = "gpu 0 GPU-aaaa 97887 4 0 NVIDIA H20"
GPU1 = "gpu 1 GPU-bbbb 97887 4 0 NVIDIA H20"


@pytest.fixture
def say(nvml: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the library's state; the loader finds the library because the probe's process is forked from this one."""
    import ctypes

    monkeypatch.setenv("FAKE_NVML_STATE", str(nvml / "state"))
    real = ctypes.CDLL

    def load(name: str, *args: object, **kwargs: object) -> object:
        return real(str(nvml / name) if name == "libnvidia-ml.so.1" else name)

    monkeypatch.setattr("pynvml.CDLL", load)  # its own name for it, bound when torch or we first imported it
    (nvml / "state").unlink(missing_ok=True)
    return lambda *lines: write_state(nvml / "state", *lines)


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[Nvml]:
    gpus = Nvml(2.0, KernelLog(str(tmp_path / "no-kmsg")))
    yield gpus
    gpus.close()


def devices(gpus: Nvml) -> tuple[Gpu, ...]:
    seen = gpus.read()
    assert not isinstance(seen, Unreadable), seen
    return seen


def failure(gpus: Nvml) -> Unreadable:
    seen = gpus.read()
    assert isinstance(seen, Unreadable), seen
    return seen


def test_a_healthy_host(say: Callable[..., None], gpus: Nvml) -> None:
    say(GPU0, "gpu 1 GPU-bbbb 97887 77619 3 NVIDIA H20", "proc 1 4242 77600", "field 1 230 2", "fabric 0 0")
    assert devices(gpus) == (
        Gpu("GPU-aaaa", 0, "NVIDIA H20", 97887, 4, recovery="none", minor=0),
        Gpu(
            "GPU-bbbb", 1, "NVIDIA H20", 97887, 77619, False, "reboot", "complete", (Claim(4242, "compute", 77600),), 1
        ),
    )


@pytest.mark.parametrize(
    ("line", "fabric"), [("2", "in-progress"), ("1", "in-progress"), ("3 5", "failed"), ("0", "none")]
)
def test_gp_04_the_fabric_has_a_state_of_its_own(say: Callable[..., None], gpus: Nvml, line: str, fabric: str) -> None:
    say(GPU0, f"fabric 0 {line}")
    assert devices(gpus)[0].fabric == fabric


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        (18, "mismatch", "reboot"),
        (9, "no-driver", "not loaded"),
        (4, "no-permission", "permission"),
        (17, "sandbox", "sandbox?"),
        (15, "lost", "bus"),
        (999, "lost", "unknown error"),
        (21, "", "NVML failed"),
    ],
)
def test_gp_05_sy_04_a_failing_library_is_a_value_with_its_code(
    say: Callable[..., None], gpus: Nvml, code: int, name: str, words: str
) -> None:
    say(GPU0, f"fail nvmlInit {code}")
    seen = failure(gpus)
    assert (seen.port, seen.code) == ("nvml", name)
    assert words in seen.cause
    assert f"answers {code}" in seen.cause


def test_sy_04_no_gpu_at_all_asks_for_the_sandbox(say: Callable[..., None], gpus: Nvml) -> None:
    say("driver 570.1")
    assert failure(gpus).code == "sandbox"


def test_gp_05_a_mismatch_while_nvml_is_open_is_seen_and_a_reboot_cures_it(
    say: Callable[..., None], gpus: Nvml
) -> None:
    say(GPU0)
    assert devices(gpus)
    say(GPU0, "fail * 18")
    assert failure(gpus).code == "mismatch"
    say(GPU0)
    assert devices(gpus)


def test_gp_06_gpus_that_take_longer_than_a_look_to_wake_up_are_waited_for(
    say: Callable[..., None], tmp_path: Path
) -> None:
    """Without persistence mode they fall asleep when the last process lets go of them: a killed probe, too."""
    gpus = Nvml(1.0, KernelLog(str(tmp_path / "none")))
    say(GPU0, GPU1, "delay nvmlDeviceGetHandleByIndex 700")
    looks = [gpus.read()]
    while len(looks) < 10 and isinstance(looks[-1], Unreadable):
        looks.append(gpus.read())
    assert [look.code for look in looks[:-1] if isinstance(look, Unreadable)] == ["hang"] * (len(looks) - 1)
    assert 1 < len(looks) < 10
    gpus.close()


def test_gp_06_a_hang_ends_at_the_deadline_and_tells_the_age_of_the_last_answer(
    say: Callable[..., None], tmp_path: Path
) -> None:
    gpus = Nvml(1.0, KernelLog(str(tmp_path / "none")), wake_s=0.0)
    say(GPU0, GPU1)
    assert len(devices(gpus)) == 2
    say(GPU0, GPU1, "delay nvmlDeviceGetCount 600000")
    seen = failure(gpus)
    assert seen.code == "hang"
    assert "s ago with 2 GPUs" in seen.cause
    say(GPU0, GPU1, "delay nvmlInit 600000")
    assert failure(gpus).code == "hang"
    gpus.close()


def test_gp_08_a_lost_gpu_is_named_by_its_uuid(say: Callable[..., None], gpus: Nvml) -> None:
    say(GPU0, GPU1)
    assert [g.lost for g in devices(gpus)] == [False, False]
    for fault in ("fail nvmlDeviceGetHandleByIndex 15 1", "fail nvmlDeviceGetMemoryInfo 999 1"):
        say(GPU0, GPU1, fault)
        lost = devices(gpus)[1]
        assert (lost.uuid, lost.lost, lost.used_mib) == ("GPU-bbbb", True, None)
    say(GPU0)
    assert [g.uuid for g in devices(gpus)] == ["GPU-aaaa"]  # the driver counts seven of eight by now


def test_gp_08_a_gpu_that_asks_for_a_reset_says_so(say: Callable[..., None], gpus: Nvml) -> None:
    say(GPU0, "fail nvmlDeviceGetMemoryInfo 16 0")
    assert (devices(gpus)[0].recovery, devices(gpus)[0].lost) == ("reset", False)


def test_gp_11_memory_that_nobody_counted_is_not_told(say: Callable[..., None], gpus: Nvml) -> None:
    say("gpu 0 GPU-aaaa 97887 76000 0 X", "proc 0 10 NA", "proc 0 11 0")
    seen = devices(gpus)[0]
    assert (seen.used_mib, [c.used_mib for c in seen.claims]) == (76000, [None, None])


def test_gp_13_each_process_once_with_its_kind(say: Callable[..., None], gpus: Nvml) -> None:
    say(GPU0, "proc 0 10 5 G", "proc 0 11 6 M", "proc 0 11 6 C", "proc 0 12 7 C", "proc 0 12 NA G")
    assert devices(gpus)[0].claims == (Claim(10, "graphics", 5), Claim(11, "mps", 6), Claim(12, "compute", 7))


def test_gp_14_a_driver_that_comes_late_is_seen_without_a_restart(
    say: Callable[..., None], gpus: Nvml, nvml: Path
) -> None:
    assert failure(gpus).code == "no-driver"
    library = nvml / "libnvidia-ml.so.1"
    library.rename(nvml / "hidden")
    try:
        assert failure(gpus).code == "no-library"
    finally:
        (nvml / "hidden").rename(library)
    say(GPU0)
    assert len(devices(gpus)) == 1


def test_gp_15_events_stand_in_where_the_kernel_log_cannot_be_read(say: Callable[..., None], gpus: Nvml) -> None:
    say(GPU0, GPU1, "xid 1 0 13")
    devices(gpus)
    assert gpus.xids() == ()  # older than our look
    say(GPU0, GPU1, "xid 1 0 13", "xid 2 1 79", "xid 3 0 31")
    devices(gpus)
    devices(gpus)
    assert [(x.uuid, x.code) for x in gpus.xids()] == [("GPU-bbbb", 79), ("GPU-aaaa", 31)]


KMSG = """3,1200,5000000,-;usb 1-1: new device
3,1201,6500000,-;NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
3,1202,7000000,-;NVRM: Xid (PCI:0000:06:00): 43, pid=1234, name=python, Ch 00000008
3,x;NVRM: Xid (PCI:0000:06:00): 31, cut
"""


def test_gp_15_each_line_of_the_kernel_log_is_used_once(say: Callable[..., None], tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    writer = os.open(log, os.O_RDWR)
    gpus = Nvml(2.0, KernelLog(str(log)))
    say(GPU0, GPU1)
    devices(gpus)
    for record in KMSG.splitlines():  # one record a read, as /dev/kmsg gives them
        os.write(writer, record.encode())
        gpus.xids()
    assert gpus.xids() == (Xid("GPU-aaaa", 79, 6.5), Xid("GPU-bbbb", 43, 7.0))
    os.close(writer)
    gpus.close()


@pytest.mark.parametrize("code", [13, 31, 43, 79, 94])
def test_gp_15_xid_lines_of_every_class_are_parsed(code: int) -> None:
    line = f"4,9,123456789,-;NVRM: Xid (PCI:0000:3b:00): {code}, pid=77, name=python3"
    assert parse_kmsg(line) == XidLine("0000:3b:00", code, 123.456789)


@pytest.mark.parametrize(
    "record",
    [
        "",
        ";",
        "4,9;NVRM: Xid (PCI:0000:3b:00): 13",
        "4,9,x,-;NVRM: Xid (PCI:0000:3b:00): 13",
        "4,9,1,-;NVRM: Xid (PCI:zz): 13",
        "4,9,1,-;somebody says NVRM: Xid",
    ],
)
def test_other_records_are_no_xid_lines(record: str) -> None:
    assert parse_kmsg(record) is None


@pytest.mark.parametrize("path", REPLIES, ids=lambda p: p.stem)
def test_recorded_replies_give_the_recorded_facts(path: Path) -> None:
    raw = msgspec.json.decode(path.read_bytes())
    if "failure" in raw:
        seen: object = unreadable(msgspec.convert(raw["failure"], Failure))
    else:
        seen = parse(msgspec.convert(raw["reply"], Reply))
    assert msgspec.json.decode(msgspec.json.encode(seen)) == raw["facts"]


def test_gp_15_a_line_of_the_kernel_s_own_clock_is_never_of_later_than_now(tmp_path: Path) -> None:
    """That clock drifts: an engine started after a crash would be stopped for the old line, again and again."""
    log = tmp_path / "kmsg"
    ahead_us = int((time.monotonic() + 60) * 1e6)
    log.write_text(f"4,1,{ahead_us},-;NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=x")
    lines = KernelLog(str(log)).xids()
    assert isinstance(lines, tuple)
    assert lines[0].at_s <= time.monotonic()
