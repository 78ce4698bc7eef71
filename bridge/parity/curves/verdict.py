"""What a comparison finds: departures, the noise of seeds, and the curves themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Departure:
    """A stretch of steps at which A and B are not the same experiment.

    ``kind``: "band" (beyond the band of seeds), "rtol" (single runs, beyond the tolerance) or "not finite" (a NaN or an
    infinity on one side only). ``first``, ``last``: its steps; ``count``: how many compared steps that are. ``mean``
    and ``largest``: of ``(B - A) / |A|``, with its sign, over the stretch; NaN where a value is not finite.
    """

    kind: str
    first: int
    last: int
    count: int
    mean: float
    largest: float


@dataclass(frozen=True)
class Noise:
    """How the band of seeds was found: see ``bridge.parity.curves.band``.

    ``method``: "permutation" or "t". ``tests``: labelings, or tests of the Bonferroni correction. ``critical``: how
    many standard errors the band is wide. ``p``: the probability of such curves if A and B are one experiment.
    ``band``: the median over the steps of the band's half width, relative to A.
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
class Curves:
    """What was compared, for pictures. ``a`` and ``b``: the values, ``[runs, steps]``; the others ``[steps]``.

    ``mean_a``, ``mean_b``: of the smoothed runs (of the run itself if each side has one). ``spread``: of one smoothed
    run. ``half``: how far the means may lie apart. All are NaN at steps with values that are not finite.
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
