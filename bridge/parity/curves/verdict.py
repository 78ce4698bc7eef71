"""The findings of a comparison: departures, the noise of seeds, the growth of a difference, and the curves.

Two runs of one experiment that differ only in rounding (another order of sums, another kernel) drift apart: the
difference starts near the rounding of a float32 and grows exponentially (a Lyapunov exponent), until it is as large as
the noise of the loss. A difference with another cause starts larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Departure:
    """A stretch of steps in which A and B are not the same experiment.

    ``kind``: "band" (beyond the band of seeds), "rtol" (single runs, beyond the tolerance) or "not finite" (a NaN or an
    infinity on only one side). ``first``, ``last``: its steps; ``count``: the number of compared steps in it. ``mean``
    and ``largest``: of ``(B - A) / |A|``, with its sign, over the stretch; NaN if a value is not finite.
    """

    kind: str
    first: int
    last: int
    count: int
    mean: float
    largest: float


@dataclass(frozen=True, eq=False)
class Curves:
    """The compared curves, for pictures. ``a`` and ``b``: the values, ``[runs, steps]``; the others ``[steps]``.

    ``mean_a``, ``mean_b``: of the smoothed runs (of the run itself if each side has one). ``spread``: of one smoothed
    run. ``half``: how far apart the means may be. All are NaN at steps with values that are not finite.
    """

    steps: np.ndarray
    a: np.ndarray
    b: np.ndarray
    mean_a: np.ndarray
    mean_b: np.ndarray
    spread: np.ndarray
    half: np.ndarray

    @property
    def relative(self) -> np.ndarray:
        """``(B - A) / |A|`` of the means."""
        return relative_difference(self.mean_a, self.mean_b)


def relative_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``(b - a) / |a|``; 0 where both are equal, infinite where only ``a`` is 0."""
    with np.errstate(all="ignore"):
        return np.where(a == b, 0.0, (b - a) / np.abs(a))


ROUNDING = 2.0**-23
"""One rounding of a loss, which most programs write as a float32."""


_SATURATED = 0.3
"""Fraction of the largest difference at which growth ends, because the noise of the loss bounds it."""


_FEWEST = 5
"""Steps below which a line fits anything."""


_STRAIGHT = 0.5
"""Share of the variance below which the difference scatters rather than grows."""


_NEAR = 100.0
"""Roundings from which growth may start: the sums of a whole model accumulate some in one step."""


@dataclass(frozen=True)
class Growth:
    """``first_step``: the first whose relative difference exceeds ``ROUNDING``; ``size``: the difference there.

    ``rate``: of ``log(difference)`` per step, by least squares up to the first difference of 0.3 times the largest;
    ``r2``: the share of the variance that the line explains; None if fewer than five steps can be used.
    """

    first_step: int
    size: float
    rate: float | None
    r2: float | None

    def summary(self) -> str:
        start = f"The difference exceeds rounding from step {self.first_step} on, where it is {self.size:.2g}"
        if self.rate is None or self.r2 is None or self.rate <= 0 or self.r2 < _STRAIGHT:
            return f"{start}; it does not grow exponentially."
        grows = f"{start}, and grows by a factor of e in {1 / self.rate:.3g} steps (R2 {self.r2:.2f})"
        if self.size <= _NEAR * ROUNDING:
            return f"{grows}, as rounding does in two runs of one experiment."
        return f"{grows}."


def growth(steps: np.ndarray, difference: np.ndarray) -> Growth | None:
    """The growth of relative differences ``[n]``, at least 0, at ``steps [n]``; None if none exceeds rounding."""
    above = np.flatnonzero(difference > ROUNDING)
    if not len(above):
        return None
    first = int(above[0])
    saturated = int(np.argmax(difference >= _SATURATED * difference.max()))
    used = np.arange(first, saturated + 1)
    used = used[difference[used] > 0]
    start = int(steps[first]), float(difference[first])
    if len(used) < _FEWEST:
        return Growth(*start, None, None)
    x, y = steps[used].astype(float), np.log(difference[used])
    x, y = x - x.mean(), y - y.mean()
    rate = float((x * y).sum() / (x * x).sum())
    explained = float((rate * x * y).sum() / (y * y).sum()) if (y * y).sum() > 0 else math.nan
    return Growth(*start, rate, explained)
