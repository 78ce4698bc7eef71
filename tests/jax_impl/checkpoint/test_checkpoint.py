"""Checkpoints of sharded train states: names, refusals, atomicity, and both directions with stock Orbax."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

from bridge.core.formats import Box, CheckpointError, create_checkpoint, open_checkpoint
from jax_impl import (
    data_parallel_mesh,
    init_state,
    load_checkpoint,
    plan_sharding,
    save_checkpoint,
    unshard,
)
from tests.support.jax_impl import checkpoint_runs as runs
from tests.support.jax_impl.tiny import decoder

TRAIN = {
    "step": 3,
    "data": {"seed": 2**40 + 5, "negative": -(2**63), "sha": np.arange(32, dtype=np.uint8)},
    "noise": np.array([[0.5, -0.0], [np.nan, 3.0]]),
}
OBJECTS = {
    ("optimizer", "param_groups", 0, "lr"): 1e-3 / 3,
    ("optimizer", "param_groups", 0, "betas"): (0.9, 0.95),
    ("optimizer", "param_groups", 0, "params"): ["embed.weight", "norm.weight"],
    ("optimizer", "param_groups", 0, "foreach"): None,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint of three devices after one step, in small chunks, and its tensors."""
    path, plan = tmp_path_factory.mktemp("saved") / "c", runs.plan_of(3)
    state, _ = runs.train(runs.fresh(3), 3, runs.DEFAULT, first=0, count=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.core.formats.orbax.zarr.chunks._CHUNK", 300)
        save_checkpoint(path, plan, state, TRAIN, objects=OBJECTS)
    return path, runs.logical(plan, state)


def test_tensors_are_logical_and_named_by_parameter(saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, expected = saved
    parameters = runs.plan_of(3).parameters
    with open_checkpoint(path) as reader:
        names = {name for name in reader.tensors if not name.startswith("train/")}
        assert names == {
            "opt_state/count",
            *(f"{prefix}/{p}" for prefix in ("params", "opt_state/mu", "opt_state/nu") for p in parameters),
        }
        assert reader.tensors["params/layers/0/attention/query/kernel"].shape == (13, 4, 6)
        assert reader.tensors["opt_state/count"].dtype == np.int32
        assert len(reader.tensors["params/layers/0/mlp/down/kernel"].chunks) > 2
        runs.assert_same_bits({name: reader.read(name) for name in names}, expected)
        moments = [reader.read(f"opt_state/{moment}/norm/scale") for moment in ("mu", "nu")]
        assert not np.array_equal(*moments)


@pytest.mark.parametrize("api", ["v0", "v1"])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_stock_orbax_restores_it_onto_any_number_of_devices(
    saved: tuple[Path, dict[str, np.ndarray]], api: str, devices: int
) -> None:
    path, expected = saved
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))

    def like(value: Any) -> Any:
        value = np.asarray(value)
        axis = next((a for a, n in enumerate(value.shape) if n % devices == 0), None)
        spec = PartitionSpec(*(None,) * axis, "x") if axis is not None else PartitionSpec()
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec))

    train = {
        "step": np.asarray(3),
        "data": {k: np.asarray(v) for k, v in TRAIN["data"].items()},
        "noise": TRAIN["noise"],
    }
    target = jax.tree.map(like, runs.nested(expected)) | {"train": train}
    if api == "v0":
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(path, target)
    else:
        restored = v1.load(path, target)
    stock = {"/".join(key.key for key in keys): value for keys, value in jax.tree.leaves_with_path(restored)}
    assert stock["train/data/seed"] == 2**40 + 5
    runs.assert_same_bits({name: stock[name] for name in expected}, expected)


def test_a_tree_that_stock_orbax_saved_is_loaded(
    saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    _, expected = saved
    tree = runs.nested(expected) | {"train": {"step": 3, "seed": 2**40}}
    mesh = Mesh(np.array(jax.devices()), ("x",))
    kernel = tree["params"]["layers"]["0"]["attention"]["query"]
    kernel["kernel"] = jax.device_put(kernel["kernel"], NamedSharding(mesh, PartitionSpec()))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "v0", tree)
    v1.save(tmp_path / "v1", tree)
    for name in ("v0", "v1"):
        for devices in (1, 4):
            loaded = load_checkpoint(tmp_path / name, runs.plan_of(devices), runs.OPTIMIZER)
            runs.assert_same_bits(runs.logical(runs.plan_of(devices), loaded.state), expected)
            assert loaded.train == {"step": 3, "seed": 2**40}


def test_train_values_and_objects_come_back_as_given(
    saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    path, _ = saved
    plan = runs.plan_of(2)
    loaded = load_checkpoint(path, plan, runs.OPTIMIZER)
    save_checkpoint(tmp_path / "again", plan, loaded.state, loaded.train, objects=loaded.objects)
    for again in (loaded, load_checkpoint(tmp_path / "again", plan, runs.OPTIMIZER)):
        assert list(again.train) == ["step", "data", "noise"]
        assert {k: v for k, v in again.train["data"].items() if k != "sha"} == {
            "seed": 2**40 + 5,
            "negative": -(2**63),
        }
        assert type(again.train["step"]) is int
        assert again.train["data"]["sha"].tolist() == list(range(32))
        assert again.train["noise"].tobytes() == TRAIN["noise"].tobytes()
        assert again.objects == OBJECTS
        assert type(again.objects["optimizer", "param_groups", 0, "betas"]) is tuple


@pytest.mark.parametrize(
    ("train", "name"),
    [
        ({"step": 2**63}, "train/step"),
        ({"data": {"lr": 0.5}}, "train/data/lr"),
        ({"flag": True}, "train/flag"),
        ({"name": "text"}, "train/name"),
        ({"data": {}}, "train/data"),
        ({"a/b": 1}, "train/a/b"),
        ({3: 1}, "train/3"),
        ({"": 1}, "train/"),
    ],
)
def test_train_values_that_cannot_be_kept_are_refused(
    tmp_path: Path, train: dict[Any, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        save_checkpoint(tmp_path / "c", runs.plan_of(1), runs.fresh(1), train)
    assert list(tmp_path.iterdir()) == []


def test_objects_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="object 'optimizer/lr'"):
        save_checkpoint(
            tmp_path / "c", runs.plan_of(1), runs.fresh(1), objects={("optimizer", "lr"): np.float32(1)}
        )
    with pytest.raises(CheckpointError, match="collide"):
        save_checkpoint(tmp_path / "c", runs.plan_of(1), runs.fresh(1), objects={("params",): 1})
    assert list(tmp_path.iterdir()) == []


def test_weights_alone_can_be_loaded(saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, expected = saved
    plan = runs.plan_of(2)
    loaded = load_checkpoint(path, plan)
    assert loaded.state.opt_state is None
    weights = {f"params/{p}": v for p, v in unshard(plan, loaded.state.weights).items()}
    runs.assert_same_bits(weights, {name: v for name, v in expected.items() if name.startswith("params/")})
    runs.train(init_state(plan, loaded.state.weights, runs.OPTIMIZER), 2, runs.DEFAULT, first=0, count=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 2}, r"Missing: params/layers/1/.* and 22 more; unexpected: none"),
        ({"tied": True}, r"Missing: none; unexpected: .*lm_head/kernel"),
        (
            {"d_ff": 20},
            r"another shape .*params/layers/0/mlp/down/kernel \(expected \(20, 13\), got \(19, 13\)\)",
        ),
        ({"head_dim": 4}, r"another shape .*query/kernel \(expected \(13, 4, 4\), got \(13, 4, 6\)\)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_differences(
    saved: tuple[Path, dict[str, np.ndarray]], changes: dict[str, Any], message: str
) -> None:
    config = dataclasses.replace(runs.CONFIG_OF_RUNS, **changes)
    plan = plan_sharding(nnx.eval_shape(lambda: decoder(config)), data_parallel_mesh(2))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved[0], plan, runs.OPTIMIZER)


def test_a_checkpoint_of_another_optimizer_is_refused(saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    with pytest.raises(CheckpointError, match=r"Missing: none; unexpected: .*opt_state/"):
        load_checkpoint(saved[0], runs.plan_of(2), optax.sgd(0.1))
    with pytest.raises(CheckpointError, match=r"Missing: opt_state/0/trace/.*; unexpected: .*opt_state/"):
        load_checkpoint(saved[0], runs.plan_of(2), optax.sgd(0.1, momentum=0.9))


def test_tensors_of_another_dtype_are_refused_rather_than_cast(
    saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    _, expected = saved
    for name, dtype in (("params/norm/scale", np.float16), ("opt_state/count", np.int64)):
        changed = expected | {name: expected[name].astype(dtype)}
        path = tmp_path / name.replace("/", "-")
        with create_checkpoint(path, "orbax") as writer:
            for key, value in changed.items():
                for box in writer.add_tensor(key, value.shape, value.dtype).chunks:
                    writer.write(key, box, value[box.slices()])
        was, now = expected[name].dtype, np.dtype(dtype)
        with pytest.raises(CheckpointError, match=rf"another dtype .*{name} \(expected {was}, got {now}\)"):
            load_checkpoint(path, runs.plan_of(2), runs.OPTIMIZER)


def test_other_tensors_beside_the_state_are_refused(
    saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    for extra in ("ema/norm/scale", "train"):
        path = tmp_path / extra.replace("/", "-")
        with create_checkpoint(path, "orbax") as writer:
            for key, value in (saved[1] | {extra: np.zeros(2)}).items():
                for box in writer.add_tensor(key, value.shape, value.dtype).chunks:
                    writer.write(key, box, value[box.slices()])
        with pytest.raises(CheckpointError, match=f"unexpected: {extra}$"):
            load_checkpoint(path, runs.plan_of(2), runs.OPTIMIZER)


def test_a_checkpoint_of_the_other_format_or_none_is_refused(tmp_path: Path) -> None:
    plan = runs.plan_of(1)
    with create_checkpoint(tmp_path / "dcp", "dcp") as writer:
        info = writer.add_tensor(("model", "w"), (2,), np.dtype(np.float32))
        writer.write(info.name, Box((0,), (2,)), np.ones(2, np.float32))
    with pytest.raises(CheckpointError, match=r"A dcp checkpoint from another framework .*twinshard convert"):
        load_checkpoint(tmp_path / "dcp", plan)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "nothing", plan)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        load_checkpoint(tmp_path / "file", plan)


def test_damaged_data_is_refused(saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path / "c")
    file = max((tmp_path / "c" / "d").iterdir(), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"cannot (read|list)|checksum mismatch"):
        load_checkpoint(tmp_path / "c", runs.plan_of(2), runs.OPTIMIZER)


def test_an_existing_destination_is_refused(saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    before = {file: file.read_bytes() for file in saved[0].rglob("*") if file.is_file()}
    with pytest.raises(FileExistsError):
        save_checkpoint(saved[0], runs.plan_of(1), runs.fresh(1))
    assert {file: file.read_bytes() for file in saved[0].rglob("*") if file.is_file()} == before
    assert [child.name for child in saved[0].parent.iterdir()] == ["c"]


def test_a_state_of_another_plan_or_used_up_leaves_nothing_behind(tmp_path: Path) -> None:
    plan, state = runs.plan_of(2), runs.fresh(2)
    with pytest.raises(ValueError, match=r"(expected shape|sharding)"):
        save_checkpoint(tmp_path / "c", runs.plan_of(3), state)
    with pytest.raises(ValueError, match=r"weights: expected \['layers/0', ''\], got \[''\]"):
        save_checkpoint(tmp_path / "c", plan, dataclasses.replace(state, weights={"": state.weights[""]}))
    runs.train(state, 2, runs.DEFAULT, first=0, count=1)
    with pytest.raises(ValueError, match="donated"):
        save_checkpoint(tmp_path / "c", plan, state)
    assert list(tmp_path.iterdir()) == []


def test_a_process_without_devices_of_the_mesh_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = runs.fresh(1)
    monkeypatch.setattr(jax, "process_index", lambda *_: 2)
    expected = r"expected a call on a process that has devices of the mesh, one of \(0,\), got process 2"
    with pytest.raises(ValueError, match=expected):
        save_checkpoint(tmp_path / "c", runs.plan_of(1), state)
    with pytest.raises(ValueError, match=expected):
        load_checkpoint(tmp_path / "c", runs.plan_of(1))
    assert list(tmp_path.iterdir()) == []
