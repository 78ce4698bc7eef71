"""The distance between two arrays of one dtype: in units in the last place, absolute and relative.

The values of a floating-point type, in order, are numbered by consecutive integers; the distance in ULP is the
difference of those numbers. Bit patterns with the sign bit set count downwards from zero::

    value    -inf ... -2**-149   -0.0   +0.0   2**-149 ... inf   NaNs
    number    ...        -2       -1      0        1       ...

so the distance is 0 exactly if all bits agree: the two zeros have distance 1, and so do NaNs with neighbouring
payloads. Integers are their own numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from bridge.checkpoints.compare.spread import Spread
from bridge.core.formats.tensors.base import ORBAX_DTYPES, is_whole

LARGEST_ULP = 2**64 - 1
"""The largest distance that two 64-bit numbers can have."""

_BLOCK = 1 << 18
"""Elements scanned at a time."""

_SLICE = 1 << 15
"""Differing elements examined at a time, so that intermediate results stay in the processor's cache."""

_BITS_OF_SIZE = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@dataclass(frozen=True)
class Tolerance:
    """What passes as equal: each element of a tensor separately, or else the tensor as a whole.

    An element of a floating-point type passes within ``max_ulp`` units in the last place, *or* within ``rtol`` relative
    to the larger magnitude, *or* within ``atol`` absolutely. A floating-point tensor with elements that do not pass
    still passes if its norm-relative error, ||a - b|| / ||a||, is at most ``max_error`` (None: elements decide), *or*
    if ||a - b|| is at most ``noise_factor`` times ||b - noise||, if `diff` is given a noise checkpoint. All norms are
    Euclidean over the elements of the tensor, in float64.

    A NaN passes only against the same NaN, with any tolerance; integers and booleans must be equal.

    noise_factor: the default is 4. Two runs with independent rounding errors of equal size are as far from each other
    as from a third run, and 1.4 times as far as from an exact run; the rest allows for another order of summation.

    Raises ValueError for a tolerance that is negative or NaN.
    """

    max_ulp: int = 0
    rtol: float = 0.0
    atol: float = 0.0
    max_error: float | None = None
    noise_factor: float = 4.0

    def __post_init__(self) -> None:
        known = {name: value for name, value in vars(self).items() if value is not None}
        if any(not value >= 0 for value in known.values()) or self.max_ulp > LARGEST_ULP:
            listed = ", ".join(f"{name}={value}" for name, value in known.items())
            raise ValueError(f"expected tolerances of 0 or more, max_ulp below 2**64, got {listed}")


@dataclass(frozen=True)
class Place:
    """One element: its index in the tensor, and its two values as text (with their bits where the text is the same)."""

    index: tuple[int, ...]
    a: str
    b: str

    def shifted(self, offsets: tuple[int, ...]) -> Place:
        """The same element, with its index counted from another corner."""
        return replace(self, index=tuple(i + o for i, o in zip(self.index, offsets, strict=True)))


@dataclass(frozen=True)
class Difference:
    """Elements compared and how many differ in some bit; of those, how many involve a NaN or exceed the tolerance.

    max_abs and max_rel are over pairs without NaN; relative to the larger magnitude, infinite if one is infinite.
    squares: the sum of squared differences of pairs without NaN. at_ulp, at_abs: the first element with the largest
    distance, and with the largest absolute difference above 0.
    """

    elements: int = 0
    differing: int = 0
    nan: int = 0
    beyond: int = 0
    max_ulp: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    squares: float = 0.0
    at_ulp: Place | None = None
    at_abs: Place | None = None

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.elements + other.elements,
            self.differing + other.differing,
            self.nan + other.nan,
            self.beyond + other.beyond,
            max(self.max_ulp, other.max_ulp),
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
            self.squares + other.squares,
            other.at_ulp if other.max_ulp > self.max_ulp else self.at_ulp,
            other.at_abs if other.max_abs > self.max_abs else self.at_abs,
        )

    def shifted(self, offsets: tuple[int, ...]) -> Difference:
        """The same difference, with its places counted from another corner."""
        if self.at_ulp is None and self.at_abs is None:
            return self
        return replace(
            self,
            at_ulp=self.at_ulp and self.at_ulp.shifted(offsets),
            at_abs=self.at_abs and self.at_abs.shifted(offsets),
        )


def compare(
    a: np.ndarray, b: np.ndarray, tolerance: Tolerance, *, any_nan: bool = False, spread: Spread | None = None
) -> Difference:
    """Compare C-contiguous arrays of equal shape and dtype; the parts of complex numbers count as two elements.

    Elements are compared with ``tolerance`` one by one. any_nan: all NaNs are equal. spread: receives the relative
    differences of pairs without NaN. Equal bits need no arithmetic.
    """
    shape, parts = a.shape, 2 if a.dtype.kind == "c" else 1
    a, b = _parts(a), _parts(b)
    bits = _BITS_OF_SIZE[a.itemsize]
    left, right = a.view(bits), b.view(bits)
    result = Difference(elements=a.size)
    for start in range(0, a.size, _BLOCK):
        differing = left[start : start + _BLOCK] != right[start : start + _BLOCK]
        if not differing.any():
            continue
        positions = np.flatnonzero(differing) + start
        for first in range(0, positions.size, _SLICE):
            where = positions[first : first + _SLICE]
            places = _Where(where, parts, shape)
            result += _differing(a[where], b[where], places, tolerance, any_nan, spread)
    return result


def largest_ulp(a: np.ndarray, b: np.ndarray) -> int:
    """The largest distance of two elements of C-contiguous arrays of equal shape and dtype; all NaNs are equal."""
    left, right = _parts(a), _parts(b)
    largest = 0
    for start in range(0, left.size, _SLICE):
        x, y = left[start : start + _SLICE], right[start : start + _SLICE]
        ulp = _distance(_numbers(x), _numbers(y))
        if not is_whole(x.dtype):
            ulp[np.isnan(x) & np.isnan(y)] = 0
        largest = max(largest, int(ulp.max()))
    return largest


def sum_of_squares(values: np.ndarray) -> float:
    """The sum of squares of all elements except NaN, accumulated in float64; infinite with infinite elements."""
    flat = _parts(values)
    total = 0.0
    for start in range(0, flat.size, _SLICE):
        total += _squares(_values(flat[start : start + _SLICE]))
    return total


def squared_distance(a: np.ndarray, b: np.ndarray) -> float:
    """The sum of squared differences of arrays of one shape, both complex or both real, of any floating-point dtypes.

    Accumulated in float64 over pairs without NaN; infinite if exactly one of a pair is infinite.
    """
    left, right = _parts(a), _parts(b)
    total = 0.0
    for start in range(0, left.size, _SLICE):
        part = slice(start, start + _SLICE)
        with np.errstate(invalid="ignore"):  # equal infinities
            total += _squares(_values(left[part]) - _values(right[part]))
    return total


def _parts(values: np.ndarray) -> np.ndarray:
    """Flattened to one dimension, with complex numbers as their two parts."""
    flat = values.reshape(-1)
    return flat.view(f"f{flat.itemsize // 2}") if flat.dtype.kind == "c" else flat


def _squares(values: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        # Not a BLAS call: its threads cost more than they save on so few elements.
        total = float(np.einsum("i,i->", values, values))
        # The usual case needs no search for NaNs.
        return total if not math.isnan(total) else float(np.nansum(values * values))


class _Where(NamedTuple):
    """The index, from a row-major position, in a tensor of this shape whose elements have one part or two."""

    positions: np.ndarray
    parts: int
    shape: tuple[int, ...]

    def chosen(self, kept: np.ndarray) -> _Where:
        return self._replace(positions=self.positions[kept])

    def element(self, which: int) -> tuple[int, ...]:
        return tuple(map(int, np.unravel_index(self.positions[which] // self.parts, self.shape)))


def _differing(
    a: np.ndarray, b: np.ndarray, where: _Where, tolerance: Tolerance, any_nan: bool, spread: Spread | None
) -> Difference:
    """The difference of elements that all differ."""
    x, y = _values(a), _values(b)
    floating = not is_whole(a.dtype)
    with np.errstate(all="ignore"):
        absolute = np.abs(x - y)
        # Infinities of one sign have the same bits, so only a NaN or an overflow leaves no number here.
        nan = np.isnan(absolute)
        some_nan = bool(nan.any())
        if some_nan and any_nan:
            kept = ~(np.isnan(x) & np.isnan(y))
            if not kept.any():
                return Difference()
            if not kept.all():
                return _differing(a[kept], b[kept], where.chosen(kept), tolerance, False, spread)
        relative = absolute / np.maximum(np.abs(x), np.abs(y))
        relative[np.isinf(absolute)] = np.inf
    if some_nan:
        absolute[nan] = relative[nan] = 0.0
    # Opposite zeros have relative difference 0, but without a relative tolerance only equal bits pass.
    relative[absolute == 0] = 0.0
    if spread is not None:
        spread.add(relative)
    ulp = _distance(_numbers(a), _numbers(b))
    within = ulp <= ulp.dtype.type(min(tolerance.max_ulp, int(np.iinfo(ulp.dtype).max)))
    if tolerance.rtol > 0:
        within |= relative <= tolerance.rtol
    if tolerance.atol > 0:
        within |= absolute <= tolerance.atol
    within &= ~nan
    farthest, largest = int(ulp.argmax()), int(absolute.argmax())

    def locate(which: int) -> Place:
        return Place(where.element(which), *_texts(a[which], b[which]))

    return Difference(
        0,
        a.size,
        int(np.count_nonzero(nan)),
        a.size - int(np.count_nonzero(within)) if floating else a.size,
        int(ulp[farthest]),
        float(absolute[largest]),
        float(relative.max()),
        _squares(absolute),
        locate(farthest),
        locate(largest) if absolute[largest] > 0 else None,
    )


_BITS = {"int2": 2, "int4": 4, "float4_e2m1fn": 4}
"""Bits per element, for dtypes with fewer bits than their byte."""


def _texts(a: np.generic, b: np.generic) -> tuple[str, str]:
    left, right = str(a), str(b)
    if left == right or "nan" in (left, right):
        left, right = (f"{text} (0x{value.tobytes()[::-1].hex()})" for text, value in ((left, a), (right, b)))
    return left, right


def _values(elements: np.ndarray) -> np.ndarray:
    """As float64."""
    if elements.dtype.name == "bfloat16":  # the upper half of a float32; ml_dtypes converts one by one
        elements = (elements.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif elements.itemsize == 1 and elements.dtype.kind not in "biu":
        return _tables(elements.dtype.name)[0][elements.view(np.uint8)]
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return elements.astype(np.float64)


def _numbers(elements: np.ndarray) -> np.ndarray:
    """The elements' positions in the order of their type, as integers."""
    if elements.dtype.kind in "iu":
        return elements
    if elements.dtype.kind == "b":
        return elements.view(np.uint8)
    if elements.itemsize == 1:
        return _tables(elements.dtype.name)[1][elements.view(np.uint8)]
    return _signed_numbers(elements.view(f"i{elements.itemsize}"))


def _signed_numbers(bits: np.ndarray) -> np.ndarray:
    """From bit patterns as signed integers: negative ones count downwards from -1."""
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & np.iinfo(bits.dtype).max)


@lru_cache
def _tables(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Value (float64) and number (int16) of every bit pattern of a one-byte type."""
    patterns = np.arange(256, dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        values = patterns.view(ORBAX_DTYPES[name]).astype(np.float64)
    if name == "float8_e8m0fnu":  # powers of two, without a sign bit
        return values, patterns.astype(np.int16)
    if (bits := _BITS.get(name)) is not None:
        # The other bits of the byte have no meaning, but still distinguish two patterns.
        low, high = (patterns & (1 << bits) - 1).astype(np.int16), (patterns >> bits).astype(np.int16)
        signed = values.astype(np.int16) if is_whole(ORBAX_DTYPES[name]) else np.where(low < 8, low, 7 - low)
        return values, signed + (high << bits)
    numbers = _signed_numbers(patterns.view(np.int8)).astype(np.int16)
    if name.endswith("fnuz"):  # one zero; the pattern of the other is the NaN
        numbers[129:] += 1
        numbers[128] = 128
    return values, numbers


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # Differences of signed numbers overflow, but wrap to the right unsigned one when the larger comes first.
    unsigned = np.dtype(f"u{a.itemsize}")
    return np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)
