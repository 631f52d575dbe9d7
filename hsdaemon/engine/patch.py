"""The source patch of an engine: which tree, which release, what is in it, put it in, take it out.

Everything is told by content. A tree that is not what we expect is left as it is, and the reason is said.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from hsdaemon.engine import swap
from hsdaemon.engine.diff import Patch, State, Target, Verdict, decode, encode, judge, parse, sha256_without_ours
from hsdaemon.errors import EngineError
from hsdaemon.machine import disk

_VERSION_LINE = re.compile(r"^__version__ *(?:: *str *)?= *(?:version *= *)?['\"]([^'\"]+)['\"]", re.MULTILINE)
_LIMIT = 64 << 20  # bytes of one source file, more than any has
_HOLDS = (State.NEWER, State.MODIFIED, State.CONFLICT, State.MISSING)
_READY = (State.OURS, State.OURS_EDITED)


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """An engine's sources: `folder` holds the package `sglang`."""

    folder: Path
    patch: Patch


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """What a tree is. `interrupted`: a crash left a change that the next apply or revert finishes."""

    tree: Tree
    verdicts: Mapping[str, Verdict]
    interrupted: bool

    @property
    def state(self) -> State:
        states = {verdict.state for verdict in self.verdicts.values()}
        for state in (*_HOLDS, State.OLDER):
            if state in states:
                return state
        if states <= set(_READY):
            return State.OURS_EDITED if State.OURS_EDITED in states else State.OURS
        if states & set(_READY):
            return State.PARTIAL
        return State.EDITED if State.EDITED in states else State.PRISTINE

    @property
    def ready(self) -> bool:
        """Whether an engine started from this tree has all of our lines."""
        return self.state in _READY and not self.interrupted

    @property
    def reasons(self) -> list[str]:
        return [verdict.reason for verdict in self.verdicts.values() if verdict.reason]


def shipped() -> dict[str, Path]:
    """Release to file of the patches that we ship."""
    here = Path(__file__).parents[1]
    folders = (here / "patches", here.parent / "patches")  # installed, source checkout
    found = [path for folder in folders for path in folder.glob("sglang-*.diff")]
    return {path.stem.removeprefix("sglang-"): path for path in sorted(found, key=lambda path: release_key(path.stem))}


def release_key(text: str) -> tuple[int, ...]:
    """Sorts 0.5.9 before 0.5.10 and 0.5.10 before 0.5.10.post1."""
    return tuple(int(n) for n in re.findall(r"\d+", text))


def load(release: str) -> Patch:
    """The patch of a release. Raises EngineError when there is none or it is damaged."""
    path = shipped().get(release)
    if path is None:
        known = ", ".join(shipped()) or "none"
        raise EngineError(f"cannot patch SGLang {release}: no patch for this release; install one of {known}")
    patch = parse(decode(disk.read(path, _LIMIT) or b""), str(path))
    if patch.release != release:
        raise EngineError(f"cannot use the patch {path}: it is for {patch.release}; install hsdaemon again")
    return patch


def find(root: Path | None = None) -> Tree:
    """The tree at `root` (site-packages, a source checkout or the package itself), or the one that this interpreter
    would import. Raises EngineError when there is none or its release is unknown."""
    folder = _folder(root)
    said = _release_said(folder)
    if said is None or ".dev" in said or "+" in said:  # a build of somebody's own, or none
        said = _release_by_content(folder) or said or "of unknown release"
    return Tree(folder, load(said))


def _folder(root: Path | None) -> Path:
    if root is None:
        spec = importlib.util.find_spec("sglang")  # finds it without importing it
        if spec is None or not spec.submodule_search_locations:
            raise EngineError("cannot find SGLang: this interpreter has none; name its folder with --root")
        return Path(spec.submodule_search_locations[0]).resolve().parent
    root = root.resolve()
    for folder in (root, root / "python", *([root.parent] if root.name == "sglang" else [])):
        if _holds_sglang(folder):
            return folder
    raise EngineError(
        f"cannot find SGLang below {root}: no sglang/srt there; name site-packages, a source checkout or the package"
    )


def _holds_sglang(folder: Path) -> bool:
    try:
        return (folder / "sglang" / "srt").is_dir()
    except OSError as error:
        raise EngineError(f"cannot look into {folder}: {error.strerror}; name another --root, or use sudo") from None


def _release_said(folder: Path) -> str | None:
    """What the package says of itself; a source checkout without a build says nothing."""
    for name in ("_version.py", "version.py"):
        match = _VERSION_LINE.search(decode(disk.read(folder / "sglang" / name, _LIMIT) or b""))
        if match:
            return match[1]
    names = [path.name for path in folder.glob("sglang-*.dist-info")]
    return names[0].removeprefix("sglang-").removesuffix(".dist-info") if len(names) == 1 else None


def _release_by_content(folder: Path) -> str | None:
    """The release whose files these are, our lines aside."""
    patches = [load(release) for release in shipped()]
    paths = {target.path for found in patches for target in found.targets}
    seen = {path: sha256_without_ours(_text(folder / path) or "") for path in paths}
    for found in patches:
        if all(target.pristine == seen[target.path] for target in found.targets):
            return found.release
    return None


def status(tree: Tree) -> Status:
    """Judge every file. Raises StoreError when one cannot be read."""
    verdicts = {target.path: _judge(tree, target) for target in tree.patch.targets}
    return Status(tree, verdicts, swap.pending(tree.folder))


def _judge(tree: Tree, target: Target) -> Verdict:
    path = tree.folder / target.path
    text = _text(path)
    if text is None:
        return Verdict(State.MISSING, "", None, None, f"{target.path}: no such plain file")
    return judge(text, target, tree.patch.version)


def _text(path: Path) -> str | None:
    try:
        plain = stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EngineError(f"cannot look at {path}: {error.strerror}; use a user that may read it") from None
    data = disk.read(path, _LIMIT) if plain else None
    return None if data is None else decode(data)


def apply(tree: Tree) -> Status:
    """Put our lines into every file, or change none. Raises EngineError, with the tree left as it was."""
    return _change(tree, "apply", lambda verdict: verdict.applied)


def revert(tree: Tree) -> Status:
    """Take our lines out of every file, or change none. Raises EngineError, with the tree left as it was."""
    return _change(tree, "revert", lambda verdict: verdict.reverted)


def _change(tree: Tree, verb: str, wanted: Callable[[Verdict], str | None]) -> Status:
    try:
        with swap.held(tree.folder):
            swap.finish(tree.folder)
            seen = status(tree)
            swap.sweep(tree.folder, seen.verdicts)
            lacking = [verdict.reason for verdict in seen.verdicts.values() if wanted(verdict) is None]
            if lacking:
                raise EngineError(_held(tree, verb, lacking))
            changes = {path: (encode(v.text), encode(wanted(v) or "")) for path, v in seen.verdicts.items()}
            changes = {path: texts for path, texts in changes.items() if texts[0] != texts[1]}
            if changes:
                swap.swap(tree.folder, changes)
            return status(tree)
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        left = "the next apply or revert finishes it" if swap.pending(tree.folder) else "nothing was changed"
        raise EngineError(
            f"cannot {verb} the patch in {tree.folder}: {error.strerror or error}{where}; {left};"
            " make the folder writable for this user"
        ) from None


def _held(tree: Tree, verb: str, reasons: list[str]) -> str:
    return (
        f"cannot {verb} the patch in {tree.folder}: {'; '.join(reasons)}; nothing was changed;"
        f" undo that edit, or install sglang=={tree.patch.release} again"
    )
