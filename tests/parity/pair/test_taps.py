"""Functions of parameters, whose parts cannot run alone: only what their taps saw can be compared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge.core.mapping import parse_mapping
from bridge.parity.compare.parity import parity
from bridge.parity.recorded.recording import tap

BATCH = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
PARTS = ("first", "second", "third")
RULES = """
rule = [
  {torch = "first.weight : o i", jax = "first/w : i o"},
  {torch = "first.bias", jax = "first/b"},
  {torch = "second.weight : o i", jax = "second/w : i o"},
  {torch = "second.bias", jax = "second/b"},
  {torch = "third.weight : o i", jax = "third/w : i o"},
  {torch = "third.bias", jax = "third/b"},
]
"""


MAPPING = parse_mapping(RULES, "taps")
PARAMETERS = {name: {"w": jnp.ones((5, 5)), "b": jnp.ones(5)} for name in PARTS}


class Stopping(torch.nn.Linear):
    """No gradient flows into its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach())


class Frozen(torch.nn.Linear):
    """No gradient flows into its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.detach(), self.bias)


class Layers(torch.nn.Module):
    """Three linear layers, one of another class."""

    def __init__(self, **layer_types: type[torch.nn.Linear]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in PARTS:
            setattr(self, name, layer_types.get(name, torch.nn.Linear)(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in PARTS:
            x = self.get_submodule(name)(x)
        return x


def tapped(p: Any, x: jax.Array) -> jax.Array:
    for name in PARTS:
        x = tap(name, x @ p[name]["w"] + p[name]["b"])
    return x


@pytest.mark.parametrize("name", PARTS[1:])
@pytest.mark.parametrize("layer_type", [Stopping, Frozen])
def test_a_backward_fault_is_in_the_part_between_two_taps(
    layer_type: type[torch.nn.Linear], name: str
) -> None:
    report = parity(
        Layers(**{name: layer_type}), (tapped, PARAMETERS), BATCH, mapping=MAPPING, weights="torch", steps=0
    )
    first = report.first_divergence
    assert first is not None
    assert (first.stage, first.name) == ("backward", name)
    assert {row.name for row in report.introduced} == {name}


def test_layers_that_are_the_same_are_so() -> None:
    assert parity(Layers(), (tapped, PARAMETERS), BATCH, mapping=MAPPING, weights="torch", steps=0).same
