"""Unsharded training programs in plain nnx and optax, and the trees that they save with stock Orbax."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.train_state import TrainState as FlaxTrainState

from jax_impl import (
    LoadedCheckpoint,
    ShardingPlan,
    data_parallel_mesh,
    make_train_step,
    plan_sharding,
    unshard,
)

ENGINES = ["shard_map", "pjit"]
ROWS, WIDTH, STEPS = 8, 12, 3
# A large eps keeps Adam from magnifying the rounding of sums where gradients are tiny.
ADAMW = {"learning_rate": 1e-2, "b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.1}


@functools.cache
def adamw() -> optax.GradientTransformation:
    return optax.adamw(**ADAMW)


@functools.cache
def clipped() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.2), optax.adamw(**ADAMW))


class Net(nnx.Module):
    """Two blocks, and variables that are not parameters."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(3)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 5, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.head(self.dropout(x))


def rows(seed: int) -> jax.Array:
    """``[ROWS, WIDTH]``, every row, and so every device's, another."""
    return jax.random.normal(jax.random.key(seed), (ROWS, WIDTH))


def loss(model: Net, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 0.5) ** 2)


class Program:
    """An unsharded training loop in plain nnx and optax."""

    def __init__(self, optimizer: optax.GradientTransformation) -> None:
        self.model = Net()
        self.optimizer = nnx.Optimizer(self.model, optimizer, wrt=nnx.Param)

    def train(self, first: int, count: int) -> list[float]:
        losses = []
        for seed in range(first, first + count):
            value, gradients = nnx.value_and_grad(loss)(self.model, rows(seed))
            self.optimizer.update(self.model, gradients)
            losses.append(float(value))
        return losses

    @property
    def parameters(self) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(self.model, nnx.Param))

    def forget(self) -> None:
        """Reset the optimizer and keep the weights."""
        self.optimizer = nnx.Optimizer(self.model, self.optimizer.tx, wrt=nnx.Param)


def trained(optimizer: optax.GradientTransformation) -> Program:
    program = Program(optimizer)
    program.train(0, 2)
    return program


def tuples(program: Program) -> Any:
    """The optax state with arrays only, as a loop without nnx has it."""
    return nnx.as_pure(program.optimizer.opt_state)


def flax_train_state(program: Program) -> FlaxTrainState:
    return FlaxTrainState(
        step=2,
        apply_fn=None,
        params=program.parameters,
        tx=program.optimizer.tx,
        opt_state=tuples(program),
    )


FORMS: dict[str, Any] = {
    "params": lambda p: {"params": p.parameters},
    "bare": lambda p: p.parameters,
    "nnx parameters": lambda p: nnx.state(p.model, nnx.Param),
    "nnx state": lambda p: nnx.state(p.model),
    "linen variables": lambda p: {"params": {"params": p.parameters}},
    "train state": flax_train_state,
    "inside": lambda p: {"model": flax_train_state(p)},
    "nnx model and optimizer": lambda p: {"model": nnx.state(p.model), "optimizer": nnx.state(p.optimizer)},
    "nnx params and opt_state": lambda p: {
        "params": nnx.state(p.model, nnx.Param),
        "opt_state": nnx.state(p.optimizer),
    },
}
WEIGHTS_ONLY = ["params", "bare", "nnx parameters", "nnx state", "linen variables"]
WITH_OPTIMIZER = [form for form in FORMS if form not in WEIGHTS_ONLY]


def save(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


@functools.cache
def plan_of(engine: str) -> ShardingPlan:
    return plan_sharding(nnx.eval_shape(Net), data_parallel_mesh(4), units=["blocks/*"], engine=engine)


@functools.cache
def step_of(engine: str, optimizer: optax.GradientTransformation) -> Any:
    return make_train_step(plan_of(engine), loss, optimizer)


def assert_goes_on_as(
    program: Program, loaded: LoadedCheckpoint, engine: str, optimizer: optax.GradientTransformation
) -> None:
    """The weights' bits, a forward, and steps."""
    plan, state = plan_of(engine), loaded.state
    values = unshard(plan, state.weights)
    expected = nnx.to_flat_state(nnx.state(program.model, nnx.Param))
    for key, variable in expected:
        np.testing.assert_array_equal(values["/".join(map(str, key))], variable.get_raw_value())
    local = {path: value.addressable_shards[0].data for path, value in state.variables.items()}
    model = plan.merge(values, local)
    np.testing.assert_allclose(model(rows(9)), program.model(rows(9)), rtol=1e-6, atol=1e-7)
    losses = []
    for seed in range(2, 2 + STEPS):
        state, metrics = step_of(engine, optimizer)(state, rows(seed))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, program.train(2, STEPS), rtol=1e-6)


def without(tree: Mapping[Any, Any], *path: Any) -> dict[Any, Any]:
    first, *rest = path
    if not rest:
        return {key: value for key, value in tree.items() if key != first}
    return {key: without(value, *rest) if key == first else value for key, value in tree.items()}
