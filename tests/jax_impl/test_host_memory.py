"""Train states in the host's memory: trained, saved, counted and loaded like states on the device."""

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

from jax_impl import (
    TrainState,
    abstract_state,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    make_train_step,
    memory_report,
    save_checkpoint,
    unshard,
    variable_leaves,
)
from tests.support.jax_impl.zoo import Chain

HOST = "pinned_host"
DEVICE = jax.devices()[0].default_memory().kind
SIZE = 8
IS_OLD = jax.__version_info__ < (0, 10, 2)
needs_moves = pytest.mark.skipif(IS_OLD, reason="the CPU compiler moves no arrays between memories")


def model_of() -> Chain:
    """Two layers with batch statistics, random streams and a frozen kernel."""
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(SIZE, SIZE, rngs=rngs) for _ in range(2)]
    after = {"norm": nnx.BatchNorm(SIZE, rngs=rngs), "dropout": nnx.Dropout(0.0, rngs=rngs)}
    return Chain(layers, between=jnp.tanh, **after)


def loss(model: Chain, rows: Any) -> jax.Array:
    return jnp.mean((model(rows[0]) - rows[1]) ** 2)


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(1)
    return [tuple(rng.standard_normal((8, SIZE)).astype(np.float32) for _ in range(2)) for _ in range(count)]


def sharded(engine: str, devices: int = 4) -> Any:
    return fully_shard(model_of(), data_parallel_mesh(devices), engine=engine, frozen=["layers/0/kernel"])


def state_of(plan: Any, weights: Any, optimizer: Any) -> TrainState:
    return init_state(plan, weights, optimizer, variable_leaves(model_of()))


def on_host(tree: Any) -> Any:
    """But for random keys: JAX returns those on the device from every program."""
    return jax.tree.map(
        lambda x: x if is_key(x) else jax.device_put(x, x.sharding.with_memory_kind(HOST)), tree
    )


def is_key(x: jax.Array) -> bool:
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def moments_on_host(state: TrainState) -> TrainState:
    return TrainState(state.weights, on_host(state.opt_state), state.variables)


def memory_kinds(tree: Any) -> list[str]:
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


def numbers(tree: Any) -> list[np.ndarray]:
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def assert_equal(state: Any, expected: Any) -> None:
    for mine, theirs in zip(numbers(state), numbers(expected), strict=True):
        np.testing.assert_array_equal(mine, theirs)


OPTIMIZERS = {"main weights": lambda: main_weight_adamw(0.01), "muon": lambda: optax.contrib.muon(0.01)}


@needs_moves
@pytest.mark.parametrize(
    ("engine", "name", "move"),
    [
        ("shard_map", "main weights", on_host),
        pytest.param("pjit", "muon", moments_on_host, marks=pytest.mark.slow),
        pytest.param("shard_map", "muon", moments_on_host, marks=pytest.mark.slow),
        pytest.param("pjit", "main weights", on_host, marks=pytest.mark.slow),
    ],
)
def test_a_state_on_the_host_trains_there_to_the_same_bits_and_is_saved_and_loaded(
    tmp_path: Path, engine: str, name: str, move: Any
) -> None:
    optimizer = OPTIMIZERS[name]()
    plan, weights = sharded(engine)
    expected = state_of(plan, weights, optimizer)
    state = move(expected)
    step = make_train_step(plan, loss, optimizer, donate=False)
    for batch in batches(2):
        expected, wanted = step(expected, batch)
        state, metrics = step(state, batch)
        assert metrics["loss"] == wanted["loss"]
    assert_equal(state, expected)
    assert memory_kinds(state) == memory_kinds(move(expected))
    assert set(memory_kinds(expected)) == {DEVICE}

    save_checkpoint(tmp_path / "a", plan, state)
    loaded = load_checkpoint(tmp_path / "a", plan, optimizer, like=state).state
    assert_equal(loaded, expected)
    assert memory_kinds(loaded) == memory_kinds(state)
    assert set(memory_kinds(load_checkpoint(tmp_path / "a", plan, optimizer).state)) == {DEVICE}

    further, _ = step(loaded, batches(3)[2])
    assert memory_kinds(further) == memory_kinds(state)
    assert_equal(further, step(expected, batches(3)[2])[0])
    assert_equal(unshard(plan, state.weights), unshard(plan, expected.weights))


@needs_moves
def test_an_abstract_state_says_where_arrays_are_loaded_on_other_devices(tmp_path: Path) -> None:
    optimizer = main_weight_adamw(0.01)
    plan, weights = sharded("shard_map")
    state = state_of(plan, weights, optimizer)
    save_checkpoint(tmp_path / "a", plan, state)
    other, _ = sharded("pjit", 2)
    like = abstract_state(other, optimizer)
    like = TrainState(
        {
            key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(HOST))
            for key, x in like.weights.items()
        },
        like.opt_state,
        like.variables,
    )
    loaded = load_checkpoint(tmp_path / "a", other, optimizer, like=like).state
    assert set(memory_kinds(loaded.weights)) == {HOST}
    assert set(memory_kinds((loaded.opt_state, loaded.variables))) == {DEVICE}
    weights_only = load_checkpoint(tmp_path / "a", other, like=like).state
    assert set(memory_kinds(weights_only.weights)) == {HOST}
    step = make_train_step(other, loss, optimizer)
    after, _ = step(loaded, batches(1)[0])
    assert set(memory_kinds(after.weights)) == {HOST}
    assert_equal(after, step(load_checkpoint(tmp_path / "a", other, optimizer).state, batches(1)[0])[0])
    with pytest.raises(ValueError, match="like: expected a state of the same plan and optimizer"):
        load_checkpoint(tmp_path / "a", plan, optimizer, like=like)


@needs_moves
@pytest.mark.slow
def test_a_program_around_the_steps_keeps_the_memory_of_its_state() -> None:
    optimizer = optax.adam(0.01)
    plan, weights = sharded("shard_map")
    state = state_of(plan, weights, optimizer)
    step = make_train_step(plan, loss, optimizer, donate=False)
    rows = jax.tree.map(lambda *x: np.stack(x), *batches(2))
    scanned = jax.jit(lambda state: jax.lax.scan(step, state, rows))
    moved = moments_on_host(state)
    after, metrics = scanned(moved)
    expected, wanted = scanned(state)
    np.testing.assert_array_equal(metrics["loss"], wanted["loss"])
    assert_equal(after, expected)
    assert memory_kinds(after) == memory_kinds(moved)


def test_bytes_on_the_host_are_no_bytes_of_the_device() -> None:
    plan, weights = sharded("shard_map")
    state = state_of(plan, weights, optax.adam(0.01))
    before = memory_report(plan, state)
    after = memory_report(plan, moments_on_host(state))
    assert "host" not in str(before)
    assert "host" in str(after)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
    for mine, theirs in zip(after.devices, before.devices, strict=True):
        assert (mine.moments, mine.main_weights) == (0, theirs.main_weights)
        assert mine.host == held
        assert mine.total + mine.host == theirs.total


@needs_moves
def test_moments_are_born_on_the_device_from_weights_on_the_host() -> None:
    plan, weights = sharded("shard_map")
    state = state_of(plan, on_host(weights), optax.contrib.schedule_free_adamw(0.01))
    assert set(memory_kinds(state.weights)) == {HOST}
    assert set(memory_kinds(state.opt_state)) == {DEVICE}


@pytest.mark.skipif(not IS_OLD, reason="the CPU compiler moves arrays between memories")
def test_what_old_versions_cannot_do_is_said() -> None:
    plan, weights = sharded("shard_map")
    optimizer = optax.adam(0.01)
    state = moments_on_host(state_of(plan, weights, optimizer))
    with pytest.raises(
        ValueError, match=r"in the host's memory need jax 0\.10\.2 or later in a step, got 0\.10"
    ):
        make_train_step(plan, loss, optimizer)(state, batches(1)[0])
