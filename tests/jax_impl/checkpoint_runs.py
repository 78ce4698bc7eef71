"""Training runs to interrupt: plans and compiled steps are made once for each number of devices and strategy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_impl import (
    ShardingPlan,
    TrainState,
    data_parallel_mesh,
    init_state,
    main_weight_adamw,
    make_train_step,
    plan_sharding,
    shard_weights,
    unshard,
)
from jax_impl.module_tree import parameter_leaves
from tests.jax_impl.tiny import decoder, loss, tokens

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# Divisible by one to four devices.
ROWS = 12
OPTIMIZER = main_weight_adamw(1e-2, weight_decay=0.1)


@functools.cache
def plan_of(devices: int, strategy: str = "optim_grads_params") -> ShardingPlan:
    return plan_sharding(nnx.eval_shape(decoder), data_parallel_mesh(devices), strategy=strategy)


@functools.cache
def step_of(devices: int, strategy: str = "optim_grads_params") -> Any:
    return make_train_step(plan_of(devices, strategy), loss, OPTIMIZER)


def fresh(devices: int, strategy: str = "optim_grads_params") -> TrainState:
    plan = plan_of(devices, strategy)
    return init_state(plan, shard_weights(plan, parameter_leaves(decoder())), OPTIMIZER)


def train(
    state: TrainState, devices: int, strategy: str, first: int, count: int
) -> tuple[TrainState, list[float]]:
    """``count`` steps, each on another batch whose rows, and so every device's, all differ. ``state`` is used up."""
    losses = []
    for index in range(first, first + count):
        state, metrics = step_of(devices, strategy)(state, tokens(ROWS, seed=100 + index))
        losses.append(float(metrics["loss"]))
    return state, losses


def logical(plan: ShardingPlan, state: TrainState) -> dict[str, np.ndarray]:
    """Every tensor of a train state with AdamW, by its name in a checkpoint, in memory of its own."""
    kinds = {"params": state.weights, "opt_state/mu": state.opt_state.mu, "opt_state/nu": state.opt_state.nu}
    arrays = {
        f"{kind}/{path}": np.array(value)
        for kind, buffers in kinds.items()
        for path, value in unshard(plan, buffers).items()
    }
    return {**arrays, "opt_state/count": np.array(state.opt_state.count)}


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in arrays.items():
        *parents, last = name.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def assert_same_bits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        a, b = np.asarray(found[name]), np.asarray(value)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), name


def forward(plan: ShardingPlan, state: TrainState) -> np.ndarray:
    """Logits of the logical model."""
    model = plan.merge(unshard(plan, state.weights))
    graphdef, parameters = nnx.split(model)
    return np.asarray(jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))(parameters, tokens(2, seed=7)))
