"""The state that optimizers of main weights keep of a parameter, and the elements that an update brings together.

Moments in float16 and float8 have a float32 scale for each row. Single elements, the rows of vectors and scalars, have
none and stay in the dtype of the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bridge.core.dtype_names import BYTES
from bridge.core.sharding.layout.rows import rows_of

SCALED: Final = ("float16", "float8_e4m3fn", "float8_e5m2")
MOMENTS: Final = ("float32", "bfloat16", *SCALED)
"""Dtypes in which moments are stored; float32 means the dtype of the update."""
MOMENT_BYTES: Final = {dtype: BYTES.get(dtype, 1) for dtype in MOMENTS}
SCALE_BYTES: Final = 4

# Elements that PyTorch stages together, unless the rows that cannot be cut apart have more.
CHUNK: Final = 1 << 20
# Elements of the longest vector register, AVX-512's, in the shortest dtype of an update: where PyTorch cuts tensors.
VECTOR: Final = 16
# Elements of the matrices that one rank owns in a round of PyTorch's Muon, unless one matrix has more.
ROUND: Final = 1 << 22


def update_dtype(main: str) -> str:
    """In which main weights are updated, and moments kept that are not to be rounded."""
    return "float64" if main == "float64" else "float32"


def unscaled_bytes(dtype: str | None, main: str) -> int:
    """Bytes of an element of a moment without scales; ``main``: the dtype of the main weights."""
    return BYTES[dtype if dtype == "bfloat16" else update_dtype(main)]


def moment_bytes(dtype: str | None, main: str, shape: Sequence[int], numel: int, rows: int) -> int:
    """Bytes of ``numel`` elements, in so many ``rows``, of a moment of a parameter of this shape, scales included."""
    if dtype in SCALED and rows_of(shape)[0] > 1:
        return numel * MOMENT_BYTES[dtype] + rows * SCALE_BYTES
    return numel * unscaled_bytes(dtype, main)
