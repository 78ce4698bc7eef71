"""A model that gives a module its input in another layout: the module is right, and not the place of the fault."""

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
    def __init__(self, kind: str) -> None:
        super().__init__()
        images = kind == "images"
        self.first, self.second = (
            nn.Conv2d(SIZE, SIZE, 3, padding=1, bias=False) if images else nn.Linear(SIZE, SIZE, bias=False)
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return found


class Jax(nnx.Module):
    def __init__(self, kind: str, exchanged: bool) -> None:
        rngs = nnx.Rngs(0)
        self.images, self.exchanged = kind == "images", exchanged
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
@pytest.mark.parametrize("kind", RULES)
def test_a_module_is_not_blamed_for_axes_that_the_model_exchanges(kind: str, exchanged: bool) -> None:
    """All sizes are equal, so that values alone tell that height and width, or time and features, are exchanged."""
    shape = (SIZE,) * (4 if kind == "images" else 3)
    batch = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    mapping = {"name": "layouts", "rule": RULES[kind]}
    report = parity(Torch(kind), Jax(kind, exchanged), batch, mapping=mapping, weights="torch", steps=0)
    assert report.same != exchanged
    assert [row.name for row in report.introduced if row.stage == "forward"] == ([""] if exchanged else [])
