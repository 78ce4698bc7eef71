"""Every strategy of ``jax_impl`` against the unsharded model on the whole batch; each rank has different data."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_impl import data_parallel_mesh, fully_shard, init_state, main_weight_adamw, make_train_step, unshard
from tests.support.jax_impl.tiny import decoder, loss, named, tokens

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
LAST_IS_USUAL = [*(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES[:-1]), STRATEGIES[-1]]
ROWS, STEPS = 36, 3
# A large eps keeps Adam from hiding a wrong gradient scale, and from magnifying rounding where gradients are tiny.
ADAMW = {"learning_rate": 1e-2, "b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.1}


def batch(step):
    return tokens(ROWS, seed=step)


@functools.cache
def reference(dtype):
    """Losses of each step, first gradients and last weights of plain JAX and optax, without any sharding."""
    graphdef, weights = nnx.split(decoder(dtype=dtype))
    optimizer = optax.adamw(**ADAMW)
    opt_state = optimizer.init(weights)

    @jax.jit
    def step(weights, opt_state, rows):
        value, gradients = jax.value_and_grad(lambda w: loss(nnx.merge(graphdef, w), rows))(weights)
        updates, opt_state = optimizer.update(gradients, opt_state, weights)
        return value, gradients, optax.apply_updates(weights, updates), opt_state

    losses, first = [], None
    for i in range(STEPS):
        value, gradients, weights, opt_state = step(weights, opt_state, batch(i))
        losses.append(float(value))
        first = gradients if first is None else first
    return losses, named(first), named(weights)


def run(strategy, devices, microbatches, dtype):
    optimizer = main_weight_adamw(**ADAMW)
    plan, weights = fully_shard(decoder(dtype=dtype), data_parallel_mesh(devices), strategy=strategy)
    step = make_train_step(plan, loss, optimizer, microbatches=microbatches)
    _, gradients = step.gradients(weights, batch(0))
    first = unshard(plan, gradients)
    state, losses = init_state(plan, weights, optimizer), []
    for i in range(STEPS):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return losses, first, unshard(plan, state.weights)


def assert_equal_within(actual, expected, tolerance):
    losses, gradients, weights = actual
    np.testing.assert_allclose(losses, expected[0], rtol=tolerance)
    for values, references in ((gradients, expected[1]), (weights, expected[2])):
        assert list(values) == list(references)
        for path, reference_value in references.items():
            scale = float(np.abs(reference_value).max())
            assert scale > 0, f"{path} takes no part in the test"
            np.testing.assert_allclose(
                values[path], reference_value, rtol=0, atol=tolerance * scale, err_msg=path
            )


@pytest.mark.fast_cases("optim_grads_params-4-1", "optim-2-3")
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_gradients_and_weights_equal_those_of_the_unsharded_model(strategy, devices, microbatches):
    report = run(strategy, devices, microbatches, jnp.float32)
    assert_equal_within(report, reference(jnp.float32), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LAST_IS_USUAL)
def test_in_float64_they_are_equal_to_twelve_digits(strategy):
    with jax.enable_x64(True):
        report = run(strategy, 3, 3, jnp.float64)
        assert_equal_within(report, reference(jnp.float64), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LAST_IS_USUAL)
def test_bfloat16_compute_stays_near_the_unsharded_float32_model(strategy):
    optimizer = main_weight_adamw(**ADAMW)
    plan, weights = fully_shard(
        decoder(), data_parallel_mesh(3), strategy=strategy, param_dtype="bfloat16", reduce_dtype="float32"
    )
    step = make_train_step(plan, loss, optimizer, microbatches=3)
    state, losses = init_state(plan, weights, optimizer), []
    for i in range(STEPS):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, reference(jnp.float32)[0], rtol=1e-2)
    assert {buffer.dtype for buffer in state.weights.values()} == {jnp.dtype("float32")}
