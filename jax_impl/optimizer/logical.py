"""Give the model's own parameters to optimizers that look at shapes or names (Muon, a decay mask by ``ndim``).

At rest, weights stay sharded as planned. Moments are sharded like the pjit engine's: along a dimension that the number
of shards divides, or not at all. Weights and gradients are gathered only in the update, unit by unit::

    flat [padded], sharded -> all-gather -> parameters, cut like the moments -> update -> flat, sharded

So every step gathers weights and gradients, which an elementwise optimizer on the stored shards does not need.
Therefore ``fit_to_plan`` finds out which of the two an optimizer needs (``chosen_form.py``).
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
    """A transformation of the plan's arrays that trains like ``optimizer`` on the unsharded model.

    If ``optimizer`` treats each element alike, wherever it is stored, this is ``optimizer`` on the stored arrays; else
    ``optimizer`` on the model's parameters. ``chosen_form.py`` decides. ``update`` accepts ``value``, the loss.

    Raises ``ValueError`` for an optimizer that can update neither.
    """
    # By specification, this optimizer's update of an element depends at most on the element's row.
    if isinstance(optimizer, MainWeightTransformation):
        return taking_loss(optimizer.on_plan(plan))
    arrays, models = arrays_of(plan), trees_of(plan)
    form = chosen_form(optimizer, arrays, models, plan.engine == "shard_map")
    able = taking_loss(optimizer)
    return able if form is None else _on_parameters(plan, able, forms_of(arrays, models, units=True)[form])


def warn_of_whole_moments(plan: ShardingPlan, opt_state: Any) -> None:
    """Issue a ``RuntimeWarning`` that names parameters whose moments in ``opt_state`` are whole on every device.

    Only for moments by parameter with flat weights; the pjit engine warns about uncut parameters while it plans.
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
            f"shard_map engine: this optimizer looks at shapes or names of parameters. {len(whole)} of "
            f"{len(plan.logical)} parameters ({share:.0%} of the elements) have no dimension that the number of "
            f"shards divides, so their moments are whole on every device: {tuple(whole)[:5]}; an optimizer that "
            "treats all elements alike (adamw without a mask) shards any shape",
            RuntimeWarning,
        )


def _uncut(plan: ShardingPlan) -> frozenset[str]:
    """Paths of parameters that a strategy shards but that have no dimension to cut."""
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
    """An optimizer's state at rest, with dictionaries in place of ``nnx.State``; the leaves keep their order."""

    def plain(node: Any) -> Any:
        if isinstance(node, nnx.Variable):
            return node.get_raw_value()
        if not isinstance(node, nnx.State):
            return node
        return OrderedDict((key, plain(below)) for key, below in sorted(node.items()))

    return jax.tree.map(plain, state, is_leaf=lambda node: isinstance(node, nnx.State))


def parameters_of_arrays(plan: ShardingPlan, buffers: Buffers) -> dict[str, jax.Array]:
    """The parameters in the arrays, by path; each is cut like its moments."""
    by_path: dict[str, jax.Array] = {}
    last: Any = ()
    for group in plan.groups:
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
    """The plan's arrays for these weights or updates; updates may have a wider dtype than the weights."""
    by_key: Buffers = {}
    for group in plan.groups:
        if group.trainable:
            leaves = [parameters[path] for path in group.paths]
            dtype = jnp.result_type(*leaves)
            arrays = group.at_rest([leaf.astype(dtype) for leaf in leaves])
            by_key.update(zip(group.stored, arrays, strict=True))
    # Without the constraint, XLA may leave the flat arrays whole.
    return {key: jax.lax.with_sharding_constraint(x, plan.sharding(key)) for key, x in by_key.items()}
