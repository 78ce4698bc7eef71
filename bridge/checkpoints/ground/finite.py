"""How many elements of an array are NaN or infinite."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from bridge.core.formats.tensors.base import ORBAX_DTYPES, is_whole

# The bits of the exponent, all of which are set in infinities and NaNs and in nothing else.
_EXPONENT = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "float16": 0x1F << 10, "bfloat16": 0xFF << 7}
_NAN, _INFINITE = 1, 2


def count_not_finite(array: np.ndarray) -> tuple[int, int]:
    """(NaNs, infinities) in an array of any dtype of ORBAX_DTYPES; the parts of complex numbers count as two."""
    if is_whole(array.dtype):
        return 0, 0
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(f"f{flat.itemsize // 2}")
    if flat.itemsize == 1:
        kinds = np.take(_kinds(flat.dtype.name), flat.view(np.uint8))
        return int(np.count_nonzero(kinds == _NAN)), int(np.count_nonzero(kinds == _INFINITE))
    bits = flat.view(f"u{flat.itemsize}")
    mask = bits.dtype.type(_EXPONENT[flat.dtype.name])
    chosen = (bits & mask) == mask
    if not chosen.any():
        return 0, 0
    special = bits[chosen]
    infinite = int(np.count_nonzero((special << 1) == (mask << 1)))
    return special.size - infinite, infinite


@lru_cache
def _kinds(name: str) -> np.ndarray:
    """Whether each bit pattern of a type of one byte is a NaN, an infinity or neither."""
    with np.errstate(invalid="ignore"):
        values = np.arange(256, dtype=np.uint8).view(ORBAX_DTYPES[name]).astype(np.float64)
    return np.where(np.isnan(values), _NAN, np.where(np.isinf(values), _INFINITE, 0)).astype(np.uint8)
