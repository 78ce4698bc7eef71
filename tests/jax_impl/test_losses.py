"""Losses that return a weight or statistics, against the plain model on the whole batch; steps in other programs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl import (
    abstract_state,
    call_unit,
    data_parallel_mesh,
    fully_shard,
    init_state,
    main_weight_adamw,
    make_gradients,
    make_train_step,
    shard_batch,
    unshard,
)
from jax_impl.runtime.step.losses import as_parts
from tests.support.jax_impl.zoo import by_path, dense_tree, tanh_layer

ROWS, LENGTH = 16, 5


def parameters() -> dict[str, Any]:
    return dense_tree((3, 8), head=(8, 1))


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Rows have 0 to 5 tokens; the last four none, so that whole devices and microbatches have none."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, LENGTH + 1, ROWS)
    counts[-4:] = 0
    return {
        "x": rng.standard_normal((ROWS, LENGTH, 3)).astype(np.float32),
        "y": rng.standard_normal((ROWS, LENGTH)).astype(np.float32),
        "mask": np.arange(LENGTH) < counts[:, None],
    }


def token_losses(tree: Any, rows: Any) -> jax.Array:
    hidden = call_unit(tanh_layer, tree["layers"][0], rows["x"])
    return ((hidden @ tree["head"])[..., 0] - rows["y"]) ** 2


def pair(tree: Any, rows: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(token_losses(tree, rows) * rows["mask"]), jnp.sum(rows["mask"])


def quotient(tree: Any, rows: Any) -> jax.Array:
    total, weight = pair(tree, rows)
    return total / weight


def with_statistics(tree: Any, rows: Any) -> Any:
    losses = token_losses(tree, rows)
    inside = losses < 1
    statistics = {
        "inside": jnp.mean(inside, where=rows["mask"]),
        "hits": jnp.sum(inside & rows["mask"]),
        "any": jnp.any(rows["mask"]),
        "per_position": jnp.mean(losses, axis=0),
    }
    return jnp.mean(losses), statistics


def sharded(engine: str, devices: int, strategy: str = "optim_grads_params") -> Any:
    mesh = data_parallel_mesh({"dp_outer": 2, "dp": devices // 2} if strategy == "hfsdp" else devices)
    return fully_shard(parameters(), mesh, units=["layers/*"], engine=engine, strategy=strategy)


def assert_close(arrays: Any, expected: Any, rtol: float = 2e-6) -> None:
    for path, value in by_path(expected).items():
        scale = np.max(np.abs(value))
        np.testing.assert_allclose(arrays[path], value, rtol=rtol, atol=rtol * scale, err_msg=path)


@pytest.mark.fast_cases("shard_map-no_shard-1-1", "pjit-optim-2-2", "shard_map-hfsdp-1-1")
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params", "hfsdp"])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_a_sum_with_its_weight_is_the_mean_over_all_tokens_of_the_batch(
    engine: str, strategy: str, devices: int, microbatches: int
) -> None:
    plan, weights = sharded(engine, max(devices, 2) if strategy == "hfsdp" else devices, strategy)
    step = make_train_step(plan, pair, optax.sgd(1.0), microbatches=microbatches)
    loss, gradients = step.gradients(weights, batch())
    expected_loss, expected = jax.value_and_grad(quotient)(parameters(), batch())
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    assert_close(unshard(plan, gradients), expected)


@pytest.mark.fast_cases("shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_training_on_pairs_is_training_on_the_quotient_of_the_whole_batch(engine: str) -> None:
    plan, weights = sharded(engine, 4)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, pair, optimizer, microbatches=2)
    expected = parameters()
    opt_state = optimizer.init(expected)
    for seed in range(4):
        state, metrics = step(state, batch(seed))
        loss, gradients = jax.value_and_grad(quotient)(expected, batch(seed))
        updates, opt_state = optimizer.update(gradients, opt_state, expected)
        expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        assert metrics["weight"] == batch(seed)["mask"].sum()
    assert_close(unshard(plan, state.weights), expected, rtol=1e-5)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_a_batch_without_any_token_has_neither_loss_nor_gradients(engine: str) -> None:
    plan, weights = sharded(engine, 4)
    empty = {**batch(), "mask": np.zeros((ROWS, LENGTH), bool)}
    loss, gradients = make_train_step(plan, pair, optax.sgd(1.0)).gradients(weights, empty)
    assert loss == 0
    assert not any(np.any(value) for value in unshard(plan, gradients).values())


@pytest.mark.each_value
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_statistics_beside_a_mean_are_averaged_and_counts_are_summed(engine: str, microbatches: int) -> None:
    plan, weights = sharded(engine, 4)
    full = {**batch(), "mask": np.ones((ROWS, LENGTH), bool)}
    step = make_train_step(plan, with_statistics, optax.sgd(0.1), microbatches=microbatches, has_aux=True)
    (loss, statistics), gradients = step.gradients(weights, full)
    (expected_loss, expected), reference = jax.value_and_grad(with_statistics, has_aux=True)(
        parameters(), full
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    assert_close(unshard(plan, gradients), reference)
    np.testing.assert_allclose(statistics["inside"], expected["inside"], rtol=1e-6)
    np.testing.assert_allclose(statistics["per_position"], expected["per_position"], rtol=1e-5)
    assert statistics["hits"] == expected["hits"]
    assert statistics["any"] == microbatches * (4 if engine == "shard_map" else 1)
    _, metrics = step(init_state(plan, weights, optax.sgd(0.1)), full)
    assert metrics.keys() == {"loss", "aux"}
    np.testing.assert_allclose(metrics["aux"]["inside"], expected["inside"], rtol=1e-6)


@pytest.mark.parametrize("of_gradients", [False, True])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_rows_beside_a_loss_are_refused_where_they_would_be_averaged(engine: str, of_gradients: bool) -> None:
    def loss(tree: Any, rows: Any) -> Any:
        losses = token_losses(tree, rows)
        return jnp.mean(losses), {"losses": losses}

    def mean_of_features(tree: Any, rows: Any) -> Any:
        # As many as a part has rows.
        return jnp.mean(token_losses(tree, rows)), {
            "features": jnp.mean(tree["head"]) + jnp.arange(ROWS // 8)
        }

    plan, weights = sharded(engine, 4)

    def run(loss: Any, microbatches: int) -> Any:
        if of_gradients:
            made = make_gradients(plan, loss, microbatches, has_aux=True)
            return made(weights, shard_batch(plan, batch(), microbatches))[0]
        step = make_train_step(plan, loss, optax.sgd(0.1), microbatches=microbatches, has_aux=True)
        return step.gradients(weights, batch())[0]

    with pytest.raises(
        ValueError, match=r"got a value for each row in aux\['losses'\]: return a mean over the rows"
    ):
        run(loss, 2)
    assert run(mean_of_features, 2)[1]["features"].shape == (ROWS // 8,)
    if engine == "pjit":
        # There is one part, and nothing to average.
        np.testing.assert_allclose(
            run(loss, 1)[1]["losses"], token_losses(parameters(), batch()), rtol=1e-5, atol=1e-6
        )


@pytest.mark.fast_cases("shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_statistics_beside_a_pair_have_its_weights(engine: str) -> None:
    def loss(tree: Any, rows: Any) -> Any:
        losses, weight = token_losses(tree, rows), jnp.sum(rows["mask"])
        inside = jnp.sum((losses < 1) & rows["mask"]) / jnp.maximum(weight, 1)
        return (jnp.sum(losses * rows["mask"]), weight), {"inside": inside}

    plan, weights = sharded(engine, 4)
    step = make_train_step(plan, loss, optax.sgd(0.1), microbatches=2, has_aux=True)
    (value, statistics), _ = step.gradients(weights, batch())
    (total, weight), expected = loss(parameters(), batch())
    np.testing.assert_allclose(value, total / weight, rtol=2e-6)
    np.testing.assert_allclose(statistics["inside"], expected["inside"], rtol=2e-6)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_gradients_that_are_not_a_step_return_statistics_too(engine: str) -> None:
    plan, weights = sharded(engine, 2)
    gradients = jax.jit(make_gradients(plan, with_statistics, has_aux=True))
    (loss, aux), _, variables = gradients(weights, shard_batch(plan, batch()))
    expected_loss, expected = with_statistics(parameters(), batch())
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    assert aux["hits"] == expected["hits"]
    assert variables == {}


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (
            lambda tree, rows: token_losses(tree, rows),
            {},
            r"expected a floating-point scalar, or \(sum, weight\)",
        ),
        (
            lambda tree, rows: (jnp.mean(token_losses(tree, rows)), {"a": 1}),
            {},
            r"got a tuple of float32 of shape \(\), dict. To return statistics .* has_aux=True",
        ),
        (
            lambda tree, rows: (jnp.mean(token_losses(tree, rows)), jnp.mean(token_losses(tree, rows) < 1)),
            {},
            "weight from the batch alone, .* got a weight that depends on the model: .* has_aux=True",
        ),
        (lambda tree, rows: jnp.sum(rows["mask"]), {}, "floating-point scalar.* got int32"),
        (lambda tree, rows: jnp.mean(token_losses(tree, rows)), {"has_aux": True}, r"expected \(loss, aux\)"),
        (quotient, {}, r"Return \(sum\(loss \* mask\), sum\(mask\)\)"),
        (lambda tree, rows: (quotient(tree, rows), jnp.sum(rows["mask"])), {}, "got a quotient by a sum"),
    ],
)
def test_what_is_no_loss_is_refused_with_the_way_out(loss: Any, options: Any, message: str) -> None:
    plan, weights = sharded("shard_map", 2)
    step = make_train_step(plan, loss, optax.sgd(0.1), **options)
    with pytest.raises(ValueError, match=message):
        step.gradients(weights, batch())


def stepped(engine: str, optimizer: Any) -> Any:
    plan, weights = sharded(engine, 4)
    return plan, init_state(plan, weights, optimizer), make_train_step(plan, pair, optimizer, microbatches=2)


@pytest.mark.fast_cases("shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_a_step_is_traced_inside_of_other_programs(engine: str) -> None:
    optimizer = main_weight_adamw(1e-2, weight_decay=0.1)
    plan, state, step = stepped(engine, optimizer)
    several = jax.tree.map(lambda *x: np.stack(x), *(batch(seed) for seed in range(3)))
    jitted = jax.jit(step)
    scanned, losses = jax.jit(lambda state, several: jax.lax.scan(step, state, several))(state, several)
    other = state
    for seed in range(3):
        other, jitted_metrics = jitted(other, batch(seed))
        state, metrics = step(state, batch(seed))
        np.testing.assert_allclose(jitted_metrics["loss"], metrics["loss"], rtol=1e-6)
        np.testing.assert_allclose(losses["loss"][seed], metrics["loss"], rtol=1e-6)
    for result in (scanned, other):
        assert jax.tree.map(lambda x: x.shape, result) == jax.tree.map(lambda x: x.shape, state)
        for key in plan.arrays:
            plan.check_array(key, result.weights[key])
            np.testing.assert_allclose(result.weights[key], state.weights[key], rtol=1e-5, atol=1e-7)
        assert result.opt_state.count == 3
    step(scanned, batch(3))


@pytest.mark.fast_cases("shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_a_step_is_compiled_ahead_from_shapes(engine: str) -> None:
    optimizer = main_weight_adamw(1e-2)
    plan, state, step = stepped(engine, optimizer)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    compiled = step.lower(abstract_state(plan, optimizer), shapes).compile()
    assert compiled.memory_analysis() is not None
    updated, metrics = compiled(state, batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.weights))
    _, fresh, step = stepped(engine, optimizer)
    expected, reference = step(fresh, batch())
    np.testing.assert_allclose(metrics["loss"], reference["loss"], rtol=1e-6)
    for key in plan.arrays:
        np.testing.assert_allclose(updated.weights[key], expected.weights[key], rtol=1e-5, atol=1e-7)


def test_a_step_that_donates_nothing_leaves_the_state_as_it_was() -> None:
    plan, weights = sharded("shard_map", 2)
    optimizer = main_weight_adamw(1e-2)
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, pair, optimizer, donate=False, wait=True)
    once, _ = step(state, batch())
    again, _ = step(state, batch())
    for key in plan.arrays:
        np.testing.assert_array_equal(once.weights[key], again.weights[key])


def test_shapes_of_a_state_are_those_that_init_state_makes() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    plan, weights = sharded("shard_map", 2)
    state = init_state(plan, weights, optimizer)
    described = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype, x.sharding))
    assert described(abstract_state(plan, optimizer)) == described(state)


def test_what_is_not_linear_in_its_rows_is_one_over_all_devices_by_sums_of_its_ingredients() -> None:
    """``docs/explanation/unit-in-jax.md`` has this remedy for the shard_map engine; the pjit engine needs none."""

    def spread(tree: Any, rows: Any, axes: Any = None) -> jax.Array:
        x = token_losses(tree, rows)
        sums = jnp.stack([jnp.sum(x), jnp.sum(x**2), jnp.float32(x.size)])
        total, squares, count = sums if axes is None else jax.lax.psum(sums, axes)
        return squares / count - (total / count) ** 2

    expected, reference = jax.value_and_grad(spread)(parameters(), batch())
    for engine, axes in (("pjit", None), ("shard_map", "dp")):
        plan, weights = sharded(engine, 4)
        step = make_train_step(plan, functools.partial(spread, axes=axes), optax.sgd(1.0), equal_parts=True)
        sharded_loss, gradients = step.gradients(weights, batch())
        np.testing.assert_allclose(sharded_loss, expected, rtol=5e-6)
        assert_close(unshard(plan, gradients), reference, rtol=5e-6)


@pytest.mark.parametrize("pair", [False, True])
def test_statistics_of_a_part_can_be_added_up(pair: bool) -> None:
    """Counts as they are, and means weighted as the loss is."""
    statistics = {"hits": jnp.int32(2), "any": jnp.bool_(True), "mean": jnp.float32(0.5)}
    loss = (jnp.float32(6), jnp.int32(3)) if pair else jnp.float32(2)
    aux = as_parts((loss, statistics), has_aux=True).aux
    assert {name: (value.dtype.name, float(value)) for name, value in aux.items()} == {
        "hits": ("int32", 2.0),
        "any": ("int32", 1.0),
        "mean": ("float32", 1.5 if pair else 0.5),
    }
