"""Checkpoints of sharded train states: names, refusals, atomicity, and both directions with stock Orbax."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

from bridge.formats import Box, CheckpointError, create_checkpoint, open_checkpoint
from jax_impl import (
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    make_train_step,
    memory_report,
    plan_sharding,
    save_checkpoint,
    shard_weights,
    unshard,
)
from jax_impl.module_tree import parameter_leaves
from tests.jax_impl import checkpoint_runs as runs
from tests.jax_impl.tiny import CONFIG, decoder, loss, tokens

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


def perturbed(state: Any) -> Any:
    """The state with other values in every buffer, moments too, of which the layout's padding keeps zeros."""
    return jax.tree.map(
        lambda x: (
            jnp.where(x == 0, 0, x + 0.25 * jnp.cos(jnp.arange(x.size, dtype=x.dtype))) if x.ndim else x + 3
        ),
        state,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint of three devices after one step, in small chunks, and its tensors."""
    path, plan = tmp_path_factory.mktemp("saved") / "c", runs.plan_of(3)
    state, _ = runs.train(runs.fresh(3), 3, plan.strategy.name, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.formats.orbax_writer._CHUNK", 300)
        save_checkpoint(path, plan, state, TRAIN, objects=OBJECTS)
    return path, runs.logical(plan, state)


def test_tensors_are_logical_and_named_by_parameter(saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, expected = saved
    parameters = runs.plan_of(3).parameters
    with open_checkpoint(path) as reader:
        names = {name for name in reader.tensors if not name.startswith("train/")}
        assert names == {
            "opt_state/count",
            *(f"{kind}/{p}" for kind in ("params", "opt_state/mu", "opt_state/nu") for p in parameters),
        }
        assert reader.tensors["params/layers/0/attention/query/kernel"].shape == (13, 4, 6)
        assert reader.tensors["opt_state/count"].dtype == np.int32
        assert len(reader.tensors["params/layers/0/mlp/down/kernel"].chunks) > 2
        runs.assert_same_bits({name: reader.read(name) for name in names}, expected)
        moments = [reader.read(f"opt_state/{kind}/norm/scale") for kind in ("mu", "nu")]
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
            found = checkpointer.restore(path, target)
    else:
        found = v1.load(path, target)
    stock = {"/".join(key.key for key in keys): value for keys, value in jax.tree.leaves_with_path(found)}
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
    found = {f"params/{p}": v for p, v in unshard(plan, loaded.state.weights).items()}
    runs.assert_same_bits(found, {name: v for name, v in expected.items() if name.startswith("params/")})
    runs.train(init_state(plan, loaded.state.weights, runs.OPTIMIZER), 2, plan.strategy.name, 0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 2}, r"Missing: params/layers/1/.*, \.\.\. \(27 in all\); unexpected: none"),
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
    with pytest.raises(CheckpointError, match="got a DCP one: convert it"):
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
    with pytest.raises(CheckpointError, match=r"cannot (read|list)"):
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
    with pytest.raises(ValueError, match=r"weights: expected one buffer for each of units"):
        save_checkpoint(tmp_path / "c", plan, dataclasses.replace(state, weights={"": state.weights[""]}))
    runs.train(state, 2, plan.strategy.name, 0, 1)
    with pytest.raises(RuntimeError, match="deleted"):
        save_checkpoint(tmp_path / "c", plan, state)
    assert list(tmp_path.iterdir()) == []


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = runs.fresh(1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="expected a single JAX process, got 2"):
        save_checkpoint(tmp_path / "c", runs.plan_of(1), state)
    with pytest.raises(RuntimeError, match="expected a single JAX process, got 2"):
        load_checkpoint(tmp_path / "c", runs.plan_of(1))
    assert list(tmp_path.iterdir()) == []


OPTIMIZERS = {
    "adamw with bfloat16 mu": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clipped schedule": optax.chain(
        optax.clip(1.0), optax.lion(1e-3), optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 9))
    ),
    "masked": optax.masked(optax.adam(1e-2), {"layers/0": True, "": False}),
    "injected": optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_made_of_flat_buffers_and_numbers_is_kept(tmp_path: Path, kind: str) -> None:
    optimizer, three, two = OPTIMIZERS[kind], runs.plan_of(3), runs.plan_of(2, "optim")
    weights = shard_weights(three, parameter_leaves(runs.model()))
    state = perturbed(init_state(three, weights, optimizer))
    save_checkpoint(tmp_path / "a", three, state)
    loaded = load_checkpoint(tmp_path / "a", two, optimizer).state
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    like = init_state(two, shard_weights(two, parameter_leaves(runs.model())), optimizer)
    for found, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(like), strict=True):
        assert (found.dtype, found.sharding) == (expected.dtype, expected.sharding)
    save_checkpoint(tmp_path / "b", two, loaded)
    with open_checkpoint(tmp_path / "a") as a, open_checkpoint(tmp_path / "b") as b:
        assert any("/0/" in name or "trace" in name for name in a.tensors)
        runs.assert_same_bits({n: b.read(n) for n in b.tensors}, {n: a.read(n) for n in a.tensors})
    back = load_checkpoint(tmp_path / "b", three, optimizer).state
    for found, expected in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_units_that_a_mask_leaves_out_have_no_moments_anywhere(tmp_path: Path, strategy: str) -> None:
    plan, optimizer = runs.plan_of(2, strategy), OPTIMIZERS["masked"]
    state = init_state(plan, shard_weights(plan, parameter_leaves(runs.model())), optimizer)
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding == (plan.sharding if leaf.ndim else plan.replicated)
    state, _ = make_train_step(plan, loss, optimizer)(state, tokens(2))
    masked_in = [path for path, info in plan.parameters.items() if info.unit == "layers/0"]
    numel = sum(int(np.prod(plan.parameters[path].shape)) for path in masked_in)
    shards = 1 if strategy == "no_shard" else 2
    assert sum(device.moments for device in memory_report(plan, state).devices) == 2 * 4 * numel * 2 // shards
    save_checkpoint(tmp_path / "c", plan, state)
    with open_checkpoint(tmp_path / "c") as reader:
        saved = {name.removeprefix("opt_state/inner_state/0/") for name in reader.tensors if "opt" in name}
        assert saved == {"count", *(f"{kind}/{path}" for kind in ("mu", "nu") for path in masked_in)}
    loaded = load_checkpoint(tmp_path / "c", plan, optimizer).state
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for found, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert found.sharding == expected.sharding
        np.testing.assert_array_equal(found, expected)


def _steps_of_each_unit() -> optax.GradientTransformation:
    return optax.GradientTransformation(
        lambda weights: {"steps": dict.fromkeys(weights, jnp.int32(0))}, lambda g, state, _: (g, state)
    )


def _window_of_losses() -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda _: {"window": jnp.zeros(5)}, lambda g, state, _: (g, state))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (_window_of_losses, "window"),
        (_steps_of_each_unit, "steps/"),
        (lambda: optax.add_noise(0.1, 0.5, jax.random.key(0)), "rng_key"),
    ],
)
def test_an_optimizer_with_other_arrays_is_refused_by_name(tmp_path: Path, make: Any, name: str) -> None:
    plan = runs.plan_of(2)
    optimizer = make()
    state = init_state(plan, shard_weights(plan, parameter_leaves(runs.model())), optimizer)
    with pytest.raises(ValueError, match=f"optimizer state 'opt_state/{name}': expected one flat buffer"):
        save_checkpoint(tmp_path / "c", plan, state)
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("granularity", [("row", 1), ("block", 3), ("tensor", 1)])
@pytest.mark.parametrize("chunk", [16, 100, 1 << 20])
def test_odd_parameters_are_exact_for_every_granularity_and_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granularity: tuple[str, int], chunk: int
) -> None:
    monkeypatch.setattr("bridge.formats.orbax_writer._CHUNK", chunk)
    optimizer = main_weight_adamw(0.1)
    kind, rows = granularity
    plan, weights = fully_shard(Odd(1), data_parallel_mesh(4), granularity=kind, rows=rows)
    state = perturbed(init_state(plan, weights, optimizer))
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


X64_PROGRAM = """
import sys
from jax_impl import simulate_devices
simulate_devices(3)
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
from jax_impl import data_parallel_mesh, fully_shard, init_state, load_checkpoint, main_weight_adamw, save_checkpoint
from tests.jax_impl.checkpoint_runs import assert_same_bits, logical
from tests.jax_impl.tiny import decoder

optimizer = main_weight_adamw(1e-2)
plan, weights = fully_shard(decoder(dtype=jnp.float64), data_parallel_mesh(3))
state = init_state(plan, weights, optimizer)
assert state.weights[""].dtype == np.float64
save_checkpoint(sys.argv[1], plan, state, {"seed": 2**40})
two, _ = fully_shard(decoder(dtype=jnp.float64), data_parallel_mesh(2), strategy="optim")
loaded = load_checkpoint(sys.argv[1], two, optimizer)
assert_same_bits(logical(two, loaded.state), logical(plan, state))
assert loaded.train == {"seed": 2**40}
"""


def test_float64_weights_stay_float64(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", X64_PROGRAM, str(tmp_path / "c")], check=True, timeout=300)
    with pytest.raises(CheckpointError, match=r"another dtype .*expected float32, got float64"):
        load_checkpoint(
            tmp_path / "c",
            plan_sharding(nnx.eval_shape(lambda: decoder(CONFIG)), data_parallel_mesh(1)),
            runs.OPTIMIZER,
        )


MEMORY_PROGRAM = """
import sys
from jax_impl import simulate_devices
simulate_devices(4)
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax_impl import data_parallel_mesh, init_state, load_checkpoint, main_weight_adamw, plan_sharding, save_checkpoint
from jax_impl import shard_weights
from tests.process_memory import AnonymousPeak

class Block(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.zeros((2001, 3001), jnp.float32))
        self.stack = nnx.Param(jnp.zeros((3, 501, 2001), jnp.float32))

class Big(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Block() for _ in range(4)])

plan = plan_sharding(nnx.eval_shape(Big), data_parallel_mesh(4))
rng = np.random.default_rng(0)
optimizer = main_weight_adamw(1e-3)
weights = {path: rng.random(info.shape, np.float32) for path, info in plan.parameters.items()}
state = jax.block_until_ready(init_state(plan, shard_weights(plan, weights), optimizer))
sums = {path: value.sum() for path, value in weights.items()}
del weights
with AnonymousPeak() as saving:
    save_checkpoint(sys.argv[1], plan, state)
size = sum(x.nbytes for x in jax.tree.leaves(state))
del state
with AnonymousPeak() as loading:
    state = load_checkpoint(sys.argv[1], plan, optimizer).state
for unit, buffer in state.weights.items():
    for piece in plan.local_pieces(unit, buffer):
        sums[piece.path] -= piece.values.sum()
assert all(abs(rest) < 100 for rest in sums.values()), sums
print(size >> 20, saving.above >> 20, (loading.above - size) >> 20)
"""


def test_saving_and_loading_take_memory_for_a_unit_not_for_a_copy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY_PROGRAM, str(tmp_path / "c")]
    result = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    size, saving, loading = map(int, re.findall(r"-?\d+", result.stdout))
    print(f"state {size} MiB, extra while saving {saving} MiB, while loading {loading} MiB")
    assert size > 400
    assert saving < 200
    assert loading < 150
