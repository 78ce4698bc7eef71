"""Parameters into a unit's flat buffer and out of it: whole inside a compiled step, piecewise on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.layout import Layout, row_boxes

Read = Callable[[str, tuple[int, ...], tuple[int, ...]], np.ndarray]


class Piece(NamedTuple):
    """A box of one parameter, in its global coordinates, with its values (shape ``sizes``)."""

    path: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: np.ndarray


def pack(layout: Layout, leaves: Sequence[jax.Array]) -> jax.Array:
    """Parameters in the order of ``layout.slots`` -> flat ``[padded_size]``, zeros between them."""
    by_name = {slot.name: leaf for slot, leaf in zip(layout.slots, leaves, strict=True)}
    dtype = leaves[0].dtype if leaves else jnp.float32
    parts, end = [], 0
    for slot in layout.occupied():
        if slot.offset > end:
            parts.append(jnp.zeros(slot.offset - end, dtype))
        parts.append(by_name[slot.name].reshape(-1))
        end = slot.end
    if layout.padded_size > end:
        parts.append(jnp.zeros(layout.padded_size - end, dtype))
    return jnp.concatenate(parts) if parts else jnp.zeros(0, dtype)


def unpack(layout: Layout, flat: jax.Array) -> tuple[jax.Array, ...]:
    """Flat ``[padded_size]`` -> parameters in the order of ``layout.slots``."""
    return tuple(lax.slice(flat, (slot.offset,), (slot.end,)).reshape(slot.shape) for slot in layout.slots)


def shard_boxes(layout: Layout, rank: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], slice]]:
    """``(path, offsets, sizes, where in the rank's shard)`` of everything that ``rank`` owns."""
    for name, (r0, r1) in layout.row_ranges(rank).items():
        slot = layout.slot(name)
        start = slot.offset + r0 * slot.row_size - rank * layout.shard_size
        for box in row_boxes(slot.shape, r0, r1):
            size = int(np.prod(box.sizes, dtype=np.int64))
            yield name, box.offsets, box.sizes, slice(start, start + size)
            start += size


def shard_pieces(layout: Layout, rank: int, shard: np.ndarray) -> Iterator[Piece]:
    """The parameters' pieces in one rank's ``[shard_size]`` values; ``Piece.values`` are views of them."""
    for name, offsets, sizes, where in shard_boxes(layout, rank):
        yield Piece(name, offsets, sizes, shard[where].reshape(sizes))


def shard_from(layout: Layout, rank: int, dtype: np.dtype, read: Read) -> np.ndarray:
    """One rank's ``[shard_size]`` values from ``read(path, offsets, sizes)``; padding is zero.

    Raises ``ValueError`` naming the parameter when ``read`` returns another shape.
    """
    shard = np.zeros(layout.shard_size, dtype)
    for name, offsets, sizes, where in shard_boxes(layout, rank):
        values = np.asarray(read(name, offsets, sizes))
        if values.shape != sizes:
            raise ValueError(
                f"parameter {name!r}: expected values of shape {sizes} at {offsets}, got {values.shape}"
            )
        shard[where] = values.reshape(-1)
    return shard
