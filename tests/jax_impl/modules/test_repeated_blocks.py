"""Which modules become units where nobody says which: by the names and the structure of the model alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import nnx

from jax_impl import data_parallel_mesh, plan_sharding

VECTOR = np.ones(4, np.float32)
LEAF = {"w": VECTOR}
BLOCK = {"attention": {"w": VECTOR}, "mlp": {"w": VECTOR}}


def units_of(model: Any, **options: Any) -> list[str]:
    return list(plan_sharding(model, data_parallel_mesh(4), **options).units)[:-1]


@pytest.mark.parametrize(
    ("model", "units"),
    [
        ({"wte": VECTOR, "h": [BLOCK, BLOCK], "norm": LEAF}, ["h/0", "h/1"]),
        ({"Block_0": BLOCK, "Block_1": BLOCK, "Dense_0": LEAF, "Dense_1": LEAF}, ["Block_0", "Block_1"]),
        ({"block": BLOCK, "block_1": BLOCK, "linear": LEAF}, ["block", "block_1"]),
        ({"Dense_0": LEAF, "Dense_1": LEAF, "head": {"v": VECTOR}}, ["Dense_0", "Dense_1"]),
        ([LEAF, LEAF], ["0", "1"]),
        # Two models beside each other are no blocks, but theirs are.
        ([{"a": VECTOR, "layers": [BLOCK]}, {"b": VECTOR, "blocks": [BLOCK]}], ["0/layers/0", "1/blocks/0"]),
        # Experts are a part of their layer; layers of several kinds are all blocks.
        (
            {"layers": [{"mlp": LEAF}, {"experts": [BLOCK, BLOCK]}, {"experts": [BLOCK, BLOCK]}]},
            ["layers/0", "layers/1", "layers/2"],
        ),
        (
            {"sequence": [{"embedding": VECTOR}, BLOCK, BLOCK, {"scale": VECTOR}]},
            ["sequence/1", "sequence/2"],
        ),
    ],
)
def test_repeated_blocks_are_the_units(model: Any, units: list[str]) -> None:
    assert units_of(model) == units


def test_layers_of_a_stack_are_blocks() -> None:
    stack = {"blocks": {"mlp": {"w": np.ones((3, 4), np.float32)}}, "norm": LEAF}
    assert units_of(stack, stacked=["blocks"]) == ["blocks"]


def test_a_model_without_blocks_is_refused_with_its_modules() -> None:
    model = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), down=nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"repeated blocks.*modules \['down', 'up'\]: choose units=\["):
        units_of(model)
    assert units_of(model, units=[]) == []
    with pytest.raises(ValueError, match=r"units: expected a list of patterns, got 'up': use \['up'\]"):
        units_of(model, units="up")
