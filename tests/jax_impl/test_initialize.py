"""Weights that are born sharded: the values of the unsharded model, and no more memory than a unit's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jax_impl import (
    data_parallel_mesh,
    fully_shard,
    init_sharded,
    init_state,
    make_train_step,
    unshard,
    variable_leaves,
)
from jax_impl.initialize import _by_parameter, _on_shards, _op_by_op
from jax_impl.modules.module_tree import parameter_leaves
from jax_impl.modules.tree_model import as_module

pytestmark = pytest.mark.optimized

WIDTH, DEPTH = 40, 4


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, kernel_init=nnx.initializers.orthogonal(), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(jnp.tanh(self.up(self.norm(x)))))


class Layers(nnx.Module):
    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(17, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(DEPTH)])

    def __call__(self, rows: jax.Array) -> jax.Array:
        x = self.embed(rows)
        for layer in self.layers:
            x = layer(x)
        return x


class Linear(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


class Stacked(nnx.Module):
    def __init__(self) -> None:
        self.embed = nnx.Embed(17, WIDTH, rngs=nnx.Rngs(1))
        self.layers = nnx.split_rngs(splits=DEPTH)(nnx.vmap(Linear))(nnx.Rngs(0))


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = linen.Dense(WIDTH)(x)
        return x


def of_linen() -> Any:
    return Net().init(jax.random.key(0), jnp.zeros((1, 7)))["params"]


def of_a_key() -> Any:
    keys = jax.random.split(jax.random.key(5), 3)
    return {
        "layers": [{"w": jax.random.normal(key, (7, 3)) / math.sqrt(7)} for key in keys],
        "scale": jnp.ones(5),
    }


CASES = {
    "nnx": (Layers, {}),
    "frozen": (Layers, {"frozen": ["embed/*", "layers/0/up/*"]}),
    "stack": (Stacked, {"stacked": ["layers"]}),
    "linen": (of_linen, {"units": ["Dense_*"]}),
    "tree": (of_a_key, {}),
}


@pytest.mark.fast_cases(
    "frozen-mesh1-hfsdp-pjit",
    "stack-2-no_shard-shard_map",
    "linen-4-optim_grads_params-shard_map",
    "tree-4-optim_grads_params-shard_map",
)
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize(
    ("mesh", "strategy"), [(4, "optim_grads_params"), ({"outer": 2, "inner": 2}, "hfsdp"), (2, "no_shard")]
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_values_are_those_of_the_unsharded_model(case: str, mesh: Any, strategy: str, engine: str) -> None:
    make, options = CASES[case]
    options = {**options, "strategy": strategy, "engine": engine}
    expected_plan, expected = fully_shard(make(), data_parallel_mesh(mesh), **options)
    plan, weights, variables = init_sharded(make, data_parallel_mesh(mesh), **options)
    assert plan.parameters == expected_plan.parameters
    for key in expected_plan.arrays:
        plan.check_array(key, weights[key])
        # LLVM takes a division by a number for a product where it can, which differs from program to program.
        np.testing.assert_array_max_ulp(
            np.asarray(weights[key]), np.asarray(expected[key]), maxulp=1 if case == "tree" else 0
        )
    leaves = variable_leaves(make())
    assert variables.keys() == leaves.keys()
    for path, value in leaves.items():
        assert variables[path].dtype == value.dtype
        if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(variables[path], value)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_training_goes_on_from_them(engine: str) -> None:
    def loss(model: Any, rows: jax.Array) -> jax.Array:
        return jnp.mean(model(rows) ** 2)

    mesh, optimizer = data_parallel_mesh(4), optax.adam(1e-2)
    rows = np.random.default_rng(0).integers(0, 17, (8, 3))
    plan, weights, variables = init_sharded(Layers, mesh, engine=engine)
    state = init_state(plan, weights, optimizer, variables)
    model = Layers()
    other_plan, weights = fully_shard(model, mesh, engine=engine)
    other = init_state(other_plan, weights, optimizer, variable_leaves(model))
    for _ in range(2):
        state, metrics = make_train_step(plan, loss, optimizer)(state, rows)
        other, expected = make_train_step(other_plan, loss, optimizer)(other, rows)
        assert metrics["loss"] == expected["loss"]
    trained, reference = unshard(plan, state.weights), unshard(other_plan, other.weights)
    for path, value in reference.items():
        np.testing.assert_array_equal(trained[path], value)


@pytest.mark.parametrize("program", [_on_shards, _by_parameter], ids=["shard_map", "pjit"])
@pytest.mark.filterwarnings("ignore:pjit engine")
def test_a_device_holds_its_shards_and_a_unit_and_sends_nothing(program: Callable[..., Any]) -> None:
    engine = "shard_map" if program is _on_shards else "pjit"
    plan, weights, _ = init_sharded(of_many, data_parallel_mesh(8), engine=engine)
    whole = sum(4 * array.size for array in weights.values())

    def values() -> Any:
        module = as_module(of_many())
        return parameter_leaves(module), variable_leaves(module)

    compiled = program(plan, _op_by_op(values)).lower().compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        assert collective not in text
    assert memory.output_size_in_bytes < 1.1 * whole / 8
    # One of sixteen units, packed, and what the generator needs for it.
    assert memory.temp_size_in_bytes < 6 * whole / 16


def of_many() -> Any:
    keys = jax.random.split(jax.random.key(5), 16)
    return {"layers": [{"w": jax.random.normal(key, (128, 256))} for key in keys]}


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="units: expected patterns of module paths"):
        init_sharded(of_a_key, data_parallel_mesh(2), units=["blocks/*"])
