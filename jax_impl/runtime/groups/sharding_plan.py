"""The sharding plan of a model: its units, their parameter groups, and the arrays of a train state.

::

    unit        group                      arrays by key
    layers/0    trainable                  "layers/0"
    layers/1    trainable                  "layers/1"
                frozen, float32            "layers/1 (frozen)"
                frozen, bfloat16           "layers/1 (frozen, bfloat16)"
    layers/2    trainable, float32         "layers/2"
                trainable, bfloat16        "layers/2 (bfloat16)"
                frozen, uint8              "layers/2 (frozen, uint8)"
                trainable, replicated      "layers/2 (replicated)"
    ""          trainable                  ""

In the shard_map engine a group is one flat array; in the pjit engine each parameter is an array, by its path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bridge.core.callers import warn_caller
from bridge.core.sharding import Layout, Strategy
from bridge.core.sharding.policy.recompute import Recompute
from bridge.core.views import Viewed
from jax_impl.comm.mesh import DataParallelMesh, ModelAxes, data_spec, is_simulated
from jax_impl.modules.module_tree import UnitModule, VariableInfo
from jax_impl.modules.tree_model import Tree, as_given
from jax_impl.runtime.groups.layout_report import layout_report
from jax_impl.runtime.groups.logical_group import Group, LogicalArray, logical_array
from jax_impl.runtime.groups.memory_kinds import check_not_donated, in_memory
from jax_impl.runtime.groups.row_arrays import SCALED, SCALES, UNSCALED, is_scaled, row_arrays, scales_of
from jax_impl.runtime.groups.stored import BufferSlice, Read, Stored
from jax_impl.runtime.groups.variables import spec_of

# Arrays by key: weights, gradients, and each kind of moments.
Buffers = dict[str, jax.Array]


@dataclass(frozen=True)
class UnitPlan:
    """One unit: its module, strategy, and nonempty groups (trainable groups, then frozen groups by dtype)."""

    module: UnitModule
    strategy: Strategy
    recompute: Recompute
    groups: tuple[Group, ...]

    @property
    def layout(self) -> Layout:
        """The layout of the trainable group, or of the only group. Raises ``ValueError`` if there is none."""
        layouts = [group.layout for group in self.groups if hasattr(group, "layout")]
        if not layouts:
            raise ValueError(
                f"unit {self.module.path!r}: expected a flat group, got {len(self.groups)} groups without layout"
            )
        return layouts[0]


@dataclass(frozen=True)
class ParamInfo:
    """A parameter as checkpoints see it. ``key``: key of its array; ``dtype``: dtype of its main weights."""

    unit: str
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    trainable: bool


@dataclass(frozen=True, repr=False)
class ShardingPlan(Viewed):
    """How one model is sharded over one mesh; ``fully_shard`` makes it. Contains no parameters.

    ``print`` shows a table.

    ``model``: the logical model as one unit. ``units``: by unit path, the root ``""`` last. ``variables``: by path,
    variables that are not parameters. ``engine``: "shard_map" or "pjit". ``given_variables``: values of ``variables``
    in the sharded model; None from ``plan_sharding``. ``prefetch``: see ``runtime/unit/order.py``.
    """

    mesh: Mesh
    engine: str
    units: Mapping[str, UnitPlan]
    model: UnitModule
    variables: Mapping[str, VariableInfo]
    given_variables: Mapping[str, jax.Array] | None = field(default=None, compare=False, repr=False)
    prefetch: int = 0

    def summary(self) -> str:
        """One line."""
        return layout_report(self).summary()

    def __str__(self) -> str:
        return layout_report(self).render(merge=True)

    @property
    def num_devices(self) -> int:
        return int(self.mesh.devices.size)

    @property
    def data_ranks(self) -> int:
        """The number of parts into which the rows of a batch are cut: devices, without model axes."""
        return self.axes.shards(self.axes.ndim)

    @property
    def variable_specs(self) -> dict[str, PartitionSpec]:
        """The specs of variables: whole, or cut by rows like a batch."""
        return {path: spec_of(info, self.axes) for path, info in self.variables.items()}

    def variable_sharding(self, path: str) -> NamedSharding:
        return NamedSharding(self.mesh, spec_of(self.variables[path], self.axes))

    def constrain_variables(self, variables: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Inside a program: these variables, constrained to their shardings.

        A step constrains the variables that it gets, too: a loop of steps would shard its carry as the step uses it.
        """
        shardings = {path: self.variable_sharding(path) for path in variables}
        return jax.lax.with_sharding_constraint(dict(variables), shardings)

    @property
    def chained(self) -> bool:
        """Whether collectives must run one after another, as on simulated devices."""
        return is_simulated(self.mesh)

    @property
    def brings_units(self) -> bool:
        """Whether the gradient step copies weights from host memory unit by unit, not all at once.

        XLA:TPU cannot copy pieces of logical arrays, or of arrays that it cuts over model axes, between memories.
        """
        return self.engine == "shard_map" and not self.model_axes.names

    @cached_property
    def _seen(self) -> dict[str, tuple[tuple[int, ...], NamedSharding]]:
        return {}

    @cached_property
    def axes(self) -> DataParallelMesh:
        return DataParallelMesh.of(self.mesh)

    @cached_property
    def model_axes(self) -> ModelAxes:
        return ModelAxes.of(self.mesh)

    @property
    def groups(self) -> list[Group]:
        """The groups of all units, in the order of the units."""
        return [group for unit in self.units.values() for group in unit.groups]

    @cached_property
    def arrays(self) -> Mapping[str, Stored]:
        """Every array of a train state's weights."""
        stored = (group.stored.items() for group in self.groups)
        return MappingProxyType({key: array for items in stored for key, array in items})

    @cached_property
    def row_arrays(self) -> Mapping[str, Stored]:
        """Arrays of an optimizer's state if moments have one scale per row (``row_arrays.py``)."""
        groups = [group for group in self.groups if group.trainable]
        scales = {
            path + SCALES: scales_of(self.logical[path])
            for group in groups
            for path in group.paths
            if is_scaled(group, path)
        }
        return MappingProxyType(
            scales | {key: stored for group in groups for key, stored in row_arrays(group).items()}
        )

    @cached_property
    def trainable(self) -> frozenset[str]:
        """Keys of the arrays that have gradients and moments."""
        return frozenset(key for group in self.groups if group.trainable for key in group.stored)

    @cached_property
    def parameters(self) -> Mapping[str, ParamInfo]:
        """Every parameter by its path in the model, in the order of the model's own state."""
        by_path = {}
        for name, unit in self.units.items():
            for group in unit.groups:
                keys = list(group.stored) * (len(group.paths) // len(group.stored))
                for path, key in zip(group.paths, keys, strict=True):
                    by_path[path] = (name, key, group.dtype, group.trainable)
        infos = {}
        for path, shape in zip(self.model.parameters, self.model.shapes, strict=True):
            unit_path, key, dtype, trainable = by_path[path]
            infos[path] = ParamInfo(unit_path, key, shape, dtype, trainable)
        return MappingProxyType(infos)

    @cached_property
    def whole_parameters(self) -> tuple[str, ...]:
        """Parameters that a strategy shards but every device holds whole, as the pjit engine cannot cut them."""
        cut = {path for g in self.groups if self.axes.shards(g.strategy.optimizer) > 1 for path in g.paths}
        return tuple(
            path
            for path, info in self.parameters.items()
            if path in cut and getattr(self.arrays[info.key], "dimension", 0) is None
        )

    @cached_property
    def logical(self) -> Mapping[str, LogicalArray]:
        """By path, how the moments are sharded for an optimizer that gets parameters (``optimizer/logical.py``)."""
        arrays, sizes = {}, self.model_axes.by_name
        for group in self.groups:
            wire, strategy, layers = group.wire, group.strategy, group.layers
            for path in group.paths if group.trainable else ():
                shape, cuts = self.parameters[path].shape, group.cuts_of(path)
                arrays[path] = logical_array(path, shape, wire, strategy, layers, cuts, sizes)
        return MappingProxyType(arrays)

    def layers_of(self, path: str) -> int | None:
        """The number of layers of a parameter's stack, or None."""
        return self.units[self.parameters[path].unit].module.layers

    def sharding(self, key: str) -> NamedSharding:
        """The sharding of the array ``key`` of weights, gradients and moments, or of moments by parameter path."""
        return NamedSharding(self.mesh, self.stored(key).spec)

    @property
    def data_specs(self) -> dict[str, PartitionSpec]:
        """The specs of the arrays on the data-parallel axes, on which a step is manual."""
        return {key: data_spec(stored.spec) for key, stored in self.arrays.items()}

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        return {key: self.sharding(key) for key in self.arrays}

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def stored(self, key: str) -> Stored:
        """Raises ``ValueError`` for an unknown key."""
        for known in (self.arrays, self.row_arrays):
            if key in known:
                return known[key]
        if key not in self.logical:
            raise ValueError(f"expected an array among {list(self.arrays)[:12]}, got {key!r}")
        return self.logical[key]

    def holding(self, buffers: Mapping[str, Any], path: str) -> str | None:
        """The key of the parameter in ``buffers``: its array's key, or its own path; None if neither is there."""
        own = self.parameters[path].key
        keys = (own, path, own + SCALED, own + UNSCALED, own + SCALES, path + SCALES)
        return next(
            (key for key in keys if key in buffers and self.tensor_shape(key, path) is not None), None
        )

    def tensor_shape(self, key: str, path: str) -> tuple[int, ...] | None:
        """The shape of a parameter's data in the array ``key``; None if there is none."""
        return self.stored(key).tensor_shape(path, self.parameters[path].shape)

    def locate_buffer(self, path: tuple[Any, ...], leaf: Any) -> tuple[str, tuple[Any, ...]] | None:
        """The key of the plan's array that ``leaf`` at tree path ``path`` corresponds to, and the path without it.

        None for other leaves. Weights are a dictionary by key, and optimizer states keep these keys. The state of an
        optimizer that gets parameters keeps the model's tree, so there the key is a parameter's path.
        """
        shape, logical = np.shape(leaf), self.logical
        names = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
        # The longest matching name of a parameter; among equally long ones, the innermost.
        spans = sorted(itertools.combinations(range(len(path) + 1), 2), key=lambda s: (s[0] - s[1], -s[0]))
        matches = ((*span, "/".join(names[slice(*span)])) for span in spans)
        first, last, parameter = next(
            (match for match in matches if match[2] in logical and shape == logical[match[2]].shape),
            (0, 0, ""),
        )
        # The innermost known key: an optimizer may add its own labels outside or inside.
        for i in reversed([i for i, entry in enumerate(path) if isinstance(entry, jax.tree_util.DictKey)]):
            key = path[i].key
            # Skip the unit's part of a parameter's path: the array of unit "head" may have the shape of "head/bias".
            within_path = first <= i < last and last - first > 1
            if not within_path and any(
                key in known and shape == known[key].shape for known in (self.arrays, self.row_arrays)
            ):
                return key, (*path[:i], *path[i + 1 :])
        return (parameter, (*path[:first], *path[last:])) if last else None

    def local_pieces(self, key: str, array: jax.Array) -> Iterator[BufferSlice]:
        """The pieces of parameters that this process holds in the array ``key``, one device at a time.

        Nothing is gathered. Over all processes, every element occurs exactly once (from its first replica).
        """
        stored = self.stored(key)
        self.check_array(key, array)
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                pieces = stored.pieces(shard.index, np.asarray(shard.data))
                yield from (piece for piece in pieces if not piece.repeated)

    def build_buffer(self, key: str, read: Read) -> jax.Array:
        """Build the array ``key`` from ``read(path, offsets, sizes) -> np.ndarray``, for boxes of addressable shards.

        Values are cast to the main dtype.
        """
        stored = self.stored(key)
        last: dict[str, np.ndarray] = {}

        def values(index: tuple[slice, ...] | None) -> np.ndarray:
            index = index or ()
            # JAX asks for the replicas of a shard one after another, so only one shard is remembered.
            if repr(index) not in last:
                last.clear()
                last[repr(index)] = stored.shard(index, stored.dtype, read)
            return last[repr(index)]

        return jax.make_array_from_callback(stored.shape, self.sharding(key), values)

    def _at_rest(self, key: str) -> tuple[tuple[int, ...], NamedSharding]:
        """Shape and sharding of the array ``key``, remembered, since every step checks every array."""
        if key not in self._seen:
            self._seen[key] = self.stored(key).shape, self.sharding(key)
        return self._seen[key]

    def check_array(self, key: str, array: jax.Array) -> None:
        """Raise ``ValueError`` unless ``array`` has the shape and sharding of the array ``key``, and was not donated.

        Any kind of memory is allowed.
        """
        shape, sharding = self._at_rest(key)
        check_not_donated(f"array {key!r}", array)
        # Traced arrays have no sharding yet.
        lies = sharding if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
        if array.shape != shape or not (
            lies and lies.is_equivalent_to(in_memory(sharding, lies.memory_kind), array.ndim)
        ):
            raise ValueError(
                f"array {key!r}: expected shape {shape} with sharding {sharding.spec} over {self.num_devices} devices "
                f"{dict(self.mesh.shape)}, got {array.shape} with {lies or 'no sharding'}: place it by "
                "jax.device_put(weights, plan.shardings)"
            )

    def merge(
        self, parameters: Mapping[str, jax.Array], variables: Mapping[str, jax.Array] | None = None
    ) -> nnx.Module | Tree:
        """The logical model with ``{path: value}`` for its parameters and its other variables.

        ``unshard(plan, state)`` returns parameters and other variables in one mapping. Without values, the variables
        are those of the model that ``fully_shard`` got, with a warning if training changes them (batch statistics).
        Raises ``ValueError`` for missing or unknown paths.
        """
        if variables is None:
            others = {path: parameters[path] for path in self.variables if path in parameters}
            parameters = {path: value for path, value in parameters.items() if path not in others}
            if not others and self.variables and self.given_variables is not None:
                others = dict(self.given_variables)
                self._warn_of_given_variables()
        else:
            others = dict(variables)
        for what, expected, values in (
            ("parameters", self.parameters, parameters),
            ("other variables", self.variables, others),
        ):
            if expected.keys() != values.keys():
                missing, unexpected = (
                    sorted(a.keys() - b.keys())[:5] for a, b in ((expected, values), (values, expected))
                )
                raise ValueError(
                    f"expected values for exactly the model's {what}; missing {missing}, unexpected {unexpected}"
                    + (": unshard(plan, state) returns all" if what != "parameters" else "")
                )
        merged = self.model.merge(
            [parameters[path] for path in self.parameters],
            [others[path] for path in self.model.variables],
            {},
        )
        return as_given(merged)

    def _warn_of_given_variables(self) -> None:
        changing = [path for path, info in self.variables.items() if not issubclass(info.cls, nnx.RngState)]
        if changing:
            warn_caller(
                f"plan.merge: {changing[:3]} have the values of the original model, although training changes them: "
                "plan.merge(unshard(plan, state)) uses the state's values",
                RuntimeWarning,
            )
