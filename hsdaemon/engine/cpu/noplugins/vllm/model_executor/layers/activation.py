"""SGLang's own classes: its module of this name is half loaded when it asks, and has them already."""

import sys


def __getattr__(name):
    return getattr(sys.modules["sglang.srt.layers.activation"], name)
