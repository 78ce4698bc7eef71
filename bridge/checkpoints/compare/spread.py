"""The distribution of a tensor's relative differences: counts in logarithmic bins, in bounded memory.

The bins are fixed: 16 per power of ten, from 1e-17 to 10. Differences are relative to the larger magnitude, so finite
differences are at most 2, and in float64 only 0 is below 1e-17. Counts add up region by region; percentiles are read
from the counts.
"""

from __future__ import annotations

import math

import numpy as np

PERCENTILES = (50.0, 90.0, 99.0, 99.9)

_LOWEST, _HIGHEST = -17, 1
_PER_DECADE = 16
_BINS = (_HIGHEST - _LOWEST) * _PER_DECADE

_NO_DIFFERENCE = {f"{percent:g}": 0.0 for percent in PERCENTILES}


class Spread:
    """Counts of relative differences above 0 by their size; infinite ones have a separate bin, the last."""

    def __init__(self) -> None:
        # Allocated at the first difference: equal tensors need none, and there may be 100,000 of them.
        self._counts: np.ndarray | None = None

    def add(self, relative: np.ndarray) -> None:
        """Count float64 differences of any shape; zeros are left out."""
        above = relative[relative > 0]
        finite = above[np.isfinite(above)]
        which = np.floor((np.log10(finite) - _LOWEST) * _PER_DECADE).astype(np.int64)
        counts = np.bincount(np.clip(which, 0, _BINS - 1), minlength=_BINS)
        self._join(np.append(counts, above.size - finite.size))

    def join(self, other: Spread) -> None:
        """Add the counts of another spread."""
        if other._counts is not None:
            self._join(other._counts)

    def percentiles(self, elements: int) -> dict[str, float]:
        """The difference that so many percent of ``elements`` do not exceed; uncounted elements have difference 0.

        The value is the upper edge of a bin, at most 16 % above the exact percentile. Keys: "50", "90", "99", "99.9".
        """
        if self._counts is None:
            return _NO_DIFFERENCE.copy()
        zeros = elements - int(self._counts.sum())
        up_to = np.cumsum(self._counts) + zeros
        by_percent = {}
        for percent in PERCENTILES:
            rank = math.ceil(elements * percent / 100)
            which = int(np.searchsorted(up_to, rank))
            upper_edge = math.inf if which >= _BINS else 10.0 ** (_LOWEST + (which + 1) / _PER_DECADE)
            by_percent[f"{percent:g}"] = 0.0 if rank <= zeros else upper_edge
        return by_percent

    def histogram(self, elements: int) -> dict[str, int]:
        """Counts by power of ten: "1e-07" has the differences from 1e-7 to less than 1e-6.

        "0" counts the elements without a difference, "inf" the infinite differences, if there are any. All powers
        between the lowest and the highest that occur are listed, even with a count of 0.
        """
        if self._counts is None:
            return {"0": elements} if elements else {}
        counts = {}
        if zeros := elements - int(self._counts.sum()):
            counts["0"] = zeros
        decades = self._counts[:-1].reshape(-1, _PER_DECADE).sum(axis=1)
        occupied = np.flatnonzero(decades)
        if occupied.size:
            for k in range(int(occupied[0]), int(occupied[-1]) + 1):
                counts[f"1e{_LOWEST + k:+03d}"] = int(decades[k])
        if infinite := int(self._counts[-1]):
            counts["inf"] = infinite
        return counts

    def _join(self, counts: np.ndarray) -> None:
        if counts.any():
            self._counts = counts if self._counts is None else self._counts + counts
