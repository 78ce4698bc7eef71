"""A language model with two LSTM layers, and its port, a scan over fused gates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from flax import nnx

from bridge.core.mapping import parse_mapping
from tests.support.parity.nnx_parts import embedding, layer_norm
from tests.support.parity.pair_tools import VOCABULARY, Pair, paired, randomize, tokens, with_rules

EMBEDDING, HIDDEN = 24, 32


class TorchLSTM(torch.nn.Module):
    """Tokens ``[B, T]`` -> logits ``[B, T, 61]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, EMBEDDING)
        self.layers = torch.nn.ModuleList(
            torch.nn.LSTM(size, HIDDEN, batch_first=True) for size in (EMBEDDING, HIDDEN)
        )
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(self.norm(x))


class LSTMLayer(nnx.Module):
    """``[B, T, size]`` -> ``[B, T, hidden]``; gates input, forget, cell, output on the axis before the last."""

    def __init__(self, size: int, hidden: int, rngs: nnx.Rngs) -> None:
        self.input_kernel = nnx.Param(jax.random.normal(rngs.params(), (size, 4, hidden)))
        self.state_kernel = nnx.Param(jax.random.normal(rngs.params(), (hidden, 4, hidden)))
        self.input_bias = nnx.Param(jnp.zeros((4, hidden)))
        self.state_bias = nnx.Param(jnp.zeros((4, hidden)))

    def gates(self, x: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Input, forget, cell and output gates ``[B, hidden]``."""
        y = jnp.einsum("bi,igh->gbh", x, self.input_kernel[...]) + self.input_bias[...][:, None]
        y = y + jnp.einsum("bi,igh->gbh", hidden, self.state_kernel[...]) + self.state_bias[...][:, None]
        sigmoid = jax.nn.sigmoid
        return sigmoid(y[0]), sigmoid(y[1]), jnp.tanh(y[2]), sigmoid(y[3])

    def step(
        self, carry: tuple[jax.Array, jax.Array], x: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """One position: hidden and cell state ``[B, hidden]``."""
        hidden, cell = carry
        take, keep, new, out = self.gates(x, hidden)
        cell = keep * cell + take * new
        hidden = out * jnp.tanh(cell)
        return (hidden, cell), hidden

    def __call__(self, x: jax.Array) -> jax.Array:
        zero = jnp.zeros((len(x), self.input_bias[...].shape[-1]), x.dtype)
        _, outputs = jax.lax.scan(self.step, (zero, zero), jnp.moveaxis(x, 1, 0))
        return jnp.moveaxis(outputs, 0, 1)


class LSTM(nnx.Module):
    """Tokens ``[B, T]`` -> logits ``[B, T, 61]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = embedding(VOCABULARY, EMBEDDING, rngs)
        self.layers = nnx.List([LSTMLayer(size, HIDDEN, rngs) for size in (EMBEDDING, HIDDEN)])
        self.norm = layer_norm(HIDDEN, 1e-5, rngs)
        self.head = nnx.Linear(HIDDEN, VOCABULARY, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


RULES = with_rules("""
rule = [
  embed embed embed
  {torch = "layers.{i}.weight_ih_l0 : (g h) x", jax = "layers/{i}/input_kernel : x g h"},
  {torch = "layers.{i}.weight_hh_l0 : (g h) s", jax = "layers/{i}/state_kernel : s g h"},
  {torch = "layers.{i}.bias_ih_l0 : (g h)", jax = "layers/{i}/input_bias : g h"},
  {torch = "layers.{i}.bias_hh_l0 : (g h)", jax = "layers/{i}/state_bias : g h"},
  norm norm norm
  {torch = "head.weight : v h", jax = "head/kernel : h v"},
  {torch = "head.bias", jax = "head/bias"},
]
""")


def lstm_pair(name: str, seed: int) -> Pair:
    """The pair; both biases of a layer are random, and so is the state's kernel."""
    model = TorchLSTM().eval()
    randomize(model, seed)
    mapping = parse_mapping(RULES, "lstm")
    return paired(name, model, LSTM(nnx.Rngs(seed)), mapping, tokens(seed), axes={"g": 4})
