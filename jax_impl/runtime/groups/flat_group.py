"""A group of the shard_map engine: a unit's parameters of one trainability in one flat array, cut
unevenly into rows.

    at rest       [padded] of level ``optimizer``, main dtype; of a stack [layers, padded]
    source        what a step holds of it: level ``parameters``. Whole weights, and shards coarser than at rest, are
                  gathered once a step, in the compute dtype; otherwise it is the array at rest
    gradient      level ``gradients``, grad dtype; reduced there in each backward, and to level ``optimizer`` once a
                  step

Levels: ``comm/mesh.py``. Everything but the storage half runs inside ``shard_map``, on this
device's shards.

A unit's layout may have several buffers, but at rest, on the wire and to optimizers it is one
array, rank after rank::

    rank                  |------- 0 -------|------- 1 -------|------- 2 -------|
    array                 |buffer 0 |buf. 1 |buffer 0 |buf. 1 |buffer 0 |buf. 1 |

so that one gather and one reduction move all buffers. A buffer's shards are brought together only
where parameters are cut from them. With one buffer, or one rank, array and buffers are in the same
order.
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
# Path, offsets and sizes of a box of a parameter, and where the box is in the shard.
Boxes = Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int | slice, ...]]]


class Levels:
    """What a group of either engine derives from its ``wire`` and ``strategy``."""

    wire: Wire
    strategy: Strategy

    @property
    def dtype(self) -> np.dtype:
        return self.wire.main

    @property
    def transfers(self) -> StrategyCollectives:
        """Over which axes weights are gathered, and gradients reduced."""
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
    """The same of a group whose weights are gathered as float8."""

    @property
    def sends_once(self) -> bool:
        # A scale of a tensor is the largest magnitude of all its shards.
        return super().sends_once or self._by_tensor

    @property
    def holds_at_rest(self) -> bool:
        return False

    @property
    def _by_tensor(self) -> bool:
        return self.wire.float8 == "float8_e4m3fn"


@dataclass(frozen=True)
class FlatGroup(Levels):
    """``paths``: of the parameters, in the order of ``layout.slots``. ``layers``: of a stack, or None."""

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
        """Its arrays in a train state."""
        return {self.key: self}

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._stack, self.layout.padded_size)

    @property
    def spec(self) -> PartitionSpec:
        """How the array at rest lies on the mesh."""
        return self.wire.axes.spec(self.strategy.optimizer, len(self._stack))

    def cuts_of(self, path: str) -> tuple[Cut, ...]:
        """How a parameter is cut over model axes, by dimensions of a layer."""
        return ()

    def layer_shape(self, path: str) -> tuple[int, ...]:
        """Of a parameter; of a stack, of one layer's."""
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
        """Zeros whose cotangent is the gradient: what a step differentiates by."""
        if not self.trainable:
            return ()
        size = self.layout.padded_size // self.wire.axes.shards(self.strategy.gradients)
        return (jnp.zeros((*self._stack, size), self.wire.grad),)

    def gather(self, sources: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Sources of one layer -> whole compute weights, where the strategy shards them.

        Raises ``ValueError`` for those of a whole stack, which nothing has sliced.
        """
        self._check_layer(sources[0])
        return (self.wire.all_gather(sources[0], self.transfers.gathered, self._row),)

    def leaves(self, whole: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Whole compute weights of one layer -> parameters, in the order of ``paths``.

        Raises ``ValueError`` as ``gather`` does, where the strategy keeps weights whole.
        """
        # ``gather`` has checked sharded weights.
        if not self.strategy.shard_parameters:
            self._check_layer(whole[0])
        return unpack(self.layout, whole[0])

    def reduce(self, gradients: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Gradients of the leaves on each device -> what its collectors get."""
        packed = pack(self.layout, gradients, self._row)
        return (self.wire.reduce_scatter(packed, self.transfers.scattered),)

    def finish(self, gradients: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Accumulated gradients -> the sum over all devices, sharded as at rest."""
        axes, wire = self.transfers, self.wire

        # First the levels that microbatches left whole, then the axes over which weights are
        # copies: so the last all-reduce is of a shard.
        def reduce(x: jax.Array) -> jax.Array:
            return wire.all_reduce(wire.reduce_scatter(x, axes.scattered_once), axes.summed_once)

        return (self._each_layer(reduce, gradients[0]),)

    def logical(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Whole arrays -> parameters as the model has them, in the order of ``paths``."""
        if self.layers is None:
            return unpack(self.layout, arrays[0])
        return jax.vmap(lambda flat: unpack(self.layout, flat))(arrays[0])

    def at_rest(self, leaves: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Parameters as the model has them, of one dtype -> the array; the inverse of ``logical``."""
        if self.layers is None:
            return (pack(self.layout, leaves),)
        return (jax.vmap(lambda *layer: pack(self.layout, layer))(*leaves),)

    def numel(self, index: Index) -> int:
        """Elements of parameters in the shard of the array at ``index``, as ``jax.Shard.index`` gives it."""
        rows = self.layout.row_ranges(self._rank(index))
        return (self.layers or 1) * sum(
            (r1 - r0) * self.layout.slot(name).row_size for name, (r0, r1) in rows.items()
        )

    def pieces(self, index: Index, values: np.ndarray) -> Iterator[BufferSlice]:
        """The parameters' pieces in a shard of the array; ``Piece.values`` are views of ``values``."""
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
        # A stack that nothing has sliced would be gathered as a whole, N layers at once. Of what is
        # no stack, JAX's own error tells more: see unnamed_stack.
        if self.layers is not None and array.ndim != 1:
            raise ValueError(
                f"unit {self.unit!r}: expected its {self.layers} layers in a loop or map over them (nnx.scan, "
                "nnx.vmap, jax.lax.scan), since it is a stack, got one call with all of them: where it is none, name "
                "all that are by fully_shard(..., stacked=[...])"
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
        # Collectives along the second axis would transpose a copy of all layers ("optim_grads" of a
        # stack: 7.99 bytes a parameter instead of 5.07).
        return function(array) if self.layers is None else lax.map(function, array)


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
        # The matrix and the buffer have one tiling, so nothing is copied on TPUs.
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
    # One buffer after the other into its columns: a concatenation would hold the buffers beside
    # their copy. On TPUs rows of 128 elements make this 4 s of compiling instead of 18 (three
    # buffers of a layer of width 2048).
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
