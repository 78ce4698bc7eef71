"""A compiled step as a schedule: the computation, the transfers, and what runs during each transfer.

``read_program`` reads the text of ``jax.stages.Compiled.as_text()`` for a GPU or a TPU. The steps are in the order in
which the device gets them::

    Start("ag.1", Transfer("all_gather", ...))
    Work("gemm", flops={"bf16": ...}, bytes=...)      during the transfer
    Done("ag.1")
    Loop(32, (...))
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bridge.compiling.timing.program_traffic import traffic
from bridge.core.hlo.collectives import (
    COPY,
    DONE,
    START,
    Transfer,
    chain_of,
    collectives_of,
    marked,
    partitions_of,
    transfer,
)
from bridge.core.hlo.text import Array, Computation, Module, Operation, check_scheduled, read_module


@dataclass(frozen=True)
class Work:
    """An operation: ``flops`` of its matrix products by class (``product_flops``), ``bytes`` of memory traffic."""

    name: str
    flops: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0


@dataclass(frozen=True)
class Start:
    key: str
    transfer: Transfer


@dataclass(frozen=True)
class Done:
    """``key``: of a start in the same iteration of a loop, or in the one before."""

    key: str


@dataclass(frozen=True)
class Loop:
    times: int
    steps: tuple[Step, ...]


Step = Work | Start | Done | Loop


@dataclass(frozen=True)
class Program:
    """The work of one device in one run."""

    steps: tuple[Step, ...]

    @property
    def flops(self) -> Counter[str]:
        """Operations of all matrix products, by class."""
        total: Counter[str] = Counter()
        for step, times in _each(self.steps, 1):
            if isinstance(step, Work):
                total.update({dtype: times * count for dtype, count in step.flops.items()})
        return total

    @property
    def bytes(self) -> int:
        """Bytes of memory traffic, without collectives."""
        works = (times * step.bytes for step, times in _each(self.steps, 1) if isinstance(step, Work))
        copies = (times * transfer.bytes for transfer, times in self.transfers if transfer.kind == COPY)
        return sum(works) + sum(copies)

    @property
    def transfers(self) -> list[tuple[Transfer, int]]:
        """Each transfer with the number of its runs."""
        return [(step.transfer, times) for step, times in _each(self.steps, 1) if isinstance(step, Start)]


def read_program(text: str) -> Program:
    """Raises ``ValueError`` for a text that is no scheduled program, and for a loop of unknown length."""
    check_scheduled(text)
    module = read_module(text)
    return Program(tuple(_Reader(module, partitions_of(text)).steps(module.entry)))


def _each(steps: tuple[Step, ...], times: int) -> Iterator[tuple[Step, int]]:
    for step in steps:
        if isinstance(step, Loop):
            yield from _each(step.steps, times * step.times)
        else:
            yield step, times


class _Reader:
    def __init__(self, module: Module, partitions: int) -> None:
        self._module = module
        self._partitions = partitions

    def steps(self, computation: Computation) -> Iterator[Step]:
        under_way: set[str] = set()
        for operation in computation.operations:
            if operation.op == "while":
                body = next(self._module.called(operation))
                yield Loop(self._module.trips(operation), tuple(self.steps(body)))
            elif operation.op == "call":
                for called in self._module.called(operation):
                    yield from self.steps(called)
            elif operation.op == "conditional":
                yield from self._longest_branch(operation)
            elif operation.op.endswith("-done"):
                yield Done(self._started(computation, operation))
            else:
                yield from self._issued(computation, operation, under_way)

    def _issued(self, computation: Computation, operation: Operation, under_way: set[str]) -> Iterator[Step]:
        """``under_way``: chains of the TPU compiler's asynchronous collectives; the call updates the set."""
        wrapped = collectives_of(self._module, operation)
        begun, ended = (marked(self._module, operation, mark) if wrapped else set() for mark in (START, DONE))
        at_once = [collective for collective in wrapped if chain_of(collective) not in begun | under_way]
        if at_once:
            yield Start(operation.name, transfer(self._module, at_once, operation, self._partitions))
            if not operation.op.endswith("-start"):
                yield Done(operation.name)
        for collective in wrapped:
            if chain_of(collective) in begun:
                yield Start(
                    chain_of(collective), transfer(self._module, [collective], operation, self._partitions)
                )
        for chain in sorted(ended):
            yield Done(chain)
        under_way |= begun
        under_way -= ended
        flops = product_flops(self._module, computation, operation)
        if operation.op.endswith("-start") and not wrapped:
            if flops:
                # Computed at the same time as other operations, but on the same units, so treated as computed here.
                yield Work(operation.name, dict(flops))
            yield Start(operation.name, Transfer(COPY, self._copied(operation)))
            return
        moved = traffic(self._module, computation, operation)
        if flops or moved:
            yield Work(operation.name, dict(flops), moved)

    def _longest_branch(self, operation: Operation) -> tuple[Step, ...]:
        branches = [Program(tuple(self.steps(branch))) for branch in self._module.called(operation)]
        if not branches:
            return ()
        return max(branches, key=lambda branch: (branch.flops.total(), branch.bytes)).steps

    def _copied(self, operation: Operation) -> int:
        """Bytes of ``copy-start``, ``slice-start`` and other asynchronous operations: the result is in HBM, or the
        operand, or both."""
        arrays = operation.arrays
        size = min((array.bytes for array in arrays if array.shape), default=0)
        return size * sum(array.in_hbm for array in arrays if array.shape)

    def _started(self, computation: Computation, done: Operation) -> str:
        name = done.operands[0] if done.operands else done.name
        while name in computation.by_name:
            operation = computation.by_name[name]
            if operation.op.endswith("-start") or not operation.operands:
                return name
            name = operation.operands[0]
        return name


_DIMENSIONS = re.compile(r'"?lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)[\]}]')
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_PRECISION = re.compile(r'operand_precision"?[=:][\[{]([^\]}]*)[\]}]')
_TARGET = re.compile(r'custom_call_target="__(cublas|cudnn)\$([\w$]+)"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\{[^}]*?"dimensions":\[([^\]]*)\]')


def product_flops(module: Module, computation: Computation, operation: Operation) -> Counter[str]:
    """Operations of ``operation`` in ``computation``, and of computations that it calls; a loop's body counts once.

    A product of sums over ``k`` has ``2 k`` operations for each element of its result. Products appear as ``dot``, as
    ``convolution`` (the TPU compiler's form for all of them), and as calls to cuBLAS and cuDNN. Elementwise operations
    are not products: memory bounds their time.

    Classes: ``bf16`` (also float16), ``f8``, ``s8``, ``f64``; float32 by the precision that the program asks for:
    ``f32`` (XLA's default: TF32 on GPUs, one pass in bfloat16 on TPUs), ``f32_high`` and ``f32_highest``.
    """
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
