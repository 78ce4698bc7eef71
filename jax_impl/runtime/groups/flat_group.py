"""A group of the shard_map engine: a unit's trainable or frozen parameters in one flat array, cut unevenly into rows.

    at rest       [padded] at level ``optimizer``, main dtype; [layers, padded] for a stack
    source        the array that a step holds, at level ``parameters``. Whole weights, and shards coarser than at rest,
                  are gathered once per step, in the compute dtype; otherwise this is the array at rest
    gradient      level ``gradients``, grad dtype; reduced there in each backward, and to level ``optimizer`` once a
                  step

``comm/mesh.py`` explains levels. Everything except storage runs inside ``shard_map``, on this device's shards.

A unit's layout may have several buffers, but at rest, on the wire and for optimizers they form one array, rank after
rank::

    rank                  |------- 0 -------|------- 1 -------|------- 2 -------|
    array                 |buffer 0 |buf. 1 |buffer 0 |buf. 1 |buffer 0 |buf. 1 |

So one gather and one reduction move all buffers. A buffer's shards are joined only when parameters are sliced from the
buffer. With one buffer, or one rank, array and buffers have the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from bridge.core.sharding import Layout, Strategy, row_boxes
from bridge.core.sharding.policy.parallel import Cut
from bridge.core.sharding.policy.strategy_collectives import StrategyCollectives, collectives_of
from jax_impl.comm.collectives import LANES, Wire
from jax_impl.runtime.groups.stored import BufferSlice, Read, read_box

Index = tuple[slice, ...]
# Path, offsets and sizes of a box of a parameter, and its index in the shard.
Boxes = Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int | slice, ...]]]


class Levels:
    """The properties that a group of either engine derives from its ``wire`` and ``strategy``."""

    wire: Wire
    strategy: Strategy

    @property
    def dtype(self) -> np.dtype:
        return self.wire.main

    @property
    def transfers(self) -> StrategyCollectives:
        """The axes over which weights are gathered and gradients are reduced."""
        return collectives_of(self.strategy, self.wire.axes.ndim)

    @property
    def sends_once(self) -> bool:
        """Whether ``hold`` has collectives."""
        return bool(self.transfers.gathered_once)

    @property
    def holds_at_rest(self) -> bool:
        """Whether sources are the arrays at rest."""
        return 0 < self.strategy.parameters == self.strategy.optimizer


class Float8Levels(Levels):
    """The same for a group whose weights are gathered as float8."""

    @property
    def sends_once(self) -> bool:
        # A tensor's scale needs the largest magnitude over all its shards.
        return super().sends_once or self._by_tensor

    @property
    def holds_at_rest(self) -> bool:
        return False

    @property
    def _by_tensor(self) -> bool:
        return self.wire.float8 == "float8_e4m3fn"


@dataclass(frozen=True)
class FlatGroup(Levels):
    """``paths``: parameters in the order of ``layout.slots``. ``layers``: number of layers of a stack, or None."""

    key: str
    unit: str
    paths: tuple[str, ...]
    layout: Layout
    wire: Wire
    strategy: Strategy
    trainable: bool
    layers: int | None

    @property
    def stored(self) -> dict[str, FlatGroup]:
        """The group's arrays in a train state."""
        return {self.key: self}

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._stack, self.layout.padded_size)

    @property
    def spec(self) -> PartitionSpec:
        """The spec of the array at rest."""
        return self.wire.axes.spec(self.strategy.optimizer, len(self._stack))

    def cuts_of(self, path: str) -> tuple[Cut, ...]:
        """The cuts of a parameter over model axes, by dimensions of a layer."""
        return ()

    def layer_shape(self, path: str) -> tuple[int, ...]:
        """The shape of a parameter; in a stack, of one layer."""
        return self.layout.slots[self._numbers[path]].shape

    def tensor_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return shape if path in self._numbers else None

    def hold(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Arrays at rest -> sources."""
        (array,) = arrays
        if self.holds_at_rest:
            return (array,)
        axes = self.transfers.gathered_once
        return (self._each_layer(lambda x: self.wire.all_gather(x, axes), array),)

    def collectors(self) -> tuple[jax.Array, ...]:
        """Zeros with respect to which a step differentiates; their cotangent is the gradient."""
        if not self.trainable:
            return ()
        size = self.layout.padded_size // self.wire.axes.shards(self.strategy.gradients)
        return (jnp.zeros((*self._stack, size), self.wire.grad),)

    def gather(self, sources: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Sources of one layer -> whole compute weights, if the strategy shards them.

        Raises ``ValueError`` for the sources of a whole stack, which no loop has sliced.
        """
        self._check_layer(sources[0])
        return (self.wire.all_gather(sources[0], self.transfers.gathered, self._row),)

    def leaves(self, whole: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Whole compute weights of one layer -> parameters, in the order of ``paths``.

        Raises ``ValueError`` as ``gather`` does, if the strategy keeps weights whole.
        """
        # ``gather`` has already checked sharded weights.
        if not self.strategy.shard_parameters:
            self._check_layer(whole[0])
        return unpack(self.layout, whole[0])

    def reduce(self, gradients: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Gradients of the leaves on each device -> the cotangents of its collectors."""
        packed = pack(self.layout, gradients, self._row)
        return (self.wire.reduce_scatter(packed, self.transfers.scattered),)

    def finish(self, gradients: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Accumulated gradients -> the sum over all devices, sharded as at rest."""
        axes, wire = self.transfers, self.wire

        # First reduce the levels that microbatches left whole, then the axes over which weights are replicated: so the
        # last all-reduce is of a shard.
        def reduce(x: jax.Array) -> jax.Array:
            return wire.all_reduce(wire.reduce_scatter(x, axes.scattered_once), axes.summed_once)

        return (self._each_layer(reduce, gradients[0]),)

    def logical(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Whole arrays -> the model's parameters, in the order of ``paths``."""
        if self.layers is None:
            return unpack(self.layout, arrays[0])
        return jax.vmap(lambda flat: unpack(self.layout, flat))(arrays[0])

    def at_rest(self, leaves: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The model's parameters, of one dtype -> the array; the inverse of ``logical``."""
        if self.layers is None:
            return (pack(self.layout, leaves),)
        return (jax.vmap(lambda *layer: pack(self.layout, layer))(*leaves),)

    def numel(self, index: Index) -> int:
        """Number of parameter elements in the shard of the array at ``index``, an index as in ``jax.Shard.index``."""
        rows = self.layout.row_ranges(self._rank(index))
        return (self.layers or 1) * sum(
            (r1 - r0) * self.layout.slot(name).row_size for name, (r0, r1) in rows.items()
        )

    def pieces(self, index: Index, values: np.ndarray) -> Iterator[BufferSlice]:
        """The parameters' pieces in a shard of the array; ``BufferSlice.values`` are views of ``values``."""
        for path, offsets, sizes, where in self.boxes(index):
            yield BufferSlice(path, offsets, sizes, values[where].reshape(sizes))

    def shard(self, index: Index, dtype: np.dtype, read: Read) -> np.ndarray:
        """A shard's values from ``read(path, offsets, sizes)``; padding is zero."""
        values = np.zeros((*self._stack, self.layout.shard_size), dtype)
        for path, offsets, sizes, where in self.boxes(index):
            values[where] = read_box(read, path, offsets, sizes).reshape(-1)
        return values

    def boxes(self, index: Index) -> Boxes:
        """The boxes of parameters in the shard of the array at ``index``, in the order of ``paths``."""
        paths = dict(zip((slot.name for slot in self.layout.slots), self.paths, strict=True))
        boxes = list(shard_boxes(self.layout, self._rank(index)))
        if self.layers is None:
            yield from ((paths[name], offsets, sizes, (where,)) for name, offsets, sizes, where in boxes)
            return
        for layer in range(self.layers):
            for name, offsets, sizes, where in boxes:
                yield paths[name], (layer, *offsets), (1, *sizes), (layer, where)

    def _rank(self, index: Index) -> int:
        return (index[-1].start or 0) // self.layout.shard_size if self.layout.shard_size else 0

    def _check_layer(self, array: jax.Array) -> None:
        # A stack that no loop has sliced would be gathered whole, N layers at once. For other units, JAX's own error
        # tells more: see unnamed_stack.
        if self.layers is not None and array.ndim != 1:
            raise ValueError(
                f"unit {self.unit!r}: expected a loop or map over its {self.layers} layers (nnx.scan, nnx.vmap, "
                "jax.lax.scan), since the unit is a stack, got one call with all layers: if the unit is not a stack, "
                "list the real stacks in fully_shard(..., stacked=[...])"
            )

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {path: number for number, path in enumerate(self.paths)}

    @property
    def _row(self) -> int | None:
        return row_size(self.layout) if self.wire.in_rows else None

    @property
    def _stack(self) -> tuple[int, ...]:
        return () if self.layers is None else (self.layers,)

    def _each_layer(self, function: Callable[[jax.Array], jax.Array], array: jax.Array) -> jax.Array:
        # Collectives along the second axis would transpose a copy of all layers ("optim_grads" of a stack: 7.99 bytes
        # per parameter instead of 5.07).
        return function(array) if self.layers is None else lax.map(function, array)


def row_size(layout: Layout) -> int | None:
    """Elements of the rows in which TPUs gather and reduce the array; None if a shard does not consist of whole rows.

    XLA:TPU stores both matrices and rows of a buffer in tiles of 8 rows of 128 elements. A matrix whose rows differ
    from the rows of the buffer must be copied. So a matrix that is alone in its buffer keeps its own rows.
    """
    if not layout.shard_size or not _in_rows(layout):
        return None
    columns = layout.slots[0].shape[-1] if layout.slots[0].shape else 1
    if _keeps_rows(layout, columns) and columns % LANES == 0 and layout.shard_size % columns == 0:
        return columns
    return LANES


def pack(layout: Layout, leaves: Sequence[jax.Array], row: int | None = None) -> jax.Array:
    """Parameters in the order of ``layout.slots`` -> flat ``[padded_size]``, zeros between them.

    ``row``: from ``row_size``; the result is then ``[num_shards, S / row, row]``.
    """
    if row is not None and _keeps_rows(layout, row):
        # The matrix and the buffer have the same tiling, so TPUs copy nothing.
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
    # Write one buffer after another into its columns: a concatenation would hold the buffers and their copy at once.
    # For TPUs, rows of 128 elements reduce compile time from 18 s to 4 s (three buffers of a layer of width 2048).
    packed = _by_rank(layout, jnp.zeros(layout.padded_size, dtype))
    for values, columns in zip(buffers, _columns(layout), strict=True):
        packed = lax.dynamic_update_slice_in_dim(packed, _by_rank(layout, values), columns.start, axis=1)
    return packed.reshape(-1) if row is None else packed


def unpack(layout: Layout, whole: jax.Array) -> tuple[jax.Array, ...]:
    """Flat ``[padded_size]``, or rows as in ``pack``, -> parameters in the order of ``layout.slots``."""
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
    """Whether the rows of the array are the rows of its only parameter."""
    return len(layout.slots) == 1 and layout.slots[0].offset == 0 and layout.slots[0].shape[-1:] == (row,)


def _by_rank(layout: Layout, array: jax.Array) -> jax.Array:
    """``[num_shards * S]`` -> ``[num_shards, S]``, or ``[num_shards, S / 128, 128]`` if shards are whole rows.

    XLA:TPU compiles slices of such rows ten times faster than slices of ``S`` columns, whose tiles have nothing in
    common with the tiles of the flat array.
    """
    return array.reshape(layout.num_shards, -1, *([LANES] if _in_rows(layout) else []))


def _columns(layout: Layout) -> list[slice]:
    """The slice of each buffer in the second dimension of ``_by_rank``."""
    each = LANES if _in_rows(layout) else 1
    return [slice(shard.start // each, shard.stop // each) for shard in layout.shard_slices]


def _in_rows(layout: Layout) -> bool:
    return not any(size % LANES for size in layout.shard_sizes)


def shard_boxes(layout: Layout, rank: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], slice]]:
    """``(name, offsets, sizes, slice of the rank's shard)`` for all boxes that ``rank`` owns."""
    for name, (r0, r1) in layout.row_ranges(rank).items():
        slot = layout.slot(name)
        start = layout.shard_start(name, rank)
        for box in row_boxes(slot.shape, r0, r1):
            size = int(np.prod(box.sizes, dtype=np.int64))
            yield name, box.offsets, box.sizes, slice(start, start + size)
            start += size
