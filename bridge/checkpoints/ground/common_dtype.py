"""The dtype in which tensors of two dtypes are compared."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from bridge.core.formats.tensors.base import is_whole


def common_dtype(a: np.dtype, b: np.dtype) -> np.dtype | None:
    """The dtype in which to compare two dtypes: the narrower floating-point type, to which the other is rounded.

    For integers, the type that holds the values of both, since no value may change. None if neither floating-point type
    holds all values of the other (float16 and bfloat16), and for types of different kinds.
    """
    if a == b:
        return a
    if is_whole(a) and is_whole(b):
        # NumPy promotes none of ml_dtypes' integers, which take one byte each.
        joint = np.promote_types(*(dtype if dtype.kind in "biu" else np.int8 for dtype in (a, b)))
        return joint if joint.kind in "biu" else None
    if a.kind == b.kind == "c":
        return min(a, b, key=lambda dtype: dtype.itemsize)
    if any(is_whole(dtype) or dtype.kind == "c" for dtype in (a, b)):
        return None
    return next((n for n, w in ((a, b), (b, a)) if _holds(w, n)), None)


def _holds(wide: np.dtype, narrow: np.dtype) -> bool:
    w, n = ml_dtypes.finfo(wide), ml_dtypes.finfo(narrow)
    return bool(w.nmant >= n.nmant and w.maxexp >= n.maxexp and w.minexp <= n.minexp)
