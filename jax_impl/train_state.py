"""The train state: how it is made and placed, what it is like without values, and which plan it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jax_impl.batch import place_whole
from jax_impl.optimizer.logical import fitted, warn_of_whole_moments
from jax_impl.runtime.memory_kinds import on_device
from jax_impl.runtime.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.variables import Variables


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """``weights``: main weights, arrays by key. ``opt_state``: the optimizer's, moments in equal arrays.

    ``variables``: what else the model has (batch statistics, random streams), by path.
    """

    weights: Buffers
    opt_state: Any
    variables: Variables = field(default_factory=dict)


def init_state(
    plan: ShardingPlan,
    weights: Buffers,
    optimizer: optax.GradientTransformation,
    variables: Mapping[str, jax.Array] | None = None,
) -> TrainState:
    """The state before the first step; moments are born sharded, and frozen weights have none.

    ``variables``: of a model that has variables other than parameters; default those of the model that ``fully_shard``
    got. Raises ``ValueError`` for others than the plan's, and where ``plan_sharding`` made the plan and none are given:
    ``variable_leaves(model)`` has them. A ``RuntimeWarning`` names parameters whose moments are whole on every device,
    because the optimizer looks at shapes and no dimension divides.
    """
    if variables is None:
        # Copies, because a program of the whole step may be given all of the state (donated).
        variables = {path: jnp.copy(value) for path, value in (plan.given_variables or {}).items()}
    opt_state = initial_moments(plan, weights, optimizer)
    warn_of_whole_moments(plan, opt_state)
    return TrainState(weights, opt_state, place_variables(plan, variables))


def initial_moments(plan: ShardingPlan, weights: Buffers, optimizer: optax.GradientTransformation) -> Any:
    """The optimizer's state before the first step, born sharded."""
    return _placed(plan, fitted(plan, optimizer).init, trainable(plan, weights))


def trainable(plan: ShardingPlan, weights: Buffers) -> Buffers:
    """The arrays that an optimizer sees."""
    return {key: array for key, array in weights.items() if key in plan.trainable}


def abstract_state(plan: ShardingPlan, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, dtypes and shardings of ``init_state``'s result, without values: what ``TrainStep.lower`` needs."""
    weights: Any = {
        key: jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=plan.sharding(key))
        for key, stored in plan.arrays.items()
    }
    moments = jax.eval_shape(fitted(plan, optimizer).init, trainable(plan, weights))
    opt_state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        moments,
        shardings_of(plan, moments),
    )
    variables: Any = {
        path: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=plan.replicated)
        for path, info in plan.variables.items()
    }
    return TrainState(weights, opt_state, variables)


def _placed(plan: ShardingPlan, init: Callable[[Buffers], Any], weights: Buffers) -> Any:
    shardings = shardings_of(plan, jax.eval_shape(init, weights))
    return jax.jit(lambda weights: init(on_device(weights)), out_shardings=shardings)(weights)


def shardings_of(plan: ShardingPlan, opt_state: Any) -> Any:
    """Of every leaf of an optimizer's state, abstract or not."""
    by_shape = {plan.arrays[key].shape: plan.sharding(key) for key in plan.trainable}

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        located = plan.locate_buffer(path, leaf)
        if located is not None:
            return plan.sharding(located[0])
        # A transformation may keep moments under other keys than the weights'.
        return by_shape.get(leaf.shape, plan.replicated)

    return jax.tree.map_with_path(sharding, opt_state)


def place_variables(plan: ShardingPlan, variables: Mapping[str, jax.Array]) -> Variables:
    """Whole on every device of the plan; raises ``ValueError`` for other variables than the plan's."""
    missing, unexpected = (
        sorted(plan.variables.keys() - variables.keys()),
        sorted(variables.keys() - plan.variables.keys()),
    )
    if missing or unexpected:
        raise ValueError(
            f"variables: expected those of the model that are no parameters, missing {missing[:5]}, unexpected "
            f"{unexpected[:5]}; jax_impl.variable_leaves(model) gives them"
        )
    for path, info in plan.variables.items():
        if variables[path].shape != info.shape or variables[path].dtype != info.dtype:
            raise ValueError(
                f"variable {path!r}: expected {info.dtype} of shape {info.shape}, got {variables[path].dtype} of shape "
                f"{variables[path].shape}"
            )
    return {path: place_whole(plan, variables[path]) for path in plan.variables}


def check_state(plan: ShardingPlan, weights: Buffers, variables: Variables) -> None:
    """Raises ``ValueError`` for weights or variables of another plan, and for donated ones."""
    if weights.keys() != plan.arrays.keys():
        raise ValueError(f"step: expected weights {list(plan.arrays)[:12]}, got {list(weights)[:12]}")
    for key, array in weights.items():
        plan.check_array(key, array)
    if variables.keys() != plan.variables.keys():
        raise ValueError(
            f"step: expected the model's variables {list(plan.variables)[:12]}, got {list(variables)[:12]}; give "
            "them to init_state, or to gradients"
        )
