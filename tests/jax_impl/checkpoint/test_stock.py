"""Checkpoints that ordinary JAX programs saved by stock Orbax: what is loaded trains on as the program itself does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState as FlaxTrainState

from bridge.core.formats import CheckpointError
from jax_impl import (
    LoadedCheckpoint,
    apply_linen,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    make_train_step,
    unshard,
    variable_leaves,
)
from tests.support.jax_impl.stock_programs import (
    ADAMW,
    ENGINES,
    FORMS,
    STEPS,
    WEIGHTS_ONLY,
    WIDTH,
    WITH_OPTIMIZER,
    Net,
    adamw,
    assert_goes_on_as,
    clipped,
    flax_train_state,
    plan_of,
    rows,
    save,
    trained,
    without,
)


def _each(forms: list[str], fast: str) -> list[Any]:
    return [
        pytest.param(form, engine, marks=() if (form, engine) == (fast, "shard_map") else pytest.mark.slow)
        for form in forms
        for engine in ENGINES
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "engine"), _each(WEIGHTS_ONLY, "params"))
def test_weights_alone_are_loaded(tmp_path: Path, form: str, engine: str) -> None:
    program = trained(clipped())
    path = save(tmp_path / "c", FORMS[form](program))
    variables = variable_leaves(Net())
    loaded = load_checkpoint(path, plan_of(engine), variables=variables)
    assert loaded.state.opt_state is None
    assert len(loaded.fresh) == (0 if form == "nnx state" else 2)
    program.forget()
    state = init_state(plan_of(engine), loaded.state.weights, clipped(), loaded.state.variables)
    assert_goes_on_as(program, LoadedCheckpoint(state, {}, {}), engine, clipped())
    # The same in one call: moments are fresh ones.
    whole = load_checkpoint(path, plan_of(engine), clipped(), strict=False, variables=variables)
    for leaf, expected in zip(
        jax.tree.leaves(whole.state.opt_state),
        jax.tree.leaves(init_state(plan_of(engine), whole.state.weights, clipped(), variables).opt_state),
        strict=True,
    ):
        assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
        np.testing.assert_array_equal(leaf, expected)
    assert {name for name in whole.fresh if "variables" not in name} >= {
        "opt_state/1/0/count",
        "opt_state/1/0/mu/blocks/1/kernel",
    }
    with pytest.raises(CheckpointError, match=r"strict=False.*Missing: .*opt_state/1/0/count"):
        load_checkpoint(path, plan_of(engine), clipped(), variables=variables)


@pytest.mark.parametrize(("form", "engine"), _each(WITH_OPTIMIZER, "nnx model and optimizer"))
def test_weights_and_moments_are_loaded(tmp_path: Path, form: str, engine: str) -> None:
    program = trained(clipped())
    path = save(tmp_path / "c", FORMS[form](program))
    loaded = load_checkpoint(path, plan_of(engine), clipped(), variables=variable_leaves(Net()))
    assert loaded.train == {"step": 2}
    assert all(name.startswith("variables/") for name in loaded.fresh)
    assert loaded.ignored == ()
    assert_goes_on_as(program, loaded, engine, clipped())


# Optimizers of whole parameters, of other trees than the model's, and with weights of their own.
FURTHER: dict[str, Any] = {
    "muon": lambda: optax.contrib.muon(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "decay of matrices": lambda: optax.adamw(
        **ADAMW, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    ),
    "several steps": lambda: optax.MultiSteps(optax.adamw(**ADAMW), 2).gradient_transformation(),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer_name", FURTHER)
def test_states_of_other_optimizers_are_loaded(tmp_path: Path, optimizer_name: str, engine: str) -> None:
    optimizer = FURTHER[optimizer_name]()
    program = trained(optimizer)
    path = save(tmp_path / "c", flax_train_state(program))
    for strict in (False, True):
        loaded = load_checkpoint(
            path, plan_of(engine), optimizer, strict=strict, variables=variable_leaves(Net())
        )
        assert all(name.startswith("variables/") for name in loaded.fresh)
        assert loaded.ignored == ()
    assert_goes_on_as(program, loaded, engine, optimizer)


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(linen.Dense(WIDTH)(x))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = Block()(x)
        return linen.Dense(5)(x)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_linen_program_goes_on(tmp_path: Path, engine: str) -> None:
    net = LinenNet()

    def linen_loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((apply_linen(net, {"params": params}, x) - 0.5) ** 2)

    def alone(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((net.apply({"params": params}, x) - 0.5) ** 2)

    @jax.jit
    def train(state: FlaxTrainState, x: jax.Array) -> tuple[FlaxTrainState, jax.Array]:
        value, gradients = jax.value_and_grad(alone)(state.params, x)
        return state.apply_gradients(grads=gradients), value

    params = net.init(jax.random.key(2), rows(0))["params"]
    state = FlaxTrainState.create(apply_fn=net.apply, params=params, tx=clipped())
    for seed in range(2):
        state, _ = train(state, rows(seed))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(2, args=ocp.args.StandardSave(state))
    plan, _ = fully_shard(params, data_parallel_mesh(4), units=["Block_*"], engine=engine)
    loaded = load_checkpoint(tmp_path, plan, clipped())
    assert (loaded.train, loaded.fresh, loaded.ignored) == ({"step": 2}, (), ())
    whole = plan.merge(unshard(plan, loaded.state.weights))
    np.testing.assert_array_equal(
        net.apply({"params": whole}, rows(9)), net.apply({"params": state.params}, rows(9))
    )
    step, sharded = make_train_step(plan, linen_loss, clipped()), loaded.state
    for seed in range(2, 2 + STEPS):
        sharded, metrics = step(sharded, rows(seed))
        state, value = train(state, rows(seed))
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)


def test_variables_that_a_checkpoint_has_are_its_own(tmp_path: Path) -> None:
    program = trained(adamw())
    program.model.dropout.rngs.count[...] = jnp.uint32(7)
    path = save(tmp_path / "c", nnx.state(program.model))
    loaded = load_checkpoint(path, plan_of("shard_map"), variables=variable_leaves(Net()))
    assert int(loaded.state.variables["dropout/rngs/count"]) == 7
    assert loaded.fresh == ()
    key = variable_leaves(program.model)["dropout/rngs/key"]
    loaded_key = loaded.state.variables["dropout/rngs/key"]
    np.testing.assert_array_equal(jax.random.key_data(loaded_key), jax.random.key_data(key))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    program, plan = trained(adamw()), plan_of("shard_map")
    variables = variable_leaves(Net())
    parameters = save(tmp_path / "a", {"params": program.parameters})
    for strict in (True, False):
        with pytest.raises(
            CheckpointError, match=r"variables=jax_impl.variable_leaves\(model\) supplies .*variables/dropout"
        ):
            load_checkpoint(parameters, plan, strict=strict)
    fewer = save(tmp_path / "b", {"params": without(program.parameters, "head", "kernel")})
    changed = {**program.parameters, "head": {"kernel": jnp.zeros((WIDTH, 4))}}
    other = save(tmp_path / "c", {"params": changed})
    for strict in (True, False):
        with pytest.raises(
            CheckpointError,
            match=r"optimizer\. strict=False with initial=state .*Missing: params/head/kernel; unexpected",
        ):
            load_checkpoint(fewer, plan, strict=strict, variables=variables)
        with pytest.raises(CheckpointError, match=r"another shape .*head/kernel \(expected \(12, 5\), got"):
            load_checkpoint(other, plan, strict=strict, variables=variables)
    more = save(tmp_path / "d", {"params": program.parameters, "ema": program.parameters})
    with pytest.raises(CheckpointError, match=r"strict=False, .*unexpected: ema/blocks/0/bias"):
        load_checkpoint(more, plan, variables=variables)
    ignored = load_checkpoint(more, plan, strict=False, variables=variables).ignored
    assert len(ignored) == 5
    assert all(name.startswith("ema/") for name in ignored)
    with pytest.raises(ValueError, match="variables: expected"):
        load_checkpoint(parameters, plan, variables={})
