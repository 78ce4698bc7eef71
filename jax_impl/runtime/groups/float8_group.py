"""Groups whose weights travel as float8 payload, with the bits of ``bridge.core.sharding.policy.float8``.

A flat group::

    hold      main weights [S]  ->  payload [S], scales        once per step, each device its own rows
    gather    payload and scales of all shards, uint8
    leaves    payload and scales of a parameter  ->  the compute dtype, exactly

So weights that wait for their use, such as a unit that was gathered ahead, are held as bytes. The gradients of the
leaves go to the main weights unchanged (straight-through).

All devices run one program, but hold different rows of different parameters: the *parts* of a shard. There are three
ways to quantize a shard::

    one shard                      all parts are known: quantize each parameter separately
    blocks of whole tiles          mxfp8: every 32 elements, of any parameter (``float8.in_blocks``)
    otherwise                      each device reads its row of tables that describe all shards

The third way computes the properties of each element or block from its position. Padding is zero and has payload 0, so
it may count as any part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from bridge.core.sharding import Layout
from bridge.core.sharding.layout.slot import Slot
from bridge.core.sharding.policy.float8 import (
    BLOCK,
    blocks_of,
    in_blocks,
    piece_bytes,
    scale_bytes,
    scale_parts,
)
from jax_impl.comm.collectives import LANES
from jax_impl.runtime.groups.cut_group import CutGroup
from jax_impl.runtime.groups.flat_group import FlatGroup, Float8Levels, pack, unpack
from jax_impl.runtime.groups.float8 import decode, each_in_row, encode, in_rows, magnitudes, scales_of
from jax_impl.runtime.groups.logical_group import LogicalArray, LogicalGroup


@dataclass(frozen=True)
class Float8Group(Float8Levels, FlatGroup):
    """Sources are pieces of uint8 ``[piece_bytes * shards]``, and for float8_e4m3fn also the parameters' scales."""

    def hold(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        layout = self.layout
        values = arrays[0].astype(jnp.float32)
        rank = self.wire.axes.shard_index(self.strategy.optimizer)
        scales: tuple[jax.Array, ...] = ()
        if self._by_tensor:
            bits = self._on_layers(lambda x: amax_of_tensors(layout, x, rank), values)
            amax = self._of_whole_tensors(lax.bitcast_convert_type(bits, jnp.float32))
            scales = (scales_of(lax.bitcast_convert_type(amax, jnp.int32)),)
            pieces = self._on_layers(lambda x, s: quantize_tensors(layout, x, s, rank), values, *scales)
        else:
            pieces = self._on_layers(lambda x: quantize_blocks(layout, x, rank), values)
        if axes := self.transfers.gathered_once:
            pieces = self._each_layer(partial(self.wire.gather_as_it_is, axes=axes), pieces)
        return (pieces, *scales)

    def gather(self, sources: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        pieces, *scales = sources
        self._check_layer(pieces)
        return (self.wire.gather_as_it_is(pieces, self.transfers.gathered, self._piece_row), *scales)

    def leaves(self, whole: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        pieces, *scales = whole
        if not self.strategy.shard_parameters:
            self._check_layer(pieces)
        layout, row = self.layout, 1 if pieces.ndim == 1 else pieces.shape[-1]
        pieces = pieces.reshape(layout.num_shards, -1, *pieces.shape[2:])
        size = layout.shard_size // row
        payload = pieces[:, :size]
        values = unpack(layout, payload.reshape(-1) if row == 1 else payload)
        if self._by_tensor:
            decoded = [decode(leaf, scale) for leaf, scale in zip(values, *scales, strict=True)]
        else:
            of_rows = scales_of_leaves(layout, pieces[:, size:].reshape(layout.num_shards, -1))
            decoded = [
                decode(leaf, each_in_row(own, leaf.shape[-1]))
                for leaf, own in zip(values, of_rows, strict=True)
            ]
        return tuple(leaf.astype(self.wire.compute) for leaf in decoded)

    def _of_whole_tensors(self, amax: jax.Array) -> jax.Array:
        return self.wire.largest(amax, self.strategy.optimizer)

    @property
    def _piece_row(self) -> int | None:
        sizes = self.layout.shard_size, piece_bytes(self.layout, self.wire.float8 or "")
        return LANES if self.wire.in_rows and not any(size % LANES for size in sizes) else None

    def _on_layers(self, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        return function(*arrays) if self.layers is None else jax.vmap(function)(*arrays)


@dataclass(frozen=True)
class CutFloat8Group(CutGroup, Float8Group):
    """On a mesh with model axes: rows and their blocks belong to parts; a tensor's scale covers all its parts."""

    def _of_whole_tensors(self, amax: jax.Array) -> jax.Array:
        of_part = super()._of_whole_tensors(amax)
        return lax.pmax(of_part, self.axes) if self.axes else of_part


@dataclass(frozen=True)
class Float8LogicalGroup(Float8Levels, LogicalGroup):
    """Of the pjit engine: sources are the payload of each parameter, uint8 of its shape, then the scales of each one.

    Parameters are quantized in place, and constrained to be whole when they are used. So XLA gathers payload and scales
    and dequantizes after the gather. XLA itself adds the reductions for the scales: the largest magnitudes of tensors,
    and of blocks that a cut separates.

    Scales of mxfp8 are ``[..., blocks of a row]``; for float8_e4m3fn each dimension is 1, except the layers of a stack.
    """

    def hold(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        values = [x.astype(jnp.float32) for x in arrays]
        scales = [self._scales(x) for x in values]
        payload = [encode(x, self._of_each(s, x)) for x, s in zip(values, scales, strict=True)]
        held = self._moved((*payload, *scales), self.strategy.optimizer)
        sends = self.strategy.parameters != self.strategy.optimizer
        return self._moved(held, self.strategy.parameters) if sends else held

    def gather(self, sources: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        # As in LogicalGroup.gather: what holds the gather stays before the gather.
        sources = self._moved(sources, self.strategy.parameters, one_layer=True)
        return self._moved(sources, 0, one_layer=True)

    def leaves(self, whole: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        count = len(self.arrays)
        return tuple(
            decode(x, self._of_each(s, x)).astype(self.wire.compute)
            for x, s in zip(whole[:count], whole[count:], strict=True)
        )

    def _scales(self, values: jax.Array) -> jax.Array:
        if not self._by_tensor:
            return scales_of(magnitudes(in_rows(values)).max(axis=-1, initial=0))
        own = tuple(range(0 if self.layers is None else 1, values.ndim))
        return scales_of(magnitudes(values).max(axis=own, keepdims=True, initial=0))

    def _of_each(self, scales: jax.Array, values: jax.Array) -> jax.Array:
        return scales if self._by_tensor else each_in_row(scales, values.shape[-1])

    def _moved(
        self, sources: Sequence[jax.Array], level: int, *, one_layer: bool = False
    ) -> tuple[jax.Array, ...]:
        count, left_out = len(self.arrays), 1 if one_layer and self.layers is not None else 0
        scales = (
            lax.with_sharding_constraint(x, NamedSharding(self.mesh, self._spec(array, level, left_out)))
            for x, array in zip(sources[count:], self.arrays, strict=True)
        )
        return (*self._lying(sources[:count], level, one_layer=one_layer), *scales)

    def _spec(self, array: LogicalArray, level: int, layers: int) -> PartitionSpec:
        """The spec of a parameter's scales: the parameter's spec, but rows are cut only between blocks."""
        if self._by_tensor:
            return PartitionSpec()
        spec = array.spec_of(level, layers)
        if len(spec) < len(array.shape) - layers:
            return spec
        names = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],)
        cut = BLOCK * math.prod(self.mesh.shape[name] for name in names)
        return PartitionSpec(*spec[:-1], None) if array.shape[-1] % cut else spec


# The index of a device's shard; None if there is only one.
Rank = jax.Array | None


def quantize_blocks(layout: Layout, values: jax.Array, rank: Rank) -> jax.Array:
    """mxfp8: float32 ``[S]`` -> the data that the shard sends, payload and scales, as uint8 ``[piece_bytes]``."""
    if in_blocks(layout):
        blocks = values.reshape(-1, BLOCK)
        scales = scales_of(magnitudes(blocks).max(axis=-1))
        payload = encode(blocks, scales[:, None]).reshape(-1)
    elif rank is None:
        leaves = unpack(layout, values)
        of_leaves = [scales_of(_largest(in_rows(leaf))) for leaf in leaves]
        encoded = [
            encode(leaf, each_in_row(own, leaf.shape[-1]))
            for leaf, own in zip(leaves, of_leaves, strict=True)
        ]
        payload = pack(layout, encoded)
        by_name = dict(zip((slot.name for slot in layout.slots), of_leaves, strict=True))
        held = (slot.name for buffer in range(len(layout.shard_sizes)) for slot in layout.occupied(buffer))
        scales = jnp.concatenate([by_name[name].reshape(-1) for name in held])
    else:
        payload, scales = _quantize_odd_blocks(layout, values, rank)
    padding = scale_bytes(layout, "mxfp8") - scales.size
    return jnp.concatenate([payload, scales, jnp.zeros(padding, jnp.uint8)])


def amax_of_tensors(layout: Layout, values: jax.Array, rank: Rank) -> jax.Array:
    """float32 ``[S]`` -> bits of each parameter's largest magnitude in this shard, int32 ``[slots]``."""
    if rank is None:
        whole = unpack(layout, values)
        return jnp.stack([_largest(leaf.reshape(-1)) for leaf in whole])
    parts = _Parts.of(layout, rank)
    cells = magnitudes(values).reshape(-1, parts.cell).max(axis=-1)
    at = parts.cells()[:, None]
    mine = (at >= parts.starts) & (at < parts.stops)
    by_part = jnp.where(mine, cells[:, None], 0).max(axis=0, initial=0)
    numbers = jnp.arange(len(layout.slots), dtype=jnp.int32)
    return jnp.where(parts.numbers[:, None] == numbers, by_part[:, None], 0).max(axis=0)


def quantize_tensors(layout: Layout, values: jax.Array, scales: jax.Array, rank: Rank) -> jax.Array:
    """float8_e4m3fn: float32 ``[S]`` and the scale of each parameter, ``[slots]`` -> payload, uint8 ``[S]``."""
    if rank is None:
        leaves = unpack(layout, values)
        return pack(layout, [encode(leaf, scale) for leaf, scale in zip(leaves, scales, strict=True)])
    parts = _Parts.of(layout, rank)
    of_cells = parts.look_up(scales.astype(jnp.int32)[parts.numbers])
    return encode(values.reshape(-1, parts.cell), of_cells[:, None]).reshape(-1)


def scales_of_leaves(layout: Layout, scales: jax.Array) -> Sequence[jax.Array]:
    """mxfp8: scales of all shards ``[num_shards, scale_bytes]`` -> of each parameter ``[..., blocks of a row]``."""
    if in_blocks(layout):
        tiles = _tiles(layout)
        return unpack(tiles, scales[:, : tiles.shard_size].reshape(-1))
    return [
        scales[ranks[:, None], starts[:, None] + np.arange(blocks_of(slot.row_size), dtype=np.int32)].reshape(
            *slot.shape[:-1], -1
        )
        for slot, (ranks, starts) in zip(layout.slots, _places(layout), strict=True)
    ]


def _quantize_odd_blocks(layout: Layout, values: jax.Array, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    parts, size = _Parts.of(layout, rank), scale_bytes(layout, "mxfp8")
    starts, row_sizes, blocks, scale_starts = map(
        parts.look_up, (parts.starts, parts.row_sizes, parts.blocks, parts.scale_starts)
    )
    rows, columns = jnp.divmod(parts.cells() - starts, row_sizes)
    # Without this mask, padding after a part would count for blocks of the next part.
    inside = parts.cells() < parts.look_up(parts.stops)
    numbers = jnp.where(inside, scale_starts + rows * blocks + columns // BLOCK, size)
    amax = jax.ops.segment_max(magnitudes(values), numbers, size + 1)
    # Segments without elements contain the smallest integer.
    scales = scales_of(jnp.maximum(amax, 0))
    return encode(values, scales[numbers]), scales[:size]


def _largest(values: jax.Array) -> jax.Array:
    """Bits of the largest magnitude along the last axis."""
    return magnitudes(values).max(axis=-1, initial=0)


@functools.cache
def _tiles(layout: Layout) -> Layout:
    """The layout of the scales: the same layout with one block per 32 elements."""
    slots = tuple(
        Slot(
            slot.name,
            (*slot.shape[:-1], slot.shape[-1] // BLOCK),
            slot.block,
            slot.buffer,
            slot.offset // BLOCK,
        )
        for slot in layout.slots
    )
    return Layout(layout.num_shards, tuple(size // BLOCK for size in layout.shard_sizes), slots)


@functools.cache
def _places(layout: Layout) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each row of each parameter: its shard, and the start of its scales there."""
    by_slot = [
        (np.zeros(slot.num_rows, np.int32), np.zeros(slot.num_rows, np.int32)) for slot in layout.slots
    ]
    for rank in range(layout.num_shards):
        for part in scale_parts(layout, rank):
            slot = layout.slots[part.number]
            r0, r1 = layout.row_range(slot.name, rank)
            ranks, starts = by_slot[part.number]
            ranks[r0:r1] = rank
            starts[r0:r1] = part.start + part.blocks * np.arange(r1 - r0)
    return by_slot


@functools.cache
def _tables(layout: Layout) -> np.ndarray:
    """int32 ``[6, num_shards, parts]``: the fields of ``_Parts``. Parts that a shard lacks start at its end."""
    rows = []
    for rank in range(layout.num_shards):
        held = [
            (whole.start + part.start, whole.start + part.stop)
            for buffer, whole in enumerate(layout.shard_slices)
            for part in layout.parts(rank, buffer)
        ]
        rows.append(
            [
                (start, stop, layout.slots[part.number].row_size, part.blocks, part.start, part.number)
                for (start, stop), part in zip(held, scale_parts(layout, rank), strict=True)
            ]
        )
    nothing = (layout.shard_size, layout.shard_size, 1, 1, 0, 0)
    most = max(1, *map(len, rows))
    return np.array([row + [nothing] * (most - len(row)) for row in rows], np.int32).transpose(2, 0, 1)


@dataclass(frozen=True)
class _Parts:
    """The parts of this device's shard, int32 ``[parts]`` each. ``cell``: number of elements that share a part."""

    layout: Layout
    cell: int
    starts: jax.Array
    stops: jax.Array
    row_sizes: jax.Array
    blocks: jax.Array
    scale_starts: jax.Array
    numbers: jax.Array

    @staticmethod
    def of(layout: Layout, rank: jax.Array) -> _Parts:
        own = jnp.asarray(_tables(layout))[:, rank]
        return _Parts(layout, BLOCK if in_blocks(layout) else 1, *own)

    def cells(self) -> jax.Array:
        """The start of each cell in the shard."""
        return jnp.arange(0, self.layout.shard_size, self.cell, dtype=jnp.int32)

    def look_up(self, values: jax.Array) -> jax.Array:
        """For each cell, the entry of ``values [parts]`` of the cell's part, or of the part before."""
        steps = values - jnp.concatenate([jnp.zeros(1, values.dtype), values[:-1]])
        # Elements before the first part are padding.
        starts = self.starts.at[0].set(0)
        return jnp.where(self.cells()[:, None] >= starts, steps, 0).sum(axis=1, dtype=values.dtype)
