"""Parameters into a unit's flat array and out of it: whole inside a compiled step, piecewise on the host.

A unit's layout may have several buffers, but at rest, on the wire and to optimizers it is one array, rank after rank::

    rank                  |------- 0 -------|------- 1 -------|------- 2 -------|
    array                 |buffer 0 |buf. 1 |buffer 0 |buf. 1 |buffer 0 |buf. 1 |

so that one gather and one reduction move all buffers. A buffer's shards are brought together only where parameters are
cut from them. With one buffer, or one rank, array and buffers are in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bridge.core.sharding import Layout, row_boxes
from jax_impl.comm.collectives import LANES

Read = Callable[[str, tuple[int, ...], tuple[int, ...]], np.ndarray]


class Piece(NamedTuple):
    """A box of one parameter, in its global coordinates, with its values (shape ``sizes``).

    ``repeated``: whether another device has the same, in a shard that is no replica.
    """

    path: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: np.ndarray
    repeated: bool = False


def row_size(layout: Layout) -> int | None:
    """Elements of the rows in which TPUs gather and reduce the array; None where a shard is no number of whole rows.

    XLA:TPU holds arrays in tiles of 8 rows of 128 elements, a matrix as much as rows of a buffer: what has other rows
    in the buffer than in the matrix is copied. So a matrix that is alone keeps its own rows.
    """
    if not layout.shard_size or not _in_rows(layout):
        return None
    columns = layout.slots[0].shape[-1] if layout.slots[0].shape else 1
    if _keeps_rows(layout, columns) and columns % LANES == 0 and layout.shard_size % columns == 0:
        return columns
    return LANES


def pack(layout: Layout, leaves: Sequence[jax.Array], row: int | None = None) -> jax.Array:
    """Parameters in the order of ``layout.slots`` -> flat ``[padded_size]``, zeros between them.

    ``row``: as ``row_size`` says, to ``[num_shards, S / row, row]``.
    """
    if row is not None and _keeps_rows(layout, row):
        rows = leaves[0].reshape(-1, row)
        padding = layout.padded_size // row - len(rows)
        return jnp.pad(rows, ((0, padding), (0, 0))).reshape(layout.num_shards, -1, row)
    by_name = {slot.name: leaf for slot, leaf in zip(layout.slots, leaves, strict=True)}
    dtype = leaves[0].dtype if leaves else jnp.float32
    buffers = []
    for buffer, shard_size in enumerate(layout.shard_sizes):
        parts, end = [], 0
        for slot in layout.occupied(buffer):
            if slot.offset > end:
                parts.append(jnp.zeros(slot.offset - end, dtype))
            parts.append(by_name[slot.name].reshape(-1))
            end = slot.end
        if layout.num_shards * shard_size > end:
            parts.append(jnp.zeros(layout.num_shards * shard_size - end, dtype))
        buffers.append(jnp.concatenate(parts))
    if not buffers:
        return jnp.zeros(0, dtype)
    if len(buffers) == 1:
        return buffers[0] if row is None else buffers[0].reshape(layout.num_shards, -1, row)
    # One buffer after the other into its columns: a concatenation would hold the buffers beside their copy.
    packed = _by_rank(layout, jnp.zeros(layout.padded_size, dtype))
    for values, columns in zip(buffers, _columns(layout), strict=True):
        packed = lax.dynamic_update_slice_in_dim(packed, _by_rank(layout, values), columns.start, axis=1)
    return packed.reshape(-1) if row is None else packed


def unpack(layout: Layout, whole: jax.Array) -> tuple[jax.Array, ...]:
    """Flat ``[padded_size]``, or in rows as of ``pack``, -> parameters in the order of ``layout.slots``."""
    if whole.ndim > 1 and _keeps_rows(layout, whole.shape[-1]):
        (slot,) = layout.slots
        rows = whole.reshape(-1, whole.shape[-1])
        return (rows[: slot.end // rows.shape[1]].reshape(slot.shape),)
    if len(layout.shard_sizes) > 1:
        ranks = _by_rank(layout, whole)
        buffers = [ranks[:, columns].reshape(-1) for columns in _columns(layout)]
    else:
        buffers = [whole.reshape(-1)]
    return tuple(
        lax.slice(buffers[slot.buffer], (slot.offset,), (slot.end,)).reshape(slot.shape)
        for slot in layout.slots
    )


def _keeps_rows(layout: Layout, row: int) -> bool:
    """Whether the rows of the array are those of the one parameter in it."""
    return len(layout.slots) == 1 and layout.slots[0].offset == 0 and layout.slots[0].shape[-1:] == (row,)


def _by_rank(layout: Layout, array: jax.Array) -> jax.Array:
    """``[num_shards * S]`` -> ``[num_shards, S]``, or ``[num_shards, S / 128, 128]`` where shards are whole rows.

    XLA:TPU compiles a cut of such rows ten times faster than one of ``S`` columns, whose tiles have nothing in common
    with those of the flat array.
    """
    return array.reshape(layout.num_shards, -1, *([LANES] if _in_rows(layout) else []))


def _columns(layout: Layout) -> list[slice]:
    """Where each buffer is in the second dimension of ``_by_rank``."""
    each = LANES if _in_rows(layout) else 1
    return [slice(shard.start // each, shard.stop // each) for shard in layout.shard_slices]


def _in_rows(layout: Layout) -> bool:
    return not any(size % LANES for size in layout.shard_sizes)


def shard_boxes(layout: Layout, rank: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], slice]]:
    """``(name, offsets, sizes, where in the rank's shard)`` of everything that ``rank`` owns."""
    for name, (r0, r1) in layout.row_ranges(rank).items():
        slot = layout.slot(name)
        start = layout.shard_start(name, rank)
        for box in row_boxes(slot.shape, r0, r1):
            size = int(np.prod(box.sizes, dtype=np.int64))
            yield name, box.offsets, box.sizes, slice(start, start + size)
            start += size
