"""Equinox models as users write them, and units under ``jax.vmap``, against plain JAX on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl import (
    call_unit,
    count_collectives,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    make_gradients,
    make_train_step,
    plan_sharding,
    save_checkpoint,
    shard_batch,
    unshard,
)

DIM = 8
OPTIMIZER = optax.adam(1e-2)
pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    activation: Callable[[jax.Array], jax.Array]
    scale: float
    unused: None = None

    def __init__(self, key: jax.Array) -> None:
        self.norm = eqx.nn.LayerNorm(DIM)
        self.mlp = eqx.nn.MLP(DIM, DIM, 12, 1, key=key, activation=jax.nn.gelu)
        self.dropout = eqx.nn.Dropout(0.5, inference=True)
        self.activation = jax.nn.silu
        self.scale = 0.5

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        return x + self.scale * self.dropout(self.activation(self.mlp(self.norm(x))), key=key)

    def backwards(self, x: jax.Array) -> jax.Array:
        return self.norm(self.mlp(x))


class Model(eqx.Module):
    first: eqx.nn.Linear
    blocks: list[Block]
    last: eqx.nn.Linear
    name: str

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.first = eqx.nn.Linear(4, DIM, key=keys[0])
        self.blocks = [Block(keys[1]), Block(keys[2])]
        self.last = eqx.nn.Linear(DIM, 2, key=keys[3])
        self.name = "model of one row"

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.blocks[0].backwards(x))


def rows(count: int = 16) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - 0.3) ** 2)


def trained_alone(model: Any, loss_fn: Any, x: Any, steps: int = 3) -> tuple[list[float], Any]:
    params, static = eqx.partition(model, eqx.is_inexact_array)
    moments, losses = OPTIMIZER.init(params), []
    gradient = jax.jit(jax.value_and_grad(lambda params: loss_fn(eqx.combine(params, static), x)))
    for _ in range(steps):
        value, gradients = gradient(params)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, eqx.combine(params, static)


def trained(plan: Any, weights: Any, loss_fn: Any, x: Any, microbatches: int = 1) -> tuple[list[float], Any]:
    step = make_train_step(plan, loss_fn, OPTIMIZER, microbatches=microbatches)
    state, losses = init_state(plan, weights, OPTIMIZER), []
    for _ in range(3):
        state, metrics = step(state, x)
        losses.append(float(metrics["loss"]))
    return losses, state


def assert_equal_models(model: Any, expected: Any) -> None:
    assert jax.tree.structure(model) == jax.tree.structure(expected)
    for mine, other in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(other):
            np.testing.assert_allclose(mine, other, atol=1e-6)
        else:
            assert mine is other or mine == other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("shard_map", {}),
        pytest.param("pjit", {}, marks=pytest.mark.slow),
        pytest.param("shard_map", {"strategy": "optim", "recompute": True}, marks=pytest.mark.slow),
        pytest.param("shard_map", {"units": ["blocks/*", "blocks/*/mlp", "first"]}, marks=pytest.mark.slow),
        pytest.param("pjit", {"units": ["blocks/*/mlp/layers/*"]}, marks=pytest.mark.slow),
        pytest.param("pjit", {"strategy": "optim_grads", "units": []}, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_a_pytree_trains_by_its_own_call(engine: str, options: dict[str, Any]) -> None:
    model, x = Model(jax.random.key(0)), rows()
    expected, alone = trained_alone(model, loss, x)
    plan, weights = fully_shard(model, data_parallel_mesh(4), engine=engine, **options)
    assert "blocks/1/mlp/layers/0/weight" in plan.parameters
    if not options:
        assert list(plan.units) == ["blocks/0", "blocks/1", ""]
    losses, state = trained(plan, weights, loss, x, microbatches=2)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert_equal_models(plan.merge(unshard(plan, state)), alone)


@pytest.mark.parametrize("vectorize", [jax.vmap, eqx.filter_vmap])
def test_a_unit_under_vmap_is_gathered_and_reduced_once_for_all_rows(vectorize: Any) -> None:
    plan, weights = fully_shard(Model(jax.random.key(0)), data_parallel_mesh(4))

    def vectorized(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(vectorize(lambda row: model(row))(x))

    counts = count_collectives(make_gradients(plan, vectorized), weights, shard_batch(plan, rows()))
    unit, root = plan.arrays["blocks/0"].shape[0], plan.arrays[""].shape[0]
    calls = {
        (collective.kind, collective.size): n
        for collective, n in counts.items()
        if collective.kind == "reduce_scatter"
    }
    # Two calls of the first block, one of the second.
    assert calls == {("reduce_scatter", unit): 3, ("reduce_scatter", root): 1}


def tower(block: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ block["w"])


def in_a_loop(params: Any, x: jax.Array) -> jax.Array:
    def passes(row: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 2, lambda _, y: call_unit(tower, params["blocks"][0], y), row)

    return jnp.mean((jax.vmap(passes)(x) - 0.3) ** 2)


def nested(params: Any, x: jax.Array) -> jax.Array:
    def pair(row: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * call_unit(tower, params["blocks"][0], row)

    scales = jnp.float32([1, 2, 4])
    return jnp.mean((jax.vmap(lambda row: jax.vmap(lambda s: pair(row * s, s))(scales))(x) - 0.3) ** 2)


@pytest.mark.parametrize(
    ("engine", "loss_fn"),
    [
        ("shard_map", nested),
        pytest.param("pjit", nested, marks=pytest.mark.slow),
        pytest.param("shard_map", in_a_loop, marks=pytest.mark.slow),
        pytest.param("pjit", in_a_loop, marks=pytest.mark.slow),
    ],
)
def test_units_under_vmap_have_the_gradient_of_the_sum(engine: str, loss_fn: Any) -> None:
    params = {"blocks": [{"w": jax.random.normal(jax.random.key(1), (4, 4))}]}
    expected, gradients = jax.value_and_grad(loss_fn)(params, rows())
    plan, weights = fully_shard(params, data_parallel_mesh(4), engine=engine)
    value, reduced, _ = jax.jit(make_gradients(plan, loss_fn))(weights, shard_batch(plan, rows()))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_equal_models(plan.merge(unshard(plan, reduced)), gradients)


def test_an_ensemble_under_vmap_has_gradients_of_its_members() -> None:
    params = {"members": {"w": jax.random.normal(jax.random.key(1), (3, 4, 4))}}

    def ensemble(params: Any, x: jax.Array) -> jax.Array:
        scaled = x * jnp.float32([1, 2, 4])[:, None, None]
        outputs = jax.vmap(lambda member, x: call_unit(tower, member, x))(params["members"], scaled)
        return jnp.mean((outputs - 0.3) ** 2)

    expected, gradients = jax.value_and_grad(ensemble)(params, rows())
    plan, weights = fully_shard(params, data_parallel_mesh(4), stacked=["members"])
    assert plan.units["members"].module.layers == 3
    value, reduced, _ = jax.jit(make_gradients(plan, ensemble))(weights, shard_batch(plan, rows()))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_equal_models(plan.merge(unshard(plan, reduced)), gradients)


@pytest.mark.slow
def test_a_checkpoint_of_an_equinox_model_goes_on(tmp_path: Any) -> None:
    model, x = Model(jax.random.key(0)), rows()
    expected, _ = trained_alone(model, loss, x, steps=4)
    plan, weights = fully_shard(model, data_parallel_mesh(4))
    losses, state = trained(plan, weights, loss, x)
    save_checkpoint(tmp_path / "step", plan, state)
    other = plan_sharding(model, data_parallel_mesh(2), strategy="optim")
    loaded = load_checkpoint(tmp_path / "step", other, OPTIMIZER)
    _, metrics = make_train_step(other, loss, OPTIMIZER)(loaded.state, x)
    np.testing.assert_allclose([*losses, float(metrics["loss"])], expected, rtol=1e-6)


def test_numbers_that_are_no_arrays_are_settings_of_modules_only() -> None:
    mesh, vector = data_parallel_mesh(4), np.ones(4, np.float32)
    tree = {"blocks": [{"w": vector, "activation": jnp.tanh, "heads": 2, "kind": "up", "causal": True}]}
    plan, weights = fully_shard(tree, mesh)
    merged = plan.merge(unshard(plan, weights))["blocks"][0]
    assert (merged["activation"], merged["heads"], merged["kind"]) == (jnp.tanh, 2, "up")
    assert merged["causal"] is True
    with pytest.raises(ValueError, match=r"'blocks/0/scale': expected an array, got float 0.5: jnp.asarray"):
        plan_sharding({"blocks": [{"w": vector, "scale": 0.5}]}, mesh)
