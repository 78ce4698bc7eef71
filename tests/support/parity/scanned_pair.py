"""A decoder whose layers are a ``ModuleList``, and its linen port: one layer, scanned over stacked weights."""

from __future__ import annotations

import flax.linen as nn
import jax
import torch

from bridge.core.mapping import parse_mapping
from tests.support.parity.nnx_parts import attend, heads_of, rotary, rotate
from tests.support.parity.pair_tools import VOCABULARY, Pair, randomize, tokens
from tests.support.parity.ported import ported

WIDTH, HEADS, HIDDEN, LAYERS = 16, 2, 20, 3


class TorchAttention(torch.nn.Module):
    """Causal attention with rotary positions; ``[B, T, 16]``."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, torch.nn.Linear(WIDTH, WIDTH, bias=False))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        rates = 1000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True
        )
        return self.o(y.transpose(1, 2).flatten(2))


class TorchMLP(torch.nn.Module):
    """Gated by SiLU; ``[B, T, 16]``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = torch.nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = torch.nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class TorchLayer(torch.nn.Module):
    """Attention and MLP with RMS norms before; ``[B, T, 16]``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = torch.nn.RMSNorm(WIDTH, eps=1e-5)
        self.attention = TorchAttention()
        self.mlp_norm = torch.nn.RMSNorm(WIDTH, eps=1e-5)
        self.mlp = TorchMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TorchDecoder(torch.nn.Module):
    """Tokens ``[B, T]`` -> logits ``[B, T, 61]``; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(TorchLayer() for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T


class Attention(nn.Module):
    """Causal attention with rotary positions; ``[B, T, 16]``."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (heads_of(nn.Dense(WIDTH, use_bias=False, name=name)(x), HEADS) for name in ("q", "k", "v"))
        tables = rotary(x.shape[1], WIDTH // HEADS, 1000.0)
        y = attend(rotate(q, tables), rotate(k, tables), v, scale=(WIDTH // HEADS) ** -0.5, causal=True)
        return nn.Dense(WIDTH, use_bias=False, name="o")(y)


class MLP(nn.Module):
    """Gated by SiLU; ``[B, T, 16]``."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = jax.nn.silu(nn.Dense(HIDDEN, use_bias=False, name="gate")(x))
        return nn.Dense(WIDTH, use_bias=False, name="down")(
            gate * nn.Dense(HIDDEN, use_bias=False, name="up")(x)
        )


class Layer(nn.Module):
    """Attention and MLP with RMS norms before; a scan's body: ``[B, T, 16]`` and None."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        x = x + Attention(name="attention")(
            nn.RMSNorm(epsilon=1e-5, use_fast_variance=False, name="attention_norm")(x)
        )
        y = nn.RMSNorm(epsilon=1e-5, use_fast_variance=False, name="mlp_norm")(x)
        return x + MLP(name="mlp")(y), None


class Decoder(nn.Module):
    """Tokens ``[B, T]`` -> logits ``[B, T, 61]``; the head is the embedding."""

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, _ = stack(name="layers")(embed(ids), None)
        x = nn.RMSNorm(epsilon=1e-5, use_fast_variance=False, name="norm")(x)
        return embed.attend(x)


PORT = Decoder()
RULES = """
rule = [
  {torch = "embed.weight", jax = "embed/embedding"},
  {torch = "norm.weight", jax = "norm/scale"},
  {torch = "layers.{i}.attention_norm.weight : m", jax = "layers/attention_norm/scale : {i} m"},
  {torch = "layers.{i}.mlp_norm.weight : m", jax = "layers/mlp_norm/scale : {i} m"},
  {torch = "layers.{i}.attention.q.weight : o m", jax = "layers/attention/q/kernel : {i} m o"},
  {torch = "layers.{i}.attention.k.weight : o m", jax = "layers/attention/k/kernel : {i} m o"},
  {torch = "layers.{i}.attention.v.weight : o m", jax = "layers/attention/v/kernel : {i} m o"},
  {torch = "layers.{i}.attention.o.weight : o m", jax = "layers/attention/o/kernel : {i} m o"},
  {torch = "layers.{i}.mlp.gate.weight : o m", jax = "layers/mlp/gate/kernel : {i} m o"},
  {torch = "layers.{i}.mlp.up.weight : o m", jax = "layers/mlp/up/kernel : {i} m o"},
  {torch = "layers.{i}.mlp.down.weight : o m", jax = "layers/mlp/down/kernel : {i} m o"},
]
"""


def scanned_pair(name: str, seed: int) -> Pair:
    """The pair and a batch for the next token."""
    model = TorchDecoder().eval()
    randomize(model, seed)
    rules = parse_mapping(RULES, "scanned")
    return ported(name, model, PORT, rules, tokens(seed, length=9), loss="next_token")
