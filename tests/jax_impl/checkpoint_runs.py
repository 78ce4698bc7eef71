"""Training runs to interrupt: plans and compiled steps are made once for each number of devices and strategy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
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
)
from jax_impl.layout import Layout
from jax_impl.models import Decoder
from jax_impl.module_tree import parameter_leaves
from tests.jax_impl.tiny import CONFIG, decoder, loss, tokens

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# Divisible by one to four devices.
ROWS = 12
# One block: a step is compiled for every number of devices and strategy, and blocks add to that most.
CONFIG_OF_RUNS = dataclasses.replace(CONFIG, n_layers=1)
OPTIMIZER = main_weight_adamw(1e-2, weight_decay=0.1)


def model() -> Decoder:
    return decoder(CONFIG_OF_RUNS)


@functools.cache
def plan_of(devices: int, strategy: str = "optim_grads_params") -> ShardingPlan:
    return plan_sharding(nnx.eval_shape(model), data_parallel_mesh(devices), strategy=strategy)


@functools.cache
def step_of(devices: int, strategy: str = "optim_grads_params") -> Any:
    return make_train_step(plan_of(devices, strategy), loss, OPTIMIZER)


def fresh(devices: int, strategy: str = "optim_grads_params") -> TrainState:
    plan = plan_of(devices, strategy)
    return init_state(plan, shard_weights(plan, parameter_leaves(model())), OPTIMIZER)


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
    """Every tensor of a train state with AdamW, by its name in a checkpoint, cut from the gathered buffers."""
    kinds = {"params": state.weights, "opt_state/mu": state.opt_state.mu, "opt_state/nu": state.opt_state.nu}
    arrays = {}
    for kind, buffers in kinds.items():
        for unit, buffer in buffers.items():
            layout = plan.units[unit].layout
            for slot in layout.slots:
                flat = whole_buffer(layout, np.array(buffer), slot.buffer)
                arrays[f"{kind}/{slot.name}"] = flat[slot.offset : slot.end].reshape(slot.shape)
    return {**arrays, "opt_state/count": np.array(state.opt_state.count)}


def whole_buffer(layout: Layout, flat: np.ndarray, buffer: int) -> np.ndarray:
    """One of a layout's buffers from the unit's array, in which it lies a shard at a time."""
    if not layout.shard_sizes:
        return flat
    size, before = layout.shard_sizes[buffer], sum(layout.shard_sizes[:buffer])
    starts = [rank * sum(layout.shard_sizes) + before for rank in range(layout.num_shards)]
    return np.concatenate([flat[start : start + size] for start in starts])


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
    """Logits of the logical model on one device."""
    arrays = logical(plan, state)
    logical_model = plan.merge({path: jnp.asarray(arrays[f"params/{path}"]) for path in plan.parameters})
    return np.asarray(_logits(*nnx.split(logical_model)))


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef: nnx.GraphDef, parameters: nnx.State) -> jax.Array:
    return nnx.merge(graphdef, parameters)(tokens(2, seed=7))
