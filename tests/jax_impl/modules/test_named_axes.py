"""Units that use the name of an axis that ``jax.vmap`` around them maps, against plain JAX; every row is different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jax_impl import (
    apply_linen,
    call_unit,
    count_collectives,
    data_parallel_mesh,
    fully_shard,
    make_gradients,
    shard_batch,
    unshard,
)

DIM, DEVICES = 4, 4
pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")


def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(16, DIM))


def parameters() -> dict[str, Any]:
    values = np.random.default_rng(1).normal(size=(2, DIM, DIM))
    return {"blocks": [{"w": jnp.asarray(value)} for value in values]}


def centered(block: Any, x: jax.Array) -> jax.Array:
    y = jnp.tanh(x @ block["w"])
    return y - jax.lax.pmean(y, "batch") + jax.lax.pmean(y @ y, "batch")


def one_axis(params: Any, x: jax.Array) -> jax.Array:
    def model(row: jax.Array) -> jax.Array:
        for block in params["blocks"]:
            row = call_unit(centered, block, row)
        return row

    return jnp.mean((jax.vmap(model, axis_name="batch")(x) - 0.3) ** 2)


def two_axes(params: Any, x: jax.Array) -> jax.Array:
    """The second block's rows are the same along the outer axis, whose name the block uses."""

    def block(block: Any, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ block["w"])
        y = y - jax.lax.pmean(y, ("scales", "batch")) * jax.lax.psum(y * y, "scales")
        return y * (1 + jax.lax.axis_index("batch"))

    def model(row: jax.Array, scale: jax.Array) -> jax.Array:
        return call_unit(block, params["blocks"][0], row * scale) + call_unit(block, params["blocks"][1], row)

    def scaled(scale: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: model(row, scale), axis_name="batch")(x)

    return jnp.mean((jax.vmap(scaled, axis_name="scales")(jnp.array([1.0, 2.0, 4.0])) - 0.3) ** 2)


def shared_result(params: Any, x: jax.Array) -> jax.Array:
    def block(block: Any, x: jax.Array) -> Any:
        y = jnp.tanh(x @ block["w"])
        return y, jax.lax.pmean(y, "batch")

    def model(row: jax.Array) -> Any:
        return call_unit(block, params["blocks"][0], row)

    y, mean = jax.vmap(model, axis_name="batch", out_axes=(0, None))(x)
    return jnp.mean((y - 0.3) ** 2) + (mean**3).sum()


def in_a_loop(params: Any, x: jax.Array) -> jax.Array:
    def model(row: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 2, lambda _, y: call_unit(centered, params["blocks"][0], y), row)

    return jnp.mean((jax.vmap(model, axis_name="batch")(x) - 0.3) ** 2)


def assert_gradients_as_alone(
    params: Any, loss: Callable[..., Any], engine: str, reference: Any = None, **options: Any
) -> Any:
    """The axis of a vmap has the rows of one device in the shard_map engine, and all rows in the pjit engine."""
    parts = jnp.split(rows(), DEVICES if engine == "shard_map" else 1)

    def mean(params: Any) -> Any:
        return sum((reference or loss)(params, part) for part in parts) / len(parts)

    expected, gradients = jax.jit(jax.value_and_grad(mean))(params)
    plan, weights = fully_shard(params, data_parallel_mesh(DEVICES), engine=engine, **options)
    value, reduced, _ = jax.jit(make_gradients(plan, loss))(weights, shard_batch(plan, rows()))
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for mine, other in zip(
        jax.tree.leaves(plan.merge(unshard(plan, reduced))), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(mine, other, atol=1e-12)
    return plan


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize("loss", [one_axis, two_axes, shared_result])
def test_units_know_the_names_of_the_axes_around_them(loss, engine, recompute):
    with jax.enable_x64(True):
        assert_gradients_as_alone(parameters(), loss, engine, recompute=recompute)


def test_names_of_the_mesh_may_be_among_them():
    """Means over all rows of all devices are those of the whole batch."""

    def loss_over(names: Any) -> Any:
        def block(block: Any, x: jax.Array) -> jax.Array:
            y = jnp.tanh(x @ block["w"])
            return y - jax.lax.pmean(y, names) + jax.lax.pmean(y @ y, names)

        def loss(params: Any, x: jax.Array) -> jax.Array:
            def model(row: jax.Array) -> jax.Array:
                return call_unit(block, params["blocks"][1], call_unit(block, params["blocks"][0], row))

            return jnp.mean((jax.vmap(model, axis_name="batch")(x) - 0.3) ** 2)

        return loss

    with jax.enable_x64(True):
        expected, gradients = jax.jit(jax.value_and_grad(loss_over("batch")))(parameters(), rows())
        plan, weights = fully_shard(parameters(), data_parallel_mesh(DEVICES))
        batch = shard_batch(plan, rows())
        value, reduced, _ = jax.jit(make_gradients(plan, loss_over(("dp", "batch"))))(weights, batch)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        for path, gradient in unshard(plan, reduced).items():
            block = int(path.split("/")[1])
            np.testing.assert_allclose(gradient, gradients["blocks"][block]["w"], atol=1e-12)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_units_in_a_loop_know_the_names_too(engine):
    with jax.enable_x64(True):
        assert_gradients_as_alone(parameters(), in_a_loop, engine)


def test_recomputed_units_in_a_loop_do_not_and_are_refused():
    plan, weights = fully_shard(parameters(), data_parallel_mesh(2), recompute=True)
    with pytest.raises(ValueError, match=r"unit 'blocks/0': expected no loop .* recompute=False \(.*batch"):
        make_gradients(plan, in_a_loop)(weights, shard_batch(plan, rows()))


def test_a_unit_is_gathered_and_reduced_once_for_all_of_a_named_axis():
    plan, weights = fully_shard(parameters(), data_parallel_mesh(DEVICES))
    counted = count_collectives(make_gradients(plan, one_axis), weights, shard_batch(plan, rows()))
    counts = {
        (collective.kind, collective.size): n
        for collective, n in counted.items()
        if collective.kind == "reduce_scatter"
    }
    assert counts == {("reduce_scatter", plan.arrays["blocks/0"].shape[0]): 2}


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Dense(DIM, param_dtype=jnp.float64)(x)
        norm = linen.BatchNorm(use_running_average=False, axis_name="batch", param_dtype=jnp.float64)
        return x + jnp.tanh(norm(x))


class Rows(linen.Module):
    """Blocks for one row, statistics shared by all rows."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mapped = linen.vmap(
            lambda block, x: block(x),
            variable_axes={"params": None, "batch_stats": None},
            split_rngs={"params": False},
            axis_name="batch",
        )
        return mapped(Block(name="Block_1"), mapped(Block(name="Block_0"), x))


@pytest.mark.fast_cases("shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_batch_norm_under_linens_vmap_is_one_over_the_axis(engine):
    def loss_of(apply: Any) -> Any:
        def loss(params: Any, x: jax.Array) -> Any:
            variables = {"params": params, "batch_stats": statistics}
            y, updated = apply(Rows(), variables, x, mutable=["batch_stats"])
            # Also what the modules wrote.
            return jnp.mean((y - 0.3) ** 2) + sum(map(jnp.sum, jax.tree.leaves(updated)))

        return loss

    with jax.enable_x64(True):
        variables = Rows().init(jax.random.key(0), rows())
        statistics = variables["batch_stats"]
        plan = assert_gradients_as_alone(
            variables["params"],
            loss_of(apply_linen),
            engine,
            loss_of(linen.Module.apply),
            units=["Block_*", "Block_0/BatchNorm_0"],
        )
    assert list(plan.units) == ["Block_0", "Block_0/BatchNorm_0", "Block_1", ""]


class Normalizing(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(DIM, DIM, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        return y / jnp.sqrt(jax.lax.pmean(y * y, "batch") + 1e-3)


@pytest.mark.fast_cases("shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_nnx_modules_know_the_names_too(engine):
    with jax.enable_x64(True):
        model = nnx.List([Normalizing(nnx.Rngs(seed)) for seed in range(2)])
        graphdef, state = nnx.split(model)

        def loss(model: Any, x: jax.Array) -> jax.Array:
            y = jax.vmap(lambda row: model[1](model[0](row)), axis_name="batch")(x)
            return jnp.mean((y - 0.3) ** 2)

        def alone(state: Any, x: jax.Array) -> jax.Array:
            return loss(nnx.merge(graphdef, state), x)

        parts = jnp.split(rows(), DEVICES if engine == "shard_map" else 1)
        expected = jax.grad(lambda state: sum(alone(state, part) for part in parts) / len(parts))(state)
        plan, weights = fully_shard(model, data_parallel_mesh(DEVICES), units=["*"], engine=engine)
        _, reduced, _ = jax.jit(make_gradients(plan, loss))(weights, shard_batch(plan, rows()))
        gradients = unshard(plan, reduced)
        for path, value in nnx.to_flat_state(expected):
            np.testing.assert_allclose(gradients["/".join(map(str, path))], value[...], atol=1e-12)
