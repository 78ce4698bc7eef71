"""Every public transformation of optax trains as on the unsharded model, in both engines, on 1, 2, 4 and 8 devices.

In float64, and to 1e-9 of a parameter's largest weight. In float32 some miss 1e-6 without being wrong: sums over
devices are taken in another order, and an update that divides by the root of a tiny moment makes 4e-6 of that rounding.
In float64 it makes 1e-13 of it, so what is more would be a fault. ``test_chosen_form.py`` and ``test_logical.py`` have
float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl import data_parallel_mesh, fully_shard, init_state, make_train_step, unshard
from jax_impl.runtime.step.gradients import unchecked_gradients
from tests.support.jax_impl.optimizers import PLAIN, transformations
from tests.support.jax_impl.zoo import Everything, by_path, dense_tree, loss_of_layers, pairs

ENGINES = ("shard_map", "pjit")
DEVICES = (1, 2, 4, 8)
TOLERANCE = 1e-9
STEPS = 3


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


loss = loss_of_layers()


def parameters() -> dict[str, Any]:
    """The pjit engine cuts some over 8 devices, and some over none."""
    return dense_tree((3, 8), head=(8, 5), bias=True, dtype="float64")


@functools.cache
def batches() -> list[Any]:
    return pairs(STEPS, 8, 3, 5, growing=True)


@functools.cache
def plan_of(engine: str, devices: int) -> tuple[Any, Any, Any]:
    """Plan, weights, and the program of the gradients, which all optimizers share."""
    plan, weights = fully_shard(parameters(), data_parallel_mesh(devices), units=["layers/*"], engine=engine)
    return plan, weights, jax.jit(unchecked_gradients(plan, loss, 1), static_argnames="to_host")


@functools.cache
def plain_gradients() -> Any:
    return jax.jit(jax.value_and_grad(loss))


def trained(engine: str, devices: int, optimizer: optax.GradientTransformation) -> dict[str, jax.Array]:
    plan, weights, gradients = plan_of(engine, devices)
    step = make_train_step(plan, loss, optimizer)
    step._gradients, step._checked = gradients, Everything()
    # Steps donate their state.
    state = init_state(plan, jax.tree.map(jnp.copy, weights), optimizer)
    for batch in batches():
        state, _ = step(state, batch)
    return unshard(plan, state.weights)


def plainly_trained(optimizer: optax.GradientTransformation) -> dict[str, jax.Array]:
    weights = parameters()
    able = optax.with_extra_args_support(optimizer)
    state = able.init(weights)
    # optax means this one to take no arguments that it does not know, and yet calls it one that does.
    names_loss = optimizer.update.__qualname__ != "sam.<locals>.transparent_update_fn"

    @jax.jit
    def update(gradients: Any, state: Any, weights: Any, value: jax.Array) -> Any:
        updates, state = able.update(gradients, state, weights, **({"value": value} if names_loss else {}))
        return optax.apply_updates(weights, updates), state

    for batch in batches():
        value, gradients = plain_gradients()(weights, batch)
        weights, state = update(gradients, state, weights, value)
    return by_path(weights)


def assert_trains_as_unsharded(name: str, engines: Any = ENGINES, devices: Any = DEVICES) -> float:
    """The largest difference, relative to a parameter's largest weight."""
    by_unit = transformations()[name]
    by_name = PLAIN.get(name, by_unit)
    try:
        expected = plainly_trained(by_name())
    except Exception:
        # It needs more (a function of the loss, gradients of single rows), also on the unsharded model.
        for engine in engines:
            with pytest.raises(ValueError, match="from only gradients, state, weights and the loss"):
                trained(engine, devices[-1], by_name())
        return 0.0
    worst = 0.0
    for engine in engines:
        # One object, whose programs are read once for all devices.
        optimizer = (by_unit if engine == "shard_map" else by_name)()
        for count in devices:
            weights = trained(engine, count, optimizer)
            assert weights.keys() == expected.keys()
            for path, value in expected.items():
                scale = TOLERANCE * np.max(np.abs(value))
                np.testing.assert_allclose(
                    weights[path],
                    value,
                    rtol=0,
                    atol=scale,
                    err_msg=f"{name}, {engine}, {count} devices, {path}",
                )
                worst = max(worst, float(np.max(np.abs(weights[path] - value)) * TOLERANCE / scale))
    return worst


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(transformations()))
def test_every_public_transformation_trains_as_on_the_unsharded_model(name: str) -> None:
    assert_trains_as_unsharded(name)


@pytest.mark.filterwarnings("ignore:shard_map engine")
def test_lamb_trains_as_on_the_unsharded_model() -> None:
    assert_trains_as_unsharded("lamb", ("shard_map",), (4,))


@pytest.mark.slow
def test_the_walk_would_see_a_slightly_different_optimizer() -> None:
    expected = plainly_trained(optax.adamw(0.01))
    weights = trained("shard_map", 4, optax.adamw(0.01, weight_decay=1.01e-4))
    for path, value in expected.items():
        assert np.max(np.abs(weights[path] - value)) > TOLERANCE * np.max(np.abs(value))
