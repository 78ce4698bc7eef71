"""Units inside a unit that recomputes: how often they are gathered, how many of them are there at once, and gradients.

A layer is a chain of four units, so that it shows which of them stay from the second forward to backward.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_impl import (
    ShardingPolicy,
    UnitPolicy,
    data_parallel_mesh,
    fully_shard,
    make_gradients,
    plan_sharding,
    shard_batch,
    unshard,
)
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from tests.support.jax_impl.dependence import Step, runs, steps
from tests.support.jax_impl.tiny import named
from tests.support.jax_impl.zoo import Chain, Matrix

PARTS = 4
WIDTH = 16
DEVICES = 4


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int, parts: int) -> None:
        self.parts = nnx.List([Matrix(width, rngs) for _ in range(parts)])
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        for part in self.parts[::-1]:
            x = x + part(x)
        return x * self.scale[...]


def model_of(layers: int = 2, stacked: bool = False, width: int = WIDTH, parts: int = PARTS) -> Chain:
    rngs = nnx.Rngs(0)
    return Chain([Layer(rngs, width, parts) for _ in range(layers)], stacked=stacked, scale=width)


def loss(model: Chain, rows: jax.Array) -> jax.Array:
    return jnp.mean(model(rows) ** 2)


def policy(inner: bool, prefetch: int = 0) -> ShardingPolicy:
    units = (
        UnitPolicy("layers.*.parts.*", recompute=inner),
        UnitPolicy("layers.*", recompute=True),
        UnitPolicy(""),
    )
    return ShardingPolicy(units, prefetch=prefetch)


def rows_of() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((2 * DEVICES, WIDTH)).astype(np.float32)


def traced(monkeypatch: Any, prefetch: int, inner: bool, stacked: bool = False) -> Any:
    """A step's program on what passes for an accelerator."""
    monkeypatch.setattr(ShardingPlan, "chained", False)
    model = nnx.eval_shape(lambda: model_of(stacked=stacked))
    options: dict[str, Any] = {"stacked": ["layers"]} if stacked else {}
    plan = plan_sharding(model, data_parallel_mesh(DEVICES), policy=policy(inner, prefetch), **options)
    weights = {key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in plan.arrays.items()}
    rows = jax.ShapeDtypeStruct((2 * DEVICES, WIDTH), jnp.float32)
    return jax.make_jaxpr(make_gradients(plan, loss))(weights, rows).jaxpr


def unit_of(step: Step) -> str:
    """The innermost unit of its scope, where it is a part; else the layer or nothing."""
    return ["", *re.findall(r"layers/\d+(?:/parts/\d+)?", step.scope)][-1]


@pytest.mark.fast_cases("1-True", "0-False")
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_last_units_of_a_recomputation_stay_for_backward(monkeypatch, prefetch, inner):
    program_steps = steps(traced(monkeypatch, prefetch, inner))
    gathered = Counter(unit_of(step) for step in program_steps if step.primitive == "all_gather")
    for layer, part in itertools.product(range(2), range(PARTS)):
        # Parts run from the last to the first.
        assert gathered[f"layers/{layer}/parts/{part}"] == (2 if part <= prefetch else 3)


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("stacked", [False, True])
def test_a_pass_of_a_loop_gathers_as_often(monkeypatch, stacked):
    program = traced(monkeypatch, 1, True, stacked)
    # A layer's own gather for the next pass has the scope of the part that it runs beside.
    of_parts = sum(
        passes for _, scope, passes in runs(program, "all_gather") if re.search(r"parts/\d\)?/gather", scope)
    )
    # Three each, but for the last two parts.
    assert of_parts == 2 * (3 * PARTS - 2)


@pytest.mark.optimized
@pytest.mark.parametrize("prefetch", [0, 1])
def test_no_more_weights_are_there_at_once_than_prefetch_says(prefetch):
    width, parts = 256, 8
    plan = plan_sharding(
        nnx.eval_shape(lambda: model_of(1, width=width, parts=parts)),
        data_parallel_mesh(DEVICES),
        policy=policy(True, prefetch),
    )
    weights = {
        key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=plan.sharding(key))
        for key, array in plan.arrays.items()
    }
    cut = jax.sharding.NamedSharding(plan.mesh, plan.axes.batch_spec)
    rows = jax.ShapeDtypeStruct((2 * DEVICES, width), jnp.float32, sharding=cut)
    program = jax.jit(make_gradients(plan, loss)).lower(weights, rows).compile()
    # And one unit's gradients.
    temporary = program.memory_analysis().temp_size_in_bytes / (4 * width**2)
    assert 2 + prefetch < temporary < 2.1 + prefetch


def in_one_process(model: Chain, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    graphdef, state = nnx.split(model)
    value, gradients = jax.value_and_grad(lambda s: loss(nnx.merge(graphdef, s), jnp.asarray(rows)))(state)
    return value, named(gradients)


@pytest.mark.fast_cases("1-1-shard_map-True-False", "1-1-shard_map-False-True")
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    ("devices", "prefetch", "engine", "stacked"),
    [
        (DEVICES, 0, "shard_map", False),
        # The program of accelerators, on one device: on several simulated ones its collectives could meet and hang.
        (1, 1, "shard_map", False),
        (1, 1, "shard_map", True),
        pytest.param(DEVICES, 0, "shard_map", True, marks=pytest.mark.slow),
        pytest.param(DEVICES, 0, "pjit", False, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_whole_model(monkeypatch, devices, prefetch, engine, stacked, inner):
    if devices == 1:
        monkeypatch.setattr(ShardingPlan, "chained", False)
    model, rows = model_of(stacked=stacked), rows_of()
    options: dict[str, Any] = {"stacked": ["layers"]} if stacked else {}
    plan, weights = fully_shard(
        model, data_parallel_mesh(devices), policy=policy(inner, prefetch), engine=engine, **options
    )
    value, reduced, *_ = jax.jit(make_gradients(plan, loss, 2))(weights, shard_batch(plan, rows, 2))
    expected, theirs = in_one_process(model, rows)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    own = unshard(plan, reduced)
    assert own.keys() == theirs.keys()
    for path, gradient in theirs.items():
        scale = float(jnp.abs(gradient).max())
        np.testing.assert_allclose(own[path], gradient, rtol=0, atol=1e-5 * scale, err_msg=path)
