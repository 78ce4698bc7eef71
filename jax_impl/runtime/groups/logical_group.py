"""A group of the pjit engine: a unit's trainable or frozen parameters, each a logical array with a ``NamedSharding``.

Each parameter is cut along its largest dimension that the number of shards divides; without such a dimension, every
device holds it whole. All levels of sharding (``comm/mesh.py``) cut along that dimension::

    optimizer level 2 on 2 x 4 devices    (4096, 1024) -> 8 x (512, 1024)      (331,) -> whole
    parameters level 1                    4 x (1024, 1024)                     whole

If model axes cut a parameter, each part is divided among its devices in the same way; both may cut one dimension, model
axes first.

This engine writes no collectives, only sharding constraints; XLA chooses the communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bridge.core.sharding import Strategy
from bridge.core.sharding.policy.parallel import Cut, cut_dimension, local_shape
from jax_impl.comm.collectives import Wire, round_to
from jax_impl.runtime.groups.flat_group import FlatGroup, Levels
from jax_impl.runtime.groups.stored import BufferSlice, Read, read_box

Index = tuple[slice, ...]


@dataclass(frozen=True)
class LogicalArray:
    """One parameter at rest. ``dimension``: the dimension that data-parallel axes cut, None if the parameter is whole;
    ``level``: the number of these axes. ``cuts``: over model axes. All dimensions refer to ``shape``, with layers."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    wire: Wire
    level: int
    dimension: int | None
    cuts: tuple[Cut, ...] = ()

    @property
    def spec(self) -> PartitionSpec:
        return self.spec_of(self.level)

    @property
    def layers(self) -> None:
        """A stack is one array like any other."""
        return None

    def spec_of(self, level: int, layers: int = 0) -> PartitionSpec:
        """The spec at another level; ``layers``: the number of leading axes to omit."""
        by_dimension = {cut.dimension: (cut.axis,) for cut in self.cuts}
        if self.dimension is not None:
            over = by_dimension.get(self.dimension, ())
            by_dimension[self.dimension] = (*over, *self.wire.axes.names[:level])
        used = [by_dimension.get(i, ()) for i in range(layers, len(self.shape))]
        while used and not used[-1]:
            used.pop()
        return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in used))

    def tensor_shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return self.shape if path == self.path else None

    def numel(self, index: Index) -> int:
        return int(np.prod(self._sizes(index), dtype=np.int64))

    def pieces(self, index: Index, values: np.ndarray) -> Iterator[BufferSlice]:
        yield BufferSlice(self.path, tuple(part.start or 0 for part in index), self._sizes(index), values)

    def shard(self, index: Index, dtype: np.dtype, read: Read) -> np.ndarray:
        offsets, sizes = tuple(part.start or 0 for part in index), self._sizes(index)
        return read_box(read, self.path, offsets, sizes).astype(dtype)

    def _sizes(self, index: Index) -> tuple[int, ...]:
        return tuple(len(range(*part.indices(size))) for part, size in zip(index, self.shape, strict=True))


def logical_array(
    path: str,
    shape: Sequence[int],
    wire: Wire,
    strategy: Strategy,
    layers: int | None,
    cuts: Sequence[Cut] = (),
    sizes: Mapping[str, int] | None = None,
) -> LogicalArray:
    """A parameter of ``shape``, including a stack's layers; the layer dimension is never cut.

    ``cuts``: cuts over model axes of these ``sizes``, by dimensions of a layer.
    """
    stack = 0 if layers is None else 1
    cut = None
    if strategy.optimizer:
        local = local_shape(shape[stack:], cuts, sizes or {})
        cut = cut_dimension(local, wire.axes.shards(strategy.optimizer))
    dimension = None if cut is None else cut + stack
    over = tuple(Cut(part.axis, part.dimension + stack) for part in cuts)
    return LogicalArray(path, tuple(shape), wire.main, wire, strategy.optimizer, dimension, over)


@dataclass(frozen=True)
class LogicalGroup(Levels):
    """``arrays``: the parameters at rest, in the order of the unit. ``layers``: as in ``FlatGroup``."""

    unit: str
    arrays: tuple[LogicalArray, ...]
    mesh: Mesh
    wire: Wire
    strategy: Strategy
    trainable: bool
    layers: int | None

    @cached_property
    def paths(self) -> tuple[str, ...]:
        return tuple(array.path for array in self.arrays)

    @property
    def stored(self) -> dict[str, LogicalArray]:
        return {array.path: array for array in self.arrays}

    def cuts_of(self, path: str) -> tuple[Cut, ...]:
        stack = 0 if self.layers is None else 1
        return tuple(Cut(cut.axis, cut.dimension - stack) for cut in self.stored[path].cuts)

    def layer_shape(self, path: str) -> tuple[int, ...]:
        return self.stored[path].shape[0 if self.layers is None else 1 :]

    def hold(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        if self.holds_at_rest:
            return tuple(arrays)
        return self._lying(map(self.wire.cast, arrays), self.strategy.parameters)

    def collectors(self) -> tuple[jax.Array, ...]:
        if not self.trainable:
            return ()
        return tuple(jnp.zeros(array.shape, self.wire.grad) for array in self.arrays)

    def gather(self, sources: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        # First constrain the sources to their own sharding. Otherwise XLA gathers before the select that delays a
        # gather (hold_until), which then delays nothing and copies whole weights (decoder of 4 layers, 32,000 tokens,
        # compiled for 64 H100s: 394 MB instead of 305 MB).
        lying = self._lying(map(self.wire.cast, sources), self.strategy.parameters, one_layer=True)
        return self._lying(lying, 0, one_layer=True)

    def leaves(self, whole: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(whole)

    def reduce(self, gradients: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        rounded = (round_to(round_to(x, self.wire.reduce), self.wire.grad) for x in gradients)
        # No sharding can express "partial", so XLA reduces in each microbatch. Gradients that are cut in the end are
        # cut there, too: when they were left whole under "optim", XLA all-reduced and then cut: twice the bytes.
        return self._lying(rounded, self.strategy.gradients or self.strategy.optimizer, one_layer=True)

    def finish(self, gradients: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return self._lying(gradients, self.strategy.optimizer)

    def logical(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(arrays)

    def at_rest(self, leaves: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(leaves)

    # All transfers of this engine are constraints. Without a constraint on each unit's weights, GSPMD also moves
    # activations: 10 all-to-alls in a step of 8 scanned layers.
    def _lying(
        self, values: Iterable[jax.Array], level: int, *, one_layer: bool = False
    ) -> tuple[jax.Array, ...]:
        left_out = 1 if one_layer and self.layers is not None else 0
        return tuple(
            lax.with_sharding_constraint(x, NamedSharding(self.mesh, array.spec_of(level, left_out)))
            for x, array in zip(values, self.arrays, strict=True)
        )


# A group of either engine; FlatGroup documents the methods.
Group = FlatGroup | LogicalGroup
