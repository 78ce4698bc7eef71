"""Fixed numbers that make a loss of any outputs: the sum of each leaf times its numbers, over the root of its size."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np


def probe_values(place: str, shape: Sequence[int]) -> np.ndarray:
    """Standard normal numbers, float64 of this shape: the same in every process for the same place and shape."""
    return np.random.default_rng(zlib.crc32(place.encode())).standard_normal(tuple(shape))
