"""Checkpoints of train states with any optimizer, and of parameters of any shape."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from bridge.core.formats import open_checkpoint
from jax_impl import (
    call_unit,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    make_train_step,
    memory_report,
    save_checkpoint,
    shard_batch,
    shard_weights,
    unshard,
)
from jax_impl.modules.module_tree import parameter_leaves
from tests.support.jax_impl import checkpoint_runs as runs
from tests.support.jax_impl.tiny import loss, tokens

OPTIMIZERS = {
    "adamw with bfloat16 mu": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clipped schedule": optax.chain(
        optax.clip(1.0), optax.lion(1e-3), optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 9))
    ),
    "masked": optax.masked(optax.adam(1e-2), {"layers/0": True, "": False}),
    "injected": optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.01),
    "window of losses in 0/": optax.chain(
        optax.GradientTransformation(lambda _: {"window": jnp.zeros(5)}, lambda g, state, _: (g, state))
    ),
}


@pytest.mark.fast_cases("masked", "injected", "momentum", "clipped schedule", "window of losses in 0/")
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_any_optimizer_made_of_flat_buffers_and_numbers_is_kept(tmp_path: Path, optimizer_name: str) -> None:
    optimizer, three, two = OPTIMIZERS[optimizer_name], runs.plan_of(3), runs.plan_of(2, "optim")
    weights = shard_weights(three, parameter_leaves(runs.model()))
    state = runs.perturbed(init_state(three, weights, optimizer))
    save_checkpoint(tmp_path / "a", three, state)
    loaded = load_checkpoint(tmp_path / "a", two, optimizer).state
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    like = init_state(two, shard_weights(two, parameter_leaves(runs.model())), optimizer)
    for leaf, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(like), strict=True):
        assert (leaf.dtype, leaf.sharding) == (expected.dtype, expected.sharding)
    save_checkpoint(tmp_path / "b", two, loaded)
    with open_checkpoint(tmp_path / "a") as a, open_checkpoint(tmp_path / "b") as b:
        assert any("/0/" in name or "trace" in name for name in a.tensors)
        runs.assert_same_bits({n: b.read(n) for n in b.tensors}, {n: a.read(n) for n in a.tensors})
    back = load_checkpoint(tmp_path / "b", three, optimizer).state
    for leaf, expected in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_units_that_a_mask_leaves_out_have_no_moments_anywhere(tmp_path: Path, strategy: str) -> None:
    plan, optimizer = runs.plan_of(2, strategy), OPTIMIZERS["masked"]
    state = init_state(plan, shard_weights(plan, parameter_leaves(runs.model())), optimizer)
    for keys, leaf in jax.tree.leaves_with_path(state):
        located = plan.locate_buffer(keys, leaf)
        assert (located is None) == (leaf.ndim == 0)
        assert leaf.sharding == (plan.sharding(located[0]) if located else plan.replicated)
    state, _ = make_train_step(plan, loss, optimizer)(state, tokens(2))
    masked_in = [path for path, info in plan.parameters.items() if info.unit == "layers/0"]
    numel = sum(int(np.prod(plan.parameters[path].shape)) for path in masked_in)
    shards = 1 if strategy == "no_shard" else 2
    assert sum(device.moments for device in memory_report(plan, state).devices) == 2 * 4 * numel * 2 // shards
    save_checkpoint(tmp_path / "c", plan, state)
    with open_checkpoint(tmp_path / "c") as reader:
        saved = {name.removeprefix("opt_state/inner_state/0/") for name in reader.tensors if "opt" in name}
        assert saved == {"count", *(f"{moment}/{path}" for moment in ("mu", "nu") for path in masked_in)}
    loaded = load_checkpoint(tmp_path / "c", plan, optimizer).state
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for restored, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert restored.sharding == expected.sharding
        np.testing.assert_array_equal(restored, expected)


def _steps_of_each_unit() -> optax.GradientTransformation:
    """It needs the engine's flat arrays: on a tree by names it would get the model's own parameters."""
    return optax.GradientTransformation(
        lambda weights: {"steps": {unit: jnp.int32(flat.ndim) for unit, flat in weights.items()}},
        lambda g, state, _: (g, state),
    )


def test_an_optimizer_with_other_arrays_is_refused_by_name(tmp_path: Path) -> None:
    plan = runs.plan_of(2)
    optimizer = _steps_of_each_unit()
    state = init_state(plan, shard_weights(plan, parameter_leaves(runs.model())), optimizer)
    with pytest.raises(
        ValueError, match="optimizer state 'opt_state/steps/': expected an array for each weight array"
    ):
        save_checkpoint(tmp_path / "c", plan, state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_random_key_of_an_optimizer_goes_on(tmp_path: Path, engine: str, impl: str) -> None:
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0, impl=impl)), optax.sgd(0.1))
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    plan, weights = fully_shard(model, data_parallel_mesh(2), units=[], engine=engine)
    step = make_train_step(plan, lambda model, x: jnp.mean((model(x) - x) ** 2), optimizer, donate=False)
    rows = np.ones((4, 8), np.float32)
    state, _ = step(init_state(plan, weights, optimizer), rows)
    save_checkpoint(tmp_path / "c", plan, state)
    with open_checkpoint(tmp_path / "c") as reader:
        assert reader.tensors["opt_state/0/rng_key"].dtype == np.uint32
    loaded = load_checkpoint(tmp_path / "c", plan, optimizer, like=state).state
    assert jax.tree.map(jax.typeof, loaded) == jax.tree.map(jax.typeof, state)
    for mine, expected in zip(
        *(step(given, rows)[0].weights.values() for given in (loaded, state)), strict=True
    ):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize(("engine", "axes"), [("shard_map", {"tp": 2}), ("pjit", {}), ("pjit", {"tp": 2})])
def test_a_statistic_of_a_parameter_is_whole_even_if_another_parameter_has_its_shape(
    tmp_path: Path, engine: str, axes: dict[str, int]
) -> None:
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    # The means over a kernel's rows or columns have the shape of a bias.
    net = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(16, 8, rngs=nnx.Rngs(1)))
    parallel: Any = {"layers/0": "colwise", "layers/2": "rowwise"} if axes else None
    mesh = data_parallel_mesh({"dp": 2, **axes})
    plan, weights = fully_shard(net, mesh, engine=engine, units=["layers/*"], parallel=parallel)
    step = make_train_step(plan, lambda model, x: jnp.mean((model(x) - x) ** 2), optimizer, donate=False)
    rows = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    state, _ = step(init_state(plan, weights, optimizer), rows)
    save_checkpoint(tmp_path / "c", plan, state)
    loaded = load_checkpoint(tmp_path / "c", plan, optimizer).state
    for mine, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert mine.sharding.is_equivalent_to(expected.sharding, mine.ndim)
    assert step(step(loaded, rows)[0], rows)[1] == step(step(state, rows)[0], rows)[1]


class Odd(nnx.Module):
    """Empty and scalar parameters, a list of modules, fewer rows than devices, and a stack of matrices."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def values(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.asarray(rng.standard_normal(shape), jnp.float32))

        self.layers = nnx.List([nnx.Linear(3, 5, rngs=nnx.Rngs(i + seed)) for i in range(2)])
        self.scale = values()
        self.nothing = values(0, 4)
        self.short = values(2, 7)
        self.stack = values(3, 4, 5)


@pytest.mark.each_value
@pytest.mark.parametrize("granularity", [("row", 1), ("block", 3), ("tensor", 1)])
@pytest.mark.parametrize("chunk", [16, 100, 1 << 20])
def test_odd_parameters_are_exact_for_every_granularity_and_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granularity: tuple[str, int], chunk: int
) -> None:
    monkeypatch.setattr("bridge.core.formats.orbax.zarr.chunks._CHUNK", chunk)
    optimizer = main_weight_adamw(0.1)
    boundary, rows = granularity
    plan, weights = fully_shard(Odd(1), data_parallel_mesh(4), granularity=boundary, rows=rows)
    state = runs.perturbed(init_state(plan, weights, optimizer))
    moments = dataclasses.replace(state.opt_state, mu=jax.tree.map(jnp.negative, state.weights))
    state = dataclasses.replace(state, opt_state=moments)
    save_checkpoint(tmp_path / "c", plan, state)
    expected = runs.logical(plan, state)
    with open_checkpoint(tmp_path / "c") as reader:
        runs.assert_same_bits({name: reader.read(name) for name in reader.tensors}, expected)
    for devices in (1, 3):
        other, _ = fully_shard(Odd(2), data_parallel_mesh(devices), strategy="optim")
        loaded = load_checkpoint(tmp_path / "c", other, optimizer)
        runs.assert_same_bits(runs.logical(other, loaded.state), expected)


def test_the_array_of_a_unit_is_told_from_a_parameter_inside_of_the_unit_that_has_its_shape(
    tmp_path: Path,
) -> None:
    # Whole on one device, the unit "head" has an array "head" of shape (4,), as its only sharded parameter has.
    random = np.random.default_rng(0)
    model = {"head": {"bias": random.normal(size=4), "kernel": random.normal(size=(3, 4))}}
    model = jax.tree.map(lambda values: jnp.asarray(values, jnp.float32), model)
    batch = random.normal(size=(12, 3)).astype(np.float32), random.normal(size=(12, 4)).astype(np.float32)

    def loss(tree: Any, rows: Any) -> jax.Array:
        x, y = rows
        output = call_unit(lambda unit, x: x @ unit["kernel"] + unit["bias"], tree["head"], x)
        return jnp.mean((output - y) ** 2)

    # A mask by shape: such an optimizer is given the parameters.
    optimizer = optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))
    slopes, opt_state, values = jax.value_and_grad(loss), optimizer.init(model), model
    for step, devices in enumerate((1, 3, 1)):
        plan, weights = fully_shard(
            model, data_parallel_mesh(devices), units=["head"], replicated=["head/kernel"]
        )
        state = init_state(plan, weights, optimizer)
        if step:
            state = load_checkpoint(tmp_path / str(step - 1), plan, optimizer).state
        state, metrics = make_train_step(plan, loss, optimizer)(state, shard_batch(plan, batch))
        expected, gradients = slopes(values, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, values)
        values = optax.apply_updates(values, updates)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
        for path, array in unshard(plan, state.weights).items():
            np.testing.assert_allclose(
                array, values["head"][path.removeprefix("head/")], rtol=1e-5, atol=1e-6
            )
        save_checkpoint(tmp_path / str(step), plan, state)
        with open_checkpoint(tmp_path / str(step)) as reader:
            assert {"opt_state/0/mu/head/bias", "opt_state/0/nu/head/kernel"} <= reader.tensors.keys()
