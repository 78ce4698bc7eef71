"""A Llama-style decoder in flax nnx: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

The twin of the PyTorch decoder: same config, same numbers; parameter paths are JAX's own (``kernel [in, out]``).
Every module computes in the dtype of its parameters; norms, rotations, scores and softmax in at least float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_impl.modules.stack import scan_layers, stack_layers


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the decoder. Raises ``ValueError`` for sizes that do not fit together."""

    vocab_size: int = 257
    d_model: int = 331
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 2
    head_dim: int = 40
    d_ff: int = 883
    rope_theta: int = 10000
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "rope_theta",
        )  # fmt: skip
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"DecoderConfig.{name}: expected a value >= 1, got {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"DecoderConfig.n_heads: expected a multiple of n_kv_heads = {self.n_kv_heads}, got {self.n_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"DecoderConfig.head_dim: expected an even size (rotary pairs), got {self.head_dim}"
            )


def widened(x: jax.Array) -> jax.Array:
    """Cast to at least float32; float64 stays float64."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    # By default accelerators multiply float32 with fewer bits.
    return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST)


class Kernel(nnx.Module):
    """One bias-free projection; ``equation`` names its axes, weights are normal with ``std``.

    ``dot_general``: replaces ``jnp.einsum``; has the signature of ``jax.lax.dot_general``:
    ``model.set_attributes(dot_general=float8_dot_general)``.
    """

    def __init__(
        self, equation: str, shape: tuple[int, ...], *, rngs: nnx.Rngs, dtype: jnp.dtype, std: float = 0.02
    ) -> None:
        self.equation = equation
        self.dot_general: Callable[..., jax.Array] | None = None
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), shape, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.dot_general is None:
            return _einsum(self.equation, x, self.kernel[...])
        of_x, of_kernel = self.equation.split("->")[0].split(",")
        summed = [axis for axis in of_x if axis in of_kernel]
        axes = tuple(tuple(map(names.index, summed)) for names in (of_x, of_kernel))
        return self.dot_general(x, self.kernel[...], (axes, ((), ())), jax.lax.Precision.HIGHEST)


class Embedding(nnx.Module):
    """Vectors looked up by number: ``embedding [rows, width]``; ``attend`` reads the table as output weights."""

    def __init__(self, width: int, rows: int, *, rngs: nnx.Rngs, dtype: jnp.dtype, std: float = 0.02) -> None:
        self.embedding = nnx.Param(std * jax.random.normal(rngs.params(), (rows, width), dtype))

    def __call__(self, numbers: jax.Array) -> jax.Array:
        return self.embedding[...][numbers]

    def attend(self, x: jax.Array) -> jax.Array:
        return _einsum("btd,vd->btv", x, self.embedding[...])


class RMSNorm(nnx.Module):
    """Scales start near one, not at one, so that a lost or swapped norm weight shows in the loss."""

    def __init__(self, size: int, eps: float, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.eps = eps
        self.scale = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (size,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = widened(x)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale[...]


def rotary_tables(length: int, head_dim: int, theta: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, float64 ``[length, head_dim / 2]``, of ``position * theta ** (-2 i / head_dim)``."""
    frequencies = float(theta) ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    angles = np.arange(length)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def rotate(x: jax.Array, cos: np.ndarray, sin: np.ndarray) -> jax.Array:
    """Rotate the halves of the last axis: ``x [B, T, heads, head_dim]``, tables ``[T, head_dim / 2]``."""
    wide = widened(x)
    first, second = jnp.split(wide, 2, axis=-1)
    c, s = (jnp.asarray(table[:, None, :], wide.dtype) for table in (cos, sin))
    return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention; query head j reads key/value head ``j // (n_heads // n_kv_heads)``."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        c = config
        self.config = config
        out_std = 0.02 / (2 * c.n_layers) ** 0.5
        self.query = Kernel("btd,dhk->bthk", (c.d_model, c.n_heads, c.head_dim), rngs=rngs, dtype=dtype)
        self.key = Kernel("btd,dhk->bthk", (c.d_model, c.n_kv_heads, c.head_dim), rngs=rngs, dtype=dtype)
        self.value = Kernel("btd,dhk->bthk", (c.d_model, c.n_kv_heads, c.head_dim), rngs=rngs, dtype=dtype)
        self.out = Kernel(
            "bthk,hkd->btd", (c.n_heads, c.head_dim, c.d_model), rngs=rngs, dtype=dtype, std=out_std
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        batch, length, _ = x.shape
        cos, sin = rotary_tables(length, config.head_dim, config.rope_theta)
        query = rotate(self.query(x), cos, sin)
        key = rotate(self.key(x), cos, sin)
        value = self.value(x)
        grouped = query.reshape(batch, length, config.n_kv_heads, -1, config.head_dim)
        scores = _einsum("btngk,bsnk->bngts", widened(grouped), widened(key)) * config.head_dim**-0.5
        causal = np.tril(np.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(x.dtype)
        mixed = _einsum("bngts,bsnk->btngk", weights, value)
        return self.out(mixed.reshape(batch, length, config.n_heads, config.head_dim))


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        wide, narrow = (config.d_model, config.d_ff), (config.d_ff, config.d_model)
        out_std = 0.02 / (2 * config.n_layers) ** 0.5
        self.gate = Kernel("btd,df->btf", wide, rngs=rngs, dtype=dtype)
        self.up = Kernel("btd,df->btf", wide, rngs=rngs, dtype=dtype)
        self.down = Kernel("btf,fd->btd", narrow, rngs=rngs, dtype=dtype, std=out_std)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One pre-norm layer."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs, dtype=dtype)
        self.attention = Attention(config, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs, dtype=dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """``tokens`` int ``[B, T]`` -> logits ``[B, T, vocab_size]`` in the dtype of the parameters.

    ``dtype`` is the dtype of fresh parameters; float64 needs ``jax_enable_x64``. ``stacked``: all layers form one
    scanned stack, with the same parameters plus a leading axis.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32, stacked: bool = False
    ) -> None:
        self.config = config
        self.stacked = stacked
        self.embed = Embedding(config.d_model, config.vocab_size, rngs=rngs, dtype=dtype)
        layers = [Block(config, rngs=rngs, dtype=dtype) for _ in range(config.n_layers)]
        self.layers: Any = stack_layers(layers) if stacked else nnx.List(layers)
        self.norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs, dtype=dtype)
        if not config.tied:
            shape = (config.d_model, config.vocab_size)
            self.lm_head = Kernel("btd,dv->btv", shape, rngs=rngs, dtype=dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        if self.stacked:
            x = scan_layers(self.layers, x)
        else:
            for layer in self.layers:
                x = layer(x)
        x = self.norm(x)
        return self.embed.attend(x) if self.config.tied else self.lm_head(x)


def next_token_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy over all tokens, in at least float32: logits ``[B, T, V]``, targets int ``[B, T]``."""
    logits = widened(logits)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
