"""A flat group on a mesh with model axes: each part of the parameters has a separate flat buffer.

Parameters that are cut over the same model axes form one group; parameters that no axis cuts form another. A *row*
contains the parts of all parameters at one position on the group's model axes, and ``layout`` is the layout of a row:
all rows are alike. Example: a kernel ``[4, 6]`` whose second dimension is cut over ``tp = 2``, on ``dp = 2``::

    row 0, tp = 0     kernel[:, 0:3] flat      |a0 a1|      a0, b0: the shards of dp = 0
    row 1, tp = 1     kernel[:, 3:6] flat      |b0 b1|      a1, b1: the shards of dp = 1
    at rest           [a0 b0 a1 b1], cut over (dp, tp)      each device has one shard of one row
    gathered          [a0 a1 b0 b1], cut over tp            moves a0, a1 only between devices of tp = 0

Each device turns its row into its parts of the parameters, which are cut over the model axes in the user's model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from bridge.core.sharding.policy.parallel import Cut
from jax_impl.comm.mesh import ModelAxes
from jax_impl.runtime.groups.flat_group import Boxes, FlatGroup, Index, pack, unpack


@dataclass(frozen=True)
class CutGroup(FlatGroup):
    """``cuts``: the cuts of each parameter, over the same model axes, by dimensions of one layer. Parameter arrays that
    a method takes or returns are whole, unless they are rows."""

    model: ModelAxes
    cuts: tuple[tuple[Cut, ...], ...]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The model axes that cut the parameters, outer to inner."""
        cut = {part.axis for part in self.cuts[0]} if self.cuts else set()
        return tuple(name for name in self.model.names if name in cut)

    @cached_property
    def rows(self) -> int:
        return math.prod(self._sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._stack, self.rows * self.layout.padded_size)

    @property
    def spec(self) -> PartitionSpec:
        return self.wire.axes.spec(self.strategy.optimizer, len(self._stack), self.axes)

    def cuts_of(self, path: str) -> tuple[Cut, ...]:
        return self.cuts[self.paths.index(path)]

    def layer_shape(self, path: str) -> tuple[int, ...]:
        shape = list(super().layer_shape(path))
        for cut in self.cuts_of(path):
            shape[cut.dimension] *= self.model.by_name[cut.axis]
        return tuple(shape)

    def hold(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        if self.holds_at_rest:
            return super().hold(arrays)
        whole = self.model.on_each(super().hold, (self._flat(),), self._flat())
        return tuple(whole(tuple(arrays)))

    def collectors(self) -> tuple[jax.Array, ...]:
        return tuple(self.model.on_each(super().collectors, (), self._flat())())

    def gather(self, sources: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        self._check_layer(sources[0])
        return tuple(self.model.on_each(super().gather, (self._row_spec,), self._row_spec)(tuple(sources)))

    def leaves(self, whole: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        if not self.strategy.shard_parameters:
            self._check_layer(whole[0])
        cut = self.model.on_each(super().leaves, (self._row_spec,), self._leaf_specs)
        return tuple(cut(tuple(whole)))

    def reduce(self, gradients: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        reduced = self.model.on_each(super().reduce, (self._leaf_specs,), self._row_spec)
        return tuple(reduced(tuple(gradients)))

    def finish(self, gradients: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(self.model.on_each(super().finish, (self._flat(),), self._flat())(tuple(gradients)))

    def logical(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        stack, layout = self._stack, self.layout
        shards = arrays[0].reshape(*stack, layout.num_shards, self.rows, layout.shard_size)
        rows = shards.swapaxes(-3, -2).reshape(*stack, self.rows, layout.padded_size)
        # Whole rows, but only one row on each device.
        rows = lax.with_sharding_constraint(rows, NamedSharding(self.model.mesh, self._flat()))
        function = jax.vmap(partial(unpack, layout))
        parts = (function if self.layers is None else jax.vmap(function))(rows)
        return tuple(self._joined(part, cuts) for part, cuts in zip(parts, self.cuts, strict=True))

    def at_rest(self, leaves: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        stack, layout = self._stack, self.layout
        parts = [self._split(leaf, cuts) for leaf, cuts in zip(leaves, self.cuts, strict=True)]
        function = jax.vmap(lambda *row: pack(layout, row))
        rows = (function if self.layers is None else jax.vmap(function))(*parts)
        shards = rows.reshape(*stack, self.rows, layout.num_shards, layout.shard_size)
        return (shards.swapaxes(-3, -2).reshape(self.shape),)

    def boxes(self, index: Index) -> Boxes:
        coordinates = self._places(index)
        for path, offsets, sizes, where in super().boxes(index):
            shifted = list(offsets)
            for cut in self.cuts_of(path):
                dimension = cut.dimension + len(self._stack)
                shifted[dimension] += coordinates[cut.axis] * self._part(path, cut)
            yield path, tuple(shifted), sizes, where

    def _part(self, path: str, cut: Cut) -> int:
        """The size of a row's part of a parameter along the cut dimension."""
        return self.layout.slots[self.paths.index(path)].shape[cut.dimension]

    def _rank(self, index: Index) -> int:
        return super()._rank(index) // self.rows

    def _places(self, index: Index) -> Mapping[str, int]:
        """The position, on each model axis that cuts the group, of the row to which the shard belongs."""
        row, coordinates = super()._rank(index) % self.rows, {}
        for name, size in zip(reversed(self.axes), reversed(self._sizes), strict=True):
            row, coordinates[name] = divmod(row, size)
        return coordinates

    def _joined(self, parts: jax.Array, cuts: Sequence[Cut]) -> jax.Array:
        """The rows' parts ``[stack, rows, part]`` -> the parameter ``[stack, shape]``."""
        stack, axes = len(self._stack), len(self.axes)
        parts = parts.reshape(*parts.shape[:stack], *self._sizes, *parts.shape[stack + 1 :])
        order, shape = list(range(stack)), list(parts.shape[:stack])
        by_dimension = {cut.dimension: self.axes.index(cut.axis) for cut in cuts}
        for dimension in range(parts.ndim - stack - axes):
            own = stack + axes + dimension
            axis = by_dimension.get(dimension)
            order += [own] if axis is None else [stack + axis, own]
            shape.append(parts.shape[own] * (1 if axis is None else self._sizes[axis]))
        return parts.transpose(order).reshape(shape)

    def _split(self, leaf: jax.Array, cuts: Sequence[Cut]) -> jax.Array:
        """The inverse of ``_joined``."""
        stack = len(self._stack)
        by_dimension = {cut.dimension: self.axes.index(cut.axis) for cut in cuts}
        shape, own, positions = list(leaf.shape[:stack]), [], dict[int, int]()
        for dimension, size in enumerate(leaf.shape[stack:]):
            axis = by_dimension.get(dimension)
            if axis is not None:
                positions[axis] = len(shape)
                shape.append(self._sizes[axis])
                size //= self._sizes[axis]
            own.append(len(shape))
            shape.append(size)
        split = leaf.reshape(shape).transpose(
            *range(stack), *(positions[i] for i in range(len(self.axes))), *own
        )
        return split.reshape(*leaf.shape[:stack], self.rows, *split.shape[stack + len(self.axes) :])

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(self.model.by_name[name] for name in self.axes)

    @property
    def _row_spec(self) -> PartitionSpec:
        """The spec of one layer's values, row after row."""
        return PartitionSpec(self.axes) if self.axes else PartitionSpec()

    def _flat(self) -> PartitionSpec:
        """The same spec for all layers."""
        return PartitionSpec(*[None] * len(self._stack), *self._row_spec)

    @cached_property
    def _leaf_specs(self) -> tuple[PartitionSpec, ...]:
        """The specs of one layer's parameters."""
        specs = []
        for slot, cuts in zip(self.layout.slots, self.cuts, strict=True):
            names: list[str | None] = [None] * len(slot.shape)
            for cut in cuts:
                names[cut.dimension] = cut.axis
            specs.append(PartitionSpec(*names))
        return tuple(specs)
