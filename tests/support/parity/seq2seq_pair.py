"""An encoder-decoder of ``torch.nn`` transformer layers, and its linen port with flax's attention."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge.core.mapping import parse_mapping
from tests.support.parity.pair_tools import VOCABULARY, Pair, randomize, tokens
from tests.support.parity.ported import ported

WIDTH, HEADS, HIDDEN, LAYERS = 16, 2, 24, 2


def _positions(length: int) -> np.ndarray:
    """Sines and cosines: float32 ``[length, WIDTH]``."""
    rates = np.exp(-np.arange(0, WIDTH, 2) * math.log(100.0) / WIDTH)
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], -1).astype(np.float32)


class TorchSeq2Seq(torch.nn.Module):
    """Tokens ``source [B, S]``, 0 is padding, ``target [B, T]`` -> logits ``[B, T, 61]``."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "d_model": WIDTH,
            "nhead": HEADS,
            "dim_feedforward": HIDDEN,
            "batch_first": True,
            "dropout": 0.0,
        }
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(**sizes, norm_first=True) for _ in range(LAYERS)
        )
        self.encoder_norm = torch.nn.LayerNorm(WIDTH)
        self.decoder = torch.nn.ModuleList(
            torch.nn.TransformerDecoderLayer(**sizes, activation="gelu") for _ in range(LAYERS)
        )
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.from_numpy(_positions(ids.shape[1]))
        x = self.embed(ids) * math.sqrt(WIDTH)
        return x + positions.to(x.dtype)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        padding = source == 0
        memory = self.embedded(source)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        memory = self.encoder_norm(memory)
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.embedded(target)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=later, memory_key_padding_mask=padding)
        return self.head(x)


class Encoder(nn.Module):
    """Norms first, ReLU; ``[B, S, 16]``."""

    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, seen: jax.Array) -> jax.Array:
        y = nn.LayerNorm(epsilon=self.eps, use_fast_variance=False, name="norm1")(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="self_attn")(y, y, mask=seen)
        y = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm2")(x)
        y = nn.Dense(WIDTH, name="linear2")(jax.nn.relu(nn.Dense(HIDDEN, name="linear1")(y)))
        return x + y


class Decoder(nn.Module):
    """Norms last, GELU; ``[B, T, 16]``."""

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, causal: jax.Array, seen: jax.Array) -> jax.Array:
        own = nn.MultiHeadDotProductAttention(HEADS, name="self_attn")(x, x, mask=causal)
        x = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm1")(x + own)
        other = nn.MultiHeadDotProductAttention(HEADS, name="multihead_attn")(x, memory, mask=seen)
        x = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm2")(x + other)
        y = jax.nn.gelu(nn.Dense(HIDDEN, name="linear1")(x), approximate=False)
        y = nn.Dense(WIDTH, name="linear2")(y)
        return nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm3")(x + y)


class Seq2Seq(nn.Module):
    """Tokens ``source [B, S]``, 0 is padding, ``target [B, T]`` -> logits ``[B, T, 61]``."""

    def setup(self) -> None:
        self.embed = nn.Embed(VOCABULARY, WIDTH)
        self.encoder = [Encoder() for _ in range(LAYERS)]
        self.encoder_norm = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)
        self.decoder = [Decoder() for _ in range(LAYERS)]
        self.head = nn.Dense(VOCABULARY)

    def embedded(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids) * math.sqrt(WIDTH)
        return x + jnp.asarray(_positions(ids.shape[1]), x.dtype)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        seen = (source != 0)[:, None, None]
        memory = self.embedded(source)
        for layer in self.encoder:
            memory = layer(memory, seen)
        memory = self.encoder_norm(memory)
        causal = jnp.tril(jnp.ones((target.shape[1],) * 2, bool))[None, None]
        x = self.embedded(target)
        for block in self.decoder:
            x = block(x, memory, causal, seen)
        return self.head(x)


PORT = Seq2Seq()


def _attention(torch_path: str, path: str) -> list[str]:
    names = ("query", "key", "value")
    kernels = ", ".join(f'"{path}/{n}/kernel : m h {n[0]}"' for n in names)
    biases = ", ".join(f'"{path}/{n}/bias : h {n[0]}"' for n in names)
    return [
        f'{{torch = "{torch_path}.in_proj_weight : ((h q) + (h k) + (h v)) m", jax = [{kernels}]}}',
        f'{{torch = "{torch_path}.in_proj_bias : ((h q) + (h k) + (h v))", jax = [{biases}]}}',
        f'{{torch = "{torch_path}.out_proj.weight : m (h d)", jax = "{path}/out/kernel : h d m"}}',
        f'{{torch = "{torch_path}.out_proj.bias", jax = "{path}/out/bias"}}',
    ]


def _rules() -> str:
    lines = ['{torch = "embed.weight", jax = "embed/embedding"}']
    norms, linears = [("encoder_norm", "encoder_norm")], [("head", "head")]
    for stack, count in (("encoder", 2), ("decoder", 3)):
        a, b = f"{stack}.{{i}}", f"{stack}_{{i}}"
        lines += _attention(f"{a}.self_attn", f"{b}/self_attn")
        norms += [(f"{a}.norm{k}", f"{b}/norm{k}") for k in range(1, count + 1)]
        linears += [(f"{a}.linear{k}", f"{b}/linear{k}") for k in (1, 2)]
    lines += _attention("decoder.{i}.multihead_attn", "decoder_{i}/multihead_attn")
    for a, b in norms:
        lines += [f'{{torch = "{a}.weight", jax = "{b}/scale"}}', f'{{torch = "{a}.bias", jax = "{b}/bias"}}']
    for a, b in linears:
        lines += [f'{{torch = "{a}.weight : o i", jax = "{b}/kernel : i o"}}']
        lines += [f'{{torch = "{a}.bias", jax = "{b}/bias"}}']
    return 'axes = {k = "q", v = "q"}\nrule = [\n' + ",\n".join(lines) + "\n]"


def seq2seq_pair(name: str, seed: int) -> Pair:
    """The pair and a batch whose sources end in padding."""
    model = TorchSeq2Seq().eval()
    randomize(model, seed)
    source, target = tokens(seed, length=7), tokens(seed + 100, length=6)
    source = np.maximum(source, 1)
    source[1, 5:], source[2, 3:] = 0, 0
    batch = {"source": source, "target": target}
    return ported(
        name, model, PORT, parse_mapping(_rules(), "seq2seq"), batch, axes={"h": HEADS, "q": WIDTH // HEADS}
    )
