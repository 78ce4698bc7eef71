"""Llama in plain flax nnx, in the sizes of published measurements: models for ``bench_public.py``.

Attention is ``jax.nn.dot_product_attention``, which XLA compiles without a fused kernel. Layers are scanned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Sizes:
    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    theta: float

    @property
    def head(self) -> int:
        return self.width // self.heads


LLAMA3_8B = Sizes(128256, 4096, 32, 32, 8, 14336, 500_000.0)
LLAMA3_70B = Sizes(128256, 8192, 80, 64, 8, 28672, 500_000.0)
LLAMA2_70B = Sizes(32000, 8192, 80, 64, 8, 28672, 10_000.0)


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """Rotate ``[B, T, heads, head]`` by position. The two halves of a head form the pairs."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        s = self.sizes = sizes
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norm1, self.norm2 = nnx.RMSNorm(s.width, rngs=rngs), nnx.RMSNorm(s.width, rngs=rngs)
        self.q, self.o = linear(s.width, s.width), linear(s.width, s.width)
        self.k, self.v = (linear(s.width, s.key_heads * s.head) for _ in range(2))
        self.gate, self.up = linear(s.width, s.hidden), linear(s.width, s.hidden)
        self.down = linear(s.hidden, s.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        s, (batch, length, _) = self.sizes, x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).reshape(batch, length, -1, s.head) for layer in (self.q, self.k, self.v))
        mixed = jax.nn.dot_product_attention(rotated(q, s.theta), rotated(k, s.theta), v, is_causal=True)
        x = x + self.o(mixed.reshape(batch, length, s.width))
        y = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
def scanned(block: Any, x: jax.Array) -> jax.Array:
    """Apply each layer of a stack in turn."""
    return block(x)


class Llama(nnx.Module):
    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(sizes.vocabulary, sizes.width, rngs=rngs)

        @nnx.split_rngs(splits=sizes.layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(sizes, rngs=rngs)

        self.layers = stacked(rngs)
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.head = nnx.Linear(sizes.width, sizes.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        # nnx.Embed keeps the dtype of its initial weights, float32. Without this cast all products would be float32.
        x = self.embed(tokens).astype(self.head.kernel[...].dtype)
        return self.head(self.norm(scanned(self.layers, x)))


def llama3_8b(rngs: nnx.Rngs) -> Llama:
    return Llama(LLAMA3_8B, rngs=rngs)


def llama3_70b(rngs: nnx.Rngs) -> Llama:
    return Llama(LLAMA3_70B, rngs=rngs)


def llama2_70b(rngs: nnx.Rngs) -> Llama:
    return Llama(LLAMA2_70B, rngs=rngs)


def loss(model: Llama, batch: dict[str, Any]) -> jax.Array:
    """Mean cross entropy of the next token, in float32."""
    logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
    targets = batch["tokens"][:, 1:]
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
