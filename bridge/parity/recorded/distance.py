"""The distance of two arrays, and the part of it that rounding explains.

The error model. A value is computed four times: by both sides, each in float64 and in the compute dtype::

    torch, float64  --------- distance --------- JAX, float64
         |                                            |
       noise of torch                            noise of JAX          floor = the larger of the two
         |                                            |
    torch, float32                               JAX, float32

The float64 runs are 2**29 times finer than float32, so a distance between them is not rounding. It is a different
computation, or a constant that one side rounded to float32 (rotary frequencies, a softmax that is kept in float32).
Such constants cause a difference of the size of the floor, never several times the floor. A difference counts if the
distance is more than ``FACTOR`` times the floor. Distances are Euclidean norms over the whole array. If float32 keeps
an array exactly (a lookup, a reshape), its floor is a quarter of one rounding of its values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from bridge.checkpoints.compare.ulp import largest_ulp

FACTOR = 4.0
"""Ratio of distance to floor above which a difference counts.

Two samples of rounding differ, and a float32 constant on one side costs one floor. Correct pairs stay below 4 over 20
seeds (``test_bugs_named.py``).
"""

_LEAST_PART = 0.25
"""Fraction of one rounding of each value: a lookup is exact in float32, and its floor must not be 0."""
_BLOCK = 1 << 13
"""Elements per block: a block stays in the processor's cache, and BLAS starts no threads for so few elements."""


def epsilon(dtype: str) -> float:
    """The distance from 1 to the next number of ``dtype``."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps)


@dataclass(frozen=True)
class Distance:
    """The distance of two arrays of one shape. All norms are Euclidean, over elements finite in both, in float64.

    ``absolute``: norm of the difference; infinite if a value is finite, NaN or infinite on only one side. ``norm``: the
    larger norm of the two. ``cosine``: of the angle between them, NaN if one is zero. ``max_ulp``: the largest distance
    of two elements in units in the last place, both rounded to the compute dtype. ``where``: index of the element with
    the largest difference; ``values``: the two values there.
    """

    absolute: float
    norm: float
    cosine: float
    max_ulp: int
    where: tuple[int, ...]
    values: tuple[float, float]

    @property
    def relative(self) -> float:
        """``absolute`` over ``norm``; 0 between zeros."""
        return self.absolute / self.norm if self.norm > 0 else (math.inf if self.absolute else 0.0)


def distance(a: np.ndarray, b: np.ndarray, dtype: str = "float32") -> Distance:
    """Compare two arrays. Integers and booleans that differ are infinitely far apart.

    Sums go block by block, so intermediate results take little memory.
    """
    exact = _exact(a, b)
    scale = _scale(a, b)
    squares, left, right, products, ulp, worst, largest = 0.0, 0.0, 0.0, 0.0, 0, 0, -1.0
    for start, left_block, right_block in _blocks(a, b):
        x, y, difference = _parted(left_block, right_block, exact)
        ulp = ulp if exact else max(ulp, _ulp(left_block, right_block, dtype))
        index = int(difference.argmax())
        if difference[index] > largest:
            worst, largest = start + index, float(difference[index])
        # In place: with GPT-2's gradient rows, temporaries of the embedding took 9 GB.
        for values in (x, y, difference):
            values /= scale
        squares += float(difference.dot(difference))
        left, right, products = left + float(x.dot(x)), right + float(y.dot(y)), products + float(x @ y)
    norms = math.sqrt(left), math.sqrt(right)
    where = tuple(map(int, np.unravel_index(worst, a.shape))) if a.size else ()
    return Distance(
        math.sqrt(squares) * scale,
        max(norms) * scale,
        # Rounding can push the cosine of equal arrays beyond 1.
        float(np.clip(products / (norms[0] * norms[1]), -1, 1)) if min(norms) > 0 else math.nan,
        ulp,
        where,
        (float(a[where]), float(b[where])) if a.size else (0.0, 0.0),
    )


def gap(a: np.ndarray, b: np.ndarray) -> float:
    """``distance(a, b).absolute``."""
    exact, scale, squares = _exact(a, b), _scale(a, b), 0.0
    for _, left, right in _blocks(a, b):
        difference = _parted(left, right, exact)[2]
        difference /= scale
        squares += float(difference.dot(difference))
    return math.sqrt(squares) * scale


def norm(a: np.ndarray) -> float:
    """The Euclidean norm in float64; values that are not finite count as 0."""
    squares = 0.0
    for _, block, _ in _blocks(a, a):
        values = block.astype(np.float64).ravel(order="K")
        values[~np.isfinite(values)] = 0.0
        squares += float(values.dot(values))
    return math.sqrt(squares)


def _exact(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype.kind in "iub" or b.dtype.kind in "iub"


def _blocks(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Both arrays in blocks, in row-major order, each with the index of its first element; none for empty arrays."""
    if a.shape != b.shape:
        raise ValueError(f"expected arrays of one shape, got {a.shape} and {b.shape}")
    if 0 < a.size <= _BLOCK:
        yield 0, a, b
        return
    # Views with the same order are traversed flat; other pairs go by rows, which copies one block at a time.
    if a.flags.c_contiguous and b.flags.c_contiguous:
        a, b = a.reshape(-1), b.reshape(-1)
    elif a.shape and a.shape[0] == 1:
        yield from _blocks(a[0], b[0])
        return
    rows = max(1, _BLOCK * len(a) // a.size) if a.size else 1
    for first in range(0, len(a) if a.size else 0, rows):
        yield first * (a.size // len(a)), a[first : first + rows], b[first : first + rows]


def _parted(a: np.ndarray, b: np.ndarray, exact: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both in float64, flat, with 0 where either is not finite; and the distances of their elements."""
    # Also copies float64: the arrays are changed.
    x, y = (side.astype(np.float64).reshape(-1) for side in (a, b))
    with np.errstate(all="ignore"):
        difference = x - y
        np.abs(difference, out=difference)
        # In the usual case everything is finite, and no search is needed.
        if not exact and math.isfinite(float(difference.max())):
            return x, y, difference
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        both = np.isfinite(x) & np.isfinite(y)
    difference[~same if exact else ~(same | both)] = np.inf
    difference[same] = 0.0
    x[~both] = 0.0
    y[~both] = 0.0
    return x, y, difference


def _scale(a: np.ndarray, b: np.ndarray) -> float:
    """The largest magnitude, to scale by: squares of finite numbers may overflow."""
    largest = 0.0
    for _, left, right in _blocks(a, b):
        ends = [float(end) for part in (left, right) for end in (part.max(), part.min())]
        if not all(map(math.isfinite, ends)):
            x, y = (part.astype(np.float64).reshape(-1) for part in (left, right))
            both = np.isfinite(x) & np.isfinite(y)
            ends = [
                end for part in (x[both], y[both]) for end in (part.max(initial=0.0), part.min(initial=0.0))
            ]
        largest = max(largest, *map(abs, ends))
    return float(largest) or 1.0


def _ulp(a: np.ndarray, b: np.ndarray, dtype: str) -> int:
    # A float64 beyond the dtype's range becomes infinite there, and this distance counts.
    with np.errstate(all="ignore"):
        left, right = (np.ascontiguousarray(side.astype(np.dtype(dtype))) for side in (a, b))
    return largest_ulp(left, right)


def noise(low: np.ndarray | None, high: np.ndarray, dtype: str) -> float:
    """The error of rounding an array to ``dtype``: ``|low - high|``, at least a fraction of one rounding of ``high``.

    ``low``: the same array, computed in ``dtype``; None if it is unknown.
    """
    least = _LEAST_PART * epsilon(dtype) * norm(high)
    if low is None or low.shape != high.shape:
        return least
    apart = gap(low, high)
    # A routing decision that rounding flips, or an overflow, says nothing about the rest.
    return max(least, apart) if math.isfinite(apart) else least


def fits(candidate: np.ndarray, value: np.ndarray, floor: float) -> bool:
    """Whether rounding explains the distance of two arrays: equal shapes, and within ``FACTOR`` times ``floor``."""
    return candidate.shape == value.shape and distance(candidate, value).absolute <= FACTOR * floor
