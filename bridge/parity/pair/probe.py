"""Fixed numbers for the loss of a model that has none: the same in both frameworks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np


def probe_values(place: str, shape: Sequence[int]) -> np.ndarray:
    """Standard normal float64 numbers of ``shape`` for the output leaf at ``place``."""
    return np.random.default_rng(zlib.crc32(place.encode())).standard_normal(shape)
