"""The source patch: told by content, all files or none, edits of others kept, a conflict holds.

The trees here are small ones of three files, with patches made for them by the program that makes the real ones; the
real files are those of the installed release and of wheels (test_patch_releases.py).
"""

import fcntl
import importlib
import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsdaemon import cli
from hsdaemon.engine import diff, inplace, patch, swap
from hsdaemon.engine.diff import State
from hsdaemon.errors import EngineError
from patches import make

RELEASE = "0.5.5"
SCHEDULER = """\
import logging
import os

logger = logging.getLogger(__name__)


def configure(server_args):
    return server_args


def run_scheduler_process(
    server_args,
    pipe_writer,
):
    # Generate the logger prefix
    prefix = ""
    started.append(configure(server_args))
    return prefix


started = []
"""
BATCH = """\
class ForwardBatch:
    @classmethod
    def init_new(cls, batch, model_runner):
        ret = cls(
            forward_mode=batch.forward_mode,
        )
        device = model_runner.device
        return ret
"""
WORKER_BATCH = """\
class ScheduleBatch:
    def get_model_worker_batch(self):
        return ModelWorkerBatch(
            input_ids=self.input_ids,
        )


@dataclasses.dataclass
class ModelWorkerBatch:
    # The input ids
    input_ids: torch.Tensor

    is_prefill_only: bool = False
"""
FILES = {
    make.SCHEDULER: SCHEDULER,
    make.BATCH: BATCH,
    make.WORKER_BATCH: WORKER_BATCH,
    "sglang/_version.py": f"__version__ = version = '{RELEASE}'\n",
}
WHOLE = {make.SCHEDULER: 0o640, make.BATCH: 0o644, make.WORKER_BATCH: 0o644}


def plant(folder: Path) -> Path:
    """A released tree of three files below `folder`."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(WHOLE.get(name, 0o644))
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """site-packages with the small release, for which alone a patch is shipped."""
    root = plant(tmp_path / "site")
    ship(monkeypatch, tmp_path / "shipped", make.make(RELEASE, root))
    return root


def ship(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"sglang-{RELEASE}.diff"
    path.write_text(text)
    monkeypatch.setattr(patch, "shipped", lambda: {RELEASE: path})
    return path


def content(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def state(root: Path) -> State:
    return patch.status(patch.find(root)).state


def edit(root: Path, name: str, old: str, new: str) -> None:
    path = root / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def held(verb: Callable[[patch.Tree], patch.Status], root: Path) -> str:
    """The refusal of `verb`, which must leave every byte as it was."""
    before = content(root)
    with pytest.raises(EngineError) as refused:
        verb(patch.find(root))
    assert content(root) == before
    message = str(refused.value)
    assert message.startswith("cannot ")
    assert "\n" not in message
    return message


def test_ca_08_applied_twice_is_applied_once_and_reverts_byte_for_byte(site: Path) -> None:
    before = content(site)
    assert patch.apply(patch.find(site)).state is State.OURS
    applied = content(site)
    assert {name for name in applied if applied[name] != before[name]} == WHOLE.keys()
    assert patch.apply(patch.find(site)).state is State.OURS
    assert content(site) == applied
    assert patch.revert(patch.find(site)).state is State.PRISTINE
    assert patch.revert(patch.find(site)).state is State.PRISTINE
    assert content(site) == before


def test_ca_08_a_diff_cut_anywhere_changes_nothing(site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, before = make.make(RELEASE, site), content(site)
    for end in [*range(0, len(text), 37), len(text) - 1]:
        ship(monkeypatch, tmp_path / "shipped", text[:end])
        with pytest.raises(EngineError, match=r"cannot use the patch .*install hsdaemon again"):
            patch.apply(patch.find(site))
    assert content(site) == before


def test_ca_08_a_diff_with_a_changed_byte_is_refused(
    site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = make.make(RELEASE, site)
    ship(monkeypatch, tmp_path / "shipped", text.replace("from_patch()", "from_patsh()"))
    with pytest.raises(EngineError, match="cut off or was changed"):
        patch.apply(patch.find(site))


def test_ca_08_edits_of_others_elsewhere_are_kept_in_both_directions(site: Path) -> None:
    edit(site, make.SCHEDULER, "    return server_args\n", "    print('mine')\n    return server_args\n")
    before = content(site)
    assert state(site) is State.EDITED
    done = patch.apply(patch.find(site))
    assert done.state is State.OURS_EDITED
    assert done.ready
    text = (site / make.SCHEDULER).read_text()
    assert "print('mine')" in text
    assert "from_patch()" in text
    assert patch.apply(patch.find(site)).state is State.OURS_EDITED
    patch.revert(patch.find(site))
    assert content(site) == before


def test_ca_08_edits_made_after_the_patch_survive_its_revert(site: Path) -> None:
    patch.apply(patch.find(site))
    edit(site, make.SCHEDULER, "started = []\n", "started = [1]\n")
    assert state(site) is State.OURS_EDITED
    assert patch.revert(patch.find(site)).state is State.EDITED
    assert (site / make.SCHEDULER).read_text() == SCHEDULER.replace("started = []\n", "started = [1]\n")


def test_ca_08_a_conflict_in_one_file_holds_all_of_them(site: Path) -> None:
    edit(site, make.BATCH, "forward_mode=batch.forward_mode", "forward_mode=None")
    assert state(site) is State.CONFLICT
    assert "forward_batch_info.py" in held(patch.apply, site)
    assert "# hsdaemon" not in (site / make.SCHEDULER).read_text()


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("from_patch()", "pass", State.MODIFIED),
        ("            from_patch()\n", "", State.MODIFIED),
        ("    # hsdaemon patch 1 end\n", "", State.CONFLICT),
        ("    # hsdaemon patch 1 end\n", "    # hsdaemon patch 1 end\n" * 2, State.CONFLICT),
    ],
)
def test_ca_08_lines_of_ours_that_somebody_changed_are_neither_removed_nor_replaced(
    site: Path, old: str, new: str, seen: State
) -> None:
    patch.apply(patch.find(site))
    edit(site, make.SCHEDULER, old, new)
    assert state(site) is seen
    assert "scheduler.py" in held(patch.apply, site)
    assert "scheduler.py" in held(patch.revert, site)


def test_ca_08_an_edit_that_would_not_compile_with_the_patch_holds(site: Path) -> None:
    edit(site, make.SCHEDULER, "started = []\n", "started = [\n")
    assert "would not compile" in held(patch.apply, site)


def test_an_older_version_of_ours_is_replaced_and_a_newer_one_is_left(
    site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, pristine = make.make(RELEASE, site), content(site)
    monkeypatch.setattr(make, "VERSION", 2)
    monkeypatch.setattr(make, "ARM", make.ARM.replace("no capture in", "nothing captured in"))
    second = make.make(RELEASE, site)
    patch.apply(patch.find(site))
    ship(monkeypatch, tmp_path / "shipped", second)
    assert state(site) is State.OLDER
    assert patch.apply(patch.find(site)).state is State.OURS
    assert "nothing captured in" in (site / make.SCHEDULER).read_text()
    ship(monkeypatch, tmp_path / "shipped", first)
    assert state(site) is State.NEWER
    assert "version 2" in held(patch.apply, site)
    patch.revert(patch.find(site))
    assert content(site) == pristine


def test_a_half_patched_tree_is_seen_and_completed(site: Path) -> None:
    patch.apply(patch.find(site))
    (site / make.BATCH).write_text(BATCH)
    seen = patch.status(patch.find(site))
    assert seen.state is State.PARTIAL
    assert not seen.ready
    assert patch.apply(patch.find(site)).state is State.OURS


def test_modes_stay_and_other_names_of_the_same_file_do_not_change(site: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cached.py"  # installers link files from their cache into site-packages
    os.link(site / make.SCHEDULER, cached)
    patch.apply(patch.find(site))
    assert {name: (site / name).stat().st_mode & 0o777 for name in WHOLE} == WHOLE
    assert cached.read_text() == SCHEDULER


def test_a_link_in_place_of_a_file_is_refused(site: Path, tmp_path: Path) -> None:
    (site / make.BATCH).rename(tmp_path / "elsewhere.py")
    (site / make.BATCH).symlink_to(tmp_path / "elsewhere.py")
    assert "no such plain file" in held(patch.apply, site)


def test_stale_compiled_files_go(site: Path) -> None:
    source = site / make.SCHEDULER
    for verb in (patch.apply, patch.revert):
        compiled = py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        assert compiled is not None
        verb(patch.find(site))
        assert not Path(compiled).exists()


def test_two_at_once_are_one_after_the_other(site: Path) -> None:
    fd = os.open(site, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert "another hs-extract" in held(patch.apply, site)
    os.close(fd)
    assert patch.apply(patch.find(site)).ready


# -- which tree, which release


@pytest.mark.parametrize("inner", ["", "python"])
@pytest.mark.parametrize("named", ["root", "package"])
def test_every_layout_is_found(site: Path, tmp_path: Path, inner: str, named: str) -> None:
    folder = tmp_path / "checkout" / inner
    shutil.copytree(site, folder)
    tree = patch.find(tmp_path / "checkout" if named == "root" else folder / "sglang")
    assert tree.folder == folder.resolve()
    assert patch.apply(tree).ready


@pytest.mark.parametrize("said", ["", "__version__ = '0.5.5.dev12+gabcdef'\n"])
def test_a_checkout_that_does_not_name_its_release_is_known_by_content(site: Path, said: str) -> None:
    (site / "sglang/_version.py").write_text(said)
    patch.apply(patch.find(site))
    assert patch.find(site).patch.release == RELEASE
    edit(site, make.BATCH, "return ret", "return  ret")
    with pytest.raises(EngineError, match="no patch for this release"):
        patch.find(site)


def test_ca_07_an_unknown_release_is_refused_whatever_its_files_are(site: Path) -> None:
    (site / "sglang/_version.py").write_text("__version__ = version = '0.9.99'\n")
    before = content(site)
    with pytest.raises(EngineError, match=r"cannot patch SGLang 0\.9\.99: no patch for this release.*0\.5\.5"):
        patch.find(site)
    assert content(site) == before


def test_ca_07_a_renamed_place_is_refused(site: Path) -> None:
    edit(site, make.SCHEDULER, "def run_scheduler_process(\n    server_args,\n    pipe_writer,\n):", "def run(pipe):")
    assert "not those of the release" in held(patch.apply, site)


def test_a_folder_without_sglang_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot find SGLang below .*; name "):
        patch.find(tmp_path)


def test_the_folder_may_be_relative(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site / "sglang")
    assert patch.find(Path()).folder == site


def test_a_missing_file_is_named(site: Path) -> None:
    (site / make.BATCH).unlink()
    assert "forward_batch_info.py" in held(patch.apply, site)
    assert state(site) is State.MISSING


# -- read-only trees, full disks, crashes

CHILD = """
import sys
from pathlib import Path
from hsdaemon.engine import patch
shipped = Path(sys.argv[2])
patch.shipped = lambda: {"0.5.5": shipped}
try:
    patch.apply(patch.find(Path(sys.argv[1])))
except patch.EngineError as error:
    print(error)
"""


def test_ca_08_a_read_only_tree_is_one_clear_line(site: Path) -> None:
    """As a user without root's right to write anywhere."""
    before = content(site)
    folders = [p for p in [site, *site.rglob("*")] if p.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*powerless, sys.executable, "-c", CHILD, str(site), str(patch.shipped()[RELEASE])],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        timeout=60,
    )
    for folder in folders:
        folder.chmod(0o755)
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"cannot apply the patch in {site}: Permission denied at ")
    assert "nothing was changed; make the folder writable" in line
    assert content(site) == before


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_disk_that_fills_up_leaves_the_tree(site: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    written: list[int] = []

    def full(fd: int, data: memoryview) -> None:
        written.append(fd)
        if len(written) == nth:
            raise OSError(28, "No space left on device")
        os.write(fd, data)

    monkeypatch.setattr("hsdaemon.machine.disk.write_all", full)
    assert "No space left on device" in held(patch.apply, site)


TOUCHES = ("open", "write", "fsync", "rename", "unlink", "chmod", "fchmod")


def die_at(n: int, act: Callable[[], object]) -> bool:
    """Run `act` in a child that is gone at its n-th touch of the disk. Gives whether it died."""
    pid = os.fork()
    if pid == 0:
        left = [n]

        def deadly(call: Callable[..., object]) -> Callable[..., object]:
            def touched(*args: object, **kwargs: object) -> object:
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
                return call(*args, **kwargs)

            return touched

        for name in TOUCHES:
            setattr(os, name, deadly(getattr(os, name)))
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def deaths(act: Callable[[], object], again: Callable[[], object]) -> Iterator[int]:
    for n in range(1, 200):
        again()
        if not die_at(n, act):
            assert n > 15, "the child died too rarely to have shown anything"
            return
        yield n
    raise AssertionError("the act never ended")


def half(site: Path, old: dict[str, bytes], new: dict[str, bytes]) -> list[str]:
    """Files that are neither old nor new."""
    return [name for name in old if content(site)[name] not in (old[name], new[name])]


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_ca_08_a_death_at_any_touch_of_the_disk_is_finished_or_undone(site: Path, verb: str) -> None:
    pristine = content(site)
    patch.apply(patch.find(site))
    ours = content(site)
    start = pristine if verb == "apply" else ours

    def again() -> None:
        shutil.rmtree(site / "sglang")
        (site / swap.JOURNAL).unlink(missing_ok=True)
        for name, data in start.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_bytes(data)

    decided = 0
    for n in deaths(lambda: getattr(patch, verb)(patch.find(site)), again):
        assert half(site, pristine, ours) == [], f"torn at touch {n}"
        seen = patch.status(patch.find(site))
        decided += seen.interrupted
        if not seen.interrupted:
            assert seen.state in (State.PRISTINE, State.OURS), f"some files changed undecided at touch {n}"
        finish = patch.apply if n % 2 else patch.revert
        finish(patch.find(site))
        assert content(site) == (ours if n % 2 else pristine), f"something is left over from touch {n}"
    assert decided > 2


def test_the_crash_test_catches_a_change_in_place(site: Path) -> None:
    """Its negative control: without drafts and a journal some death leaves a torn file."""
    old = content(site)
    new = old | {name: old[name] + b"# changed\n" for name in WHOLE}

    def in_place() -> None:
        for name in WHOLE:
            fd = os.open(site / name, os.O_WRONLY | os.O_TRUNC)
            for at in range(0, len(new[name]), 32):
                os.write(fd, new[name][at : at + 32])

    torn = [
        n for n in deaths(in_place, lambda: [(site / k).write_bytes(v) for k, v in old.items()]) if half(site, old, new)
    ]
    assert torn


def test_a_reinstall_between_a_crash_and_the_next_start_wins(site: Path) -> None:
    changes = {name: (text.encode(), text.encode() + b"# ours\n") for name, text in FILES.items() if name in WHOLE}
    for n in range(1, 100):
        if not die_at(n, lambda: swap.swap(site, changes)):
            raise AssertionError("no death fell behind the decision")
        if swap.pending(site):
            break
    (site / make.SCHEDULER).write_text("# another release\n")
    assert swap.finish(site)
    assert (site / make.SCHEDULER).read_text() == "# another release\n"
    assert not list(site.rglob(".*hsdaemon*"))


def test_a_journal_that_names_files_outside_is_refused(site: Path) -> None:
    (site / swap.JOURNAL).write_text('{"../x": ["a", "b"]}')
    assert "none of ours" in held(patch.apply, site)


# -- what the lines do, in the engine


def test_the_lines_are_inert_without_our_environment_and_never_raise(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch.apply(patch.find(site))
    calls: list[str] = []
    scope: dict[str, object] = {"__name__": "scheduler"}
    exec(compile((site / make.SCHEDULER).read_text(), "scheduler.py", "exec"), scope)
    run = scope["run_scheduler_process"]
    assert callable(run)

    def broken() -> None:
        calls.append("called")
        raise RuntimeError("the capture is broken")

    monkeypatch.setattr("hsdaemon.capture.from_patch", broken)
    monkeypatch.delenv("HSDAEMON_CAPTURE", raising=False)
    run("args", None)
    assert calls == []
    monkeypatch.setenv("HSDAEMON_CAPTURE", "{}")
    run("args", None)
    assert calls == ["called"]
    monkeypatch.setitem(sys.modules, "hsdaemon.capture", None)  # importing it fails
    run("args", None)
    assert scope["started"] == ["args"] * 3


# -- a reinstall


def test_en_16_a_reinstall_that_removes_the_patch_is_seen_and_mended_before_a_start(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    (site / "sglang/__init__.py").touch()
    importlib.invalidate_caches()
    patch.apply(patch.find())
    inplace.check("patch")
    plant(site)
    assert state(site) is State.PRISTINE
    with pytest.raises(EngineError, match="hs-extract patch apply"):
        inplace.check("patch")
    inplace.check("patch", mend=True)
    assert state(site) is State.OURS
    plant(site)
    edit(site, make.BATCH, "forward_mode=batch.forward_mode", "forward_mode=None")
    with pytest.raises(EngineError, match="undo that edit"):
        inplace.check("patch", mend=True)


# -- the verb


def test_the_verb_says_what_it_did_in_its_last_line(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def hs(what: str) -> tuple[int, str]:
        code = cli.main(["patch", what, "--root", str(site)])
        return code, capsys.readouterr().out.splitlines()[-1]

    for what, code, seen in [
        ("status", 1, "pristine"),
        ("apply", 0, "ours"),
        ("status", 0, "ours"),
        ("revert", 0, "pristine"),
    ]:
        assert hs(what) == (code, f"patch: release={RELEASE} version=1 state={seen} files=3 root={site}")


def test_the_verb_refuses_with_the_engines_exit_code(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(site, make.BATCH, "forward_mode=batch.forward_mode", "forward_mode=None")
    assert cli.main(["patch", "apply", "--root", str(site)]) == 69
    assert capsys.readouterr().err.startswith("hs-extract: cannot apply the patch")


# -- properties

LINE = st.sampled_from([*diff.lines_of(SCHEDULER), "    x = 1\n", "\n", "    # hsdaemon\n", "# no newline at the end"])


def target() -> diff.Target:
    text = make.patch_text(RELEASE, FILES)
    return diff.parse(text, "x").targets[0]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.lists(LINE, max_size=3)), max_size=4))
def test_whatever_others_edited_applying_and_reverting_gives_their_text_back(
    edits: list[tuple[int, int, list[str]]],
) -> None:
    lines = diff.lines_of(SCHEDULER)
    for at, gone, new in edits:
        lines[at : at + gone] = new
    text = "".join(lines)
    seen = diff.judge(text, target(), 1)
    if seen.applied is None:
        assert seen.state in (State.CONFLICT, State.MODIFIED)
        return
    again = diff.judge(seen.applied, target(), 1)
    assert again.state in (State.OURS, State.OURS_EDITED)
    assert (again.applied, again.reverted) == (seen.applied, text)


@given(st.binary(max_size=200))
def test_any_bytes_survive(data: bytes) -> None:
    text = diff.decode(data)
    assert "".join(diff.lines_of(text)) == text
    assert diff.encode(text) == data
