"""Functions transformed by haiku, unedited, and layers of haiku as units, against plain optax on the whole batch."""

from __future__ import annotations

from typing import Any

import haiku as hk
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

DIM = 6
OPTIMIZER = optax.adam(1e-2)
pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")


def network(x: jax.Array) -> jax.Array:
    x = hk.nets.MLP([DIM, DIM], name="mlp")(x)
    x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    return hk.Linear(2)(x * hk.get_parameter("scale", [DIM], init=jnp.ones))


NETWORK = hk.without_apply_rng(hk.transform(network))
LAYER = hk.without_apply_rng(hk.transform(lambda x: x + hk.nets.MLP([2 * DIM, 4])(x)))


def rows(count: int = 8) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)


def whole(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((NETWORK.apply(params, x) - 0.3) ** 2)


def layers() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(1), 3)
    return {"layers": [LAYER.init(key, rows()) for key in keys[:2]], "head": NETWORK.init(keys[2], rows())}


def by_layers(params: Any, x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = call_unit(LAYER.apply, layer, x)
    return whole(params["head"], x)


def assert_trains_as_alone(params: Any, loss: Any, microbatches: int = 2, **options: Any) -> Any:
    x = rows()
    plan, weights = fully_shard(params, data_parallel_mesh(4), **options)
    step = make_train_step(plan, loss, OPTIMIZER, microbatches=microbatches)
    state, moments, gradient = (
        init_state(plan, weights, OPTIMIZER),
        OPTIMIZER.init(params),
        jax.value_and_grad(loss),
    )
    for _ in range(3):
        value, gradients = gradient(params, x)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        state, metrics = step(state, x)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    trained = plan.merge(unshard(plan, state))
    assert jax.tree.structure(trained) == jax.tree.structure(params)
    jax.tree.map(lambda mine, other: np.testing.assert_allclose(mine, other, atol=1e-6), trained, params)
    return plan, state


@pytest.mark.parametrize(
    ("engine", "units"),
    [
        pytest.param("shard_map", [], marks=pytest.mark.slow),
        pytest.param("pjit", [], marks=pytest.mark.slow),
        pytest.param("shard_map", ["mlp/~/linear_*", "layer_norm"], marks=pytest.mark.slow),
        pytest.param("pjit", ["mlp/~/linear_*", "layer_norm"], marks=pytest.mark.slow),
    ],
)
def test_an_unedited_network_trains(engine: str, units: list[str]) -> None:
    plan, _ = assert_trains_as_alone(
        NETWORK.init(jax.random.key(0), rows()), whole, engine=engine, units=units
    )
    assert {"mlp/~/linear_0/w", "layer_norm/offset", "~/scale"} <= plan.parameters.keys()
    assert len(plan.units) == (4 if units else 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_layers_that_are_transformed_each_are_units(engine: str) -> None:
    plan, _ = assert_trains_as_alone(layers(), by_layers, engine=engine)
    assert list(plan.units) == ["layers/0", "layers/1", ""]


def test_a_unit_of_a_network_is_gathered_for_each_parameter_and_a_layer_once() -> None:
    mesh = data_parallel_mesh(4)
    plan, weights = fully_shard(NETWORK.init(jax.random.key(0), rows()), mesh, units=["mlp/~/linear_0"])
    counts = count_collectives(make_gradients(plan, whole), weights, shard_batch(plan, rows()))
    reductions = {
        collective.size: n for collective, n in counts.items() if collective.kind == "reduce_scatter"
    }
    assert reductions == {plan.arrays["mlp/~/linear_0"].shape[0]: 2, plan.arrays[""].shape[0]: 1}
    # Unaligned shards have sizes of their own.
    plan, weights = fully_shard(layers(), mesh, align=1)
    counts = count_collectives(make_gradients(plan, by_layers), weights, shard_batch(plan, rows()))
    reductions = {
        collective.size: n for collective, n in counts.items() if collective.kind == "reduce_scatter"
    }
    assert reductions == {plan.arrays["layers/0"].shape[0]: 2, plan.arrays[""].shape[0]: 1}


@pytest.mark.slow
def test_a_checkpoint_of_a_network_goes_on(tmp_path: Any) -> None:
    params, x = NETWORK.init(jax.random.key(0), rows()), rows()
    plan, state = assert_trains_as_alone(params, whole, units=["mlp/~/linear_*"])
    save_checkpoint(tmp_path / "step", plan, state)
    other = plan_sharding(params, data_parallel_mesh(2), units=[], engine="pjit")
    loaded = load_checkpoint(tmp_path / "step", other, OPTIMIZER)
    _, resumed = make_train_step(other, whole, OPTIMIZER)(loaded.state, x)
    _, metrics = make_train_step(plan, whole, OPTIMIZER)(state, x)
    np.testing.assert_allclose(resumed["loss"], metrics["loss"], rtol=1e-6)


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a/b": {"w": 1}, "a": {"b": {"w": 2}}}, r"\['a/b/w'\]"),
        ({"a": {"b": 1}, "a/b": {"w": 2}}, r"\['a/b'\]"),
    ],
)
def test_parameters_with_one_path_are_refused(tree: Any, paths: str) -> None:
    arrays = jax.tree.map(lambda value: np.full(3, value, np.float32), tree)
    with pytest.raises(ValueError, match=f"unique paths, none below another, got {paths} twice"):
        plan_sharding(arrays, data_parallel_mesh(4), units=[])
