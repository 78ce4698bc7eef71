"""DeepSeek-V3 in plain flax nnx, to be compiled for hundreds of devices.

The model has latent attention, 3 dense layers, and 58 layers of 256 experts with a shared expert (arXiv 2412.19437,
section 4.2). A dispatch of fixed capacity sends a token to its 8 experts, as in GShard (arXiv 2006.16668): full experts
drop the token. Weights of experts are stacked, ``[experts, in, out]``, so that a model axis can cut them::

    [mesh]
    dp = "all"
    ep = 32

    [[parallel]]
    match = "sparse.*.mlp.experts"
    axis = "ep"
    style = "expert"
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.bench.public_llama import rotated, scanned


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 129280
    width: int = 7168
    dense_layers: int = 3
    sparse_layers: int = 58
    heads: int = 128
    query_rank: int = 1536
    key_rank: int = 512
    head: int = 128
    rotary: int = 64
    hidden: int = 18432
    expert_hidden: int = 2048
    experts: int = 256
    chosen: int = 8
    theta: float = 10_000.0


def spread(x: jax.Array) -> jax.Array:
    """Shard sequences over ``ep``. Otherwise each device of ``ep`` would compute the same whole batch."""
    if "ep" not in jax.sharding.get_abstract_mesh().axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec("ep"))


class LatentAttention(nnx.Module):
    def __init__(self, s: Sizes, *, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.s = s
        self.q_down, self.q_up = (
            linear(s.width, s.query_rank),
            linear(s.query_rank, s.heads * (s.head + s.rotary)),
        )
        self.q_norm, self.k_norm = nnx.RMSNorm(s.query_rank, rngs=rngs), nnx.RMSNorm(s.key_rank, rngs=rngs)
        self.k_down = linear(s.width, s.key_rank + s.rotary)
        self.k_up, self.v_up = linear(s.key_rank, s.heads * s.head), linear(s.key_rank, s.heads * s.head)
        self.out = linear(s.heads * s.head, s.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        s, (batch, length, _) = self.s, x.shape
        heads = (batch, length, s.heads, -1)
        q, q_rotary = jnp.split(self.q_up(self.q_norm(self.q_down(x))).reshape(heads), [s.head], axis=-1)
        latent, k_rotary = jnp.split(self.k_down(x), [s.key_rank], axis=-1)
        latent = self.k_norm(latent)
        k_rotary = rotated(k_rotary[:, :, None], s.theta)
        k = jnp.concatenate(
            [self.k_up(latent).reshape(heads), jnp.broadcast_to(k_rotary, (*heads[:3], s.rotary))], axis=-1
        )
        q = jnp.concatenate([q, rotated(q_rotary, s.theta)], axis=-1)
        # XLA's attention needs values as wide as queries and keys.
        v = jnp.pad(self.v_up(latent).reshape(heads), [(0, 0)] * 3 + [(0, s.rotary)])
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed[..., : s.head].reshape(batch, length, -1))


class Gated(nnx.Module):
    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
    """Maps ``[experts, capacity, width]`` to the same shape."""

    def __init__(self, s: Sizes, *, rngs: nnx.Rngs) -> None:
        def stacked(*shape: int) -> nnx.Param[Any]:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), (s.experts, *shape)))

        self.gate, self.up = stacked(s.width, s.expert_hidden), stacked(s.width, s.expert_hidden)
        self.down = stacked(s.expert_hidden, s.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", x, self.gate[...]))
        hidden *= jnp.einsum("ecd,edf->ecf", x, self.up[...])
        return jnp.einsum("ecf,efd->ecd", hidden, self.down[...])


class Mixture(nnx.Module):
    def __init__(self, s: Sizes, *, rngs: nnx.Rngs) -> None:
        self.s = s
        self.router = nnx.Linear(s.width, s.experts, use_bias=False, rngs=rngs)
        self.shared = Gated(s.width, s.expert_hidden, rngs=rngs)
        self.experts = Experts(s, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        s, tokens = self.s, x.reshape(-1, x.shape[-1])
        capacity = max(1, len(tokens) * s.chosen // s.experts)
        weights, chosen = jax.lax.top_k(jax.nn.sigmoid(self.router(tokens).astype(jnp.float32)), s.chosen)
        weights /= weights.sum(-1, keepdims=True)
        goes = jax.nn.one_hot(chosen, s.experts, dtype=jnp.int32)
        # The position of a token in each of its experts. Beyond the capacity one_hot gives zeros.
        counted = jnp.cumsum(goes.reshape(-1, s.experts), axis=0).reshape(goes.shape) - 1
        position = counted.max(-1, where=goes > 0, initial=0)
        where = jax.nn.one_hot(position, capacity, dtype=x.dtype)
        sent = jnp.einsum("tke,tkc->tec", goes.astype(x.dtype), where)
        mixed = self.experts(jnp.einsum("tec,td->ecd", sent, tokens))
        back = jnp.einsum("tke,tkc,tk->tec", goes.astype(x.dtype), where, weights.astype(x.dtype))
        return (jnp.einsum("tec,ecd->td", back, mixed) + self.shared(tokens)).reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, s: Sizes, *, sparse: bool, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.RMSNorm(s.width, rngs=rngs), nnx.RMSNorm(s.width, rngs=rngs)
        self.attention = LatentAttention(s, rngs=rngs)
        self.mlp = Mixture(s, rngs=rngs) if sparse else Gated(s.width, s.hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = spread(x + self.attention(self.norm1(x)))
        return spread(x + self.mlp(self.norm2(x)))


class DeepSeek(nnx.Module):
    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        def stacked(count: int, sparse: bool) -> Block:
            @nnx.split_rngs(splits=count)
            @nnx.vmap
            def make(rngs: nnx.Rngs) -> Block:
                return Block(sizes, sparse=sparse, rngs=rngs)

            return make(rngs)

        self.embed = nnx.Embed(sizes.vocabulary, sizes.width, rngs=rngs)
        self.dense, self.sparse = stacked(sizes.dense_layers, False), stacked(sizes.sparse_layers, True)
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.head = nnx.Linear(sizes.width, sizes.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        # nnx.Embed keeps the dtype of its initial weights, float32. Without this cast all products would be float32.
        x = spread(self.embed(tokens).astype(self.head.kernel[...].dtype))
        return self.head(self.norm(scanned(self.sparse, scanned(self.dense, x))))


def deepseek_v3(rngs: nnx.Rngs) -> DeepSeek:
    return DeepSeek(Sizes(), rngs=rngs)
