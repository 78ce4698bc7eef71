"""Where an optimizer's moments are in its state: by the leaves of any pytree, or by the arrays of a plan.

::

    weights                   mu                                              mu_scale
    any pytree                the like                                        the like, None where nothing is scaled
    plan, pjit                by path                                         "<path> (scales)"
    plan, shard_map           "<key>", or "<key> (scaled)" and                "<key> (scales)"
                              "<key> (unscaled)"

``mu_scale`` is None where the format has no scales. Of a pytree that belongs to no plan, rows are those of each leaf's
own shape; a plan knows which leading dimension counts the layers of a stack, and rows are those of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from bridge.core.sharding.layout.rows import rows_of
from jax_impl.optimizer.moments import MomentFormat, Rows, decode_rows
from jax_impl.optimizer.shard_rows import ShardRows
from jax_impl.runtime.groups.flat_group import FlatGroup
from jax_impl.runtime.groups.precision import update_dtype
from jax_impl.runtime.groups.row_arrays import SCALES
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from jax_impl.runtime.groups.unit_plan import Group

VALUES = ""
# The arrays of a moment of one array of weights, by suffix of their keys.
Parts = Mapping[str, jax.Array]
Compute = Callable[[Any, Any, Any], Any]


class MomentRows(Protocol):
    """How a moment of one array of weights is stored."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of its arrays' keys."""

    def zeros(self, moment_format: MomentFormat) -> Parts: ...
    def decode(self, parts: Parts) -> jax.Array: ...
    def encode(self, moment_format: MomentFormat, values: jax.Array, step: jax.Array) -> Parts: ...


@dataclass(frozen=True)
class Alike:
    """Without scales: an array like the weights, whose dtype is ``dtype``."""

    shape: tuple[int, ...]
    dtype: np.dtype
    suffixes = (VALUES,)

    def zeros(self, moment_format: MomentFormat) -> Parts:
        return {VALUES: jnp.zeros(self.shape, moment_format.unscaled_dtype(self.dtype))}

    def decode(self, parts: Parts) -> jax.Array:
        return parts[VALUES].astype(update_dtype(self.dtype))

    def encode(self, moment_format: MomentFormat, values: jax.Array, step: jax.Array) -> Parts:
        return {VALUES: moment_format.plain(values)}


@dataclass(frozen=True)
class ArrayRows:
    """Of parameters as the model has them. Of a stack ``decode`` and ``encode`` take one layer."""

    shape: tuple[int, ...]
    dtype: np.dtype
    suffixes = (VALUES, SCALES)

    def zeros(self, moment_format: MomentFormat) -> Parts:
        scales = jnp.zeros((*self.shape[:-1], 1), jnp.float32)
        return {VALUES: jnp.zeros(self.shape, moment_format.dtype), SCALES: scales}

    def decode(self, parts: Parts) -> jax.Array:
        return decode_rows(parts[VALUES], parts[SCALES]).astype(update_dtype(self.dtype))

    def encode(self, moment_format: MomentFormat, values: jax.Array, step: jax.Array) -> Parts:
        lead = values.shape[:-1]
        numbers = jnp.zeros(lead, np.int32)
        for dimension in range(len(lead)):
            below = np.int32(math.prod(lead[dimension + 1 :]))
            numbers += lax.broadcasted_iota(np.int32, lead, dimension) * below
        stored, scale = moment_format.encode(values.astype(jnp.float32), Rows(numbers), step)
        return {VALUES: stored.astype(moment_format.dtype), SCALES: scale}


class MomentArrays:
    """How moments of all weights make an optimizer's state; here those of any pytree."""

    def rows(self, moment_format: MomentFormat, weights: Any) -> list[MomentRows]:
        """Of each array of the weights."""

        def of(leaf: Any) -> MomentRows:
            scaled = moment_format.scaled and rows_of(leaf.shape)[0] > 1
            return (ArrayRows if scaled else Alike)(tuple(leaf.shape), leaf.dtype)

        return [of(leaf) for leaf in jax.tree.leaves(weights)]

    def parts(self, rows: list[MomentRows], weights: Any, values: Any, scales: Any) -> list[Parts]:
        """Of each array of the weights, from the two trees of the state."""
        structure: Any = jax.tree.structure(weights)
        trees = {VALUES: structure.flatten_up_to(values)}
        if scales is not None:
            trees[SCALES] = structure.flatten_up_to(scales)
        return [{suffix: trees[suffix][i] for suffix in stored.suffixes} for i, stored in enumerate(rows)]

    def join(self, moment_format: MomentFormat, weights: Any, parts: list[Parts]) -> tuple[Any, Any]:
        """The two trees of the state, the second None where the format has no scales."""
        structure = jax.tree.structure(weights)
        values = jax.tree.unflatten(structure, [own[VALUES] for own in parts])
        scales = jax.tree.unflatten(structure, [own.get(SCALES) for own in parts])
        return values, scales if moment_format.scaled else None

    def compute_on(
        self, number: int, weights: Any, compute: Compute, held: Any, gradient: Any, numbers: Any
    ) -> Any:
        """``compute(held, gradient, numbers)`` for an array of the weights, where its rows are known:
        ``held`` anew.

        ``held`` and ``gradient`` are trees of arrays that lie as the weights do, ``numbers`` one of scalars.
        """
        return compute(held, gradient, numbers)


class PlanMoments(MomentArrays):
    """Of the arrays of a plan, by their keys."""

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self._groups: dict[str, Group] = {
            key: group for unit in plan.units.values() for group in unit.groups for key in group.stored
        }

    def rows(self, moment_format: MomentFormat, weights: Any) -> list[MomentRows]:
        def of(key: str, array: Any) -> MomentRows:
            shape, dtype, group = tuple(array.shape), array.dtype, self._groups[key]
            if not moment_format.scaled or key + SCALES not in self._plan.row_arrays:
                return Alike(shape, dtype)
            return ShardRows(group) if isinstance(group, FlatGroup) else ArrayRows(shape, dtype)

        return [of(*item) for item in _items(weights)]

    def parts(self, rows: list[MomentRows], weights: Any, values: Any, scales: Any) -> list[Parts]:
        return [
            {suffix: (scales if suffix == SCALES else values)[key + suffix] for suffix in stored.suffixes}
            for (key, _), stored in zip(_items(weights), rows, strict=True)
        ]

    def join(self, moment_format: MomentFormat, weights: Any, parts: list[Parts]) -> tuple[Any, Any]:
        values: dict[str, jax.Array] = {}
        scales: dict[str, jax.Array] = {}
        for (key, _), own in zip(_items(weights), parts, strict=True):
            for suffix, array in own.items():
                (scales if suffix == SCALES else values)[key + suffix] = array
        return values, scales if moment_format.scaled else None

    def compute_on(
        self, number: int, weights: Any, compute: Compute, held: Any, gradient: Any, numbers: Any
    ) -> Any:
        key, _ = _items(weights)[number]
        group = self._groups[key]
        run = compute if group.layers is None else _by_layer(compute, group.layers)
        if not isinstance(group, FlatGroup):
            return run(held, gradient, numbers)
        specs = [jax.tree.map(lambda _: group.spec, tree) for tree in (held, gradient)]
        whole = jax.tree.map(lambda _: PartitionSpec(), numbers)
        placed = jax.shard_map(
            run, mesh=self._plan.mesh, in_specs=(*specs, whole), out_specs=specs[0], check_vma=False
        )
        return placed(held, gradient, numbers)


class ParameterMoments(PlanMoments):
    """Of a plan's parameters by path, as an optimizer has them that sees parameters (``optimizer/logical.py``)."""

    def rows(self, moment_format: MomentFormat, weights: Any) -> list[MomentRows]:
        scaled = self._plan.row_arrays if moment_format.scaled else {}
        return [
            (ArrayRows if path + SCALES in scaled else Alike)(tuple(array.shape), array.dtype)
            for path, array in _items(weights)
        ]

    def compute_on(
        self, number: int, weights: Any, compute: Compute, held: Any, gradient: Any, numbers: Any
    ) -> Any:
        path, _ = _items(weights)[number]
        unit = self._plan.units[self._plan.parameters[path].unit]
        layers = next(group.layers for group in unit.groups if path in group.paths)
        run = compute if layers is None else _by_layer(compute, layers)
        return run(held, gradient, numbers)


def _items(weights: Any) -> list[tuple[str, Any]]:
    """In the order of the leaves."""
    return sorted(weights.items())


def _by_layer(compute: Compute, layers: int) -> Compute:
    """``compute`` on one layer after the other, in place: what it needs is as large as one layer."""

    def computed(held: Any, gradient: Any, numbers: Any) -> Any:
        def layer(number: Any, held: Any) -> Any:
            def of(x: jax.Array) -> jax.Array:
                return lax.dynamic_index_in_dim(x, number, keepdims=False)

            new = compute(jax.tree.map(of, held), jax.tree.map(of, gradient), numbers)
            return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, number, 0), held, new)

        return lax.fori_loop(0, layers, layer, held)

    return computed
