"""The whole product on a real systemd: the incident in small, and a host that goes down again and again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import chaos, incident, reboots

pytestmark = pytest.mark.root
pytest.importorskip("pydbus")


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_incident_ends_with_every_sample_extracted_and_no_human_act(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real SGLang, its patch lost, a foreign service on all GPUs, a tree without a manifest, a late volume."""
    assert incident.main(["--scale", "0.05", "--patch", "lost", "--folder", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "incident: ok done=1866 extracted_now=945 redone=0 human_acts=0 evicted=1"


@pytest.mark.timeout(600)
def test_st_06_mf_07_a_reboot_and_a_power_cut_lose_and_repeat_nothing_that_was_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert reboots.main(["--count", "1", "--seed", "4"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"reboots: ok reboots=1 power_cuts=1 back=\d done=360 claimed_again=\d+ lost=0 corrupt=0 duplicated=0", last
    )


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_random_faults_lose_repeat_and_corrupt_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["supervisor-killed", "worker-killed", "volume-full", "volume-gone", "dbus-restarted", "spool-removed"]
    argv = ["--faults", "6", "--rows", "3000", "--seed", "3", "--folder", str(tmp_path), "--kinds", *kinds]
    assert chaos.main(argv) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("chaos: faults=6 kinds=6 recovered=6 lost=0 corrupt=0 twice=0 median_s=")
