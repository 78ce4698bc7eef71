"""The sharding plan of a model: its units, their layouts, dtypes and placements; and buffers to and from the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_impl.buffer import Piece, Read, shard_from, shard_pieces
from jax_impl.collective import Wire
from jax_impl.layout import Layout
from jax_impl.mesh import AXIS
from jax_impl.module_tree import UnitModule
from jax_impl.strategy import Strategy

# One flat main-dtype array per unit, by unit path: weights, gradients, and each kind of moments. All buffers of the
# unit's layout lie in it (see buffer.py).
Buffers = dict[str, jax.Array]


@dataclass(frozen=True)
class ParamInfo:
    """A parameter as checkpoints see it: ``dtype`` is that of its main weights."""

    unit: str
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class UnitPlan:
    """One unit: its module, where its parameters lie, and the dtypes of its buffer."""

    module: UnitModule
    layout: Layout
    wire: Wire


@dataclass(frozen=True)
class ShardingPlan:
    """How one model is sharded over one mesh; made by ``fully_shard``, holds no values.

    ``model``: the logical model as one unit. ``units``: by unit path, the root ``""`` last. Each unit has one flat
    array of ``layout.padded_size`` elements, split over the mesh in equal contiguous shards, or replicated under
    ``no_shard`` (whose layouts have one shard). A shard is the rank's shard of each of the layout's buffers in turn.
    """

    mesh: Mesh
    strategy: Strategy
    units: Mapping[str, UnitPlan]
    model: UnitModule

    @property
    def num_devices(self) -> int:
        return int(self.mesh.devices.size)

    @cached_property
    def parameters(self) -> Mapping[str, ParamInfo]:
        """Every parameter by its path in the model, in the order of the model's own state."""
        owner = {path: name for name, unit in self.units.items() for path in unit.module.parameters}
        return MappingProxyType(
            {
                path: ParamInfo(owner[path], shape, self.units[owner[path]].wire.main)
                for path, shape in zip(self.model.parameters, self.model.shapes, strict=True)
            }
        )

    @property
    def spec(self) -> PartitionSpec:
        """How a unit's flat array lies on the mesh."""
        return PartitionSpec(AXIS) if self.strategy.shards_state else PartitionSpec()

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def unit_plan(self, unit: str) -> UnitPlan:
        """Raises ``ValueError`` for an unknown unit path."""
        if unit not in self.units:
            raise ValueError(f"expected a unit among {list(self.units)}, got {unit!r}")
        return self.units[unit]

    def locate_buffer(self, path: tuple[Any, ...], leaf: Any) -> tuple[str, tuple[Any, ...]] | None:
        """The unit whose buffer ``leaf`` at the tree path ``path`` is, and the path without that unit's key.

        None for what is no buffer. Weights are a dictionary by unit, and optimizer states keep its keys.
        """
        places = [i for i, entry in enumerate(path) if isinstance(entry, jax.tree_util.DictKey)]
        if not places or (unit := path[places[-1]].key) not in self.units:
            return None
        if leaf.shape != (self.units[unit].layout.padded_size,):
            return None
        return unit, (*path[: places[-1]], *path[places[-1] + 1 :])

    def local_pieces(self, unit: str, buffer: jax.Array) -> Iterator[Piece]:
        """The pieces of a unit's parameters that this process holds in ``buffer``, a device at a time.

        Nothing is gathered. Over all processes every element comes exactly once (of replicas, the first).
        """
        layout = self.unit_plan(unit).layout
        self._check_buffer(unit, buffer)
        for shard in buffer.addressable_shards:
            if shard.replica_id == 0:
                yield from shard_pieces(layout, self.rank_of(unit, shard.index), np.asarray(shard.data))

    def build_buffer(self, unit: str, read: Read, dtype: np.dtype | None = None) -> jax.Array:
        """A unit's buffer from ``read(path, offsets, sizes) -> np.ndarray``, called for each addressable shard's boxes.

        ``dtype``: default the main dtype, to which values are cast.
        """
        plan = self.unit_plan(unit)
        target = plan.wire.main if dtype is None else np.dtype(dtype)
        shards: dict[int, np.ndarray] = {}

        def values(index: tuple[slice, ...] | None) -> np.ndarray:
            rank = self.rank_of(unit, index)
            if rank not in shards:
                shards.clear()
                shards[rank] = shard_from(plan.layout, rank, target, read)
            return shards[rank]

        return jax.make_array_from_callback((plan.layout.padded_size,), self.sharding, values)

    def rank_of(self, unit: str, index: tuple[slice, ...] | None) -> int:
        """Which shard of the unit's buffer ``index`` selects, as ``jax.Shard.index`` gives it."""
        size = self.units[unit].layout.shard_size
        return (index[0].start or 0) // size if index and size else 0

    def _check_buffer(self, unit: str, buffer: jax.Array) -> None:
        size = self.units[unit].layout.padded_size
        if buffer.shape != (size,) or not buffer.sharding.is_equivalent_to(self.sharding, 1):
            raise ValueError(
                f"buffer of unit {unit!r}: expected shape {(size,)} with sharding {self.spec} over "
                f"{self.num_devices} devices, got {buffer.shape} with {buffer.sharding}"
            )

    def merge(self, parameters: Mapping[str, jax.Array]) -> nnx.Module:
        """The logical model with ``{path: value}`` as its parameters."""
        expected, given = set(self.parameters), set(parameters)
        if expected != given:
            raise ValueError(
                f"expected values for exactly the model's parameters; missing {sorted(expected - given)[:5]}, "
                f"unexpected {sorted(given - expected)[:5]}"
            )
        return self.model.merge([parameters[path] for path in self.parameters], {})
