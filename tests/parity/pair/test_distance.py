"""Distances, floors, and what a float64 difference means."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bridge.parity.pair.distance import FACTOR, distance, epsilon, noise
from bridge.parity.pair.rows import ratio_of, row_of

RNG = np.random.default_rng(0)


def test_a_distance_names_the_element_and_both_values() -> None:
    a = RNG.standard_normal((3, 4))
    b = a.copy()
    b[1, 2] += 0.5
    found = distance(a, b)
    assert found.absolute == pytest.approx(0.5)
    assert found.relative == pytest.approx(0.5 / max(np.linalg.norm(a), np.linalg.norm(b)))
    assert found.where == (1, 2)
    assert found.values == (a[1, 2], b[1, 2])
    assert 0 < found.cosine < 1


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
