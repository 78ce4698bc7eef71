"""An autoencoder with tied kernels, a block called in a loop and a dataclass as output, and its nnx port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from bridge.core.mapping import parse_mapping
from tests.support.parity.nnx_parts import layer_norm
from tests.support.parity.pair_tools import Pair, paired, randomize, with_rules

INPUTS, CODE, LOOPS = 20, 12, 3


@dataclass
class TorchOut:
    """Reconstruction ``[B, 20]``, code ``[B, 12]``, and nothing."""

    reconstruction: Any
    code: Any
    mask: Any = None


class TorchRefine(torch.nn.Module):
    """A residual step; ``[B, 12]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(CODE)
        self.inner = torch.nn.Linear(CODE, CODE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.softplus(self.inner(self.norm(x)))


class TorchTied(torch.nn.Module):
    """``[B, 20]`` -> ``TorchOut``; the decoder's kernel is the encoder's, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(INPUTS, CODE)
        self.refine = TorchRefine()
        self.bias = torch.nn.Parameter(torch.zeros(INPUTS))

    def forward(self, x: torch.Tensor) -> TorchOut:
        code = torch.nn.functional.elu(self.encoder(x))
        for _ in range(LOOPS):
            code = self.refine(code)
        return TorchOut(torch.nn.functional.linear(code, self.encoder.weight.T, self.bias), code)


class Refine(nnx.Module):
    """A residual step; ``[B, 12]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = layer_norm(CODE, 1e-5, rngs)
        self.inner = nnx.Linear(CODE, CODE, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.softplus(self.inner(self.norm(x)))


class Tied(nnx.Module):
    """``[B, 20]`` -> reconstruction, code and None by name."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.Linear(INPUTS, CODE, rngs=rngs)
        self.refine = Refine(rngs)
        self.bias = nnx.Param(jnp.zeros(INPUTS))

    def __call__(self, x: jax.Array) -> dict[str, Any]:
        code = jax.nn.elu(self.encoder(x))
        for _ in range(LOOPS):
            code = self.refine(code)
        out = code @ self.encoder.kernel[...].T + self.bias[...]
        return {"reconstruction": out, "code": code, "mask": None}


RULES = with_rules("""
rule = [
  dense encoder encoder
  norm refine.norm refine/norm
  dense refine.inner refine/inner
  {torch = "bias", jax = "bias"},
]
""")


def tied_pair(name: str, seed: int) -> Pair:
    """The pair and a batch ``[4, 20]``."""
    model = TorchTied().eval()
    randomize(model, seed)
    batch = np.random.default_rng(seed).standard_normal((4, INPUTS)).astype(np.float32)
    return paired(name, model, Tied(nnx.Rngs(seed)), parse_mapping(RULES, name), batch, loss="probe")
