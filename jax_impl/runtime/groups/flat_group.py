"""A group of the shard_map engine: a unit's parameters of one trainability in one flat array, cut unevenly into rows.

    at rest       [padded] of level ``optimizer``, main dtype; of a stack [layers, padded]
    source        what a step holds of it: level ``parameters``. Whole weights, and shards coarser than at rest, are
                  gathered once a step, in the compute dtype; otherwise it is the array at rest
    gradient      level ``gradients``, grad dtype; reduced there in each backward, and to level ``optimizer`` once a
                  step

Levels: ``comm/mesh.py``. Everything but the storage half runs inside ``shard_map``, on this device's shards.
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

from bridge.core.sharding import Layout, Strategy
from bridge.core.sharding.policy.parallel import Cut
from bridge.core.sharding.policy.strategy_collectives import StrategyCollectives, collectives_of
from jax_impl.comm.collectives import Wire
from jax_impl.runtime.groups.buffer import Piece, Read, pack, row_size, shard_boxes, unpack

Index = tuple[slice, ...]
# Path, offsets and sizes of a box of a parameter, and where the box is in the shard.
Boxes = Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int | slice, ...]]]


@dataclass(frozen=True)
class FlatGroup:
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
    def dtype(self) -> np.dtype:
        return self.wire.main

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

    def pieces(self, index: Index, values: np.ndarray) -> Iterator[Piece]:
        """The parameters' pieces in a shard of the array; ``Piece.values`` are views of ``values``."""
        for path, offsets, sizes, where in self.boxes(index):
            yield Piece(path, offsets, sizes, values[where].reshape(sizes))

    def shard(self, index: Index, dtype: np.dtype, read: Read) -> np.ndarray:
        """A shard's values from ``read(path, offsets, sizes)``; padding is zero."""
        values = np.zeros((*self._stack, self.layout.shard_size), dtype)
        for path, offsets, sizes, where in self.boxes(index):
            found = np.asarray(read(path, offsets, sizes))
            if found.shape != sizes:
                raise ValueError(
                    f"parameter {path!r}: expected values of shape {sizes} at {offsets}, got {found.shape}"
                )
            values[where] = found.reshape(-1)
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
        # Of what is no stack, JAX's own error tells more: see unnamed_stack.
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
        # Collectives along the second axis would transpose a copy of all layers.
        return function(array) if self.layers is None else lax.map(function, array)
