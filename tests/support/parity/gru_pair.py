"""A classifier of token sequences with two bidirectional GRU layers, and its port, a function of parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.core.mapping import parse_mapping
from bridge.parity.recorded.recording import tap
from tests.support.parity.pair_tools import VOCABULARY, Pair, randomize, tokens
from tests.support.parity.ported import ported

HIDDEN, CLASSES = 12, 5


class TorchBiGRU(torch.nn.Module):
    """Tokens ``[B, T]`` -> logits ``[B, 5]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 10)
        self.first = torch.nn.GRU(10, HIDDEN, batch_first=True, bidirectional=True)
        self.norm = torch.nn.LayerNorm(2 * HIDDEN)
        self.second = torch.nn.GRU(2 * HIDDEN, HIDDEN, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.first(self.embed(ids) * 2.0)
        x, _ = self.second(self.norm(x))
        return self.head(x.mean(1))


def direction(p: Any, x: jax.Array, reverse: bool) -> jax.Array:
    """One direction of a layer: ``[B, T, size]`` -> ``[B, T, hidden]``."""
    inputs = x @ p["w_in"] + p["b_in"]

    def step(hidden: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = hidden @ p["w_state"] + p["b_state"]
        reset_x, update_x, new_x = jnp.split(at, 3, -1)
        reset_h, update_h, new_h = jnp.split(own, 3, -1)
        reset = jax.nn.sigmoid(reset_x + reset_h)
        update = jax.nn.sigmoid(update_x + update_h)
        new = jnp.tanh(new_x + reset * new_h)
        hidden = (1 - update) * new + update * hidden
        return hidden, hidden

    zero = jnp.zeros((len(x), HIDDEN), x.dtype)
    _, out = jax.lax.scan(step, zero, jnp.moveaxis(inputs, 1, 0), reverse=reverse)
    return jnp.moveaxis(out, 0, 1)


def both(p: Any, x: jax.Array) -> jax.Array:
    """A layer of two directions: ``[B, T, size]`` -> ``[B, T, 2 * hidden]``."""
    return jnp.concatenate([direction(p["forward"], x, False), direction(p["backward"], x, True)], -1)


def norm(p: Any, x: jax.Array) -> jax.Array:
    """A layer norm with scale and bias."""
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]


def PORT(p: Any, ids: jax.Array) -> jax.Array:
    """Tokens ``[B, T]`` -> logits ``[B, 5]``; taps are named like the torch modules."""
    x = tap("embed", p["embed"]["table"][ids])
    x = tap("first", both(p["first"], x * 2.0))
    x = tap("norm", norm(p["norm"], x))
    x = tap("second", both(p["second"], x))
    return x.mean(1) @ p["head"]["kernel"] + p["head"]["bias"]


def _rules() -> str:
    lines = [
        '{torch = "embed.weight", jax = "embed/table"}',
        '{torch = "norm.weight", jax = "norm/scale"}',
        '{torch = "norm.bias", jax = "norm/bias"}',
        '{torch = "head.weight : o i", jax = "head/kernel : i o"}',
        '{torch = "head.bias", jax = "head/bias"}',
    ]
    for layer in ("first", "second"):
        for end, way in (("", "forward"), ("_reverse", "backward")):
            to = f"{layer}/{way}"
            lines += [
                f'{{torch = "{layer}.weight_ih_l0{end} : g x", jax = "{to}/w_in : x g"}}',
                f'{{torch = "{layer}.weight_hh_l0{end} : g h", jax = "{to}/w_state : h g"}}',
                f'{{torch = "{layer}.bias_ih_l0{end}", jax = "{to}/b_in"}}',
                f'{{torch = "{layer}.bias_hh_l0{end}", jax = "{to}/b_state"}}',
            ]
    return "rule = [\n" + ",\n".join(lines) + "\n]"


def gru_pair(name: str, seed: int) -> Pair:
    """The pair and a batch of tokens ``[3, 9]``."""
    model = TorchBiGRU().eval()
    randomize(model, seed)
    rules = parse_mapping(_rules(), "gru")
    return ported(name, model, PORT, rules, tokens(seed, length=9), linen=False)
