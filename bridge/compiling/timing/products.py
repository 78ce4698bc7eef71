"""Floating-point operations of the matrix products in a compiled program, by the speed class of their operands.

A product of sums over ``k`` has ``2 k`` operations for each element of its result. Products appear as ``dot``, as
``convolution`` (the TPU compiler's form for all of them), and as calls to cuBLAS and cuDNN. Elementwise operations
are not products: memory bounds their time.

Classes: ``bf16`` (also float16), ``f8``, ``s8``, ``f64``; float32 by the precision that the program asks for: ``f32``
(XLA's default: TF32 on GPUs, one pass in bfloat16 on TPUs), ``f32_high`` and ``f32_highest``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from bridge.core.hlo.text import Array, Computation, Module, Operation

_DIMENSIONS = re.compile(r'"?lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)[\]}]')
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_PRECISION = re.compile(r'operand_precision"?[=:][\[{]([^\]}]*)[\]}]')
_TARGET = re.compile(r'custom_call_target="__(cublas|cudnn)\$([\w$]+)"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\{[^}]*?"dimensions":\[([^\]]*)\]')


def product_flops(module: Module, computation: Computation, operation: Operation) -> Counter[str]:
    """Operations of ``operation`` in ``computation``, and of computations that it calls; a loop's body counts once."""
    by_class: Counter[str] = Counter()
    for owner, inner in [(computation, operation), *module.within(operation)]:
        flops, factor = _flops(owner, inner)
        if flops:
            by_class[_speed_class(inner, factor)] += flops
    return by_class


def _flops(computation: Computation, operation: Operation) -> tuple[int, Array]:
    """The number of operations, and the operand whose dtype decides the class."""
    if operation.op == "dot":
        return _contraction(computation, operation)
    if operation.op == "convolution":
        left, right = (computation.operand(operation, side).arrays[0] for side in (0, 1))
        return _convolution(operation, left, right, operation.arrays[0]), _wider(left, right)
    if operation.op == "custom-call" and (target := _TARGET.search(operation.attributes)):
        if target[1] == "cublas":
            return _contraction(computation, operation)
        return _cudnn(target[2], computation, operation)
    return 0, operation.arrays[0] if operation.arrays else Array("pred", (), False)


def _contraction(computation: Computation, operation: Operation) -> tuple[int, Array]:
    left, right = (computation.operand(operation, side).arrays[0] for side in (0, 1))
    named = _DIMENSIONS.search(operation.attributes)
    if named is None:
        raise ValueError(f"product {operation.name}: expected its contracting dimensions, got none")
    contracted = [int(axis.strip(' "')) for axis in named[1].split(",") if axis.strip(' "')]
    summed = math.prod(left.shape[axis] for axis in contracted)
    return 2 * operation.arrays[0].size * summed, _wider(left, right)


def _cudnn(target: str, computation: Computation, operation: Operation) -> tuple[int, Array]:
    first = computation.operand(operation, 0).arrays[0]
    if target.startswith("fmha"):
        # Attention: two products in forward; five in backward, which recomputes the scores.
        scores = _SCORES.search(operation.attributes)
        if scores is None:
            raise ValueError(f"attention {operation.name}: expected the shape of its scores, got none")
        size = math.prod(int(size_text.strip(' "')) for size_text in scores[1].split(","))
        return (5 if "Backward" in target else 2) * 2 * size * first.shape[-1], first
    if not target.startswith("conv"):
        return 0, first
    second, result = computation.operand(operation, 1).arrays[0], operation.arrays[0]
    arrays = first, second, result
    if "BackwardInput" in target:
        arrays = result, second, first
    elif "BackwardFilter" in target:
        arrays = first, result, second
    return _convolution(operation, *arrays), _wider(first, second)


def _convolution(operation: Operation, image: Array, kernel: Array, result: Array) -> int:
    """Operations without the places where the kernel meets padding or the holes of a dilated image.

    The TPU compiler writes batches of products as convolutions that consist mostly of holes.
    """
    labels = _LABELS.search(operation.attributes)
    if labels is None:
        raise ValueError(f"convolution {operation.name}: expected dim_labels, got none")
    axes = [
        dict(zip(names, array.shape, strict=False))
        for names, array in zip(labels.groups(), (image, kernel, result), strict=True)
    ]
    window = _window(operation.attributes)
    places = 1
    for number, axis in enumerate(sorted(name for name in axes[0] if name.isdigit())):
        places *= _met(
            *(sizes[axis] for sizes in axes),
            stride=_of_axis(window.get("stride", ()), number, 1),
            pad=_of_axis(window.get("pad", ()), number, 0),
            image_dilation=_of_axis(window.get("lhs_dilate", ()), number, 1),
            kernel_dilation=_of_axis(window.get("rhs_dilate", ()), number, 1),
        )
    return 2 * axes[2]["b"] * axes[2]["f"] * axes[1]["i"] * places


def _met(
    image: int, kernel: int, result: int, *, stride: int, pad: int, image_dilation: int, kernel_dilation: int
) -> int:
    """Pairs of a place in the result and in the kernel, on one axis, that meet an element of the image."""
    step = math.gcd(stride, image_dilation)
    period, last = image_dilation // step, (image - 1) * image_dilation
    total = 0
    for tap in range(kernel):
        offset = tap * kernel_dilation - pad
        if offset % step:
            continue
        # result places o with 0 <= stride o + offset <= last, and stride o + offset a multiple of the dilation
        low, high = max(0, -(offset // stride)), min(result - 1, (last - offset) // stride)
        first = (-(offset // step) * pow(stride // step, -1, period)) % period if period > 1 else 0
        low += (first - low) % period
        total += max(0, (high - low) // period + 1)
    return total


def _window(attributes: str) -> dict[str, list[str]]:
    written = _WINDOW.search(attributes)
    pairs = (field.split("=") for field in written[1].split()) if written else ()
    return {key: value.split("x") for key, value in pairs}


def _of_axis(values: Sequence[str], axis: int, default: int) -> int:
    """The number of an axis, such as 2 in "2" and in "2_1", the padding before and after it."""
    return int(values[axis].partition("_")[0]) if axis < len(values) else default


def _wider(left: Array, right: Array) -> Array:
    return max(left, right, key=lambda array: array.bytes / max(1, array.size))


def _speed_class(operation: Operation, factor: Array) -> str:
    dtype = factor.dtype
    if dtype.startswith("f8"):
        return "f8"
    if dtype == "f32":
        written = _PRECISION.search(operation.attributes)
        asked = written[1].lower() if written else ""
        return "f32_highest" if "highest" in asked else "f32_high" if "high" in asked else "f32"
    return {"f16": "bf16", "u8": "s8"}.get(dtype, dtype)
