"""The band of seeds: how far apart the means of two groups of runs may be if they are one experiment.

First, every run's curve is smoothed by a running median over ``window`` steps, which keeps a jump in its place and
removes single stray points. At each step the difference of the two means is divided by its standard error, from the
spread among the repeats of each side. A departure is a stretch of ``window`` or more steps that are all beyond a
critical value, on one side. This value keeps the chance of any false departure in the whole curve below ``alpha``:

- with enough repeats (4 + 4 and more for ``alpha = 0.05``), from all ways to deal the labels A and B to the runs: the
  largest stretch that each labeling gives. This holds for any noise.
- with fewer, from Student's t for normal noise. A stretch of ``window`` steps holds exactly one step whose number is
  ``window - 1`` modulo ``window``, so only these steps count as tests (Bonferroni), however correlated the steps are.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

SPREAD_WINDOWS = 4
"""The spread at a step is pooled over this many windows: with few repeats alone, the spread itself is noise."""

PARTS = 3
"""The correlation of the noise is estimated in this many parts of the curve."""

MOST_RELABELINGS = 1000
"""8 + 8 runs have 6,435 labelings; a thousand give an error of 0.7 % in an ``alpha`` of 5 %."""


@dataclass(frozen=True)
class Noise:
    """How the band of seeds was found.

    ``method``: "permutation" with ``tests`` labelings, or "t" with ``tests`` tests (Bonferroni) and ``dof`` degrees of
    freedom. ``critical``: half the width of the band in standard errors. ``p``: the probability of a stretch as extreme
    as the most extreme one, if A and B are one experiment. ``band``: the median over the steps of the band's half
    width, relative to A.
    """

    method: str
    window: int
    alpha: float
    tests: int
    dof: float
    critical: float
    p: float
    band: float


@dataclass(frozen=True, eq=False)
class Band:
    """Arrays are float64 ``[steps]``.

    ``mean_a``, ``mean_b``: of the smoothed runs. ``spread``: standard deviation of one smoothed run. ``half``: how far
    apart the means may be. ``ratio``: the difference of the means, B minus A, in standard errors; beyond the band it is
    larger than ``noise.critical`` or smaller than its negative.
    """

    mean_a: np.ndarray
    mean_b: np.ndarray
    spread: np.ndarray
    half: np.ndarray
    ratio: np.ndarray
    noise: Noise


def default_window(steps: int) -> int:
    """A twentieth of the curve, an odd number from 5 to 51."""
    return min(max(5, steps // 20), 51) // 2 * 2 + 1


def seed_band(a: np.ndarray, b: np.ndarray, *, alpha: float, window: int) -> Band:
    """The band for runs ``a [repeats, steps]`` and ``b [repeats, steps]``, finite, three runs or more in all."""
    count, steps = len(a), a.shape[1]
    window = min(window, (steps - 1) // 2 * 2 + 1)
    length = min(steps, SPREAD_WINDOWS * window)
    runs = smooth(np.concatenate([a, b]), window)
    scale = math.sqrt(1 / len(a) + 1 / len(b))
    labelings = _labelings(len(runs), count)
    difference, spread, residuals = _parts(runs, labelings[0], length)
    ratio = _ratio(difference, scale * spread)
    observed = _longest(ratio, window)
    dof = (len(runs) - 2) * _independent(residuals, spread, length)
    allowed = math.floor(alpha * len(labelings))
    if allowed:
        largest = [observed]
        for group in labelings[1:]:
            other, its_spread, _ = _parts(runs, group, length)
            largest.append(_longest(_ratio(other, scale * its_spread), window))
        method, tests = "permutation", len(labelings)
        critical = sorted(largest, reverse=True)[allowed]
        p = sum(stretch >= observed for stretch in largest) / tests
    else:
        method, tests = "t", max(1, steps // window)
        critical = two_sided_quantile(alpha / tests, dof)
        p = min(1.0, tests * two_sided_p(observed, dof)) if observed > 0 else 1.0
    means = runs[:count].mean(0), runs[count:].mean(0)
    half = critical * scale * spread
    with np.errstate(all="ignore"):
        typical = float(np.median(half / np.abs(means[0])))
    noise = Noise(method, window, alpha, tests, dof, critical, p, typical)
    return Band(*means, spread, half, ratio, noise)


def smooth(runs: np.ndarray, window: int) -> np.ndarray:
    """Running medians along the last axis. Windows near an end are moved inward, so that all are equally noisy."""
    medians = np.median(sliding_window_view(runs, window, axis=-1), axis=-1)
    return medians[..., _window_starts(runs.shape[-1], window)]


def _window_starts(steps: int, window: int) -> np.ndarray:
    return np.clip(np.arange(steps) - window // 2, 0, steps - window)


def _parts(
    runs: np.ndarray, group: tuple[int, ...], length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For ``group`` and the other runs: the difference of means, the pooled deviation of a run, and of each run."""
    chosen = np.zeros(len(runs), bool)
    chosen[list(group)] = True
    first, second = runs[chosen], runs[~chosen]
    residuals = np.concatenate([first - first.mean(0), second - second.mean(0)])
    sums = _window_sums((residuals**2).sum(0) / (len(runs) - 2), length)
    spread = np.sqrt(sums / length)[_window_starts(runs.shape[1], length)]
    return second.mean(0) - first.mean(0), spread, residuals


def _window_sums(values: np.ndarray, length: int) -> np.ndarray:
    """Sums of ``length`` consecutive values, ``[n - length + 1]``.

    Composed of sums of 1, 2, 4, ... values: differences of running sums would lose a small spread behind a large one.
    """
    total = np.zeros(len(values) - length + 1)
    done, size = 0, 1
    while done < length:
        if length & size:
            total += values[done : done + len(total)]
            done += size
        values = values[:-size] + values[size:]
        size *= 2
    return total


def _independent(residuals: np.ndarray, spread: np.ndarray, length: int) -> float:
    """How many independent values give the variance of ``length`` correlated steps, at least 1 (Bartlett)."""
    noise = np.divide(residuals, spread, out=np.zeros_like(residuals), where=spread > 0)
    steps = noise.shape[1]
    # Noise that is independent early and persistent late counts as persistent.
    parts = np.array_split(noise, PARTS, axis=1) if steps >= PARTS * length else [noise]
    return min(_independent_in(part, length) for part in parts)


def _independent_in(noise: np.ndarray, length: int) -> float:
    steps = noise.shape[1]
    total = (noise**2).mean()
    if total == 0:
        return 1.0
    spectrum = np.abs(np.fft.rfft(noise, 2 * steps, axis=1)) ** 2
    products = np.fft.irfft(spectrum, 2 * steps, axis=1)[:, :length].mean(0)
    lags = np.arange(length)
    correlation = products / (steps - lags) / total
    weights = np.where(lags == 0, 1.0, 2.0) * (1 - lags / length)
    return max(1.0, length / float((weights * np.minimum(correlation**2, 1.0)).sum()))


def _ratio(difference: np.ndarray, error: np.ndarray) -> np.ndarray:
    # Repeats that are equal bit for bit have no spread, so any difference is infinite in standard errors.
    without = np.where(difference == 0, 0.0, np.copysign(np.inf, difference))
    return np.divide(difference, error, out=without, where=error > 0)


def _longest(ratio: np.ndarray, window: int) -> float:
    """The largest value that ``window`` consecutive steps all reach on the same side."""
    return float(max(sliding_window_view(side, window).min(1).max() for side in (ratio, -ratio)))


def _labelings(runs: int, count: int) -> list[tuple[int, ...]]:
    """Groups that could have been A, the actual one first; if there are many, a fixed sample of them."""
    mirrored = 2 * count == runs
    number = math.comb(runs, count) // (2 if mirrored else 1)
    if number <= MOST_RELABELINGS:
        groups = itertools.combinations(range(runs), count)
        # Equal groups give the same statistic when A and B are exchanged; one group of each pair contains run 0.
        return [group for group in groups if not mirrored or group[0] == 0]
    # Seeded: the same runs have the same verdict every time.
    random = np.random.default_rng(0)
    own = tuple(range(count))
    drawn = {_group(random.permutation(runs), count, mirrored) for _ in range(MOST_RELABELINGS - 1)}
    return [own, *sorted(drawn - {own})]


def _group(order: np.ndarray, count: int, mirrored: bool) -> tuple[int, ...]:
    first, second = (tuple(sorted(map(int, part))) for part in (order[:count], order[count:]))
    return second if mirrored and 0 in second else first


# Lentz's method divides by its terms, which may vanish.
_TINY = 1e-300


def two_sided_p(t: float, dof: float) -> float:
    """The probability that ``|T| > t`` for ``dof`` degrees of freedom (any positive number)."""
    if math.isinf(t):
        return 0.0
    return _beta_ratio(dof / 2, 0.5, dof / (dof + t * t))


def two_sided_quantile(p: float, dof: float) -> float:
    """The ``t`` that ``|T|`` exceeds with probability ``p``, ``0 < p < 1``."""
    low, high = 0.0, 1.0
    # Bisection needs no derivative, and 60 halvings reach the last bit.
    while two_sided_p(high, dof) > p:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, dof) > p else (low, middle)
    return high


def _beta_ratio(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function ``I_x(a, b)``."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    # The continued fraction converges fast only on this side of the mean.
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_ratio(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    return front * _continued_fraction(a, b, x) / a


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Lentz's method for the continued fraction of the incomplete beta function."""
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or _TINY)
    result = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or _TINY)
            c = 1 + term / c or _TINY
            result *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return result
