"""How far apart two arrays of one dtype are: in units in the last place, absolutely and relatively.

The values of a floating-point type, in order, are numbered by consecutive integers; the distance in ULP is the
difference of those numbers. Bit patterns with the sign bit set count downwards from zero::

    value    -inf ... -2**-149   -0.0   +0.0   2**-149 ... inf   NaNs
    number    ...        -2       -1      0        1       ...

so the distance is 0 exactly when all bits agree: the two zeros are one apart, and so are NaNs with neighbouring
payloads. Integers are their own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LARGEST_ULP = 2**64 - 1
"""The largest distance that two 64-bit numbers can have."""

_SLICE = 1 << 18
"""Differing elements examined at a time: what is computed about them takes some 100 bytes each."""


@dataclass(frozen=True)
class Tolerance:
    """Floating-point elements pass when within ``max_ulp`` units in the last place *or* within ``rtol`` relatively.

    A NaN passes only against the same NaN; integers and booleans must be equal.
    """

    max_ulp: int = 0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_ulp <= LARGEST_ULP or not self.rtol >= 0:
            raise ValueError(
                f"expected tolerances of 0 or more, max_ulp below 2**64, got max_ulp={self.max_ulp}, rtol={self.rtol}"
            )


@dataclass(frozen=True)
class Difference:
    """Elements compared and how many differ in some bit; of those, how many involve a NaN or exceed the tolerance.

    max_abs and max_rel are over pairs without NaN; relative to the larger magnitude, infinite when one is infinite.
    """

    elements: int = 0
    differing: int = 0
    nan: int = 0
    beyond: int = 0
    max_ulp: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.elements + other.elements,
            self.differing + other.differing,
            self.nan + other.nan,
            self.beyond + other.beyond,
            max(self.max_ulp, other.max_ulp),
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
        )


def compare(a: np.ndarray, b: np.ndarray, tolerance: Tolerance) -> Difference:
    """Compare C-contiguous arrays of equal shape and dtype; the parts of complex numbers count as two elements."""
    if a.dtype.kind == "c":
        part = np.dtype(f"f{a.dtype.itemsize // 2}")
        a, b = a.reshape(-1).view(part), b.reshape(-1).view(part)
    a, b = a.reshape(-1), b.reshape(-1)
    bits = np.dtype(f"u{a.itemsize}")
    where = np.flatnonzero(a.view(bits) != b.view(bits))
    result = Difference(elements=a.size)
    for start in range(0, where.size, _SLICE):
        chosen = where[start : start + _SLICE]
        result += _differing(a[chosen], b[chosen], tolerance)
    return result


def _differing(a: np.ndarray, b: np.ndarray, tolerance: Tolerance) -> Difference:
    ulp = _distance(_numbers(a), _numbers(b))
    floating = a.dtype.kind not in "biu"
    with np.errstate(all="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        nan = np.isnan(x) | np.isnan(y)
        absolute = np.abs(x - y)
        relative = np.where(np.isinf(absolute), np.inf, absolute / np.maximum(np.abs(x), np.abs(y)))
    absolute, relative = np.where(nan, 0.0, absolute), np.where(nan | (absolute == 0), 0.0, relative)
    # Opposite zeros are 0 apart relatively, yet without a relative tolerance only the same bits pass.
    close = (relative <= tolerance.rtol) & (tolerance.rtol > 0)
    within = ~nan & (close | (ulp <= np.uint64(tolerance.max_ulp)))
    return Difference(
        0,
        a.size,
        int(nan.sum()),
        int((~within).sum()) if floating else a.size,
        int(ulp.max()),
        float(absolute.max()),
        float(relative.max()),
    )


def _numbers(values: np.ndarray) -> np.ndarray:
    """The elements' place in the order of their type, as int64 (uint64 for unsigned integers)."""
    if values.dtype.kind in "bu":
        return values.astype(np.uint64)
    if values.dtype.kind == "i":
        return values.astype(np.int64)
    width = 8 * values.itemsize
    bits = values.view(f"u{values.itemsize}")
    if values.dtype.name == "float8_e8m0fnu":  # powers of two, without a sign bit
        return bits.astype(np.int64)
    magnitude = (bits & bits.dtype.type((1 << (width - 1)) - 1)).astype(np.int64)
    if values.dtype.name.endswith("fnuz"):  # one zero; the pattern of the other is the NaN
        negative = np.where(magnitude == 0, 1 << (width - 1), -magnitude)
    else:
        negative = ~magnitude
    return np.where(bits >> (width - 1) != 0, negative, magnitude)


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # Differences of 64-bit numbers overflow int64, but wrap to the right uint64 when the larger comes first.
    larger, smaller = np.where(a > b, a, b), np.where(a > b, b, a)
    return larger.view(np.uint64) - smaller.view(np.uint64)
