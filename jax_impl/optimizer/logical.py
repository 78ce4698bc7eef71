"""Optimizers that look at shapes or names (Muon, a decay mask by ``ndim``): they get the model's own parameters.

At rest weights stay as the plan says, and moments lie like the pjit engine's: each parameter's cut along a dimension
that divides, or whole. Only in the update are weights and gradients brought together, unit by unit::

    flat [padded], sharded -> all-gather -> parameters, cut as the moments are -> update -> flat, sharded

Weights and gradients are then gathered in every step, which an elementwise optimizer, on the shards as they are, does
without; so ``fit_to_plan`` reads which of the two an optimizer needs (``chosen_form.py``).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from bridge.core.callers import warn_caller
from jax_impl.comm.collectives import fence
from jax_impl.optimizer.chosen_form import chosen_form
from jax_impl.optimizer.forms import Form, arrays_of, forms_of, taking_loss, trees_of
from jax_impl.optimizer.transformation import MainWeightTransformation
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan

_SHARE_TO_WARN_OF = 0.01


def fit_to_plan(
    plan: ShardingPlan, optimizer: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """A transformation of the plan's arrays that trains as ``optimizer`` does on the unsharded model.

    It is ``optimizer`` on the arrays as they are where that does the same to each element wherever the element lies;
    else ``optimizer`` on the model's parameters. Its traced programs tell which (``chosen_form.py``). ``update`` takes
    ``value``, the loss.

    Raises ``ValueError`` for an optimizer that can update neither.
    """
    # What this one does to an element depends on its row at most, by its own specification.
    if isinstance(optimizer, MainWeightTransformation):
        return taking_loss(optimizer.on_plan(plan))
    arrays, models = arrays_of(plan), trees_of(plan)
    form = chosen_form(optimizer, arrays, models, plan.engine == "shard_map")
    able = taking_loss(optimizer)
    return able if form is None else _on_parameters(plan, able, forms_of(arrays, models, units=True)[form])


def warn_of_whole_moments(plan: ShardingPlan, opt_state: Any) -> None:
    """``RuntimeWarning`` naming parameters whose moments in ``opt_state`` no device has a part of, but all have whole.

    Only of moments by parameter with flat weights; what the pjit engine cannot cut, it says when it plans.
    """
    if plan.engine != "shard_map":
        return
    uncut, whole = _uncut(plan), dict[str, int]()
    for keys, leaf in jax.tree.leaves_with_path(opt_state):
        located = plan.locate_buffer(keys, leaf)
        path = "" if located is None else located[0]
        if path not in plan.arrays and path in uncut:
            whole[path] = math.prod(leaf.shape)
    share = sum(whole.values()) / max(1, sum(math.prod(x.shape) for x in plan.logical.values()))
    if share > _SHARE_TO_WARN_OF:
        warn_caller(
            f"shard_map engine: this optimizer looks at shapes or names of parameters. No dimension of {len(whole)} of "
            f"{len(plan.logical)} of them, {share:.0%} of the elements, divides by the number of shards, so their "
            f"moments are whole on every device: {tuple(whole)[:5]}; an optimizer that treats all elements alike "
            "(adamw without a mask) shards any shape",
            RuntimeWarning,
        )


def _uncut(plan: ShardingPlan) -> frozenset[str]:
    """Paths of parameters that a strategy shards and that no dimension allows to cut."""
    return frozenset(
        path
        for path, array in plan.logical.items()
        if array.dimension is None and not array.cuts and array.wire.axes.shards(array.level) > 1
    )


def _on_parameters(
    plan: ShardingPlan, optimizer: optax.GradientTransformationExtraArgs, form: Form
) -> optax.GradientTransformationExtraArgs:
    def init(weights: Buffers) -> Any:
        return _plain(optimizer.init(form.pack(parameters_of_arrays(plan, weights))))

    def update(
        gradients: Buffers, state: Any, weights: Buffers | None = None, **extra: Any
    ) -> tuple[Buffers, Any]:
        assert weights is not None
        slopes, own = (form.pack(parameters_of_arrays(plan, buffers)) for buffers in (gradients, weights))
        if isinstance(own, nnx.State):
            structure = jax.tree.structure(jax.eval_shape(optimizer.init, own))
            state = jax.tree.unflatten(structure, jax.tree.leaves(state))
        updates, state = optimizer.update(slopes, state, own, **extra)
        return arrays_of_parameters(plan, form.unpack(updates)), _plain(state)

    return optax.GradientTransformationExtraArgs(init, update)


def _plain(state: Any) -> Any:
    """An optimizer's state at rest: dictionaries with the same leaves in the same order in place of ``nnx.State``."""

    def plain(node: Any) -> Any:
        if isinstance(node, nnx.Variable):
            return node.get_raw_value()
        if not isinstance(node, nnx.State):
            return node
        return OrderedDict((key, plain(below)) for key, below in sorted(node.items()))

    return jax.tree.map(plain, state, is_leaf=lambda node: isinstance(node, nnx.State))


def parameters_of_arrays(plan: ShardingPlan, buffers: Buffers) -> dict[str, jax.Array]:
    """By path, what the arrays hold; each cut as its moments are."""
    by_path: dict[str, jax.Array] = {}
    last: Any = ()
    for unit in plan.units.values():
        for group in unit.groups:
            if not group.trainable:
                continue
            # One gather after another: see forward.hold.
            arrays, last = fence((tuple(buffers[key] for key in group.stored), last))
            if plan.engine == "shard_map" and not plan.model_axes.names:
                arrays = jax.lax.with_sharding_constraint(arrays, plan.replicated)
            last = group.logical(arrays)
            by_path.update(zip(group.paths, last, strict=True))
    return {
        path: jax.lax.with_sharding_constraint(x, NamedSharding(plan.mesh, plan.logical[path].spec))
        for path, x in by_path.items()
    }


def arrays_of_parameters(plan: ShardingPlan, parameters: Any) -> Buffers:
    """The plan's arrays that hold these, weights or updates; updates may be of more bits than the weights."""
    by_key: Buffers = {}
    for unit in plan.units.values():
        for group in unit.groups:
            if group.trainable:
                leaves = [parameters[path] for path in group.paths]
                dtype = jnp.result_type(*leaves)
                arrays = group.at_rest([leaf.astype(dtype) for leaf in leaves])
                by_key.update(zip(group.stored, arrays, strict=True))
    # Else XLA may leave the flat arrays whole.
    return {key: jax.lax.with_sharding_constraint(x, plan.sharding(key)) for key, x in by_key.items()}
