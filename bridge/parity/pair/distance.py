"""How far apart two arrays are, and how much of it rounding explains.

The error model. A value is computed four times: by both sides, each in float64 and in the compute dtype::

    torch, float64  --------- distance --------- JAX, float64
         |                                            |
       noise of torch                            noise of JAX          floor = the larger of the two
         |                                            |
    torch, float32                               JAX, float32

The float64 runs are 2**29 times finer than float32, so what is left between them is not rounding but another
computation, or constants that one side rounded to float32 (rotary frequencies, a softmax that is kept in float32). Such
constants make a difference of the size of the floor, never several times the floor. A difference counts when the
distance is more than ``FACTOR`` times the floor. Distances are Euclidean norms over the whole array. The floor of an
array that float32 keeps exactly (a lookup, a reshape) is a quarter of one rounding of its values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from bridge.checkpoints.ulp import Tolerance, compare

FACTOR = 4.0
"""Ratio of distance to floor above which a difference counts."""

_LEAST_PART = 0.25
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


def dtype_of(name: str) -> np.dtype:
    """NumPy's or ml_dtypes' dtype."""
    return _DTYPES.get(name) or np.dtype(name)


def epsilon(dtype: str) -> float:
    """The distance from 1 to the next number of ``dtype``."""
    return float(ml_dtypes.finfo(dtype_of(dtype)).eps)


@dataclass(frozen=True)
class Distance:
    """Between two arrays of one shape. All norms are Euclidean, over the finite elements of both, in float64.

    ``absolute``: of the difference; infinite where a value is finite, NaN or infinite on one side only. ``norm``: the
    larger one of both. ``cosine``: of the angle between them, NaN where one is zero. ``max_ulp``: the largest distance
    of two elements in units in the last place, both rounded to the compute dtype. ``where``: index of the element with
    the largest difference; ``values``: there.
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
    """Compare two arrays. Integers and booleans that differ are infinitely far apart."""
    if a.shape != b.shape:
        raise ValueError(f"expected arrays of one shape, got {a.shape} and {b.shape}")
    exact = a.dtype.kind in "iub" or b.dtype.kind in "iub"
    x, y = a.astype(np.float64).reshape(-1), b.astype(np.float64).reshape(-1)
    # In place, because a whole table of embeddings is compared at once.
    with np.errstate(all="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        both = np.isfinite(x) & np.isfinite(y)
        difference = x - y
        np.abs(difference, out=difference)
    difference[~same if exact else ~(same | both)] = np.inf
    difference[same] = 0.0
    x[~both] = 0.0
    y[~both] = 0.0
    # Squares of finite numbers may overflow.
    largest = [max(float(one.max(initial=0.0)), -float(one.min(initial=0.0))) for one in (x, y)]
    scale = max(largest) or 1.0
    x /= scale
    y /= scale
    norms = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    worst = int(difference.argmax()) if difference.size else 0
    values = (float(a.reshape(-1)[worst]), float(b.reshape(-1)[worst])) if difference.size else (0.0, 0.0)
    difference /= scale
    return Distance(
        float(np.linalg.norm(difference)) * scale,
        max(norms) * scale,
        float(np.clip(x @ y / (norms[0] * norms[1]), -1, 1)) if min(norms) > 0 else math.nan,
        0 if exact else _ulp(a, b, dtype),
        tuple(map(int, np.unravel_index(worst, a.shape))) if difference.size else (),
        values,
    )


def _ulp(a: np.ndarray, b: np.ndarray, dtype: str) -> int:
    with np.errstate(all="ignore"):
        left, right = (np.ascontiguousarray(one.astype(dtype_of(dtype))) for one in (a, b))
    return compare(left, right, Tolerance(), any_nan=True).max_ulp


def noise(low: np.ndarray | None, high: np.ndarray, dtype: str) -> float:
    """What rounding to ``dtype`` does to an array: ``|low - high|``, at least a part of one rounding of ``high``.

    ``low``: the same array, computed in ``dtype``; None where that is not known.
    """
    with np.errstate(all="ignore"):
        values = np.nan_to_num(high.astype(np.float64), copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    least = _LEAST_PART * epsilon(dtype) * float(np.linalg.norm(values))
    if low is None or low.shape != high.shape:
        return least
    found = distance(low, high, dtype).absolute
    # A routing that rounding tips over, or an overflow, says nothing of the rest.
    return max(least, found) if math.isfinite(found) else least
