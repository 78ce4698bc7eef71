"""When weights come from the host's memory: read from traced programs, as on accelerators.

A chain of layers of one product each, of which each device has enough elements for two parts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_impl import data_parallel_mesh, make_gradients, plan_sharding
from jax_impl.runtime.groups.memory_kinds import HOST
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from tests.jax_impl.test_host_memory import needs_moves
from tests.support.jax_impl.dependence import Step, steps
from tests.support.jax_impl.zoo import Chain, Matrix

LAYERS, WIDTH = 4, 128


def chain() -> Chain:
    rngs = nnx.Rngs(0)
    return Chain([Matrix(WIDTH, rngs) for _ in range(LAYERS)], scale=WIDTH)


def by_layer(program_steps: list[Step], primitive: str) -> dict[int, list[Step]]:
    steps_of = defaultdict(list)
    for step in program_steps:
        if step.primitive == primitive and (match := re.search(r"layers/(\d+)", step.scope)):
            steps_of[int(match[1])].append(step)
    return steps_of


@needs_moves
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_units_weights_come_when_it_is_gathered_and_no_earlier(monkeypatch: Any, prefetch: int) -> None:
    monkeypatch.setattr(ShardingPlan, "chained", False)
    plan = plan_sharding(nnx.eval_shape(chain), data_parallel_mesh(4), prefetch=prefetch)
    weights = {
        key: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=plan.sharding(key).with_memory_kind(HOST)
        )
        for key, array in plan.arrays.items()
    }
    rows = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    program = jax.make_jaxpr(make_gradients(plan, lambda model, rows: jnp.mean(model(rows) ** 2)))(
        weights, rows
    )
    program_steps = steps(program.jaxpr, ("dot_general", "device_put"))
    moves, products = by_layer(program_steps, "device_put"), by_layer(program_steps, "dot_general")
    for layer in range(LAYERS):
        # Two parts, in forward and again in backward.
        assert len(moves[layer]) == 4
        forward, again = moves[layer][:2], moves[layer][2:]
        for before in range(layer - prefetch):
            assert all(products[before][0].number in move.before for move in forward)
        for after in range(layer + 1 + prefetch, LAYERS):
            assert all(
                any(product.number in move.before for product in products[after][1:]) for move in again
            )
