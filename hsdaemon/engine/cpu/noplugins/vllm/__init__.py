"""Import-only stand-in for `vllm`, which SGLang to 0.5.7 imports on a CPU without AMX.

It then replaces SGLang's own activations and norms by vllm's of the same name; here those are SGLang's own again. The
operators of `_custom_ops` are never called: everything runs `forward_native`.
"""
