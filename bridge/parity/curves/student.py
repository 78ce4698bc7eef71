"""Student's t distribution, in plain Python: the bridge does not depend on SciPy."""

from __future__ import annotations

import math

_TINY = 1e-300


def two_sided_p(t: float, dof: float) -> float:
    """The probability that ``|T| > t`` for ``dof`` degrees of freedom (any positive number)."""
    if math.isinf(t):
        return 0.0
    return _beta_ratio(dof / 2, 0.5, dof / (dof + t * t))


def two_sided_quantile(p: float, dof: float) -> float:
    """The ``t`` that ``|T|`` exceeds with probability ``p``, ``0 < p < 1``."""
    low, high = 0.0, 1.0
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
    # The continued fraction converges fast on this side of the mean only.
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
