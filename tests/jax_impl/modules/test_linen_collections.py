"""Collections that linen modules write, inside of units and of stacks: batch statistics and sown values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from jax_impl import apply_linen, data_parallel_mesh, fully_shard, init_state, make_train_step, unshard
from tests.jax_impl.modules.test_tree_models import DIM, assert_trees_close

pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")
DEVICES, STEPS = 4, 3


class Block(linen.Module):
    """Normalizes twice by one module, so the second call starts from what the first one wrote."""

    axis_name: str | None = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = linen.BatchNorm(use_running_average=False, momentum=0.8, axis_name=self.axis_name)
        x = x + linen.gelu(norm(linen.Dense(DIM)(norm(x))))
        self.sow("intermediates", "features", x)
        return x


class Net(linen.Module):
    axis_name: str | None = None
    with_remat: bool = True

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        again = Block(self.axis_name, name="again")
        x = again(again(x))
        if self.with_remat:
            x = linen.remat(Block)(self.axis_name, name="remat")(x)
        stack = linen.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = stack(Block(self.axis_name, name="layers"), x, None)
        return linen.Dense(3)(x)


UNITS = ["again", "remat", "layers/*"]


def rows(step: int, count: int = 32) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(count, DIM)).astype(np.float32) + 0.2 * step


def loss_of(net: linen.Module, apply: Any) -> Any:
    def loss(params: Any, x: jax.Array, stats: Any) -> Any:
        y, updated = apply(net, {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return jnp.mean((y - 0.3) ** 2), updated["batch_stats"]

    return loss


def alone(net: linen.Module, variables: Any, parts: int) -> tuple[Any, Any, list[float]]:
    """Plain optax, each step's loss and statistics the mean over ``parts`` of its rows."""
    optimizer, loss_of_part = optax.sgd(0.1, momentum=0.9), loss_of(net, linen.Module.apply)
    params, stats = variables["params"], variables["batch_stats"]
    opt_state, losses = optimizer.init(params), []

    @jax.jit
    def step(params: Any, opt_state: Any, stats: Any, x: jax.Array) -> Any:
        def mean(params: Any) -> Any:
            of_parts = [loss_of_part(params, part, stats) for part in jnp.split(x, parts)]
            return jax.tree.map(lambda *each: sum(each) / parts, *of_parts)

        (loss, stats), gradients = jax.value_and_grad(mean, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, stats, loss

    for number in range(STEPS):
        params, opt_state, stats, loss = step(params, opt_state, stats, rows(number))
        losses.append(float(loss))
    return params, stats, losses


def assert_trains_with_statistics(
    engine: str, axis_name: str | None, microbatches: int, with_remat: bool = True
) -> None:
    net = Net(axis_name, with_remat)
    variables = Net(None, with_remat).init(jax.random.key(0), rows(0))
    whole_batch = engine == "pjit" or axis_name is not None
    parts = microbatches * (1 if whole_batch else DEVICES)
    params, stats, losses = alone(Net(None, with_remat), variables, parts)
    units = [unit for unit in UNITS if with_remat or unit != "remat"]
    plan, weights = fully_shard(
        variables["params"], data_parallel_mesh(DEVICES), units=units, stacked=["layers"], engine=engine
    )
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = make_train_step(
        plan, loss_of(net, apply_linen), optimizer, microbatches=microbatches, has_aux=True
    )
    state, statistics = init_state(plan, weights, optimizer), variables["batch_stats"]
    for number in range(STEPS):
        state, metrics = step(state, rows(number), statistics)
        statistics = metrics["aux"]
        np.testing.assert_allclose(metrics["loss"], losses[number], rtol=1e-5)
    assert_trees_close(statistics, stats)
    assert_trees_close(plan.merge(unshard(plan, state.weights)), params)


def test_batch_statistics_of_units_are_those_of_the_unsharded_model():
    assert_trains_with_statistics("shard_map", "dp", 1, with_remat=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "axis_name", "microbatches"),
    [("shard_map", None, 1), ("shard_map", None, 2), ("pjit", None, 1)],
)
def test_batch_statistics_of_remat_microbatches_and_whole_batches(engine, axis_name, microbatches):
    assert_trains_with_statistics(engine, axis_name, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pjit", "shard_map"])
def test_sown_values_leave_their_units(engine):
    net, x = Net(with_remat=False), rows(0, 8)
    variables = net.init(jax.random.key(0), x)
    collections = {name: variables[name] for name in ("params", "batch_stats")}

    def loss(params: Any, x: jax.Array, apply: Any) -> Any:
        bound = {**collections, "params": params}
        y, updated = apply(net, bound, x, mutable=["batch_stats", "intermediates"])
        return jnp.mean(y**2), updated

    plan, weights = fully_shard(
        variables["params"],
        data_parallel_mesh(1),
        units=["again", "layers/*"],
        stacked=["layers"],
        engine=engine,
    )
    step = make_train_step(plan, lambda params, x: loss(params, x, apply_linen), optax.sgd(0.1), has_aux=True)
    (_, collected), _ = step.gradients(weights, x)
    _, expected = loss(variables["params"], x, linen.Module.apply)
    assert len(expected["intermediates"]["again"]["features"]) == 2
    assert_trees_close(collected, expected)
