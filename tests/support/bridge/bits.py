"""Arrays of random bits, and equality to the bit."""

from __future__ import annotations

import numpy as np


def random_bits(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Random bit patterns: NaNs of many payloads, infinities, denormals and both zeros among them."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, size=int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    if dtype == np.bool_:
        raw &= 1
    return np.frombuffer(raw.tobytes(), dtype).reshape(shape)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether shape, dtype and every bit agree."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
