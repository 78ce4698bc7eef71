"""Norms of whole parameters, from their shards: sums on each device, then one reduction for all parameters.

A parameter's rows are one range of a device's shard; the range begins and ends at other positions on each device. All
devices run one program, so each device reads as many elements as the largest range has, from the start of its own::

    device 0   |. . a a a a a b b|        a: 5 elements from 2      b: 2 elements from 7
    device 1   |b b b b . . . . .|        a: nothing                b: 4 elements from 0
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_impl.comm.collectives import fence
from jax_impl.runtime.groups.flat_group import FlatGroup
from jax_impl.runtime.groups.logical_group import LogicalArray
from jax_impl.runtime.groups.sharding_plan import ShardingPlan


def parameter_norms(
    plan: ShardingPlan, buffers: Any, *, norm_type: float = 2.0, by_layer: bool = False
) -> dict[str, Any]:
    """The norm of each whole parameter in ``buffers``, by path, in the order of the model. Nothing is gathered.

    ``buffers``: arrays by key, such as ``state.weights`` or the gradients of ``step.gradients``, or one kind of moments
    (``state.opt_state.mu``). Other scalars, such as a step count, are skipped. ``by_layer``: a parameter of a stack
    ``[layers, ...]`` gets one norm per layer, shape ``[layers]``.

    Returns numbers (with ``by_layer``, NumPy arrays), computed in float64 and equal in all processes, which must all
    call this. Inside ``jax.jit`` the norms are traced scalars, in float32 unless x64 is on; such a norm overflows or
    underflows only if its elements do. Each set of axes that cut arrays costs one all-reduce (two in float32).

    Raises ``ValueError`` for a norm type that is not positive, for an array that does not belong to the plan, and for
    two arrays with one key, as in a whole optimizer state.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a positive number or inf, got {norm_type!r}")
    arrays: dict[str, jax.Array] = {}
    for path, leaf in jax.tree.leaves_with_path(buffers):
        located = plan.locate_buffer(path, leaf)
        if located is None:
            if leaf.ndim:
                raise ValueError(
                    f"buffers{jax.tree_util.keystr(path)}: expected an array of the plan, {list(plan.arrays)[:8]}, got "
                    f"shape {leaf.shape}"
                )
            continue
        key = located[0]
        if key in arrays:
            raise ValueError(
                f"buffers: expected one array {key!r}, got two, the second at {jax.tree_util.keystr(path)}: pass one "
                "kind of moments, such as state.opt_state.mu"
            )
        plan.check_array(key, leaf)
        arrays[key] = leaf
    held = _Held(plan)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in arrays.values()):
        return _norms(arrays, held=held, norm_type=float(norm_type), by_layer=by_layer)
    with jax.enable_x64(True):
        by_path = jax.device_get(_norms(arrays, held=held, norm_type=float(norm_type), by_layer=by_layer))
    return {path: norm if norm.ndim else float(norm) for path, norm in by_path.items()}


@dataclass(frozen=True, eq=False)
class _Held:
    """A plan as a static argument: equal only to itself."""

    plan: ShardingPlan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.plan is self.plan

    def __hash__(self) -> int:
        return id(self.plan)


@partial(jax.jit, static_argnames=("held", "norm_type", "by_layer"))
def _norms(
    arrays: dict[str, jax.Array], *, held: _Held, norm_type: float, by_layer: bool
) -> dict[str, jax.Array]:
    plan = held.plan
    dtype = jax.dtypes.canonicalize_dtype(np.float64)
    specs = {key: plan.stored(key).spec for key in arrays}
    local = jax.shard_map(
        partial(_on_each_device, plan, norm_type, dtype),
        mesh=plan.mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    # A program does not keep the order of keys.
    own = local(arrays) if arrays else {}
    norms = {path: own[path] for path in plan.parameters if path in own}
    if by_layer:
        return {path: norm[0] if plan.layers_of(path) is None else norm for path, norm in norms.items()}
    return {path: _norm_of(norm, norm_type) for path, norm in norms.items()}


def _on_each_device(
    plan: ShardingPlan, norm_type: float, dtype: Any, arrays: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Norms ``[layers]``, or ``[1]``, of all parameters."""
    parts: dict[tuple[str, ...], dict[str, jax.Array]] = {}
    for key, array in arrays.items():
        stored = cast(FlatGroup | LogicalArray, plan.stored(key))
        # [layers, elements] of this device, with zeros for elements that are not the parameter's.
        parts.setdefault(_axes(stored), {}).update(_values(plan, stored, array))
    powers: dict[str, jax.Array] = {}
    last: Any = ()
    for axes, values in parts.items():
        paths = list(values)
        sizes = [jnp.abs(value.astype(dtype)) for value in values.values()]
        tops = [jnp.max(size, axis=1, initial=0) for size in sizes]
        scales = [jnp.ones_like(top) for top in tops]
        if norm_type == math.inf or dtype == jnp.float32:
            tops, last = _reduced(lax.pmax, tops, axes, last)
            scales = [jnp.where((top > 0) & jnp.isfinite(top), top, 1) for top in tops]
        if norm_type == math.inf:
            # A maximum over devices may lose a NaN; a sum does not.
            nans, last = _reduced(
                lax.psum, [jnp.sum(jnp.where(jnp.isnan(size), size, 0), axis=1) for size in sizes], axes, last
            )
            powers.update(zip(paths, (top + nan for top, nan in zip(tops, nans, strict=True)), strict=True))
            continue
        sums, last = _reduced(
            lax.psum,
            [
                jnp.sum((size / scale[:, None]) ** norm_type, axis=1)
                for size, scale in zip(sizes, scales, strict=True)
            ],
            axes,
            last,
        )
        norms = (scale * total ** (1 / norm_type) for scale, total in zip(scales, sums, strict=True))
        powers.update(zip(paths, norms, strict=True))
    return powers


def _values(
    plan: ShardingPlan, stored: FlatGroup | LogicalArray, array: jax.Array
) -> Iterator[tuple[str, jax.Array]]:
    if not isinstance(stored, FlatGroup):
        layers = plan.layers_of(stored.path)
        yield stored.path, array.reshape(1 if layers is None else layers, -1)
        return
    layout = stored.layout
    flat = array.reshape(-1, layout.shard_size)
    axes = plan.axes.names[: stored.strategy.optimizer]
    rank = lax.axis_index(axes) if axes else 0
    for path, slot in zip(stored.paths, layout.slots, strict=True):
        bounds = layout.row_bounds(slot.name)
        lengths = np.array([(b - a) * slot.row_size for a, b in itertools.pairwise(bounds)])
        starts = np.array([layout.shard_start(slot.name, r) for r in range(layout.num_shards)])
        most = int(lengths.max(initial=0))
        # A slice must end inside the shard.
        begins = np.minimum(starts, layout.shard_size - most)
        skipped = jnp.asarray(starts - begins)[rank]
        piece = lax.dynamic_slice_in_dim(flat, jnp.asarray(begins)[rank], most, axis=1)
        positions = jnp.arange(most)
        own = (positions >= skipped) & (positions < skipped + jnp.asarray(lengths)[rank])
        yield path, jnp.where(own, piece, 0)


def _reduced(
    reduction: Any, values: Sequence[jax.Array], axes: Sequence[str], last: Any
) -> tuple[list[jax.Array], Any]:
    """Reduce over the devices of ``axes`` with one collective after ``last``."""
    if not axes:
        return list(values), last
    own, last = fence((list(values), last))
    whole = reduction(jnp.concatenate(own), tuple(axes))
    ends = np.cumsum([value.size for value in own])[:-1]
    return jnp.split(whole, ends), whole


def _norm_of(norms: jax.Array, norm_type: float) -> jax.Array:
    top = jnp.max(norms)
    if norm_type == math.inf or norms.size == 1:
        return top
    scale = jnp.where((top > 0) & jnp.isfinite(top), top, 1)
    return scale * jnp.sum((norms / scale) ** norm_type) ** (1 / norm_type)


def _axes(stored: FlatGroup | LogicalArray) -> tuple[str, ...]:
    """The mesh axes over which the array is cut."""
    # An entry is a name, a tuple of names, or None, which is no leaf.
    return tuple(jax.tree.leaves(tuple(stored.spec)))
