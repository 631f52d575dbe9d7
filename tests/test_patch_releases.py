"""The shipped patches on real released files: applies, compiles, reverts byte for byte. `make patch-check` does all."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from bench import patch_check
from hsdaemon.engine import patch, releases

FETCHED = ("0.5.5", "0.5.9", "0.5.10")  # small wheels: one of each family's ends


def test_at_least_one_patch_for_every_release_of_the_table() -> None:
    assert set(releases.known()) <= patch.shipped().keys()


@pytest.mark.parametrize("release", patch.shipped())
def test_every_shipped_patch_is_whole_and_for_its_release(release: str) -> None:
    found = patch.load(release)
    assert found.release == release
    assert releases.release(release).version == release
    for target in found.targets:
        assert all(set(hunk.before) <= set(hunk.after) for hunk in target.hunks), "a patch only inserts"


@pytest.mark.engine
def test_the_installed_release(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no SGLang is installed")
    installed = Path(spec.submodule_search_locations[0]).parent
    tree = patch.find(installed)
    for name in ["sglang/_version.py", *(target.path for target in tree.patch.targets)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / name, tmp_path / name)
    assert patch_check.problem(tree.patch.release, tmp_path) == ""


@pytest.mark.parametrize("release", FETCHED)
def test_a_released_wheel(release: str, tmp_path: Path) -> None:
    try:
        patch_check.unpacked(release, tmp_path)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert patch_check.problem(release, tmp_path) == ""
