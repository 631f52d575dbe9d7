"""What releases without plugins need beside the patch: layers set behind a wrapper, and the CPU fix-ups."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hsdaemon.capture import compat
from hsdaemon.config import parse
from hsdaemon.engine import environment, releases

NOPLUGINS = Path(environment.HERE) / "cpu" / "noplugins"
HANDLER = "sglang/srt/models/deepseek_common/attention_backend_handler.py"
FAKE = {
    "sglang/srt/managers/tokenizer_manager.py": "get_mm_processor = _get_processor_wrapper = lambda *a: 'processor'",
    "sglang/srt/layers/torchao_utils.py": "def apply_torchao_config_to_model(model, config): import torchao",
    "sglang/srt/layers/activation.py": "class SiluAndMul: ...\nown = SiluAndMul\n"
    "from vllm.model_executor.layers.activation import SiluAndMul",
    HANDLER: "known = {}\nclass AttentionBackendRegistry: register = known.__setitem__\n"
    "def _dispatch_mla_subtype(): ...",
    "sglang/srt/models/deepseek_v2.py": "",
}
LOOK = """
from sglang.srt.managers import tokenizer_manager as t
from sglang.srt.layers import torchao_utils as a, activation as s
from sglang.srt.models.deepseek_common import attention_backend_handler as h
import sglang.srt.models.deepseek_v2
print(t.get_mm_processor(1), t._get_processor_wrapper(1), a.apply_torchao_config_to_model('model', ''), *h.known)
assert s.SiluAndMul is s.own
"""


def model(**parts: object) -> SimpleNamespace:
    """A model whose setter adds 1, as those of releases to 0.5.10 do."""
    made = SimpleNamespace(model=SimpleNamespace(layers=[], norm=None, layers_to_capture=[]), **parts)

    def setter(ids: list[int]) -> None:
        made.model.layers_to_capture = [k + 1 for k in ids]

    made.set_eagle3_layers_to_capture = setter
    return made


def test_layers_are_set_on_the_text_model_behind_a_wrapper_without_a_setter() -> None:
    inner = model()
    assert compat.set_layers(SimpleNamespace(language_model=inner), (1, 3, 4)) == (2, 4, 5)
    assert inner.model.layers_to_capture == [2, 4, 5]


def test_a_model_without_any_setter_is_refused_by_name() -> None:
    bare = SimpleNamespace(model=SimpleNamespace(layers=[], norm=None, layers_to_capture=[]))
    with pytest.raises(compat.Renamed, match=r"SimpleNamespace does not take \[1, 3, 4\]"):
        compat.set_layers(bare, (1, 3, 4))


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    for name, text in FAKE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.parents:
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
    return tmp_path


def look(fake: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{NOPLUGINS}:{fake}"} | env,
        timeout=60,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_the_fix_ups_are_in_before_anybody_uses_the_modules(fake: Path) -> None:
    assert look(fake, SGLANG_USE_CPU_ENGINE="1", HS_CPU_NO_MM="1") == "None None model torch_native"


def test_the_image_processor_stays_where_nobody_asked(fake: Path) -> None:
    assert look(fake, SGLANG_USE_CPU_ENGINE="1") == "processor processor model torch_native"


def test_nothing_is_fixed_on_a_gpu(fake: Path) -> None:
    assert "torchao" in look(fake)


@pytest.mark.parametrize(("release", "folder"), [("0.5.10", "noplugins"), ("0.5.11", "plugin")])
def test_a_release_gets_the_fix_ups_that_it_can_load(release: str, folder: str) -> None:
    text = '[data]\npath = "/d.jsonl"\n[model]\npath = "/m"\n[output]\npath = "/o"\n[engine]\ndevice = "cpu"\n'
    env = environment.environment(parse(text, "x"), releases.release(release), "hs-1", {}, [0], "llama")
    paths = env["PYTHONPATH"].split(":")
    assert {Path(p).name for p in paths} >= {folder, "standins"}
    assert len({"plugin", "noplugins"} & {Path(p).name for p in paths}) == 1
