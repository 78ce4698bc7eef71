"""Frozen parameters stay in the dtype in which they were given: float8 with scales of the model's own, bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from bridge.core.formats import open_checkpoint
from jax_impl import (
    call_unit,
    count_collectives,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    make_gradients,
    make_train_step,
    memory_report,
    plan_sharding,
    save_checkpoint,
    shard_batch,
    unshard,
)
from tests.support.jax_impl.zoo import loss_of_layers, pairs

FROZEN = ["*/base", "*/scale", "*/norm"]
OPTIMIZER = optax.adam(0.02)


def model() -> dict[str, Any]:
    """Two layers with float8 bases and their scales, a bfloat16 norm, and what is trained beside them."""
    rng = np.random.default_rng(0)

    def layer(dtype: Any) -> dict[str, jax.Array]:
        bits = rng.integers(0, 256, (8, 8)).astype(np.uint8).view(dtype)
        return {
            "base": jnp.asarray(np.where(np.isfinite(bits.astype(np.float32)), bits, dtype(1))),
            "scale": jnp.asarray(
                rng.random((8, 1)) / np.max(np.abs(bits[np.isfinite(bits)].astype(np.float32)))
            ),
            "norm": jnp.asarray(1 + rng.random(8), jnp.bfloat16),
            "down": jnp.asarray(rng.standard_normal((8, 3)), jnp.float32),
            "up": jnp.asarray(rng.standard_normal((3, 8)), jnp.float32),
        }

    layers = [layer(ml_dtypes.float8_e4m3fn), layer(ml_dtypes.float8_e5m2)]
    return {"layers": layers, "head": jnp.asarray(rng.standard_normal((8, 5)), jnp.float32)}


def apply(unit: Any, x: jax.Array) -> jax.Array:
    assert unit["base"].dtype.itemsize == 1
    kernel = unit["base"].astype(jnp.float32) * unit["scale"] + unit["down"] @ unit["up"]
    return jnp.tanh(x @ kernel) * unit["norm"].astype(jnp.float32)


loss = loss_of_layers(apply)


def batches(count: int) -> list[Any]:
    return pairs(count, 16, 8, 5)


def by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): np.asarray(x) for keys, x in leaves}


def is_trained(path: str) -> bool:
    return path == "head" or path.endswith(("down", "up"))


def plainly_trained(steps: int) -> dict[str, np.ndarray]:
    tree = model()
    labels = jax.tree.map_with_path(
        lambda keys, _: is_trained(jax.tree_util.keystr(keys, simple=True, separator="/")), tree
    )
    trained = jax.tree.map(lambda x, own: x if own else None, tree, labels)
    frozen = jax.tree.map(lambda x, own: None if own else x, tree, labels)

    def joined(trained: Any) -> Any:
        return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None)

    state = OPTIMIZER.init(trained)
    for batch in batches(steps):
        gradients = jax.grad(lambda trained, batch=batch: loss(joined(trained), batch))(trained)
        updates, state = OPTIMIZER.update(gradients, state, trained)
        trained = optax.apply_updates(trained, updates)
    return by_path(joined(trained))


def sharded(engine: str, devices: Any = 4, **options: Any) -> Any:
    options = {"units": ["layers/*"], "frozen": FROZEN, **options}
    return fully_shard(model(), data_parallel_mesh(devices), engine=engine, **options)


def assert_trained(weights: Any, steps: int) -> None:
    """Frozen ones to the bit."""
    expected = plainly_trained(steps)
    assert weights.keys() == expected.keys()
    for path, value in expected.items():
        assert weights[path].dtype == value.dtype, path
        if is_trained(path):
            scale = float(np.max(np.abs(value)))
            np.testing.assert_allclose(weights[path], value, rtol=0, atol=2e-6 * scale, err_msg=path)
        else:
            assert np.asarray(weights[path]).tobytes() == value.tobytes(), path


SLOW = [
    pytest.param(engine, strategy, devices, marks=pytest.mark.slow)
    for engine in ("shard_map", "pjit")
    for strategy, devices in (("no_shard", 2), ("optim", 4), ("optim_grads", 4), ("optim_grads_params", 1))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "strategy", "devices"),
    [
        ("shard_map", "hfsdp", {"dp_outer": 2, "dp": 2}),
        pytest.param("pjit", "optim_grads_params", 8, marks=pytest.mark.slow),
        pytest.param("shard_map", "optim_grads_params", 8, marks=pytest.mark.slow),
        pytest.param("pjit", "hfsdp", {"dp_outer": 2, "dp": 2}, marks=pytest.mark.slow),
        *SLOW,
    ],
)
def test_training_is_that_of_the_unsharded_model(engine: str, strategy: str, devices: Any) -> None:
    plan, weights = sharded(engine, devices, strategy=strategy)
    state, step = init_state(plan, weights, OPTIMIZER), make_train_step(plan, loss, OPTIMIZER, microbatches=2)
    for batch in batches(3):
        state, _ = step(state, batch)
    assert_trained(unshard(plan, state.weights), 3)


def test_a_unit_has_a_frozen_array_of_each_dtype_that_is_not_widened() -> None:
    plan, weights = sharded("shard_map")
    assert {key: array.dtype.name for key, array in weights.items()} == {
        "": "float32",
        "layers/0": "float32",
        "layers/0 (frozen)": "float32",
        "layers/0 (frozen, float8_e4m3fn)": "float8_e4m3fn",
        "layers/0 (frozen, bfloat16)": "bfloat16",
        "layers/1": "float32",
        "layers/1 (frozen)": "float32",
        "layers/1 (frozen, float8_e5m2)": "float8_e5m2",
        "layers/1 (frozen, bfloat16)": "bfloat16",
    }
    report = memory_report(plan, init_state(plan, weights, OPTIMIZER))
    trained = 2 * (8 * 3 + 3 * 8) + 8 * 5
    assert sum(device.main_weights for device in report.devices) == 4 * trained + 2 * (64 + 4 * 8 + 2 * 8)
    assert sum(device.moments for device in report.devices) == 2 * 4 * trained


def test_float8_travels_as_its_bytes_whatever_the_compute_dtype() -> None:
    plan, weights = sharded("shard_map", param_dtype="bfloat16", strategy="optim_grads")
    gradients = make_gradients(plan, loss)
    batch = shard_batch(plan, batches(1)[0])
    counts = count_collectives(gradients, weights, batch)
    gathered = [str(call) for call in counts if "all_gather" in str(call)]
    assert sum("uint8" in call for call in gathered) == 1, gathered
    assert not any("float8" in call for call in gathered), gathered


def test_every_bit_of_float8_passes_a_gather() -> None:
    bits = np.arange(256, dtype=np.uint8)
    tree = {"base": jnp.asarray(bits.view(ml_dtypes.float8_e5m2)), "w": jnp.ones(3)}
    plan, weights = fully_shard(tree, data_parallel_mesh(4), units=[], frozen=["base"], strategy="optim")

    def loss(tree: Any, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        gathered = jax.lax.bitcast_convert_type(tree["base"], jnp.uint8)
        return jnp.mean(tree["w"]) * jnp.mean(rows), jnp.sum(gathered != bits)

    step = make_train_step(plan, loss, OPTIMIZER, has_aux=True)
    _, metrics = step(init_state(plan, weights, OPTIMIZER), np.ones((4, 1), np.float32))
    assert metrics["aux"] == 0


@pytest.mark.parametrize(
    ("first", "then"), [("shard_map", "pjit"), pytest.param("pjit", "shard_map", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(tmp_path: Path, first: str, then: str) -> None:
    plan, weights = sharded(first)
    state, step = init_state(plan, weights, OPTIMIZER), make_train_step(plan, loss, OPTIMIZER)
    for batch in batches(2):
        state, _ = step(state, batch)
    save_checkpoint(tmp_path / "a", plan, state)
    with open_checkpoint(tmp_path / "a") as reader:
        assert reader.tensors["params/layers/0/base"].dtype == jnp.float8_e4m3fn
        assert reader.tensors["params/layers/1/norm"].dtype == jnp.bfloat16
        assert reader.read("params/layers/1/base").tobytes() == by_path(model())["layers/1/base"].tobytes()
    other, _ = sharded(then, 2, strategy="optim")
    loaded, step = (
        load_checkpoint(tmp_path / "a", other, OPTIMIZER).state,
        make_train_step(other, loss, OPTIMIZER),
    )
    for batch in batches(4)[2:]:
        loaded, _ = step(loaded, batch)
    assert_trained(unshard(other, loaded.weights), 4)


@pytest.mark.slow
def test_frozen_float8_of_a_stack_is_gathered_layer_by_layer() -> None:
    def stack() -> Any:
        layers = model()["layers"]
        layers = [{**layer, "base": layer["base"].astype(jnp.float8_e4m3fn)} for layer in layers]
        return {"layers": jax.tree.map(lambda *x: jnp.stack(x), *layers)}

    def of_stack(tree: Any, rows: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return call_unit(apply, weights, x), None

        return jnp.mean(jax.lax.scan(layer, rows, tree["layers"])[0] ** 2)

    rows = batches(1)[0][0]
    plan, weights = fully_shard(
        stack(), data_parallel_mesh(4), units=["layers/*"], stacked=["layers"], frozen=FROZEN
    )
    sharded_loss, gradients, _ = jax.jit(make_gradients(plan, of_stack))(weights, shard_batch(plan, rows))
    tree = stack()["layers"]
    base = tree.pop("base")
    expected, wanted = jax.value_and_grad(
        lambda trained: of_stack({"layers": {**trained, "base": base}}, rows)
    )(tree)
    np.testing.assert_allclose(sharded_loss, expected, rtol=1e-6)
    for path, value in unshard(plan, gradients).items():
        np.testing.assert_allclose(value, wanted[path.split("/")[1]], rtol=1e-5, atol=1e-6)
    assert np.asarray(unshard(plan, weights)["layers/base"]).tobytes() == np.asarray(base).tobytes()


@pytest.mark.parametrize(
    ("dtype", "frozen", "message"),
    [
        (
            "float8_e4m3fn",
            [],
            r"parameter 'base': expected 16 bits or more for a trainable parameter, got float8_",
        ),
        (
            "float4_e2m1fn",
            ["base"],
            r"parameter 'base': expected a floating or integer dtype of 8 bits or more, or bool, got float4_e2m1fn",
        ),
    ],
)
def test_what_has_no_right_meaning_is_refused(dtype: str, frozen: list[str], message: str) -> None:
    tree = {
        "base": jax.ShapeDtypeStruct((4, 4), jnp.dtype(dtype)),
        "w": jax.ShapeDtypeStruct((3,), jnp.float32),
    }
    with pytest.raises(ValueError, match=message):
        plan_sharding(tree, data_parallel_mesh(2), units=[], frozen=frozen)
