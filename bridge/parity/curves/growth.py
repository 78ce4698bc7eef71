"""How the difference of two single runs grows.

Two runs of one experiment that differ in rounding only (another order of sums, another kernel) drift apart: the
difference starts near the rounding of a float32 and grows exponentially (a Lyapunov exponent), until it is as large as
the noise of the loss. A difference of another cause starts larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

ROUNDING = 2.0**-23
_SATURATED = 0.3
_FEWEST = 5
_STRAIGHT = 0.5
_NEAR = 100.0


@dataclass(frozen=True)
class Growth:
    """``first_step``: the first whose relative difference exceeds ``ROUNDING``; ``size``: the difference there.

    ``rate``: of ``log(difference)`` a step, by least squares up to the first difference of 0.3 times the largest, and
    ``r2`` the share of the variance that the line explains; None where fewer than five steps can be used.
    """

    first_step: int
    size: float
    rate: float | None
    r2: float | None

    def summary(self) -> str:
        start = f"The difference exceeds rounding from step {self.first_step} on, where it is {self.size:.2g}"
        if self.rate is None or self.r2 is None or self.rate <= 0 or self.r2 < _STRAIGHT:
            return f"{start}; it does not grow exponentially."
        grows = f"{start}, and grows by e in {1 / self.rate:.3g} steps (R2 {self.r2:.2f})"
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
