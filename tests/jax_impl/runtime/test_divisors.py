"""What a step divides its sums by, and what it tells beside the loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl import data_parallel_mesh, fully_shard, init_state, main_weight_adamw, make_train_step, unshard
from tests.jax_impl.test_losses import (
    assert_close,
    batch,
    by_path,
    pair,
    parameters,
    quotient,
    sharded,
    token_losses,
)

ENGINES = pytest.mark.parametrize("engine", ["shard_map", "pjit"])


def total(tree: Any, rows: Any) -> jax.Array:
    return jnp.sum(token_losses(tree, rows))


def mean(tree: Any, rows: Any) -> jax.Array:
    return jnp.mean(token_losses(tree, rows))


@pytest.mark.each_value
@ENGINES
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("divisor", [1, 80.0])
def test_sums_divided_by_a_number_are_the_same_in_both_engines(
    engine: str, microbatches: int, divisor: float
) -> None:
    plan, weights = sharded(engine, 4)
    step = make_train_step(plan, total, optax.sgd(0.1), microbatches=microbatches, grad_divisor=divisor)
    loss, gradients = step.gradients(weights, batch())
    expected_loss, expected = jax.value_and_grad(total)(parameters(), batch())
    np.testing.assert_allclose(loss, expected_loss / divisor, rtol=2e-6)
    assert_close(unshard(plan, gradients), jax.tree.map(lambda x: x / divisor, expected))


@pytest.mark.fast_cases("shard_map")
@ENGINES
def test_units_may_have_divisors_of_their_own(engine: str) -> None:
    plan, weights = sharded(engine, 4)
    step = make_train_step(plan, mean, optax.sgd(0.1), microbatches=2, grad_divisor={"layers/*": 2.0})
    loss, gradients = step.gradients(weights, batch())
    expected_loss, expected = jax.value_and_grad(mean)(parameters(), batch())
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    parts = 8 if engine == "shard_map" else 2
    expected["layers"] = jax.tree.map(lambda x: x * parts / 2, expected["layers"])
    assert_close(unshard(plan, gradients), expected)


@pytest.mark.fast_cases("optim_grads", "hfsdp")
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params", "hfsdp"])
def test_float16_sums_of_large_gradients_do_not_overflow(strategy: str) -> None:
    # Of each device about 20,000: a sum over four is more than float16's 65,504.
    scale = 20_000 / max(np.max(np.abs(x)) for x in by_path(jax.grad(mean)(parameters(), batch())).values())

    def loss(tree: Any, rows: Any) -> jax.Array:
        return scale * mean(tree, rows)

    mesh = data_parallel_mesh({"dp_outer": 2, "dp": 2} if strategy == "hfsdp" else 4)
    plan, weights = fully_shard(
        parameters(), mesh, units=["layers/*"], strategy=strategy, reduce_dtype="float16"
    )
    # Of four devices and two microbatches; by 4 the gradients are twice as large.
    for divisor, by in ((None, 1), ({"layers/*": 4.0, "": 4.0}, 2)):
        step = make_train_step(plan, loss, optax.sgd(0.1), microbatches=2, grad_divisor=divisor)
        _, gradients = step.gradients(weights, batch())
        expected = jax.tree.map(lambda x, by=by: x * by, jax.grad(loss)(parameters(), batch()))
        for path, value in by_path(expected).items():
            np.testing.assert_allclose(
                unshard(plan, gradients)[path],
                value,
                rtol=5e-3,
                atol=5e-3 * np.max(np.abs(value)),
                err_msg=path,
            )


# Where gradients stay whole, each device's own are kept in the grad dtype, and so rounded, before they are summed.
@pytest.mark.fast_cases("optim_grads-shard_map", "optim_grads_params-pjit")
@ENGINES
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_narrow_gradients_are_means_rounded_once(engine: str, strategy: str) -> None:
    # Three devices: the sum of three, rounded to bfloat16, and a third of that, rounded again, would differ.
    rows = jax.tree.map(lambda x: x[:9], batch())
    by_dtype = {}
    for dtype in ("float32", "bfloat16"):
        plan, weights = fully_shard(
            parameters(),
            data_parallel_mesh(3),
            units=["layers/*"],
            strategy=strategy,
            engine=engine,
            grad_dtype=dtype,
        )
        step = make_train_step(plan, mean, optax.sgd(0.1))
        by_dtype[dtype] = unshard(plan, step.gradients(weights, rows)[1])
    for path, wide in by_dtype["float32"].items():
        narrow = np.asarray(by_dtype["bfloat16"][path].astype(jnp.float32))
        np.testing.assert_array_equal(narrow, np.asarray(wide.astype(jnp.bfloat16).astype(jnp.float32)), path)


@pytest.mark.parametrize(
    ("divisor", "loss", "message"),
    [
        (0, mean, "grad_divisor: expected a positive number, got 0"),
        (True, mean, "got True"),
        (
            {"layers/*": float("inf")},
            mean,
            r"grad_divisor\['layers/\*'\]: expected a positive number, got inf",
        ),
        ({"blocks/*": 2.0}, mean, r"'blocks/\*' matches none of \['layers/0', ''\]"),
        (2.0, pair, "since grad_divisor is given, got .sum, weight."),
        ({"layers/*": 2.0}, pair, "since grad_divisor is given"),
    ],
)
def test_what_cannot_divide_is_refused(divisor: Any, loss: Any, message: str) -> None:
    plan, weights = sharded("shard_map", 2)
    with pytest.raises(ValueError, match=message):
        make_train_step(plan, loss, optax.sgd(0.1), grad_divisor=divisor).gradients(weights, batch())


def warm_up(count: Any) -> Any:
    return 0.1 / (1.0 + count)


@pytest.mark.fast_cases("chain-pjit", "inject_hyperparams-shard_map")
@ENGINES
@pytest.mark.parametrize(
    "optimizer",
    [
        main_weight_adamw(warm_up),
        optax.inject_hyperparams(optax.sgd)(learning_rate=warm_up),
        optax.chain(optax.clip_by_global_norm(0.1), optax.inject_hyperparams(optax.adam)(warm_up)),
    ],
    ids=["main_weight_adamw", "inject_hyperparams", "chain"],
)
def test_a_step_tells_norm_and_learning_rate(engine: str, optimizer: Any) -> None:
    plan, weights = sharded(engine, 4)
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, pair, optimizer, metrics=["grad_norm", "learning_rate"])
    jitted = jax.jit(step)
    for number in range(2):
        gradients = jax.grad(quotient)(by_tree(unshard(plan, state.weights)), batch(number))
        expected = np.sqrt(sum(np.sum(x**2) for x in by_path(gradients).values()))
        _, traced = jitted(state, batch(number))
        state, metrics = step(state, batch(number))
        for step_metrics in (metrics, traced):
            np.testing.assert_allclose(step_metrics["grad_norm"], expected, rtol=1e-5)
            np.testing.assert_allclose(step_metrics["learning_rate"], 0.1 / (1 + number), rtol=1e-6)


def by_tree(arrays: Any) -> Any:
    return {"layers": [{"w": arrays["layers/0/w"], "b": arrays["layers/0/b"]}], "head": arrays["head"]}


def test_metrics_that_nobody_knows_are_refused() -> None:
    plan, weights = sharded("shard_map", 2)
    with pytest.raises(ValueError, match=r"metrics: expected a list of names among .* got 'grad_norm'"):
        make_train_step(plan, pair, optax.sgd(0.1), metrics="grad_norm")
    step = make_train_step(plan, pair, optax.sgd(0.1), metrics=["learning_rate"])
    with pytest.raises(ValueError, match="inject_hyperparams"):
        step(init_state(plan, weights, optax.sgd(0.1)), batch())
