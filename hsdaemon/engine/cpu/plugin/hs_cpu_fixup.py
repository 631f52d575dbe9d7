"""CPU-only fix-ups for SGLang >= 0.5.11, loaded as an SGLang general plugin.

SGLang finds it through the entry point in ``hs_cpu_fixup-1.0.dist-info`` when
this folder is on PYTHONPATH; nothing is installed and no SGLang file changes.
It does nothing unless ``SGLANG_USE_CPU_ENGINE=1``.
"""

import os

_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager"


def register():
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    if os.environ.get("HS_CPU_NO_MM") == "1":
        _no_image_processor()
    _mla_on_torch_native()


def _mla_on_torch_native():
    """DeepSeek-V3 / Kimi: no MLA handler is registered for torch_native.

    SGLang then takes the triton handler, whose un-absorbed multi-head form
    fails on torch_native ("Expected size for first two dimensions of batch2
    tensor"). The absorbed MLA form works.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)


def _no_image_processor():
    """Kimi-K2.5: the architecture is multimodal, so the tokenizer manager loads
    an image processor even with --skip-tokenizer-init, and a tiny checkpoint
    has no files for one. Text requests never use it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in ("get_processor_wrapper", "get_mm_processor"):
        HookRegistry.register(f"{_TOKENIZER_MANAGER}.{name}", lambda *_a, **_k: None, HookType.REPLACE)
