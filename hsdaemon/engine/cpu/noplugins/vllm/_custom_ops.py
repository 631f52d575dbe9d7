"""Operators by name; calling one raises NotImplementedError."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def op(*_args, **_kwargs):
        raise NotImplementedError(f"vllm stand-in: {name} called on CPU")

    return op
