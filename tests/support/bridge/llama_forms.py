"""Llama as two other code bases compute it from their own parameters: torchtitan's model, and MaxText's tree.

Both rotate pairs of neighbours ``(x[2 i], x[2 i + 1])`` instead of the two halves of a head. MaxText does not divide
scores by ``sqrt(head_dim)``, because its query kernels contain this factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def angles(config: Any, length: int) -> np.ndarray:
    """Radians, float32 ``[length, head_dim / 2]``, by transformers' own formula for the config."""
    frequencies = LlamaRotaryEmbedding(config).inv_freq.numpy()
    return np.arange(length, dtype=np.float32)[:, None] * frequencies


class TorchtitanQKV(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        d, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.wq = nn.Linear(d, heads * config.head_dim, bias=False)
        self.wk = nn.Linear(d, kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(d, kv_heads * config.head_dim, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.wq(x), self.wk(x), self.wv(x)


class TorchtitanAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_linear = TorchtitanQKV(config)
        self.wo = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (y.view(batch, length, -1, self.head_dim) for y in self.qkv_linear(x))
        query, key = self.rotate(query, rotations), self.rotate(key, rotations)
        shared = query.shape[2] // key.shape[2]
        key, value = (t.repeat_interleave(shared, dim=2) for t in (key, value))
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))

    @staticmethod
    def rotate(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Neighbours as one complex number, times ``rotations [T, head_dim / 2]``."""
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotations[None, :, None]).flatten(3).type_as(x)


class TorchtitanFeedForward(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class TorchtitanBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = TorchtitanAttention(config)
        self.feed_forward = TorchtitanFeedForward(config)
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feed_forward(self.ffn_norm(x))


class TorchtitanLlama(nn.Module):
    """``tokens`` int64 ``[B, T]`` -> logits; layers are a dictionary with number keys, as in torchtitan."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict(
            {str(i): TorchtitanBlock(config) for i in range(config.num_hidden_layers)}
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        turns = torch.from_numpy(angles(self.config, tokens.shape[1]))
        rotations = torch.polar(torch.ones_like(turns), turns)
        for layer in self.layers.values():
            x = layer(x, rotations)
        return self.lm_head(self.norm(x))


def maxtext_logits(params: Mapping[str, Any], config: Any, tokens: np.ndarray) -> np.ndarray:
    """The logits from a MaxText tree of scanned layers (axis 1 of every layer's parameter), by its conventions."""
    decoder = params["decoder"]
    rms = config.rms_norm_eps
    cos, sin = (f(angles(config, tokens.shape[1]))[:, None, :] for f in (np.cos, np.sin))

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + rms) * scale

    def rotate(x: jax.Array) -> jax.Array:
        even, odd = x[..., ::2], x[..., 1::2]
        return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)

    def layer(x: jax.Array, w: Mapping[str, Any]) -> jax.Array:
        attention, mlp = w["self_attention"], w["mlp"]
        y = norm(x, w["pre_self_attention_layer_norm"]["scale"])
        query, key, value = (
            jnp.einsum("btd,dhk->bthk", y, attention[name]["kernel"]) for name in ("query", "key", "value")
        )
        grouped = rotate(query).reshape(*y.shape[:2], key.shape[2], -1, query.shape[-1])
        scores = jnp.einsum("btngk,bsnk->bngts", grouped, rotate(key))
        seen = np.tril(np.ones((y.shape[1], y.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("bngts,bsnk->btngk", weights, value).reshape(query.shape)
        x = x + jnp.einsum("bthk,hkd->btd", mixed, attention["out"]["kernel"])
        y = norm(x, w["post_self_attention_layer_norm"]["scale"])
        hidden = jax.nn.silu(y @ mlp["wi_0"]["kernel"]) * (y @ mlp["wi_1"]["kernel"])
        return x + hidden @ mlp["wo"]["kernel"]

    x = jnp.asarray(params["token_embedder"]["embedding"])[tokens]
    for i in range(config.num_hidden_layers):
        x = layer(x, jax.tree.map(lambda w, i=i: jnp.asarray(w).take(i, axis=1), decoder["layers"]))
    x = norm(x, decoder["decoder_norm"]["scale"])
    return np.asarray(x @ decoder["logits_dense"]["kernel"])
