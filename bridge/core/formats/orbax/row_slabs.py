"""How a new array is cut into chunks: row slabs.

+-----------------+
|     chunk 0     |   up to 8 MiB        A row longer than 32 MiB is cut along the next axis in turn.
+-----------------+
|     chunk 1     |
+-----------------+
|  chunk 2 (rest) |
+-----------------+
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from bridge.core.formats.orbax.tree import leaf_name, storage_key
from bridge.core.formats.orbax.zarr.arrays import ArrayLayout
from bridge.core.formats.tensors.base import CheckpointError, TreePath

_CHUNK = 8 << 20
_MAX_CHUNK = 32 << 20


def array_layout(
    leaf: TreePath, shape: tuple[int, ...], dtype: np.dtype, chunk_shape: Sequence[int] | None
) -> ArrayLayout:
    """How a new array of an item is stored. CheckpointError for a wished-for chunk shape that is none."""
    if any(n < 0 for n in shape):
        raise CheckpointError(
            f"tensor {leaf_name(leaf)!r}: expected no negative dimension, got shape {shape}"
        )
    if chunk_shape is None:
        chunk = default_chunk(shape, dtype)
    else:
        if len(chunk_shape) != len(shape) or any(n < 1 for n in chunk_shape):
            raise CheckpointError(
                f"tensor {leaf_name(leaf)!r}: expected a chunk shape of {len(shape)} positive sizes, got "
                f"{tuple(chunk_shape)}"
            )
        chunk = _row_slab(tuple(map(min, chunk_shape, shape)), dtype.itemsize, _MAX_CHUNK)
    return ArrayLayout(storage_key(leaf), shape, dtype, chunk, chunk, zarr3=True, raw="shard", checksum=True)


def default_chunk(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """The chunk shape of a tensor for which nothing else is wished."""
    return _row_slab(shape, dtype.itemsize, _CHUNK)


@lru_cache(maxsize=4096)
def _row_slab(shape: tuple[int, ...], itemsize: int, target: int) -> tuple[int, ...]:
    """A chunk shape of about `target` bytes or less: leading axes cut to one index, the next cut, the others whole."""
    for axis, size in enumerate(shape):
        row = itemsize * math.prod(max(1, n) for n in shape[axis + 1 :])
        if row <= _MAX_CHUNK:
            # Equal slabs, rather than full ones and a small rest.
            slabs = max(1, -(-size * row // max(target, row)))
            return (1,) * axis + (max(1, -(-size // slabs)), *(max(1, n) for n in shape[axis + 1 :]))
    return ()
