"""A pickle read by its opcodes, never run: dicts, lists, plain values and tensors of known storages, nothing else.

Also takes what torch itself writes, for trees that another program made.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass

STORAGES = {
    "LongStorage": "int64",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "FloatStorage": "float32",
}
_REBUILD = "torch._utils _rebuild_tensor_v2"
_ORDERED = "collections OrderedDict"
_GLOBALS = {_REBUILD, _ORDERED, *(f"torch {name}" for name in STORAGES)}
_MARK = object()


@dataclass(frozen=True, slots=True)
class Slot:
    """A storage: its dtype, the entry `data/<key>` that holds it, its number of elements."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: a view into a storage; offset and strides in elements."""

    slot: Slot
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


class _Walk:
    """The stack and the memo of one pickle."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def to_mark(self) -> list[object]:
        at = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def pop(self, count: int) -> tuple[object, ...]:
        if len(self.stack) < count:
            raise ValueError("the stack is empty")
        items = self.stack[-count:]
        del self.stack[-count:]
        return tuple(items)

    def step(self, name: str, arg: object) -> None:
        if name in _PUSH:
            self.stack.append(_PUSH[name](arg))
        elif name in _ACTIONS:
            _ACTIONS[name](self, arg)
        else:
            raise ValueError(f"opcode {name} is not allowed")

    def put(self, arg: object) -> None:
        index = len(self.memo) if arg is None else arg
        assert isinstance(index, int)
        self.memo[index] = self.stack[-1]

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("items without a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):
                raise ValueError("a key is neither text nor a number")
            target[key] = value

    def append(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError("items without a list")
        target.extend(items)

    def reduce(self) -> None:
        call, args = self.pop(2)
        if call == _Global(_ORDERED) and args == ():
            self.stack.append({})
        elif call == _Global(_REBUILD) and isinstance(args, tuple):
            self.stack.append(_view(args))
        else:
            raise ValueError("a call that is not allowed")


def _global(arg: object) -> _Global:
    if arg not in _GLOBALS:
        raise ValueError(f"global {arg} is not allowed")
    return _Global(str(arg))


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError("a tensor's shape is not one")
    return value


def _view(args: tuple[object, ...]) -> View:
    if len(args) not in (6, 7) or not isinstance(args[0], Slot) or type(args[1]) is not int or args[1] < 0:
        raise ValueError("a tensor without a storage")
    shape, stride = _numbers(args[2]), _numbers(args[3])
    if len(shape) != len(stride) or len(shape) > 8:
        raise ValueError("a tensor's shape and strides differ")
    return View(args[0], args[1], shape, stride)


def _slot(value: object) -> Slot:
    if isinstance(value, tuple) and len(value) == 5 and value[0] == "storage" and isinstance(value[1], _Global):
        dtype = STORAGES.get(value[1].name.removeprefix("torch "))
        if dtype and isinstance(value[2], str) and type(value[4]) is int and value[4] >= 0:
            return Slot(dtype, value[2], value[4])
    raise ValueError("a storage that is not allowed")


_PUSH: dict[str, Callable[[object], object]] = {
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "MARK": lambda _: _MARK,
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "GLOBAL": _global,
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"), lambda arg: arg
    ),
}
_ACTIONS: dict[str, Callable[[_Walk, object], None]] = {
    "PROTO": lambda _walk, _arg: None,
    "FRAME": lambda _walk, _arg: None,
    "STOP": lambda _walk, _arg: None,
    "BINPUT": _Walk.put,
    "LONG_BINPUT": _Walk.put,
    "MEMOIZE": _Walk.put,
    "BINGET": lambda walk, arg: walk.stack.append(walk.memo[arg]),  # type: ignore[index]  # an int by the opcode
    "LONG_BINGET": lambda walk, arg: walk.stack.append(walk.memo[arg]),  # type: ignore[index]
    "TUPLE": lambda walk, _: walk.stack.append(tuple(walk.to_mark())),
    "TUPLE1": lambda walk, _: walk.stack.append(walk.pop(1)),
    "TUPLE2": lambda walk, _: walk.stack.append(walk.pop(2)),
    "TUPLE3": lambda walk, _: walk.stack.append(walk.pop(3)),
    "SETITEM": lambda walk, _: walk.set_items(list(walk.pop(2))),
    "SETITEMS": lambda walk, _: walk.set_items(walk.to_mark()),
    "APPEND": lambda walk, _: walk.append(list(walk.pop(1))),
    "APPENDS": lambda walk, _: walk.append(walk.to_mark()),
    "BINPERSID": lambda walk, _: walk.stack.append(_slot(walk.pop(1)[0])),
    "REDUCE": lambda walk, _: walk.reduce(),
}


def walk(raw: bytes) -> dict[object, object]:
    """The dict that the pickle builds. Raises ValueError, KeyError or IndexError for anything else."""
    state = _Walk()
    for opcode, arg, _ in pickletools.genops(raw):
        state.step(opcode.name, arg)
    if len(state.stack) != 1 or not isinstance(state.stack[0], dict):
        raise ValueError("the pickle is not one dict")
    return state.stack[0]
