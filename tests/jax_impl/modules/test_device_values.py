"""Loops and choices that devices would go through differently, with a collective inside, are refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from jax_impl import data_parallel_mesh, fully_shard, init_state, make_eval_step, make_train_step

WIDTH = 4
WAYS_OUT = r"wait for each other forever.*jax.lax.psum\(jnp.sum\(~done\), .*engine='pjit'"


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.rngs = rngs.fork()

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def sharded(engine: str = "shard_map", mesh: Any = None, **options: Any) -> tuple[Any, Any, nnx.Module]:
    model = Layers(nnx.Rngs(0))
    plan, weights = fully_shard(model, mesh or data_parallel_mesh(4), engine=engine, **options)
    return plan, init_state(plan, weights, optax.sgd(0.1)), model


def rows() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((8, WIDTH)).astype(np.float32)
    return {"x": x, "stop": np.array([0.2] * 4 + [0.02] * 4, np.float32)}


def until(all_done: Any) -> Any:
    """Passes of the model until ``all_done`` of each row's state."""

    def run(model: Any, rows: Any) -> jax.Array:
        def goes_on(carry: Any) -> Any:
            return (carry[0] < 9) & ~all_done(carry[2])

        def body(carry: Any) -> Any:
            number, x, done = carry
            new = jnp.where(done[:, None], x, 0.5 * model(x))
            return number + 1, new, done | (jnp.abs(new).max(-1) < rows["stop"])

        return lax.while_loop(goes_on, body, (0, rows["x"], jnp.zeros(len(rows["x"]), bool)))[1]

    return run


def of_own_rows(done: jax.Array) -> jax.Array:
    return jnp.all(done)


def of_all_rows(done: jax.Array) -> jax.Array:
    return lax.psum(jnp.sum(~done), "dp") == 0


def of_inner_axis(done: jax.Array) -> jax.Array:
    return lax.psum(jnp.sum(~done), "dp") == 0


def of_no_rows(done: jax.Array) -> Any:
    return jnp.zeros((), bool)


def some_layers(model: Any, rows: Any) -> jax.Array:
    """Stochastic depth: each device draws for itself."""
    x = rows["x"]
    for layer in model.layers:
        x = lax.cond(jax.random.bernoulli(model.rngs(), 0.5), layer, lambda x: x, x)
    return x


def halting(model: Any, rows: Any) -> jax.Array:
    """A choice by rows inside of a scan."""

    def step(x: jax.Array, _: Any) -> Any:
        return lax.cond(jnp.mean(x) > 0, model, lambda x: -x, x), None

    return lax.scan(step, rows["x"], None, length=2)[0]


def switched(model: Any, rows: Any) -> jax.Array:
    index = jnp.argmax(jnp.abs(rows["x"]).sum(0))
    return lax.switch(index % 2, [model.layers[0], model.layers[1]], rows["x"])


REFUSED = {
    "while": (
        until(of_own_rows),
        r"lax.while_loop at .*test_device_values.py:\d+.*unit 'layers/0', whose weights",
    ),
    "cond": (some_layers, r"lax.cond at .*test_device_values.py:\d+.*unit 'layers/0'"),
    "scan": (halting, "lax.cond at .*unit 'layers/0'"),
    "switch": (switched, "lax.cond at .*unit 'layers/[01]'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_evaluation_is_refused_with_loop_and_unit(name: str) -> None:
    run, message = REFUSED[name]
    plan, state, _ = sharded()
    with pytest.raises(ValueError, match=message) as error:
        make_eval_step(plan, run)(state, rows())
    assert error.match(WAYS_OUT)


@pytest.mark.parametrize("name", ["cond", "scan", "switch"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_training_is_refused_too(name: str, microbatches: int) -> None:
    run, message = REFUSED[name]
    plan, state, _ = sharded()
    step = make_train_step(
        plan, lambda *arguments: jnp.mean(run(*arguments) ** 2), optax.sgd(0.1), microbatches=microbatches
    )
    with pytest.raises(ValueError, match=message):
        step(state, rows())


def test_a_sum_over_one_of_two_axes_does_not_make_devices_agree() -> None:
    plan, state, _ = sharded(mesh=data_parallel_mesh({"outer": 2, "dp": 2}), strategy="optim_grads_params")
    # Each unit's weights are gathered over the inner axis alone, along which the condition is the same.
    make_eval_step(plan, until(of_inner_axis)).lower(state, rows())
    plan, state, _ = sharded(mesh=data_parallel_mesh({"dp": 2, "inner": 2}))
    with pytest.raises(ValueError, match=r"lax.while_loop.*\('dp', 'inner'\)|lax.while_loop.*'inner'"):
        make_eval_step(plan, until(of_inner_axis)).lower(state, rows())


@pytest.mark.parametrize("all_done", [of_all_rows, of_no_rows])
def test_conditions_of_all_devices_run(all_done: Any) -> None:
    plan, state, model = sharded()
    outputs = make_eval_step(plan, until(all_done))(state, rows())
    expected = until(of_no_rows if all_done is of_no_rows else of_own_rows)(model, rows())
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_the_pjit_engine_decides_by_all_rows() -> None:
    plan, state, model = sharded("pjit")
    outputs = make_eval_step(plan, until(of_own_rows))(state, rows())
    np.testing.assert_allclose(outputs, until(of_own_rows)(model, rows()), rtol=1e-5, atol=1e-6)


def test_weights_that_are_whole_may_be_used_in_any_loop() -> None:
    plan, state, model = sharded(strategy="no_shard")
    outputs = make_eval_step(plan, until(of_own_rows))(state, rows())
    np.testing.assert_allclose(outputs, until(of_own_rows)(model, rows()), rtol=1e-5, atol=1e-6)


def test_inputs_after_the_batch_decide_for_all() -> None:
    plan, state, model = sharded()

    def run(model: Any, rows: Any, on: jax.Array) -> jax.Array:
        return lax.cond(on, model, lambda x: x, rows["x"])

    outputs = make_eval_step(plan, run)(state, rows(), np.array(True))
    np.testing.assert_allclose(outputs, model(rows()["x"]), rtol=1e-5, atol=1e-6)
