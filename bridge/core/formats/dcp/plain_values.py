"""A pickle's contents other than tensors, as plain values: containers, bytes, NumPy numbers, sizes, dtypes, devices."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Final

import numpy as np

from bridge.core.formats.dcp.pickle_records import (
    BYTES_CALLS,
    ORDERED_DICT,
    Call,
    Instance,
    Name,
    Persistent,
    is_index,
)
from bridge.core.formats.tensors.arrays import NUMBER
from bridge.core.formats.tensors.base import DTYPES, CheckpointError, UnreadableValue
from bridge.core.formats.tensors.plain import PLAIN_VALUE, Described, plain_value

ARRAYS: Final = frozenset(
    f"numpy.{core}.{function}"
    for core in ("core", "_core")
    for function in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
)
REBUILDERS: Final = ("torch._utils._rebuild_", "torch._tensor._rebuild_")
"""Prefixes of the names of functions that make tensors."""
_TENSORS: Final = frozenset({"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"})
_NO_PLAIN_VALUE: Final = f"{PLAIN_VALUE}, got "
_SETS: Final = frozenset(
    f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "frozenset")
)
_CONSTANT: Final = re.compile(r"torch\.[a-z][a-z0-9_]*")
"""dtypes, layouts and memory formats."""


def plain_from_pickle(value: object, what: str) -> object:
    """A result of `read_pickle` as a plain value. NumPy numbers become numbers, dtypes and devices become text.

    UnreadableValue, beginning with `what`, for anything that is not a plain value, see `plain_value`.
    """
    try:
        return plain_value(value, what, foreign=_described)
    except CheckpointError as error:
        start, _, reason = str(error).rpartition(_NO_PLAIN_VALUE)
        text = f"{what}: expected a plain value, found {reason}" if start else reason
        raise UnreadableValue(text, reason.removeprefix(f"{what}: "), holds_tensors(value)) from None


def holds_tensors(value: object) -> bool:
    """Whether a result of `read_pickle` contains a tensor or a NumPy array, at any depth, of any class."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, Persistent) or (
            isinstance(node, Call) and node.name in ARRAYS and not _is_number(node)
        ):
            return True
        if id(node) in seen:
            continue
        seen.add(id(node))
        match node:
            case dict():
                stack += node.values()
            case list() | tuple():
                stack += node
            case Call():
                stack += (*node.args, node.state, node.items)
            case Instance():
                stack += (node.state, node.items)
    return False


def array_of(node: Call) -> np.ndarray | None:
    """The array or scalar that NumPy has pickled; None if it does not consist of numbers."""
    match node:
        case Call(args=(dtype, data)):
            shape, fortran = (), False
        case Call(args=(data, dtype, tuple(shape), str(order))) if is_index(shape):
            fortran = order == "F"
        case Call(state=(int(), tuple(shape), dtype, bool(fortran), data)) if is_index(shape):
            pass
        case _:
            return None
    match dtype:
        case Call(name="numpy.dtype", args=(str(code), *_), state=(_, str(order), *_)) if NUMBER.fullmatch(
            code
        ):
            stored_dtype = np.dtype(f"{'>' if order == '>' else '<'}{code}")
        case Call(name="numpy.dtype", args=(Name(dotted=dotted), *_)) if dotted.startswith("ml_dtypes."):
            stored_dtype = DTYPES.get(dotted.removeprefix("ml_dtypes."), np.dtype(object))
        case _:
            return None
    try:
        raw = plain_value(data, "", foreign=_bytes_or_name)
    except CheckpointError:
        return None
    native = stored_dtype.newbyteorder("<")
    if (
        not isinstance(raw, bytes)
        or DTYPES.get(native.name) != native
        or len(raw) != math.prod(shape) * stored_dtype.itemsize
    ):
        return None
    array = np.frombuffer(raw, stored_dtype).astype(native, copy=False)
    return array.reshape(shape, order="F" if fortran else "C")


def _is_number(node: Call) -> bool:
    return node.name.endswith(".scalar")


def _described(node: object) -> bytes | str | Described:
    match node:
        case Call(name=name) if name in ARRAYS and _is_number(node):
            array = array_of(node)
            if array is not None and array.dtype.kind != "c":
                return Described(array.item() if array.dtype.kind in "biu" else float(array))
            return "a NumPy number type that Python lacks"
        case Call(name="torch.device", args=(str(device),)):
            return Described(device)
        case Call(name="torch.device", args=(str(device), int(index))):
            return Described(f"{device}:{index}")
        case Call(name=name, args=(list(pairs),)) if name == ORDERED_DICT and all(map(is_pair, pairs)):
            return Described(dict(pairs))
        case Name(dotted=dotted) if _CONSTANT.fullmatch(dotted):
            return Described(dotted)
        case Persistent():
            return "the elements of a tensor"
    return _bytes_or_name(node)


def is_pair(pair: object) -> bool:
    """Whether this is a name and a value."""
    return isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)


def _bytes_or_name(node: object) -> bytes | str:
    match node:
        case bytes():
            return node
        case Call(name=name, args=()) if name in BYTES_CALLS:
            return b""
        case Call(name="_codecs.encode", args=(str(text), "latin1")):
            with suppress(UnicodeEncodeError):
                return text.encode("latin1")
            return node.name
    return described(node)


def described(node: object) -> str:
    """What a node is, for errors; nothing in it is printed."""
    match node:
        case Call(name=name) if name in _TENSORS:
            return "one tensor"
        case Call(name="torch._tensor._rebuild_from_type_v2", args=(_, Name(dotted=class_name), *_)):
            return f"a tensor of class {class_name}"
        case Call(name=name) if name in ARRAYS:
            return "an array of NumPy"
        case Call(name=name) if name in _SETS:
            return "a set"
        case Call(name=name):
            return f"a call of {name}, which Twinshard does not execute (loading the file would execute it)"
        case Instance(name=name):
            return f"an object of class {name}"
        case Name(dotted=name):
            return f"the name {name}"
    return f"a value of type {type(node).__name__}"
