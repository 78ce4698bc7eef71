"""A mixture with one expert per token and a router loss, trained with custom losses, and its nnx port."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx

from bridge.core.mapping import parse_mapping
from tests.support.parity.nnx_parts import embedding, layer_norm
from tests.support.parity.pair_tools import (
    VOCABULARY,
    Pair,
    load,
    randomize,
    tokens,
    torch_arrays,
    translated,
    with_rules,
)

WIDTH, HIDDEN, EXPERTS, CLASSES = 12, 16, 3, 4


class TorchExpert(torch.nn.Module):
    """GELU, tanh form, between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x), approximate="tanh"))


class TorchMixture(torch.nn.Module):
    """Each token's best expert; also the router's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = torch.nn.ModuleList(TorchExpert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = self.router(x).softmax(-1)
        share, chosen = shares.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            here = chosen == number
            out[here] = share[here][:, None] * expert(x[here])
        used = torch.nn.functional.one_hot(chosen, EXPERTS).to(x.dtype).mean((0, 1))
        return out, EXPERTS * (used * shares.mean((0, 1))).sum()


class TorchRouted(torch.nn.Module):
    """Tokens ``[B, T]`` -> ``{"logits": [B, 4], "auxiliary": [], "cache": None}``; two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixtures = torch.nn.ModuleList(TorchMixture() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        x, auxiliary = self.embed(ids), []
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            y, loss = mixture(norm(x))
            x = x + y
            auxiliary.append(loss)
        logits = self.head(x[:, -1])
        return {"logits": logits, "auxiliary": torch.stack(auxiliary).mean(), "cache": None}


class Expert(nnx.Module):
    """GELU, tanh form, between two projections."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Mixture(nnx.Module):
    """Each token's best expert, all experts computed; also the router's loss."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.experts = nnx.List([Expert(rngs) for _ in range(EXPERTS)])

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        shares = jax.nn.softmax(self.router(x), axis=-1)
        chosen = jax.nn.one_hot(jnp.argmax(shares, -1), EXPERTS, dtype=x.dtype)
        outputs = jnp.stack([expert(x) for expert in self.experts], -1)
        out = jnp.einsum("btme,bte,bte->btm", outputs, chosen, shares)
        return out, EXPERTS * jnp.sum(chosen.mean((0, 1)) * shares.mean((0, 1)))


class Routed(nnx.Module):
    """Tokens ``[B, T]`` -> ``{"logits": [B, 4], "auxiliary": [], "cache": None}``; two layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = embedding(VOCABULARY, WIDTH, rngs)
        self.norms = nnx.List([layer_norm(WIDTH, 1e-5, rngs) for _ in range(2)])
        self.mixtures = nnx.List([Mixture(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, ids: jax.Array) -> dict[str, Any]:
        x, auxiliary = self.embed(ids), []
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            y, loss = mixture(norm(x))
            x = x + y
            auxiliary.append(loss)
        return {"logits": self.head(x[:, -1]), "auxiliary": jnp.stack(auxiliary).mean(), "cache": None}


def torch_loss(model: Any, ids: Any) -> torch.Tensor:
    """Cross entropy of the first token's class, and a share of the router's loss."""
    out = model(ids)
    return (
        torch.nn.functional.cross_entropy(out["logits"], ids[:, 0].long() % CLASSES) + 0.1 * out["auxiliary"]
    )


def jax_loss(model: Any, ids: Any) -> jax.Array:
    """The same in JAX."""
    out = model(ids)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(out["logits"]), ids[:, :1] % CLASSES, axis=-1)
    return -chosen.mean() + 0.1 * out["auxiliary"]


RULES = with_rules("""
rule = [
  embed embed embed
  norm norms.{i} norms/{i}
  {torch = "mixtures.{i}.router.weight : o m", jax = "mixtures/{i}/router/kernel : m o"},
  {torch = "mixtures.{i}.experts.{e}.up.weight : o m", jax = "mixtures/{i}/experts/{e}/up/kernel : m o"},
  {torch = "mixtures.{i}.experts.{e}.up.bias", jax = "mixtures/{i}/experts/{e}/up/bias"},
  {torch = "mixtures.{i}.experts.{e}.down.weight : o m", jax = "mixtures/{i}/experts/{e}/down/kernel : m o"},
  {torch = "mixtures.{i}.experts.{e}.down.bias", jax = "mixtures/{i}/experts/{e}/down/bias"},
  {torch = "head.weight : o m", jax = "head/kernel : m o"},
  {torch = "head.bias", jax = "head/bias"},
]
""")


def routed_pair(name: str, seed: int) -> Pair:
    """The pair and a batch of tokens ``[3, 7]``."""
    model = TorchRouted().eval()
    randomize(model, seed)
    port, rules = Routed(nnx.Rngs(seed)), parse_mapping(RULES, "routed")
    load(port, translated(torch_arrays(model), rules, {}))
    losses: Any = (torch_loss, jax_loss)
    return Pair(name, model, port, rules, {}, tokens(seed, length=7), losses)
