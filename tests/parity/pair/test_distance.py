"""Distances, floors, and what a float64 difference means."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from bridge.parity.partners.rows import ratio_of, row_of
from bridge.parity.recorded.distance import _BLOCK, FACTOR, distance, epsilon, gap, noise, norm

RNG = np.random.default_rng(0)


def test_a_distance_names_the_element_and_both_values() -> None:
    a = RNG.standard_normal((3, 4))
    b = a.copy()
    b[1, 2] += 0.5
    measured = distance(a, b)
    assert measured.absolute == pytest.approx(0.5)
    assert measured.relative == pytest.approx(0.5 / max(np.linalg.norm(a), np.linalg.norm(b)))
    assert measured.where == (1, 2)
    assert measured.values == (a[1, 2], b[1, 2])
    assert 0 < measured.cosine < 1


def test_ulps_are_those_of_the_compute_dtype() -> None:
    a = np.array([1.0, 1.0])
    assert distance(a, a + np.array([0, 2.0**-23])).max_ulp == 1
    assert distance(a, a + np.array([0, 2.0**-30])).max_ulp == 0
    assert distance(a, a + np.array([0, 2.0**-7]), "bfloat16").max_ulp == 1


def test_nan_and_infinity_count_unless_both_have_them() -> None:
    a = np.array([1.0, math.nan, -math.inf])
    assert distance(a, a.copy()).absolute == 0
    assert distance(a, np.array([1.0, 2.0, -math.inf])).absolute == math.inf
    assert distance(a, np.array([1.0, math.nan, math.inf])).absolute == math.inf


def test_integers_are_equal_or_infinitely_far_apart() -> None:
    assert distance(np.arange(3), np.arange(3)).absolute == 0
    assert distance(np.arange(3), np.array([0, 1, 3])).absolute == math.inf


def test_the_floor_is_what_the_dtype_does_and_never_nothing() -> None:
    high = RNG.standard_normal(1000)
    low = high.astype(np.float32)
    expected = np.linalg.norm(high - low.astype(np.float64))
    assert noise(low, high, "float32") == pytest.approx(max(expected, 0.25 * 2.0**-23 * np.linalg.norm(high)))
    assert noise(high, high, "float32") == pytest.approx(0.25 * epsilon("float32") * np.linalg.norm(high))
    assert noise(None, high, "bfloat16") > 1e4 * noise(None, high, "float32")
    overflowed = low.copy()
    overflowed[0] = math.inf
    assert math.isfinite(noise(overflowed, high, "float32"))


def test_a_row_says_where_a_difference_comes_from() -> None:
    a = RNG.standard_normal(10)
    floor = noise(None, a, "float32")
    same = row_of("forward", ("a", "b"), a, a, floor, local=0.0)
    assert same.verdict == "same"
    off = a + 3 * FACTOR * floor / math.sqrt(10)
    assert row_of("forward", ("a", "b"), a, off, floor, local=1.0).verdict == "inherited"
    assert row_of("forward", ("a", "b"), a, off, floor, local=2 * FACTOR).verdict == "introduced"
    assert row_of("gradients", ("a", "b"), a, off, floor).verdict == "differs"
    assert ratio_of(distance(a, a), 0.0) == 0.0
    # The floor of a row is relative, whatever the size of the values.
    for scale in (1e-3, 1.0, 1e3):
        relative = row_of("gradients", ("a", "b"), scale * a, scale * a, scale * floor).floor
        assert relative == pytest.approx(floor / np.linalg.norm(a))
    assert row_of("gradients", ("a", "b"), 0 * a, 0 * a, floor).floor == 0.0


@pytest.mark.parametrize("turned", [False, True])
def test_blocks_make_no_difference(turned: bool) -> None:
    """Of an array of some blocks and of a part of one: the place and the ULPs exactly, sums up to their order."""
    a = RNG.standard_normal((7, _BLOCK // 2 + 5))
    b = a + 1e-6 * RNG.standard_normal(a.shape)
    b[5, 17] += 1e-3
    a[6, 3] = b[6, 3] = math.nan
    if turned:
        a, b = a.T, b.T
    measured = distance(a, b)
    assert measured.where == ((17, 5) if turned else (5, 17))
    assert measured.values == (a[measured.where], b[measured.where])
    difference = np.nan_to_num(a - b)
    assert measured.absolute == pytest.approx(np.linalg.norm(difference), rel=1e-12)
    assert gap(a, b) == measured.absolute
    assert norm(a) == pytest.approx(np.linalg.norm(np.nan_to_num(a)), rel=1e-12)
    assert measured.max_ulp == max(distance(row, other).max_ulp for row, other in zip(a, b, strict=True))
    b[measured.where] = math.inf
    assert distance(a, b).absolute == gap(a, b) == math.inf


@pytest.mark.parametrize("turned", [False, True])
def test_a_large_distance_takes_little_memory(turned: bool) -> None:
    a = RNG.standard_normal((1000, 1000)).astype(np.float32)
    b = a.astype(np.float64)
    if turned:
        a, b = a.T, b.T
    tracemalloc.start()
    try:
        distance(a, b)
        noise(a, b, "float32")
        assert tracemalloc.get_traced_memory()[1] < a.nbytes / 2
    finally:
        tracemalloc.stop()
