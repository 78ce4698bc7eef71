"""Small parts of a comparison: growth, rounding, statistics that moved apart, and what a report did not compare."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from bridge.parity.causes.causes import _offset, statistics_cause
from bridge.parity.curves.verdict import growth
from bridge.parity.stages.rerun_module import rounding
from tests.parity.pair.reports import llama, row

RNG = np.random.default_rng(0)


def test_an_exponential_growth_has_its_rate_and_is_explained_by_it() -> None:
    steps = np.arange(40) * 10
    exact = growth(steps, 1e-7 * np.exp(steps / 50))
    assert exact is not None
    assert exact.rate is not None
    assert exact.r2 is not None
    assert (exact.rate, exact.r2) == (pytest.approx(1 / 50), pytest.approx(1))
    noisy = growth(steps, 1e-7 * np.exp(steps / 50 + RNG.normal(size=40)))
    assert noisy is not None
    assert noisy.r2 is not None
    assert 0.5 < noisy.r2 < 0.99
    constant = growth(steps, np.full(40, 1e-3))
    assert constant is not None
    assert constant.rate is None or constant.r2 is None or math.isnan(constant.r2) or constant.rate == 0
    assert growth(steps, np.zeros(40)) is None


def test_rounding_between_the_sides_needs_both_values_of_one_shape() -> None:
    wide = RNG.normal(size=(4, 3))
    low = wide.astype(np.float32)
    other = low + np.float32(1e-3)
    both = rounding("float32", (low, wide), (other, wide))
    assert both.between == pytest.approx(1e-3 * 12**0.5, rel=0.1)
    assert both.floor == max(both.torch, both.jax) > 1e-4
    for torch, jax in ((None, low), (low, None), (low, low[:2])):
        assert math.isnan(rounding("float32", (torch, wide), (jax, wide)).between)


def moved(start: np.ndarray, values: np.ndarray, momentum: float) -> np.ndarray:
    return (1 - momentum) * start + momentum * values


def test_statistics_that_moved_apart_have_their_cause() -> None:
    start, mean, variance = np.zeros(8), RNG.normal(size=8), RNG.uniform(1, 2, size=8)
    farther = statistics_cause(start, start, moved(start, mean, 0.1), moved(start, mean, 0.9), 1e-9)
    assert farther.startswith("JAX's moves 9 times as far in a step as torch's: momentum a in torch is 1 - a")
    ones = np.ones(8)
    unbiased, biased = moved(ones, variance * 6 / 5, 0.1), moved(ones, variance, 0.1)
    assert "6 / 5 times the batch's" in statistics_cause(ones, ones, unbiased, biased, 1e-9)
    assert statistics_cause(ones, ones, unbiased, biased + 0.01 * RNG.normal(size=8), 1e-9) == ""
    assert statistics_cause(ones[:2], ones[:2], unbiased[:2], biased[:2], 1e-9) == ""
    assert statistics_cause(ones, start, unbiased, biased, 1e-9) == ""
    assert statistics_cause(start, start, moved(start, mean, 0.1), moved(start, mean, 0.1), 1e-9) == ""


def test_a_bias_that_is_missing_is_named_within_the_noise_of_its_sum() -> None:
    bias, floor = RNG.normal(size=4), 1e-4
    x = RNG.normal(size=(3, 4))
    near = bias * (1 + (1e-5 + 0.5 * floor / float(np.linalg.norm(bias))))
    assert _offset(x + near, x, floor, {"up.bias": bias}) == "JAX does not add torch's up.bias"
    far = bias * (1 + (1e-5 + 1.5 * floor / float(np.linalg.norm(bias))))
    assert (
        _offset(x + far, x, floor, {"up.bias": bias}) == "JAX's is torch's plus one vector at every position"
    )


def test_outputs_that_could_not_be_compared_are_named() -> None:
    whole = llama(1)
    assert not any(text.startswith("the outputs") for text in whole.not_compared)
    unknown = row("forward", "rotary", verdict="unknown"), row("forward", "", verdict="unknown")
    report = dataclasses.replace(whole, rows=(*whole.rows, *unknown))
    assert "the outputs of (model), rotary" in report.not_compared
    assert not report.complete
