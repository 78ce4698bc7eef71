"""A model that gives a module another input, or its input in another layout: the module is right, and not blamed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from bridge.parity import parity

SIZE = 4
RULES = {
    "images": [
        {"torch": f"{n}.weight : o i_ h w", "jax": f"{n}/kernel : h w i_ o"} for n in ("first", "second")
    ],
    "sequences": [{"torch": f"{n}.weight : o i_", "jax": f"{n}/kernel : i_ o"} for n in ("first", "second")],
}


class Torch(nn.Module):
    def __init__(self, domain: str) -> None:
        super().__init__()
        images = domain == "images"
        self.first, self.second = (
            nn.Conv2d(SIZE, SIZE, 3, padding=1, bias=False) if images else nn.Linear(SIZE, SIZE, bias=False)
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return output


class Jax(nnx.Module):
    def __init__(self, domain: str, exchanged: bool) -> None:
        rngs = nnx.Rngs(0)
        self.images, self.exchanged = domain == "images", exchanged
        self.first, self.second = (
            nnx.Conv(SIZE, SIZE, (3, 3), padding=1, use_bias=False, rngs=rngs)
            if self.images
            else nnx.Linear(SIZE, SIZE, use_bias=False, rngs=rngs)
            for _ in range(2)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.tanh(self.first(x.transpose(0, 2, 3, 1) if self.images else x))
        y = self.second(y.swapaxes(1, 2) if self.exchanged else y)
        return y.transpose(0, 3, 1, 2) if self.images else y


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("domain", RULES)
def test_a_module_is_not_blamed_for_axes_that_the_model_exchanges(domain: str, exchanged: bool) -> None:
    """All sizes are equal, so that values alone tell that height and width, or time and features, are exchanged."""
    shape = (SIZE,) * (4 if domain == "images" else 3)
    batch = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    mapping = {"name": "layouts", "rule": RULES[domain]}
    report = parity(Torch(domain), Jax(domain, exchanged), batch, mapping=mapping, weights="torch", steps=0)
    assert report.same != exchanged
    assert [row.name for row in report.introduced if row.stage == "forward"] == ([""] if exchanged else [])


class TorchSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.0, SIZE))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x * self.w + residual


class JaxSum(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(SIZE))

    def __call__(self, x: jax.Array, residual: jax.Array) -> jax.Array:
        return x * self.w[...] + residual


class TorchResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.sum = nn.Linear(SIZE, SIZE, bias=False), TorchSum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        output: torch.Tensor = self.sum(y, residual=y)
        return output


class JaxResidual(nnx.Module):
    def __init__(self, residual: str) -> None:
        self.first, self.sum = nnx.Linear(SIZE, SIZE, use_bias=False, rngs=nnx.Rngs(0)), JaxSum()
        self.residual = residual

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.first(x)
        return self.sum(y, residual={"same": y, "scaled": 1.5 * y, "input": x}[self.residual])


@pytest.mark.parametrize("residual", ["same", "scaled", "input"])
def test_a_module_is_not_blamed_for_a_further_input_that_the_model_gives_it(residual: str) -> None:
    rules = [
        {"torch": "first.weight : o i_", "jax": "first/kernel : i_ o"},
        {"torch": "sum.w", "jax": "sum/w"},
    ]
    batch = np.random.default_rng(0).normal(size=(5, SIZE)).astype(np.float32)
    mapping = {"name": "residual", "rule": rules}
    report = parity(TorchResidual(), JaxResidual(residual), batch, mapping=mapping, weights="torch", steps=0)
    assert report.same == (residual == "same")
    assert {row.name for row in report.introduced} == (set() if residual == "same" else {""})
