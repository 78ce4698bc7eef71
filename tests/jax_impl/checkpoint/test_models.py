"""Checkpoints of models with stacks, frozen parameters, and variables that are no parameters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

from bridge.core.formats import CheckpointError, open_checkpoint
from jax_impl import (
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    plan_sharding,
    save_checkpoint,
    variable_leaves,
)
from jax_impl.checkpoint import contents as checkpoint_contents
from jax_impl.checkpoint.matching import trees_of_weights
from tests.support.jax_impl import checkpoint_runs as runs
from tests.support.jax_impl.tiny import CONFIG, decoder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint of a model with frozen parameters, a stack and variables, and its tensors."""
    path, case = tmp_path_factory.mktemp("mixed") / "c", (4, runs.DEFAULT, "shard_map", "mixed")
    state, _ = runs.train(runs.fresh(*case), *case, first=0, count=1)
    save_checkpoint(path, runs.plan_of(*case), state)
    return path, runs.logical(runs.plan_of(*case), state)


def test_frozen_parameters_have_no_moments_and_variables_are_numbers(
    mixed: tuple[Path, dict[str, np.ndarray]],
) -> None:
    path, expected = mixed
    frozen = {"embed/embedding", "layers/linear/bias"}
    with open_checkpoint(path) as reader:
        runs.assert_same_bits({name: reader.read(name) for name in reader.tensors}, expected)
        names = {
            prefix: {n.removeprefix(f"{prefix}/") for n in reader.tensors if n.startswith(f"{prefix}/")}
            for prefix in ("params", "opt_state/mu", "opt_state/nu", "variables")
        }
        assert names["params"] - names["opt_state/mu"] == frozen
        assert names["opt_state/mu"] == names["opt_state/nu"]
        assert names["variables"] == set(variable_leaves(runs.model("mixed")))
        assert reader.tensors["params/layers/linear/kernel"].shape == (3, 12, 12)
        key = reader.read("variables/dropout/rngs/key")
        assert (key.dtype, key.shape) == (np.uint32, (2,))
        assert (
            key.tolist()
            == jax.random.key_data(variable_leaves(runs.model("mixed"))["dropout/rngs/key"]).tolist()
        )
        assert reader.read("variables/dropout/rngs/count") == 1
        assert (reader.read("variables/norm/mean") != 0).all()
    stock = {"/".join(k.key for k in keys): v for keys, v in jax.tree.leaves_with_path(v1.load(path))}
    runs.assert_same_bits(stock, expected)


def test_a_loaded_random_key_is_a_key_again(mixed: tuple[Path, dict[str, np.ndarray]]) -> None:
    plan = runs.plan_of(2, "optim", "pjit", "mixed")
    loaded = load_checkpoint(mixed[0], plan, runs.OPTIMIZER)
    key = loaded.state.variables["dropout/rngs/key"]
    assert key.sharding == plan.replicated
    assert jax.random.bits(key) == jax.random.bits(variable_leaves(runs.model("mixed"))["dropout/rngs/key"])
    assert loaded.objects == {}
    weights_only = load_checkpoint(mixed[0], plan)
    assert weights_only.state.variables.keys() == plan.variables.keys()


class Noisy(nnx.Module):
    def __init__(self, impl: str) -> None:
        self.weight = nnx.Param(jnp.ones(3))
        self.streams = nnx.RngKey(jax.random.split(jax.random.key(3, impl=impl), 4), tag="noise")


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_of_another_algorithm_are_refused(tmp_path: Path, impl: str) -> None:
    optimizer, saver = optax.sgd(0.1), Noisy(impl)
    plan, weights = fully_shard(saver, data_parallel_mesh(2), units=())
    state = init_state(plan, weights, optimizer, variable_leaves(saver))
    save_checkpoint(tmp_path / "c", plan, state)
    for other in ("threefry2x32", "rbg", "unsafe_rbg"):
        target = plan_sharding(Noisy(other), data_parallel_mesh(1), units=())
        if other == impl:
            streams = load_checkpoint(tmp_path / "c", target, optimizer).state.variables["streams"]
            assert streams.dtype == saver.streams.get_raw_value().dtype
            np.testing.assert_array_equal(
                jax.random.key_data(streams), jax.random.key_data(saver.streams[...])
            )
            continue
        with pytest.raises(CheckpointError, match=rf"streams \(expected .*{other}|another shape .*streams"):
            load_checkpoint(tmp_path / "c", target, optimizer)


def test_random_keys_that_others_saved_are_loaded_when_their_size_fits(
    mixed: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", runs.nested(mixed[1]))
    plan = runs.plan_of(2, "optim", "pjit", "mixed")
    runs.assert_same_bits(
        runs.logical(plan, load_checkpoint(tmp_path / "c", plan, runs.OPTIMIZER).state), mixed[1]
    )


def test_variables_that_are_missing_or_too_many_are_refused(
    mixed: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    plan = runs.plan_of(2, "optim", "pjit", "mixed")
    loaded = load_checkpoint(mixed[0], plan, runs.OPTIMIZER).state
    fewer = {path: value for path, value in loaded.variables.items() if path != "norm/mean"}
    with pytest.raises(ValueError, match=r"variables: expected .*'norm/mean'"):
        save_checkpoint(tmp_path / "c", plan, dataclasses.replace(loaded, variables=fewer))
    assert list(tmp_path.iterdir()) == []
    split = jax.device_put(np.zeros(12, np.float32), NamedSharding(plan.mesh, PartitionSpec("dp")))
    changed = dataclasses.replace(loaded, variables={**loaded.variables, "norm/mean": split})
    with pytest.raises(ValueError, match=r"'norm/mean': expected shape .*, whole on every device"):
        save_checkpoint(tmp_path / "c", plan, changed)
    assert list(tmp_path.iterdir()) == []
    tree = {name: value for name, value in mixed[1].items() if name != "variables/norm/mean"}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", runs.nested(tree))
    with pytest.raises(CheckpointError, match="Missing: variables/norm/mean; unexpected: none"):
        load_checkpoint(tmp_path / "c", plan, runs.OPTIMIZER)
    tree = mixed[1] | {"variables/norm/var": np.zeros(12, np.float64)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "d", runs.nested(tree))
    with pytest.raises(
        CheckpointError, match=r"another dtype .*variables/norm/var \(expected float32, got float64"
    ):
        load_checkpoint(tmp_path / "d", plan, runs.OPTIMIZER)


def test_a_stack_is_another_tree_than_its_layers(tmp_path: Path) -> None:
    plan, weights = fully_shard(runs.model("stacked"), data_parallel_mesh(2), stacked=["layers"])
    save_checkpoint(tmp_path / "c", plan, init_state(plan, weights, runs.OPTIMIZER))
    unrolled = plan_sharding(nnx.eval_shape(lambda: decoder(CONFIG)), data_parallel_mesh(2))
    with pytest.raises(CheckpointError, match=r"Missing: params/layers/0/.*; unexpected: params/layers/att"):
        load_checkpoint(tmp_path / "c", unrolled, runs.OPTIMIZER)


def test_layers_of_a_stack_leave_a_device_one_at_a_time(
    mixed: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, taken = runs.plan_of(4, "optim", "shard_map", "mixed"), []
    shards = {(plan.arrays[key].shape[1] // 4,) for key in ("layers", "layers (frozen)")}
    state = load_checkpoint(mixed[0], plan, runs.OPTIMIZER).state

    class Layers(checkpoint_contents._Layers):
        def __getitem__(self, index: tuple[int, slice]) -> np.ndarray:
            values = super().__getitem__(index)
            assert self._values.shape in shards
            taken.append(index[0])
            return values

    monkeypatch.setattr(checkpoint_contents, "_Layers", Layers)
    monkeypatch.setattr(checkpoint_contents, "is_simulated", lambda mesh: False)
    save_checkpoint(tmp_path / "c", plan, state)
    assert set(taken) == {0, 1, 2}
    with open_checkpoint(tmp_path / "c") as reader:
        runs.assert_same_bits({name: reader.read(name) for name in reader.tensors}, mixed[1])


def test_trees_of_weights_have_more_than_half_of_the_most() -> None:
    parameters = ["a/w", "a/b", "c/w", "c/b"]
    whole = [f"student/{path}/value" for path in parameters]
    half, most = ([f"{tree}/{path}" for path in parameters[:count]] for tree, count in (("x", 2), ("y", 3)))
    states = [f"opt_state/mu/{path}" for path in parameters]
    assert trees_of_weights([*whole, *half, *most, *states, "step"], parameters) == ["student", "y"]
    assert trees_of_weights(parameters, parameters) == [""]
    assert trees_of_weights(["step"], parameters) == []
