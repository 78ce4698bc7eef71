"""A Llama-style decoder: pre-norm blocks of grouped-query attention with rotary positions and SwiGLU.

::

    tokens [B, T] -> embed -> n_layers x { x += attention(norm(x)); x += mlp(norm(x)) } -> norm -> lm_head
                                                                                          -> logits [B, T, V]

Only plain matmuls and einsums, so that another framework can do the same arithmetic. Normalization, rotary angles,
attention scores and the loss are computed in float32, or in float64 for float64 parameters.
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder.

    ``n_heads * head_dim`` need not equal ``d_model``. ``tied`` uses the embedding as the output projection.

    Raises:
        ValueError: a size below 1, an odd ``head_dim``, ``n_heads`` not a multiple of ``n_kv_heads``.
    """

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
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name}: expected an int >= 1, got {value!r}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number (rotary halves), got {self.head_dim}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads: expected a multiple of n_kv_heads={self.n_kv_heads}, got {self.n_heads}"
            )
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps: expected a number > 0, got {self.norm_eps!r}")
        if not isinstance(self.tied, bool):
            raise ValueError(f"tied: expected a bool, got {self.tied!r}")


class RMSNorm(nn.Module):
    """``x * rsqrt(mean(x**2) + eps)`` over the last dimension, rounded to x's dtype, times a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = _widen(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal grouped-query attention, ``[B, T, D] -> [B, T, D]``; query head j reads key/value head j // group."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.group = config.n_heads // config.n_kv_heads
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.d_model, queries, bias=False)
        self.wk = nn.Linear(config.d_model, keys, bias=False)
        self.wv = nn.Linear(config.d_model, keys, bias=False)
        self.wo = nn.Linear(queries, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        # -1: under tensor parallelism each rank has some of the heads.
        q = self.wq(x).unflatten(-1, (-1, self.group, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, 1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        q, k = self._rotate(q), self._rotate(k).squeeze(3)
        scores = torch.einsum("btkgd,bskd->bkgts", _widen(q), _widen(k)) / math.sqrt(self.head_dim)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1).to(v.dtype)
        return self.wo(torch.einsum("bkgts,bskd->btkgd", weights, v).flatten(2))

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate the halves of the last dimension of ``[B, T, heads, group, head_dim]`` by the position."""
        wide = _widen(x)
        # Not an argument or a buffer: mixed precision would round them to the compute dtype.
        table = _rotary_table(x.shape[1], self.head_dim, self.rope_theta)
        cos, sin = torch.from_numpy(table).to(x.device, wide.dtype)[:, :, None, None, :]
        x1, x2 = wide.chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU, ``[..., D] -> [..., D]``; the first ``d_ff`` rows of ``w13`` are the gate, the rest the up projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.w13 = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.w2 = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm layer, ``[B, T, D] -> [B, T, D]``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens (integers ``[B, T]``) to logits ``[B, T, vocab_size]`` in the parameters' dtype."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        if not config.tied:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.config.tied else self.lm_head(x)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every parameter from the seed and its name, independent of the device, dtype or torch version.

        Philox keyed by ``(seed, crc32(name))`` draws float64 normals in row-major order, rounded once to the
        parameter's dtype: matrices have standard deviation 0.02, except matrices that write to the residual stream
        (``wo``, ``w2``) with 0.02 / sqrt(2 n_layers); norms are 1 + 0.1 x normal. Call it before sharding.
        """
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed: expected 0 <= seed < 2**64, got {seed}")
        for name, parameter in self.named_parameters():
            key = np.array([seed, zlib.crc32(name.encode())], dtype=np.uint64)
            normal = np.random.Generator(np.random.Philox(key=key)).standard_normal(tuple(parameter.shape))
            if name.endswith("norm.weight"):
                value = 1 + 0.1 * normal
            elif name.endswith((".wo.weight", ".w2.weight")):
                value = 0.02 / math.sqrt(2 * self.config.n_layers) * normal
            else:
                value = 0.02 * normal
            parameter.copy_(torch.from_numpy(value))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all tokens: logits ``[B, T, V]``, targets integers ``[B, T]``; a 0-d tensor.

    Computed and returned in float32, or in float64 for float64 logits.
    """
    return F.cross_entropy(_widen(logits).flatten(0, 1), targets.flatten().long())


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@functools.lru_cache(maxsize=8)
def _rotary_table(length: int, head_dim: int, theta: int) -> np.ndarray:
    """Cosines and sines of ``position * theta**(-2i / head_dim)``, float64 ``[2, length, head_dim / 2]``."""
    frequencies = float(theta) ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    angles = np.outer(np.arange(length), frequencies)
    return np.stack([np.cos(angles), np.sin(angles)])
