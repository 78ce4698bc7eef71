"""The band of seeds, on synthetic curves whose truth is known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from bridge.parity.curves.band import (
    Band,
    Noise,
    _labelings,
    default_window,
    seed_band,
    smooth,
    two_sided_p,
    two_sided_quantile,
)

STEPS = 200
WINDOW = default_window(STEPS)


# 50 times 0.05 are expected at most; more than 6 come up once in 90 times.
MOST_ALARMS = 6


def test_a_window_is_an_odd_twentieth_of_the_curve() -> None:
    windows = {
        1: 5,
        100: 5,
        139: 7,
        140: 7,
        160: 9,
        200: 11,
        999: 49,
        1000: 51,
        1019: 51,
        1020: 51,
        10**6: 51,
    }
    assert {steps: default_window(steps) for steps in windows} == windows


def alarms(noise_name: str, a: int, b: int) -> int:
    """In how many of 50 pairs of equal experiments a difference is found."""
    random = np.random.default_rng(17)
    count = 0
    for _ in range(50):
        runs = noise(noise_name, a + b, random)
        count += seed_band(runs[:a], runs[a:], alpha=0.05, window=WINDOW).noise.p <= 0.05
    return count


def noise(noise_name: str, runs: int, random: np.random.Generator) -> np.ndarray:
    """Of about unit size: independent, drifting, or with an offset of the whole run, all or its late half."""
    white = random.standard_normal((runs, STEPS))
    offset = random.standard_normal((runs, 1))
    if noise_name == "walk":
        return np.cumsum(white, 1) / np.sqrt(STEPS)
    if noise_name == "offset":
        return 0.5 * white + offset
    if noise_name == "late":
        return 0.3 * white + offset * np.clip(2 * np.arange(STEPS) / STEPS - 1, 0, 1)
    if noise_name == "shrinking":
        return white * (0.05 + np.exp(-np.arange(STEPS) / 10))
    return white


@pytest.mark.parametrize("noise_name", ["white", "walk", "offset", "late", "shrinking"])
@pytest.mark.parametrize(("a", "b"), [(3, 3), (3, 1)])
def test_false_alarms_are_as_rare_as_promised(noise_name: str, a: int, b: int) -> None:
    assert alarms(noise_name, a, b) <= MOST_ALARMS


def test_false_alarms_of_dealt_labels_are_as_rare_as_promised() -> None:
    assert alarms("walk", 4, 4) <= MOST_ALARMS


@pytest.mark.parametrize(("a", "b"), [(3, 3), (4, 4), (5, 2)])
def test_p_is_below_alpha_exactly_if_a_stretch_leaves_the_band(a: int, b: int) -> None:
    random = np.random.default_rng(3)
    seen = set()
    for size in np.linspace(0, 2, 30):
        runs = noise("white", a + b, random)
        runs[a:, 90:] += size
        band = seed_band(runs[:a], runs[a:], alpha=0.05, window=WINDOW)
        beyond = band.ratio > band.noise.critical
        stretch = max(map(len, "".join("x" if outside else " " for outside in beyond).split()), default=0)
        assert (stretch >= WINDOW) == (band.noise.p <= 0.05)
        seen.add(stretch >= WINDOW)
    assert seen == {True, False}


def test_running_medians_keep_a_jump_and_forget_a_stray_point() -> None:
    curve = np.where(np.arange(60) < 30, 1.0, 2.0)
    stray = curve.copy()
    stray[10], stray[45] = 99, -99
    assert (smooth(stray[None], 11) == curve).all()


def test_runs_without_any_spread_allow_no_difference() -> None:
    same = np.ones((2, 50))
    assert seed_band(same, same, alpha=0.05, window=5).noise.p == 1
    assert seed_band(same, same + 1e-9, alpha=0.05, window=5).noise.p == 0


def test_student_t_agrees_with_tables() -> None:
    for p, dof, t in [
        (0.05, 1, 12.7062047),
        (0.05, 4, 2.7764451),
        (0.001, 10, 4.5868939),
        (0.01, 120, 2.6174211),
    ]:
        assert two_sided_quantile(p, dof) == pytest.approx(t, rel=1e-7)
        assert two_sided_p(t, dof) == pytest.approx(p, rel=1e-6)
    for p in (0.5, 1e-6, 1e-12):  # two degrees of freedom have a closed form
        t = 2 * (0.5 - p / 2) * np.sqrt(2 / (1 - 4 * (0.5 - p / 2) ** 2))
        assert two_sided_quantile(p, 2) == pytest.approx(t, rel=1e-3)


def test_twenty_labelings_and_more_are_dealt_fewer_are_not() -> None:
    random = np.random.default_rng(0)
    for a, b, method, tests in [
        (3, 3, "t", STEPS // WINDOW),
        (4, 4, "permutation", 35),
        (5, 2, "permutation", 21),
    ]:
        runs = noise("white", a + b, random)
        band = seed_band(runs[:a], runs[a:], alpha=0.05, window=WINDOW)
        assert (band.noise.method, band.noise.tests) == (method, tests)


def test_many_labelings_are_drawn_the_same_every_time_and_each_once() -> None:
    drawn = _labelings(16, 8)
    assert drawn == _labelings(16, 8)
    assert drawn[0] == tuple(range(8))
    assert 800 < len(drawn) == len(set(drawn)) <= 1000
    assert all(group[0] == 0 for group in drawn), "a group and its complement are one labeling"


def test_a_small_spread_after_a_large_one_is_not_lost() -> None:
    runs = noise("white", 6, np.random.default_rng(0)) * np.where(np.arange(STEPS) < 50, 1e9, 1e-9)
    late = seed_band(runs[:3], runs[3:], alpha=0.05, window=5).spread[100:]
    assert (late > 2e-10).all()
    assert (late < 2e-9).all()


def test_noise_that_persists_in_one_part_counts_as_persistent() -> None:
    random = np.random.default_rng(0)
    free = {}
    for noise_name in ("white", "offset", "late"):
        runs = noise(noise_name, 6, random)
        free[noise_name] = seed_band(runs[:3], runs[3:], alpha=0.05, window=WINDOW).noise.dof
    assert free["white"] > 15
    assert 4 <= free["offset"] < 7
    assert 4 <= free["late"] < 7


def test_the_probability_of_no_distance_is_one_and_of_an_infinite_one_zero() -> None:
    assert [two_sided_p(t, 3.5) for t in (0.0, 1e200, float("inf"))] == [1.0, 0.0, 0.0]


def independent(noise: np.ndarray, length: int) -> float:
    """How many independent values give the variance of a mean over ``length`` values, by their sums over all lags."""
    steps, weights = noise.shape[1], 0.0
    for lag in range(length):
        together = (noise[:, : steps - lag] * noise[:, lag:]).sum(1).mean() / (steps - lag)
        weight = (2 if lag else 1) * (1 - lag / length)
        weights += weight * min((together / (noise**2).mean()) ** 2, 1.0)
    return max(1.0, length / weights)


def band_of_means(a: np.ndarray, b: np.ndarray, window: int, length: int, pieces: int) -> Band:
    """The band of Student's t, step by step. ``length``: of the pooled spread; ``pieces``: with their own noise."""
    steps, runs = a.shape[1], np.concatenate([a, b])

    def around(values: np.ndarray, width: int) -> list[np.ndarray]:
        starts = [min(max(step - width // 2, 0), steps - width) for step in range(steps)]
        return [values[..., start : start + width] for start in starts]

    smoothed = np.stack([np.median(part, -1) for part in around(runs, window)], -1)
    means = smoothed[: len(a)].mean(0), smoothed[len(a) :].mean(0)
    residuals = smoothed - np.repeat(means, (len(a), len(b)), 0)
    variance = (residuals**2).sum(0) / (len(runs) - 2)
    spread = np.sqrt([part.mean() for part in around(variance, length)])
    error = spread * math.sqrt(1 / len(a) + 1 / len(b))
    ratio = (means[1] - means[0]) / error
    noises = np.array_split(residuals / spread, pieces, axis=1)
    dof = (len(runs) - 2) * min(independent(part, length) for part in noises)
    tests = max(1, steps // window)
    critical = two_sided_quantile(0.05 / tests, dof)
    observed = max(
        min(side[start : start + window]) for side in (ratio, -ratio) for start in range(steps - window + 1)
    )
    p = min(1.0, tests * two_sided_p(observed, dof))
    typical = float(np.median(critical * error / np.abs(means[0])))
    numbers = Noise("t", window, 0.05, tests, dof, critical, p, typical)
    return Band(*means, spread, critical * error, ratio, numbers)


@pytest.mark.parametrize(
    ("steps", "window", "length", "pieces"), [(60, 5, 20, 3), (59, 5, 20, 1), (11, 9, 11, 1), (8, 9, 8, 1)]
)
def test_the_band_is_that_of_its_definition(steps: int, window: int, length: int, pieces: int) -> None:
    random = np.random.default_rng(0)
    runs = 5 + np.cumsum(random.standard_normal((5, steps)), 1) + random.standard_normal((5, 1))
    runs[3:] += 2
    made = seed_band(runs[:3], runs[3:], alpha=0.05, window=window)
    plain = band_of_means(runs[:3], runs[3:], min(window, 7 if steps == 8 else window), length, pieces)
    for name in ("mean_a", "mean_b", "spread", "half", "ratio"):
        np.testing.assert_allclose(getattr(made, name), getattr(plain, name), rtol=1e-9, err_msg=name)
    assert made.noise.method == "t"
    assert dataclasses.astuple(made.noise)[1:] == pytest.approx(
        dataclasses.astuple(plain.noise)[1:], rel=1e-9
    )
