"""The CPU fix-ups for SGLang 0.5.5 to 0.5.10, which load no plugins.

Python imports this by itself when its folder is on PYTHONPATH. It waits for some modules of SGLang and changes them as
soon as they are loaded; nothing is installed and no file of SGLang changes. It does nothing unless
``SGLANG_USE_CPU_ENGINE=1``. From 0.5.11 on `plugin/` does the same.
"""

import importlib.abc
import importlib.util
import os
import sys


def _no_image_processor(module):
    """A multimodal wrapper loads an image processor even with --skip-tokenizer-init, and a tiny checkpoint has no
    files for one. Text requests never use it."""
    if os.environ.get("HS_CPU_NO_MM") == "1":
        for name in ("_get_processor_wrapper", "get_processor", "get_mm_processor"):
            if hasattr(module, name):
                setattr(module, name, lambda *_a, **_k: None)


def _mla_on_torch_native(module):
    """No MLA handler is registered for torch_native, and the one for triton fails on it; the absorbed form works."""
    if hasattr(module, "_dispatch_mla_subtype"):  # to 0.5.7 in deepseek_v2, then in a module of its own
        module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def _no_torchao(module):
    """To 0.5.8 torchao is imported even where nothing is quantised."""
    module.apply_torchao_config_to_model = lambda model, *_a, **_k: model


FIXES = {
    "sglang.srt.managers.tokenizer_manager": _no_image_processor,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _mla_on_torch_native,
    "sglang.srt.models.deepseek_v2": _mla_on_torch_native,
    "sglang.srt.layers.torchao_utils": _no_torchao,
}


class _Fixed(importlib.abc.Loader):
    """The loader of a module, and its fix-up after it."""

    def __init__(self, loader, fix):
        self.loader, self.fix = loader, fix

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.fix(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.waiting = dict(FIXES)

    def find_spec(self, name, *_rest):
        fix = self.waiting.pop(name, None)
        spec = importlib.util.find_spec(name) if fix else None
        if spec is not None:
            spec.loader = _Fixed(spec.loader, fix)
        return spec


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, _Finder())
