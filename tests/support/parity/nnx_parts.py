"""Modules that several nnx ports share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def layer_norm(size: int, eps: float, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """``nnx.LayerNorm`` with the variance computed as in PyTorch."""
    return nnx.LayerNorm(size, epsilon=eps, use_fast_variance=False, rngs=rngs)


def rms_norm(size: int, eps: float, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """``nnx.RMSNorm`` with one scale for each channel."""
    return nnx.RMSNorm(size, epsilon=eps, use_fast_variance=False, rngs=rngs)


def embedding(rows: int, size: int, rngs: nnx.Rngs) -> nnx.Embed:
    """``nnx.Embed`` whose vectors have the dtype of the table, also when the table's dtype changes."""
    table = nnx.Embed(rows, size, rngs=rngs)
    table.dtype = None
    return table


def heads_of(x: jax.Array, heads: int) -> jax.Array:
    """``[B, T, heads * D]`` -> ``[B, T, heads, D]``."""
    return x.reshape(*x.shape[:-1], heads, -1)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float,
    causal: bool = False,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Attention of ``[B, T, heads, D]``, and of keys and values with as many heads or a divisor of them.

    Returns ``[B, T, heads * D]``; ``bias [1, heads, T, T]`` is added to the scaled scores.
    """
    batch, length, heads, _ = query.shape
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    weights = jax.nn.softmax(wide, axis=-1).astype(value.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, value).reshape(batch, length, -1)


def rotary(length: int, size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of rotary positions: float32 ``[length, 1, size]``, halves equal."""
    frequencies = 1.0 / theta ** (jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)[:, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the first channels of ``x [B, T, heads, D]``, as many as the tables have."""
    cos, sin = (table.astype(x.dtype) for table in tables)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = jnp.split(turned, 2, axis=-1)
    turned = turned * cos + jnp.concatenate([-second, first], axis=-1) * sin
    return jnp.concatenate([turned, rest], axis=-1)


class GeluMLP(nnx.Module):
    """GELU between two projections; ``[B, T, width]``."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class GatedMLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))``; ``[B, T, width]``."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
