"""Bytes that one operation of a compiled program reads from and writes to a device's main memory.

An operation reads its operands and writes its result; inside a fusion nothing else touches memory. If an operation uses
only a part of an operand (a slice, a gathered row, a layer of a stack), this part counts. For an update in place, the
written part counts. Caches are not modelled: if two operations read an array, it counts twice.
"""

from __future__ import annotations

import re

from bridge.core.hlo.collectives import is_collective
from bridge.core.hlo.text import Array, Computation, Module, Operation, elements

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id", "while", "conditional", "call", "add-dependency", "domain",
}  # fmt: skip
_SLICES = {"slice", "dynamic-slice", "gather"}
# One element of the result needs one element of each operand of the same size.
_ELEMENTWISE = {
    "abs", "add", "and", "bitcast", "ceil", "clamp", "compare", "convert", "copy", "cosine", "divide", "exponential",
    "floor", "is-finite", "log", "maximum", "minimum", "multiply", "negate", "not", "or", "power", "reshape", "rsqrt",
    "select", "sine", "sqrt", "subtract", "tanh", "transpose", "logistic", "xor",
}  # fmt: skip
# Custom calls that the TPU compiler uses as annotations; they move no data.
_NOTES = re.compile(r'custom_call_target="(?:AllocateBuffer|ConcatBitcast|AssumeGatherIndicesInBound)"')
_MOVED = {"bitcast", "copy", "reshape", "convert", "get-tuple-element"}


def traffic(module: Module, computation: Computation, operation: Operation) -> int:
    """Bytes of ``operation`` in ``computation``; 0 for collectives and for operations that end a transfer."""
    if operation.op in _FREE or operation.op.endswith("-done") or is_collective(operation):
        return 0
    if operation.op == "fusion":
        return _fused(module, computation, operation)
    if operation.op == "custom-call" and _NOTES.search(operation.attributes):
        return 0
    results = operation.arrays
    if operation.op == "custom-call" and 'custom_call_target="__cu' in operation.attributes:
        # cuBLAS and cuDNN have scratch memory as their last result.
        results = results[: max(1, len(results) - 1)]
    if operation.op in _SLICES:
        sliced = _operand(computation, operation, 0)
        return _hbm(results) + sum(_capped(array, results[0].size) for array in sliced)
    if operation.op == "dynamic-update-slice":
        update = _operand(computation, operation, 1)
        written = sum(array.size for array in update)
        return _hbm(update) + sum(_capped(array, written) for array in results)
    operands = (_operand(computation, operation, index) for index in range(len(operation.operands)))
    return _hbm(results) + sum(map(_hbm, operands))


def _is_transfer(operation: Operation) -> bool:
    return is_collective(operation) or 'custom_call_target="AsyncCollective' in operation.attributes


def _fused(module: Module, computation: Computation, fusion: Operation) -> int:
    inner = next(module.called(fusion), None)
    if inner is None:
        raise ValueError(f"fusion {fusion.name}: expected its computation in the text, got none")
    root = inner.root
    if _is_transfer(root):
        return 0
    demands: dict[str, int] = {}
    total = 0
    for step in inner.operations:
        if step.op == "parameter":
            for array in _operand(computation, fusion, int(step.given)):
                total += _capped(array, _demand(inner, step, demands))
    parts = [inner.by_name[name] for name in root.operands] if root.op == "tuple" else [root]
    if len(parts) != len(elements(fusion.result)):
        return total + _hbm(fusion.arrays)
    for part, result in zip(parts, fusion.arrays, strict=False):
        total += _capped(result, _written(inner, part))
    return total


def _demand(inner: Computation, value: Operation, known: dict[str, int]) -> int:
    """How many of a value's elements the fusion needs."""
    if value.name in known:
        return known[value.name]
    size = sum(array.size for array in value.arrays)
    needed = size if value.is_root else 0
    for user in inner.users.get(value.name, []):
        # Operands of a transfer, and values that are only passed on, are not read here.
        if _is_transfer(user) or (user.op == "tuple" and user.is_root and value.op == "parameter"):
            continue
        if user.op in _SLICES and user.operands[0] == value.name:
            needed += user.arrays[0].size
        elif user.op == "dynamic-update-slice" and user.operands[0] == value.name:
            # In place if the whole is the fusion's result; otherwise the whole is copied.
            needed += 0 if _is_result(inner, user) else size
        elif user.op == "tuple" and user.is_root:
            needed += size
        elif user.op in _ELEMENTWISE and sum(array.size for array in user.arrays) == size:
            needed += _demand(inner, user, known)
        else:
            needed += size
    known[value.name] = min(size, needed)
    return known[value.name]


def _is_result(inner: Computation, value: Operation) -> bool:
    """Whether a value is only returned by the fusion, perhaps moved."""
    return value.is_root or all(
        (user.op == "tuple" and user.is_root) or (user.op in _MOVED and _is_result(inner, user))
        for user in inner.users.get(value.name, [])
    )


def _written(inner: Computation, value: Operation) -> int:
    """How many elements of a fusion's result are written: for an update in place only the updated ones."""
    size = sum(array.size for array in value.arrays)
    if value.op == "parameter":
        return 0
    while value.op in _MOVED:
        value = inner.operand(value, 0)
    if _is_transfer(value):
        return 0
    if value.op == "dynamic-update-slice":
        return sum(array.size for array in inner.operand(value, 1).arrays)
    return size


def _operand(computation: Computation, operation: Operation, index: int) -> tuple[Array, ...]:
    operand = computation.operand(operation, index)
    # The destination of a running transfer is not read before the transfer ends.
    return () if operand.op.endswith("-start") else operand.arrays


def _hbm(arrays: tuple[Array, ...]) -> int:
    return sum(array.bytes for array in arrays if array.in_hbm)


def _capped(array: Array, used: int) -> int:
    """Bytes of ``used`` elements of an array in HBM."""
    return array.bytes * min(used, array.size) // array.size if array.in_hbm and array.size else 0
