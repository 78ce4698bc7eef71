"""A small MLP with a layer norm in PyTorch and in nnx, for run files and traces. Tests also copy this file."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

WIDTH, HIDDEN = 6, 8
MAPPING = """
name = "small"

[[rule]]
torch = "up.weight : o i"
jax = "up/kernel : i o"

[[rule]]
torch = "up.bias"
jax = "up/bias"

[[rule]]
torch = "norm.weight"
jax = "norm/scale"

[[rule]]
torch = "norm.bias"
jax = "norm/bias"

[[rule]]
torch = "down.weight : o i"
jax = "down/kernel : i o"

[[rule]]
torch = "down.bias"
jax = "down/bias"
"""
BATCH = np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float32)

TABLES = {
    "up.weight": (HIDDEN, WIDTH),
    "up.bias": (HIDDEN,),
    "norm.weight": (HIDDEN,),
    "norm.bias": (HIDDEN,),
    "down.weight": (WIDTH, HIDDEN),
    "down.bias": (WIDTH,),
}
NAMES = {
    "up.weight": "up/kernel",
    "up.bias": "up/bias",
    "norm.weight": "norm/scale",
    "norm.bias": "norm/bias",
    "down.weight": "down/kernel",
    "down.bias": "down/bias",
}
"""JAX names by torch names."""


def values(seed: int) -> dict[str, np.ndarray]:
    """The weights of a seed by torch name, float32."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in TABLES.items()}


def jax_values(seed: int) -> dict[str, np.ndarray]:
    """The same weights by JAX name."""
    return {NAMES[name]: np.ascontiguousarray(array.T) for name, array in values(seed).items()}


class Act(torch.nn.Module):
    """An activation with a choice: ``exact`` is GELU by the error function."""

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact = exact

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate="none" if self.exact else "tanh")


class TorchMLP(torch.nn.Module):
    """``x [B, 6]`` -> ``[B, 6]``."""

    def __init__(self, seed: int = 0, eps: float = 1e-5, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN, eps=eps)
        self.act = Act(exact=True)
        self.drop = torch.nn.Dropout(dropout)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)
        self.load_state_dict({name: torch.from_numpy(array) for name, array in values(seed).items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.act(self.norm(self.up(x)))))


class Activation(nnx.Module):
    """An activation that is a module."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x, approximate=not self.exact)


class JaxMLP(nnx.Module):
    """``x [B, 6]`` -> ``[B, 6]``."""

    def __init__(self, seed: int = 0, eps: float = 1e-5, exact: bool = True) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.norm = nnx.LayerNorm(HIDDEN, epsilon=eps, use_fast_variance=False, rngs=rngs)
        self.act = Activation(exact)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        for name, array in jax_values(seed).items():
            module, last = name.split("/")
            getattr(getattr(self, module), last)[...] = jnp.asarray(array)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.act(self.norm(self.up(x))))


def torch_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) ** 2).mean()


def jax_loss(model: Any, batch: jax.Array) -> jax.Array:
    return (model(batch) ** 2).mean()


def first_rows_torch(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch)[: len(batch)] ** 2).mean()


def first_rows_jax(model: Any, batch: jax.Array) -> jax.Array:
    """A loss that leaves out what a model returns beyond the batch's rows."""
    return (model(batch)[: len(batch)] ** 2).mean()


def half_jax_loss(model: Any, batch: jax.Array) -> jax.Array:
    """A loss that is not torch's."""
    return jax_loss(model, batch) / 2


def broken(**_: Any) -> Any:
    """A function that makes no model."""
    raise RuntimeError("no weights today")


def no_model() -> int:
    """A function that returns something else."""
    return 3
