"""The model's forward pass as a function of what a strategy holds of each unit's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_impl.buffer import unpack
from jax_impl.collective import one_after_another
from jax_impl.module_tree import ROOT
from jax_impl.plan import Buffers, ShardingPlan
from jax_impl.unit import sharded_call

# By unit path. Differentiated: main-weight shards, or whole compute weights as tuples of leaves.
Varied = Mapping[str, Any]
# By unit path. Full buffers that go with the shards, or None where there are none.
Fixed = Mapping[str, jax.Array | None]


def hold(plan: ShardingPlan, weights: Buffers) -> tuple[Varied, Fixed]:
    """What the microbatches of one step use, from this rank's part of the main weights."""
    names = list(plan.units)
    if plan.strategy.shards_weights:
        return weights, dict.fromkeys(names)
    local = [weights[name] for name in names]
    wires = [plan.units[name].wire for name in names]
    if plan.strategy.shards_state:
        full = one_after_another([wire.gather for wire in wires], local)
    else:
        full = [wire.cast(buffer) for wire, buffer in zip(wires, local, strict=True)]
    if plan.strategy.shards_gradients:
        return weights, dict(zip(names, full, strict=True))
    leaves = {name: unpack(plan.units[name].layout, flat) for name, flat in zip(names, full, strict=True)}
    return leaves, dict.fromkeys(names)


def call_model(
    plan: ShardingPlan,
    varied: Varied,
    fixed: Fixed,
    loss_fn: Callable[[nnx.Module, Any], jax.Array],
    batch: Any,
) -> jax.Array:
    """``loss_fn(model, batch)``; the loss is inside the root unit, whose weights the end of the model needs too."""
    if plan.strategy.shards_gradients:
        varied = {name: (varied[name], fixed[name]) for name in varied}
    return _call_unit(plan, ROOT, varied, loss_fn, batch)


def _call_unit(
    plan: ShardingPlan,
    path: str,
    weights: Mapping[str, Any],
    run: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``run(module, *args, **kwargs)`` on the module of unit ``path``; ``weights`` of it and all units inside."""
    unit = plan.units[path]
    arrays, rebuild = _split_arrays((args, kwargs))

    def apply(leaves: tuple[jax.Array, ...], inner: Mapping[str, Any], *arrays: Any) -> Any:
        args, kwargs = rebuild(arrays)
        calls = {below: partial(_call_unit, plan, below, inner, _run_module) for below in unit.module.inner}
        return run(unit.module.merge(leaves, calls), *args, **kwargs)

    inner = {below: weights[below] for below in _units_inside(plan, path)}
    if plan.strategy.shards_gradients:
        return sharded_call(apply, unit.layout, unit.wire, weights[path], inner, *arrays)
    return apply(weights[path], inner, *arrays)


def _run_module(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _units_inside(plan: ShardingPlan, path: str) -> list[str]:
    inside = []
    for below in plan.units[path].module.inner:
        inside += [below, *_units_inside(plan, below)]
    return inside


def _split_arrays(tree: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """The arrays of ``tree``, and how to put others in their places: flags and the like stay Python values."""
    leaves, treedef = jax.tree.flatten(tree)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

    def rebuild(arrays: Any) -> Any:
        filled = list(leaves)
        for i, array in zip(where, arrays, strict=True):
            filled[i] = array
        return jax.tree.unflatten(treedef, filled)

    return [leaves[i] for i in where], rebuild
