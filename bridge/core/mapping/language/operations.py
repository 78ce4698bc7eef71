"""Elementwise operations of an entry: the function that a convention applies to plain values before it stores them.

    query/kernel : m h d | times(d ** -0.5)      stored = plain * d ** -0.5
    norm/scale | plus(1)                         stored = plain + 1
    embedding : v m | times(bfloat16(m ** 0.5))  stored = plain * (m ** 0.5 as bfloat16)

From one convention to another, the inverse of the first operation is followed by the second operation. The result is
computed in float64 and rounded once, to nearest, to the stored dtype: exact for factors that are powers of two,
otherwise within half a unit in the last place. Multiplying a weight by c divides its gradients and first moments by c,
and its second moments by c ** 2.

Padding means rows that one convention has and another lacks:

    hf = "model.embed_tokens.weight : vocab m"
    maxtext = "token_embedder/embedding : (vocab + zeros(padding)) m"

MaxText rounds a vocabulary up, and no token uses the additional rows. For a convention with such an axis, they are
written as zeros, as many as the axis has: none, if no size is given. For a convention without the axis, they are left
out. Then they must be zeros, unless the caller gave the size of the axis: training changes the logits of all rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import ml_dtypes
import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader, TensorInfo
from bridge.core.formats.tensors.boxes import split_box
from bridge.core.mapping.language.arithmetic import POWERS, evaluate, names_in
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.relation import Block, TensorView, elements

_OPERATION = re.compile(r"(times|plus)\((?:([^()]*)|bfloat16\(([^()]*)\))\)")

_ROUNDED_ONCE = frozenset({np.float64, np.float32, np.float16, np.complex128, np.complex64})

_BUFFER = 1 << 16
"""Elements that are processed in float64 at a time."""


@dataclass(frozen=True)
class Operation:
    """``times`` or ``plus`` a constant: a product of numbers and sizes of axes, each to a power.

    axes: the axes whose sizes ``formula`` needs. narrow: the constant is rounded to bfloat16, as in models that compute
    it in that dtype.
    """

    text: str
    kind: Literal["times", "plus"]
    formula: str
    axes: frozenset[str]
    narrow: bool = False

    @staticmethod
    def parse(text: str) -> Operation:
        """Parse ``times(...)`` or ``plus(...)``. Raises MappingError, quoting the text."""
        match = _OPERATION.fullmatch(text.strip())
        constant = (match[2] or match[3] or "") if match else ""
        try:
            axes = frozenset(names_in(constant, POWERS))
        except ValueError:
            match = None
        if match is None or not all(axis.isidentifier() for axis in axes):
            raise MappingError(
                f"expected an operation such as times(d ** -0.5) or plus(1), got {text.strip()!r}"
            )
        operator = cast(Literal["times", "plus"], match[1])
        return Operation(text.strip(), operator, constant, axes, match[3] is not None)

    def constant(self, sizes: Mapping[str, int]) -> float:
        """The constant. Raises MappingError if a size is unknown or the operation cannot be undone."""
        try:
            value = evaluate(self.formula, sizes)
            value = value if isinstance(value, complex) else float(value)
        except KeyError as error:
            raise MappingError(
                f"expected the size of axis {error.args[0]} for {self.text}, got none: give it in the mapping's "
                f"[axes] table or on the command line as --axis {error.args[0]}=SIZE"
            ) from error
        except (OverflowError, ZeroDivisionError):
            value = math.nan
        if self.narrow and not isinstance(value, complex):
            value = float(rounded(np.array(value), np.dtype(ml_dtypes.bfloat16)))
        if isinstance(value, complex) or not math.isfinite(value) or (self.kind == "times" and not value):
            raise MappingError(f"expected {self.text} to be a finite number that can be undone, got {value}")
        return value


@dataclass(frozen=True)
class Change:
    """``factor * x + shift``, in float64."""

    factor: float
    shift: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether the operation is exact, except for results too small for the dtype."""
        return abs(math.frexp(self.factor)[0]) == 0.5 and not self.shift

    def apply(self, source: np.ndarray, target: np.ndarray) -> None:
        """Fill ``target`` from ``source``, of equal shape and dtype.

        Raises OverflowError if a finite element would become infinite.
        """
        with np.nditer(
            [source, target],
            ["external_loop", "buffered", "zerosize_ok"],
            [["readonly"], ["writeonly"]],
            buffersize=_BUFFER,
        ) as pieces:
            for x, y in pieces:
                wide = np.complex128 if x.dtype.kind == "c" else np.float64
                with np.errstate(all="ignore"):
                    result = rounded(x.astype(wide) * self.factor + self.shift, target.dtype)
                    lost = np.isfinite(x) & ~np.isfinite(result)
                if lost.any():
                    raise OverflowError
                y[...] = result


def change(
    source: Operation | None, target: Operation | None, sizes: Mapping[str, int], power: int
) -> Change | None:
    """The change from stored values of one convention to those of another; None if they are the same.

    power: 1 for weights, -1 for values proportional to gradients, -2 for values proportional to their squares.
    """
    if (source and source.text) == (target and target.text):
        return None
    (a, b), (c, d) = (_affine(operation, sizes) for operation in (source, target))
    composed = Change(c / a, d - c / a * b) if power == 1 else Change((c / a) ** power)
    return None if composed == Change(1.0) else composed


def _affine(operation: Operation | None, sizes: Mapping[str, int]) -> tuple[float, float]:
    if operation is None:
        return 1.0, 0.0
    constant = operation.constant(sizes)
    return (constant, 0.0) if operation.kind == "times" else (1.0, constant)


@dataclass(frozen=True)
class ChangedView:
    """A tensor view whose elements are changed block by block. ``changes``: one per block; None for no change."""

    view: TensorView
    changes: tuple[Change | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def dtype(self) -> np.dtype:
        return self.view.dtype

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.view.blocks

    @property
    def exact(self) -> bool:
        """Whether all changes are exact."""
        return all(change is None or change.exact for change in self.changes)

    def read(self, reader: CheckpointReader, box: Box) -> np.ndarray:
        """The elements of ``box``, C-contiguous, of ``dtype``. Raises CheckpointError if one becomes infinite."""
        target = np.empty(box.sizes, self.dtype)
        for block, change in zip(self.blocks, self.changes, strict=True):
            for ranges in block.pieces(box, self.dtype.itemsize):
                region = block.source_box(ranges)
                source = elements(reader.read(block.source, region), region, block.source_index, ranges)
                part = elements(target, box, block.target_index, ranges)
                fill_changed(part, source, change, f"{block.source} of {reader.path}")
        return target


def fill_changed(target: np.ndarray, source: np.ndarray, change: Change | None, what: str) -> None:
    """Write the changed elements into ``target``. CheckpointError, about tensor ``what``, if one becomes infinite."""
    if change is None:
        target[...] = source
        return
    try:
        change.apply(source, target)
    except OverflowError:
        raise CheckpointError(
            f"tensor {what}: expected elements that {target.dtype} can hold after "
            f"x * {change.factor:g} + {change.shift:g}, got one that becomes infinite"
        ) from None


def as_dtype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The elements in ``dtype``, rounded once; the same array if it has this dtype. Overflow gives infinity or NaN."""
    with np.errstate(all="ignore"):
        if array.dtype.type in (np.float64, np.complex128):
            return rounded(array, dtype) if dtype != array.dtype else array
        return array.astype(dtype, copy=False)


def rounded(wide: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 or complex128 rounded once to ``dtype``, to nearest, ties to even.

    ml_dtypes converts via float32. Two roundings differ from one for values very close to the midpoint of two numbers.
    So for its dtypes, a first step rounds to odd in float32: the last bit records that bits were cut off.
    """
    if dtype.type in _ROUNDED_ONCE:
        return wide.astype(dtype)
    narrow = wide.astype(np.float32)
    inexact = np.isfinite(narrow) & (narrow.astype(np.float64) != wide)
    away = inexact & (np.abs(narrow.astype(np.float64)) > np.abs(wide))
    bits = narrow.view(np.uint32)
    bits -= away
    bits |= inexact
    return narrow.astype(dtype)


@dataclass(frozen=True)
class PaddedView:
    """A tensor that begins with the whole ``view``, and is 0 elsewhere."""

    view: TensorView | ChangedView
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.view.dtype

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.view.blocks

    @property
    def exact(self) -> bool:
        """Whether no element is rounded."""
        return not isinstance(self.view, ChangedView) or self.view.exact

    def read(self, reader: CheckpointReader, box: Box) -> np.ndarray:
        """The elements of ``box``, C-contiguous. Raises as the view does."""
        part = box.intersect(Box.whole(self.view.shape))
        if part == box:
            return self.view.read(reader, box)
        target = np.zeros(box.sizes, self.dtype)
        if part is not None:
            target[part.slices(box)] = self.view.read(reader, part)
        return target


@dataclass(frozen=True)
class LeftOut:
    """The end of a tensor along ``dim``, from ``start`` on, which the target lacks. axis: the padding."""

    info: TensorInfo
    dim: int
    start: int
    axis: str


def require_zeros(reader: CheckpointReader, ends: Iterable[LeftOut], target: str) -> None:
    """Raises MappingError if a dropped element is not 0. target: the convention without padding."""
    for end in ends:
        shape, start, axis = end.info.shape, end.start, end.axis.removesuffix(ZEROS)
        size = shape[end.dim]
        whole = Box(
            tuple(start if k == end.dim else 0 for k in range(len(shape))),
            tuple(size - start if k == end.dim else n for k, n in enumerate(shape)),
        )
        for box in split_box(whole, end.info.dtype.itemsize):
            if box.numel and reader.read(end.info.name, box).any():
                raise MappingError(
                    f"{end.info.name} of {reader.path} has {size} elements along axis {end.dim}, but the model has "
                    f"{start}: expected zeros as padding from {start} on, found other values, for which convention "
                    f"{target} has no place. If the model has {size} elements, say so (--axis {axis}=0). If the model "
                    f"does not use the other values, leave them out (--axis {axis}={size - start}; in a program "
                    f"load_mapping(...).with_axes({{{axis!r}: {size - start}}}))"
                )


ZEROS = ".zeros"
"""Suffix of a padding axis, which one convention has and another may lack (`operations.py`)."""
