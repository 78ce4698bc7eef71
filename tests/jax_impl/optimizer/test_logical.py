"""Optimizers that look at shapes or names: trained, saved and resumed as on the unsharded model, with moments cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from bridge.core.formats import open_checkpoint
from jax_impl import (
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    make_train_step,
    memory_report,
    save_checkpoint,
    shard_weights,
    unshard,
)
from jax_impl.optimizer.logical import fit_to_plan
from tests.support.jax_impl.zoo import by_path, dense_tree, loss_of_layers, pairs

RATE = 0.02


def static_mask() -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, parameters())


OPTIMIZERS = {
    "muon": lambda: optax.contrib.muon(RATE),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(RATE),
    "decay of matrices": lambda: optax.adamw(
        RATE, weight_decay=0.5, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    ),
    "by name": lambda: optax.multi_transform(
        {"kernel": optax.adam(RATE), "other": optax.sgd(RATE)},
        lambda tree: jax.tree_util.tree_map_with_path(
            lambda keys, _: "kernel" if keys[-1].key == "w" else "other", tree
        ),
    ),
    "by a mask made of the tree": lambda: optax.adamw(RATE, weight_decay=0.5, mask=static_mask()),
    "by unit and shape": lambda: optax.masked(
        optax.contrib.muon(RATE), {"layers/0": True, "layers/1": True, "": False}
    ),
}
# What the unsharded model's tree calls the units of a mask.
PLAIN = {
    **OPTIMIZERS,
    "by unit and shape": lambda: optax.masked(optax.contrib.muon(RATE), {"layers": True, "head": False}),
}


loss = loss_of_layers()


def parameters() -> dict[str, Any]:
    return dense_tree((8, 16), (16, 8), head=(8, 8))


def batches(count: int) -> list[Any]:
    return pairs(count, 8, 8, 8)


def sharded(engine: str = "shard_map", devices: int = 4, strategy: str = "optim_grads_params") -> Any:
    return fully_shard(
        parameters(), data_parallel_mesh(devices), units=["layers/*"], engine=engine, strategy=strategy
    )


def plainly_trained(name: str, steps: int) -> dict[str, jax.Array]:
    weights, optimizer = parameters(), PLAIN[name]()
    state = optimizer.init(weights)
    for batch in batches(steps):
        updates, state = optimizer.update(jax.grad(loss)(weights, batch), state, weights)
        weights = optax.apply_updates(weights, updates)
    return by_path(weights)


def assert_close(arrays: Any, expected: Any) -> None:
    for path, value in expected.items():
        scale = float(np.max(np.abs(value)))
        np.testing.assert_allclose(arrays[path], value, rtol=1e-5, atol=1e-5 * scale, err_msg=path)


@pytest.mark.fast_cases(
    "shard_map-optim_grads_params-4-lamb", "shard_map-no_shard-1-by a mask made of the tree"
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_training_is_that_of_the_unsharded_model(engine: str, strategy: str, devices: int, name: str) -> None:
    if (engine, name) == ("pjit", "by unit and shape"):
        name = "muon"
    plan, weights = sharded(engine, devices, strategy)
    optimizer = OPTIMIZERS[name]()
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, loss, optimizer)
    for batch in batches(4):
        state, _ = step(state, batch)
    assert_close(unshard(plan, state.weights), plainly_trained(name, 4))


def test_moments_are_cut_over_the_devices_and_counted_as_moments() -> None:
    plan, weights = sharded()
    optimizer = optax.lamb(RATE)
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, loss, optimizer)
    for batch in batches(2):
        state, _ = step(state, batch)
    elements = sum(x.size for x in by_path(parameters()).values())
    for device in memory_report(plan, state).devices:
        assert device.moments == 2 * 4 * elements // 4
        assert device.other == 4


def odd_sizes() -> dict[str, Any]:
    return {"layers": [{"w": jnp.ones((5, 7)), "b": jnp.ones(8)}], "head": jnp.ones((3, 7))}


def test_moments_that_no_device_can_have_a_part_of_are_named(tmp_path: Path) -> None:
    plan, weights = fully_shard(odd_sizes(), data_parallel_mesh(4), units=["layers/*"])
    optimizer = optax.lamb(RATE)
    message = r"2 of 3 parameters \(88% of the elements\).*\('head', 'layers/0/w'\)"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        state = init_state(plan, weights, optimizer)
    assert [warning.filename for warning in caught] == [__file__]
    save_checkpoint(tmp_path / "a", plan, state)
    with pytest.warns(RuntimeWarning, match=message) as caught:
        load_checkpoint(tmp_path / "a", plan, optimizer)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({}, optax.adamw(RATE)),
        ({"strategy": "no_shard"}, optax.lamb(RATE)),
        ({"frozen": ["head", "layers/0/w"]}, optax.lamb(RATE)),
        ({}, optax.masked(optax.lamb(RATE), {"layers": [{"w": False, "b": True}], "head": False})),
    ],
)
def test_no_moments_are_named_that_are_cut_or_whole_on_purpose_or_not_there(
    options: dict[str, Any], optimizer: Any, recwarn: pytest.WarningsRecorder
) -> None:
    plan, weights = fully_shard(odd_sizes(), data_parallel_mesh(4), units=["layers/*"], **options)
    init_state(plan, weights, optimizer)
    assert not [warning for warning in recwarn if "moments" in str(warning.message)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "muon",
        "by a mask made of the tree",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("adafactor", "decay of matrices")),
    ],
)
def test_a_run_goes_on_from_its_checkpoint_on_other_devices_in_the_other_engine(
    tmp_path: Path, name: str
) -> None:
    optimizer = OPTIMIZERS[name]()
    plan, weights = sharded()
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, loss, optimizer)
    for batch in batches(2):
        state, _ = step(state, batch)
    save_checkpoint(tmp_path / "a", plan, state)
    again = load_checkpoint(tmp_path / "a", plan, optimizer).state
    for leaf, expected in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(leaf, expected)
        assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
    other, _ = sharded("pjit", 2, "optim")
    loaded = load_checkpoint(tmp_path / "a", other, optimizer).state
    save_checkpoint(tmp_path / "b", other, loaded)
    with open_checkpoint(tmp_path / "a") as a, open_checkpoint(tmp_path / "b") as b:
        assert a.tensors.keys() == b.tensors.keys()
        for tensor in a.tensors:
            np.testing.assert_array_equal(a.read(tensor), b.read(tensor))
    for own, state in ((plan, again), (other, loaded)):
        step = make_train_step(own, loss, optimizer)
        for batch in batches(4)[2:]:
            state, _ = step(state, batch)
        assert_close(unshard(own, state.weights), plainly_trained(name, 4))


@pytest.mark.fast_cases("decay of matrices")
@pytest.mark.parametrize("name", ["muon", "lamb", "decay of matrices"])
def test_parameters_of_a_stack_are_given_with_their_layers(name: str) -> None:
    rng = np.random.default_rng(3)

    def tree() -> Any:
        return {
            "layers": {
                "w": jnp.asarray(rng.standard_normal((3, 8, 4)), jnp.float32),
                "b": jnp.asarray(rng.standard_normal((3, 4)), jnp.float32),
            },
            "head": jnp.asarray(rng.standard_normal((4, 2)), jnp.float32),
        }

    model, gradients = tree(), tree()
    plan, weights = fully_shard(model, data_parallel_mesh(4), stacked=["layers"], units=["layers/*"])
    optimizer = OPTIMIZERS[name]()
    on_arrays = fit_to_plan(plan, optimizer)
    named = {
        "layers/w": gradients["layers"]["w"],
        "layers/b": gradients["layers"]["b"],
        "head": gradients["head"],
    }
    state = init_state(plan, weights, optimizer)
    update = jax.jit(on_arrays.update)
    updates, _ = update(shard_weights(plan, named), state.opt_state, weights)
    expected, _ = optimizer.update(gradients, optimizer.init(model), model)
    flat = {
        "layers/w": expected["layers"]["w"],
        "layers/b": expected["layers"]["b"],
        "head": expected["head"],
    }
    assert_close(unshard(plan, updates), flat)


def test_frozen_parameters_are_not_in_the_tree() -> None:
    plan, weights = fully_shard(
        parameters(), data_parallel_mesh(2), units=["layers/*"], frozen=["layers/0/*"]
    )
    seen: list[Any] = []

    def matrices(tree: Any) -> Any:
        seen.append(
            {
                jax.tree_util.keystr(keys, simple=True, separator="/")
                for keys, _ in jax.tree.leaves_with_path(tree)
            }
        )
        return jax.tree.map(lambda x: x.ndim > 1, tree)

    optimizer = optax.adamw(RATE, mask=matrices)
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, loss, optimizer)
    after, _ = step(state, batches(1)[0])
    assert seen[-1] == {"head", "layers/1/b", "layers/1/w"}
    trained = unshard(plan, after.weights)
    for path in ("layers/0/w", "layers/0/b"):
        np.testing.assert_array_equal(trained[path], by_path(parameters())[path])


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_a_mask_made_of_an_nnx_models_state_fits_also_where_parameters_are_frozen(engine: str) -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(8, rngs=rngs)

    mask = jax.tree.map(lambda x: x.ndim > 1, nnx.to_pure_dict(nnx.state(Model(), nnx.Param)))
    plan, weights = fully_shard(Model(), data_parallel_mesh(4), engine=engine, frozen=["layers/0/*"])
    optimizer = fit_to_plan(plan, optax.chain(optax.identity(), optax.add_decayed_weights(0.5, mask)))
    zeros = {key: jnp.zeros_like(weights[key]) for key in plan.trainable}
    trained = {key: weights[key] for key in plan.trainable}
    updates, _ = optimizer.update(zeros, optimizer.init(trained), trained)
    changes, initial = unshard(plan, updates), unshard(plan, weights)
    assert changes.keys() == {"layers/1/kernel", "layers/1/bias", "norm/scale", "norm/bias"}
    for path, update in changes.items():
        np.testing.assert_array_equal(update, 0.5 * initial[path] * path.endswith("kernel"))
