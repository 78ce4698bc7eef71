"""Distances in units in the last place, against the order of all values of small types and NumPy's nextafter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.checkpoints.compare.ulp import Difference, Tolerance, compare
from bridge.core.formats.tensors.base import DTYPES
from tests.support.examples import examples

FLOATS = [name for name in DTYPES if "float" in name]
INTEGERS = [name for name in DTYPES if "int" in name]


def array(dtype: str, *bits: int) -> np.ndarray:
    width = DTYPES[dtype].itemsize
    return np.asarray(bits, np.uint64).astype(f"u{width}").view(DTYPES[dtype])


def distance(a: np.ndarray, b: np.ndarray, **tolerance: Any) -> Difference:
    return compare(a, b, Tolerance(**tolerance))


@pytest.mark.parametrize("dtype", [name for name in FLOATS if DTYPES[name].itemsize == 1])
def test_neighbours_in_the_order_of_all_values_are_one_apart(dtype: str) -> None:
    values = array(dtype, *range(256))
    wide = values.astype(np.float64)
    kept = ~np.isnan(wide)
    values, wide = values[kept], wide[kept]
    order = np.lexsort((~np.signbit(wide), wide))  # -0 before +0
    ordered = values[order]
    for a, b in itertools.pairwise(ordered):
        assert distance(np.atleast_1d(a), np.atleast_1d(b)).max_ulp == 1
    assert distance(ordered[:1], ordered[-1:]).max_ulp == len(ordered) - 1


@examples()
@given(st.sampled_from(["float16", "float32", "float64"]), st.floats(0, 1), st.integers(1, 40))
def test_steps_of_nextafter_are_counted_on_both_sides_of_zero(dtype: str, where: float, count: int) -> None:
    numpy_dtype = DTYPES[dtype]
    start = np.asarray([where * float(np.finfo(numpy_dtype).max) * 0.5], numpy_dtype)
    end = start
    for _ in range(count):
        end = np.nextafter(end, numpy_dtype.type(np.inf))
    assert distance(start, end).max_ulp == count
    assert distance(-end, -start).max_ulp == count
    assert distance(-end, end).max_ulp == distance(np.zeros(1, numpy_dtype), end).max_ulp * 2 + 1


@pytest.mark.parametrize(
    ("dtype", "a", "b", "expected"),
    [
        ("float32", 0x3F800000, 0x3F800001, 1),
        ("float32", 0x00000000, 0x80000000, 1),
        ("float32", 0x00000001, 0x80000001, 3),
        ("float32", 0x7F7FFFFF, 0x7F800000, 1),
        ("float32", 0xFF800000, 0x7F800000, 2 * 0x7F800000 + 1),
        ("float64", 0xFFF0000000000000, 0x7FF0000000000000, 2 * 0x7FF0000000000000 + 1),
        ("bfloat16", 0x3F80, 0x3F83, 3),
        ("float8_e8m0fnu", 0, 254, 254),
        ("int64", 2**63, 2**63 - 1, 2**64 - 1),
        ("uint64", 0, 2**64 - 1, 2**64 - 1),
        ("int8", 0xFF, 0x01, 2),
        ("bool", 0, 1, 1),
    ],
)
def test_known_distances(dtype: str, a: int, b: int, expected: int) -> None:
    assert distance(array(dtype, a), array(dtype, b)).max_ulp == expected
    assert distance(array(dtype, b), array(dtype, a)).max_ulp == expected


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_equal_bits_are_no_difference_whatever_they_mean(dtype: str) -> None:
    raw = np.random.default_rng(5).integers(0, 2 if dtype == "bool" else 256, 64 * 16, dtype=np.uint8)
    a = np.frombuffer(raw.tobytes(), DTYPES[dtype])
    parts = 2 if dtype.startswith("complex") else 1
    assert distance(a, a.copy()) == Difference(elements=a.size * parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_nans_pass_only_against_the_same_nan(dtype: str) -> None:
    width = 8 * DTYPES[dtype].itemsize
    nan = (1 << (width - 1)) - 1
    same = distance(array(dtype, nan), array(dtype, nan))
    payload = distance(array(dtype, nan), array(dtype, nan - 1), max_ulp=100, rtol=1.0)
    number = distance(array(dtype, nan), array(dtype, 0), max_ulp=2**63, rtol=math.inf)
    assert same.differing == same.beyond == 0
    assert (payload.nan, payload.beyond, payload.max_ulp) == (1, 1, 1)
    assert (number.nan, number.beyond, number.max_abs) == (1, 1, 0.0)


def test_an_element_passes_by_ulp_or_by_relative_difference() -> None:
    a = np.asarray([1.0, 1.0, 1e-30, 0.0, 5.0], np.float32)
    b = np.asarray([np.nextafter(np.float32(1), np.float32(2)), 1.01, 1e-30, -0.0, 5.0], np.float32)
    exact = distance(a, b)
    assert (exact.elements, exact.differing, exact.beyond) == (5, 3, 3)
    assert exact.max_rel == pytest.approx(0.01 / 1.01, rel=1e-5)
    assert exact.max_abs == pytest.approx(0.01, rel=1e-5)
    assert distance(a, b, max_ulp=1).beyond == 1
    assert distance(a, b, rtol=0.02).beyond == 0
    assert distance(a, b, rtol=1e-6).beyond == 1


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_relative_tolerance_has_no_scale(scale: float) -> None:
    a = np.asarray([scale, -scale], np.float32)
    b = a * np.float32(1.01)
    assert distance(a, b, rtol=0.005).beyond == 2
    assert distance(a, b, rtol=0.02).beyond == 0
    assert distance(b, a, rtol=0.02).max_rel == pytest.approx(0.01 / 1.01, rel=1e-4)


def test_infinities_are_infinitely_far_from_numbers() -> None:
    diff = distance(np.asarray([np.inf]), np.asarray([1e308]), rtol=0.5)
    assert (diff.max_abs, diff.max_rel, diff.beyond, diff.nan) == (math.inf, math.inf, 1, 0)


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
def test_integers_must_be_equal_whatever_the_tolerance(dtype: str) -> None:
    a, b = np.zeros(4, DTYPES[dtype]), np.asarray([0, 1, 0, 1], DTYPES[dtype])
    diff = distance(a, b, max_ulp=5, rtol=1.0)
    assert (diff.differing, diff.beyond, diff.max_ulp) == (2, 2, 1)


def test_many_differences_are_found_across_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.checkpoints.compare.ulp._SLICE", 7)
    monkeypatch.setattr("bridge.checkpoints.compare.ulp._BLOCK", 31)
    a = np.arange(1, 101, dtype=np.float32)
    b = a.copy()
    b[::3] = np.nextafter(b[::3], np.float32(np.inf))
    b[50] = np.nextafter(np.nextafter(b[50], np.float32(0)), np.float32(0))
    diff = distance(a.reshape(10, 10), b.reshape(10, 10), max_ulp=1)
    assert (diff.elements, diff.differing, diff.beyond, diff.max_ulp) == (100, 35, 1, 2)
    assert diff.at_ulp is not None
    assert diff.at_ulp.index == (5, 0)


def test_complex_numbers_count_as_two_parts() -> None:
    a = np.asarray([1 + 1j, 2 + 2j], np.complex64)
    b = a.copy()
    b[1] = 2 + 1j * np.nextafter(np.float32(2), np.float32(3))
    diff = distance(a, b)
    assert (diff.elements, diff.differing, diff.max_ulp) == (4, 1, 1)


def test_the_sum_of_two_differences_keeps_the_largest() -> None:
    left, right = Difference(3, 2, 1, 1, 9, 0.5, 0.1), Difference(4, 1, 0, 1, 2, 0.7, 0.01)
    assert left + right == Difference(7, 3, 1, 2, 9, 0.7, 0.1)


@pytest.mark.parametrize("bad", [{"max_ulp": -1}, {"rtol": -0.1}, {"rtol": math.nan}])
def test_a_negative_tolerance_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected tolerances of 0 or more"):
        Tolerance(**bad)


def test_bfloat16_values_are_compared_in_their_own_steps() -> None:
    a = np.asarray([1.0], ml_dtypes.bfloat16)
    b = np.asarray([1.0078125], ml_dtypes.bfloat16)
    assert distance(a, b).max_ulp == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_is_compared_as_one_by_one(dtype: str) -> None:
    """Against the definitions, element by element, on random bits."""
    numpy_dtype = DTYPES[dtype]
    rng = np.random.default_rng(8)
    a, b = (
        np.frombuffer(rng.integers(0, 256, 300 * numpy_dtype.itemsize, dtype=np.uint8).tobytes(), numpy_dtype)
        for _ in "ab"
    )
    diff = distance(a, b)
    with np.errstate(all="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        nan = np.isnan(x) | np.isnan(y)
        gap = np.abs(x - y)[~nan]
    differs = np.asarray([p.tobytes() != q.tobytes() for p, q in zip(a, b, strict=True)])
    assert diff.differing == int(differs.sum())
    assert diff.nan == int((nan & differs).sum())
    assert diff.max_abs == gap.max()
    singles = [distance(a[k : k + 1], b[k : k + 1]) for k in range(a.size)]
    assert diff.max_ulp == max(single.max_ulp for single in singles)
    assert diff.max_rel == max(single.max_rel for single in singles)
    with np.errstate(over="ignore"):
        assert diff.squares == pytest.approx(float((gap * gap).sum()), rel=1e-12)


@pytest.mark.parametrize("dtype", [name for name in FLOATS if DTYPES[name].itemsize == 1])
def test_numbers_of_one_byte_floats_follow_their_values(dtype: str) -> None:
    values = array(dtype, *range(256))
    wide = values.astype(np.float64)
    for k in range(0, 256, 7):
        for other in range(0, 256, 11):
            if not (np.isnan(wide[k]) or np.isnan(wide[other])):
                between = np.unique(
                    wide[(wide > min(wide[k], wide[other])) & (wide <= max(wide[k], wide[other]))]
                )
                ulp = distance(values[k : k + 1], values[other : other + 1]).max_ulp
                # Two zeros of a type count as two.
                assert ulp - between.size in (0, 1)
