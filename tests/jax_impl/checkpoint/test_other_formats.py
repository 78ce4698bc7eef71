"""Our checkpoints in DCP and safetensors, loaded straight into shards; other names are refused with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.core.formats import CheckpointError
from jax_impl import (
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    make_train_step,
    plan_sharding,
    save_checkpoint,
    unshard,
)
from tests.jax_impl.test_losses import batch, pair, parameters, sharded

OPTIMIZER = main_weight_adamw(1e-2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A state after two steps, as Orbax, DCP and safetensors."""
    folder = tmp_path_factory.mktemp("formats")
    plan, weights = sharded("shard_map", 4)
    state = init_state(plan, weights, OPTIMIZER)
    step = make_train_step(plan, pair, OPTIMIZER, donate=False)
    for number in range(2):
        state, _ = step(state, batch(number))
    save_checkpoint(folder / "orbax", plan, state, {"step": 2})
    convert(folder / "orbax", folder / "dcp", to="dcp")
    convert(folder / "orbax", folder / "one.safetensors", to="safetensors")
    convert(
        folder / "orbax",
        folder / "weights.safetensors",
        to="safetensors",
        selection=Selection(weights_only=True),
    )
    return folder, step(state, batch(2))


@pytest.mark.parametrize("name", ["dcp", "one.safetensors"])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_a_run_goes_on_from_any_format(saved: Any, name: str, engine: str) -> None:
    folder, (expected, metrics) = saved
    shapes = jax.eval_shape(parameters)
    plan = plan_sharding(shapes, data_parallel_mesh(2), units=["layers/*"], engine=engine)
    loaded = load_checkpoint(folder / name, plan, OPTIMIZER)
    assert loaded.train == {"step": 2}
    state, resumed = make_train_step(plan, pair, OPTIMIZER)(loaded.state, batch(2))
    np.testing.assert_allclose(resumed["loss"], metrics["loss"], rtol=1e-6)
    assert int(state.opt_state.count) == int(expected.opt_state.count) == 3
    for key, value in unshard(plan, state.weights).items():
        reference = unshard(sharded("shard_map", 4)[0], expected.weights)[key]
        np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-6)


def test_weights_alone_come_from_a_file_of_weights(saved: Any) -> None:
    folder, _ = saved
    plan, _ = fully_shard(parameters(), data_parallel_mesh(4), units=["layers/*"])
    loaded = load_checkpoint(folder / "weights.safetensors", plan)
    whole = load_checkpoint(folder / "orbax", plan)
    for key in plan.arrays:
        np.testing.assert_array_equal(loaded.state.weights[key], whole.state.weights[key])
    with pytest.raises(CheckpointError, match=r"opt_state/count.*twinshard convert"):
        load_checkpoint(folder / "weights.safetensors", plan, OPTIMIZER)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_weights_in_another_dtype_are_cast_if_asked_for(saved: Any, tmp_path: Path, engine: str) -> None:
    folder, _ = saved
    half = tmp_path / "half.safetensors"
    convert(folder / "weights.safetensors", half, to="safetensors", casts=["*=bfloat16"])
    plan, _ = fully_shard(parameters(), data_parallel_mesh(4), units=["layers/*"], engine=engine)
    with pytest.raises(CheckpointError, match=r"expected float32, got bfloat16.*strict=False casts"):
        load_checkpoint(half, plan)
    weights = load_checkpoint(half, plan, strict=False).state.weights
    whole = unshard(plan, load_checkpoint(folder / "orbax", plan).state.weights)
    for path, value in unshard(plan, weights).items():
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(value, whole[path].astype(jnp.bfloat16).astype(jnp.float32))
    make_train_step(plan, pair, OPTIMIZER)(init_state(plan, weights, OPTIMIZER), batch(3))


def test_names_with_dots_are_paths_and_others_are_refused_with_the_command(tmp_path: Path) -> None:
    plan, weights = fully_shard(parameters(), data_parallel_mesh(2), units=["layers/*"])
    leaves = {"layers.0.w": (3, 8), "layers.0.b": (8,), "head": (8, 1)}
    for path, names in (("flat.safetensors", leaves), ("torch.safetensors", {"model.fc.weight": (8, 3)})):
        save_file({name: np.ones(shape, np.float32) for name, shape in names.items()}, tmp_path / path)
    loaded = load_checkpoint(tmp_path / "flat.safetensors", plan)
    assert all(jnp.max(value) == 1 for value in loaded.state.weights.values())
    assert loaded.state.weights.keys() == weights.keys()
    with pytest.raises(CheckpointError, match=r"Missing: params/head.*twinshard convert SRC DST --to orbax"):
        load_checkpoint(tmp_path / "torch.safetensors", plan)


def test_the_latest_of_several_dcp_steps_is_taken(saved: Any, tmp_path: Path) -> None:
    folder, _ = saved
    for step in (1, 3):
        convert(folder / "orbax", tmp_path / str(step), to="dcp")
    (tmp_path / "4").mkdir()
    plan, _ = fully_shard(parameters(), data_parallel_mesh(2), units=["layers/*"])
    assert load_checkpoint(tmp_path, plan).train == {"step": 2}
    assert load_checkpoint(tmp_path, plan, step=1).train == {"step": 2}
