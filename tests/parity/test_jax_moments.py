"""Moments in low precision: ``main_weight_adamw`` stores what PyTorch's ``MainWeightAdamW`` stores, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec

from jax_impl import (
    ShardingPlan,
    TrainState,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    save_checkpoint,
)
from jax_impl.checkpoint.contents import Contents
from torch_impl import MainWeightAdamW

pytestmark = [pytest.mark.optimized, pytest.mark.filterwarnings("ignore:pjit engine")]

STEPS = 100
Arrays = Mapping[str, np.ndarray]
# Whole vectors of PyTorch's kernel, but rows and numbers of rows that no number of devices divides.
SHAPES = {
    "embed": (11, 8),
    "experts": (3, 5, 8),
    "norm": (16,),
    "thin": (8, 1),
    "wide": (1, 48),
    "layers/up": (3, 7, 8),
    "layers/bias": (3, 8),
    "layers/down": (3, 2, 20),
}
LAYERS = 3
FORMATS = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
BYTES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {path: (0.1 * rng.normal(size=shape)).astype(np.float32) for path, shape in SHAPES.items()}


@functools.cache
def gradients(step: int) -> Arrays:
    """Of scales from 1e-6 to 1, with elements and a whole row of zero."""
    rng = np.random.default_rng(1 + step)
    arrays = {}
    for path, shape in SHAPES.items():
        value = rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 0, size=shape)
        value[rng.uniform(size=shape) < 0.1] = 0
        value[-1] = 0 if path in ("embed", "experts") else value[-1]
        arrays[path] = value.astype(np.float32)
    return arrays


def of_layers(arrays: Arrays) -> dict[str, np.ndarray]:
    """As a model without stacks has them."""
    unstacked = {}
    for path, value in arrays.items():
        if path.startswith("layers/"):
            unstacked |= {path.replace("/", f"/{layer}/"): value[layer] for layer in range(LAYERS)}
        else:
            unstacked[path] = value
    return unstacked


def bits(tensor: torch.Tensor) -> np.ndarray:
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    size = tensor.element_size()
    return tensor.detach().view(dtypes[size]).numpy().view(BYTES[size])


def torch_trained(
    mu: str, nu: str, steps: int = STEPS, slopes: Any = gradients
) -> tuple[dict[str, torch.nn.Parameter], MainWeightAdamW]:
    weights = {path: torch.nn.Parameter(torch.tensor(x)) for path, x in of_layers(parameters()).items()}
    optimizer = torch_optimizer(weights, mu, nu)
    for step in range(steps):
        for path, slope in of_layers(slopes(step)).items():
            weights[path].grad = torch.tensor(slope)
        optimizer.step()
    return weights, optimizer


def torch_optimizer(weights: Mapping[str, torch.nn.Parameter], mu: str, nu: str) -> MainWeightAdamW:
    dtypes = {"exp_avg_dtype": getattr(torch, mu), "exp_avg_sq_dtype": getattr(torch, nu)}
    return MainWeightAdamW(list(weights.values()), lr=1e-2, **dtypes)


def torch_run(*arguments: Any, **options: Any) -> dict[str, np.ndarray]:
    """Bits of weights, moments and scales by their names in a checkpoint."""
    return torch_bits(*torch_trained(*arguments, **options))


def torch_bits(
    weights: Mapping[str, torch.nn.Parameter], optimizer: MainWeightAdamW
) -> dict[str, np.ndarray]:
    arrays = {}
    names = {"exp_avg": "mu", "exp_avg_scale": "mu_scale", "exp_avg_sq": "nu", "exp_avg_sq_scale": "nu_scale"}
    for path, weight in weights.items():
        arrays[f"params/{path}"] = bits(weight)
        for key, value in optimizer.state[weight].items():
            if key != "step":
                arrays[f"opt_state/{names[key]}/{path}"] = bits(value)
    return arrays


def stored(plan: ShardingPlan, state: Any) -> dict[str, np.ndarray]:
    """The bits of what a checkpoint has of the state, cut from its shards."""
    arrays: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for name, by_key in Contents.of(plan, state).arrays.items():
        for key, array in by_key.items():
            for piece in plan.local_pieces(key, array):
                size = piece.values.dtype.itemsize
                shape = plan.tensor_shape(key, piece.path)
                whole = arrays.setdefault(f"{name}/{piece.path}", np.zeros(shape, BYTES[size]))
                times = seen.setdefault(f"{name}/{piece.path}", np.zeros(shape, int))
                where = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
                whole[where] = np.ascontiguousarray(piece.values).view(BYTES[size])
                times[where] += 1
    # Of rows that are cut over a model axis, several devices have the scales.
    assert all(np.all(times == 1) for times in seen.values())
    return {
        f"{name}/{path}": value
        for full, array in arrays.items()
        for name, tail in [_split(full)]
        for path, value in of_layers({tail: array}).items()
    }


def _split(name: str) -> tuple[str, str]:
    path = next(path for path in SHAPES if name.endswith(f"/{path}"))
    return name.removesuffix(f"/{path}"), path


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in arrays.items():
        *above, name = path.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = value
    return tree


def jax_run(
    mu: str, nu: str, steps: int = STEPS, slopes: Any = gradients, **sharding: Any
) -> dict[str, np.ndarray]:
    return stored(*jax_trained(mu, nu, steps, slopes, **sharding))


def jax_trained(
    mu: str, nu: str, steps: int, slopes: Any = gradients, **sharding: Any
) -> tuple[ShardingPlan, TrainState]:
    devices = sharding.pop("devices", 1)
    plan, weights = fully_shard(
        nested({path: jnp.asarray(x) for path, x in parameters().items()}),
        data_parallel_mesh(devices),
        stacked=["layers"],
        **sharding,
    )
    optimizer = main_weight_adamw(1e-2, mu_dtype=mu, nu_dtype=nu)
    state = init_state(plan, weights, optimizer)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.weights, state.opt_state))
    step = jax.jit(optimizer.on_plan(plan).apply, out_shardings=shardings, donate_argnums=(1, 2))
    held, opt_state = state.weights, state.opt_state
    for number in range(steps):
        step_slopes = slopes(number)

        def read(path: str, offsets: Any, sizes: Any, step_slopes: Arrays = step_slopes) -> np.ndarray:
            return step_slopes[path][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

        held, opt_state = step({key: plan.build_buffer(key, read) for key in plan.arrays}, opt_state, held)
        jax.block_until_ready(held)
    return plan, TrainState(held, opt_state)


def assert_same(arrays: Arrays, expected: Arrays) -> None:
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


expected = functools.cache(torch_run)


@pytest.mark.fast_cases("float8_e4m3fn-shard_map-1", "float8_e5m2-shard_map-1")
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_weights_moments_and_scales_equal_torchs_bit_for_bit(dtype: str, engine: str, devices: int) -> None:
    assert_same(jax_run(dtype, dtype, engine=engine, devices=devices), expected(dtype, dtype))


# Rows, columns, matrices of a stack and vectors, each cut over a model axis somewhere.
CUT = {
    "embed": PartitionSpec(None, "tp"),
    "experts": PartitionSpec(None, None, "tp"),
    "wide": PartitionSpec(None, "tp"),
    "thin": PartitionSpec("tp"),
    "norm": PartitionSpec("tp"),
    "layers/*/up": PartitionSpec(None, "tp"),
    "layers/*/down": PartitionSpec("tp", None),
    "layers/*/bias": PartitionSpec("tp"),
}
MESHES = {
    "empty shards": {"devices": 8},
    "hsdp": {"devices": {"dp_outer": 2, "dp": 2}, "strategy": "hsdp"},
    "hfsdp": {"devices": {"dp_outer": 2, "dp": 2}, "strategy": "hfsdp"},
    "whole tensors": {"devices": 3, "granularity": "tensor"},
    "columns": {"devices": {"dp": 2, "tp": 2}, "parallel": CUT},
    "experts": {
        "devices": {"dp": 2, "ep": 3, "tp": 1},
        "parallel": {"experts": PartitionSpec("ep"), "embed": PartitionSpec(None, "tp")},
    },
}


@pytest.mark.fast_cases("hfsdp-shard_map", "empty shards-shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize("mesh", MESHES)
def test_however_rows_are_cut_the_bits_are_the_same(mesh: str, engine: str) -> None:
    dtypes = "float8_e5m2", "float8_e4m3fn"
    assert_same(jax_run(*dtypes, steps=5, engine=engine, **MESHES[mesh]), expected(*dtypes, steps=5))


@pytest.mark.parametrize("kinds", [("float8_e4m3fn", "bfloat16"), ("float32", "float16")])
def test_a_pytree_without_a_plan_has_the_rows_of_its_leaves(kinds: tuple[str, str]) -> None:
    weights = {path: jnp.asarray(x) for path, x in of_layers(parameters()).items()}
    optimizer = main_weight_adamw(1e-2, mu_dtype=kinds[0], nu_dtype=jnp.dtype(kinds[1]))
    state = jax.jit(optimizer.init)(weights)
    step = jax.jit(optimizer.apply)
    for number in range(20):
        weights, state = step(of_layers(gradients(number)), state, weights)
    values = {f"params/{path}": value for path, value in weights.items()}
    for name in ("mu", "nu", "mu_scale", "nu_scale"):
        for path, value in (getattr(state, name) or {}).items():
            if value is not None:
                values[f"opt_state/{name}/{path}"] = value
    same = {name: np.asarray(value).view(BYTES[value.dtype.itemsize]) for name, value in values.items()}
    assert_same(same, expected(*kinds, steps=20))


@pytest.mark.fast_cases("shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_moments_that_are_loaded_from_another_format_are_stored_as_torch_stores_them(
    tmp_path: Path, engine: str
) -> None:
    before, after = ("float32", "float16"), ("float8_e5m2", "float8_e4m3fn")
    weights, optimizer = torch_trained(*before, steps=7)
    theirs = torch_optimizer(weights, *after)
    theirs.load_state_dict(optimizer.state_dict())
    plan, state = jax_trained(*before, steps=7, devices=3, engine=engine)
    save_checkpoint(tmp_path / "a", plan, state)
    ours = main_weight_adamw(1e-2, mu_dtype=after[0], nu_dtype=after[1])
    loaded = load_checkpoint(tmp_path / "a", plan, ours, moments="convert").state
    assert_same(stored(plan, loaded), torch_bits(weights, theirs))


def broken(step: int) -> Arrays:
    """Gradients with an infinity, a NaN, and numbers near the largest, in rows of their own."""
    copys = {path: value.copy() for path, value in gradients(step).items()}
    if step == 1:
        copys["embed"][2, 3], copys["embed"][4, 1], copys["embed"][6, 5] = np.inf, np.nan, -3e38
        copys["layers/up"][1, 2, 0], copys["norm"][3] = np.nan, -np.inf
    return copys


@pytest.mark.fast_cases("float8_e4m3fn-shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_infinities_and_nan_are_where_torch_has_them_and_other_rows_go_on(dtype: str, engine: str) -> None:
    ours = jax_run(dtype, dtype, steps=4, slopes=broken, engine=engine, devices=4)
    theirs = torch_run(dtype, dtype, steps=4, slopes=broken)
    assert ours.keys() == theirs.keys()
    several = 0
    for name, value in theirs.items():
        low = value.dtype != np.uint32
        numbers = [
            np.asarray(x).view(dtype if low else np.float32).astype(np.float32) for x in (ours[name], value)
        ]
        missing = np.isnan(numbers[1])
        several += np.count_nonzero(missing)
        np.testing.assert_array_equal(np.isnan(numbers[0]), missing, err_msg=name)
        np.testing.assert_array_equal(ours[name][~missing], value[~missing], err_msg=name)
        rows = {2, 4, 6} if name.endswith("embed") else {2} if name.endswith("1/up") else set()
        if missing.ndim == 2 and name != "params/wide":
            assert {int(row) for row in np.nonzero(missing)[0]} <= rows, name
    assert several > 20
