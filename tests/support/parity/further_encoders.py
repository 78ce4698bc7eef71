"""Encoders of transformers without a shipped mapping, and their nnx ports: BERT and T5's encoder."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from bridge.core.mapping import parse_mapping
from tests.support.parity.nnx_parts import attend, embedding, heads_of, layer_norm, rms_norm
from tests.support.parity.pair_tools import VOCABULARY, Pair, paired, randomize, tokens, with_rules

WIDTH, HEADS, HIDDEN, LAYERS = 32, 4, 40, 2
HEAD = WIDTH // HEADS


class BertEmbeddings(nnx.Module):
    """Tokens ``[B, T]`` -> the norm of the sum of word, position and type vectors ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words = embedding(VOCABULARY, WIDTH, rngs)
        self.positions = embedding(64, WIDTH, rngs)
        self.types = embedding(2, WIDTH, rngs)
        self.norm = layer_norm(WIDTH, 1e-12, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.words(ids) + self.positions(jnp.arange(ids.shape[1])) + self.types(jnp.zeros_like(ids))
        return self.norm(x)


class BertAttention(nnx.Module):
    """Attention of all tokens, without its output projection; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.key = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.value = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (heads_of(project(x), HEADS) for project in (self.query, self.key, self.value))
        return attend(q, k, v, scale=HEAD**-0.5)


class BertResidual(nnx.Module):
    """A projection, added to the residual, and the norm of the sum; ``[B, T, 32]``."""

    def __init__(self, size: int, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(size, WIDTH, rngs=rngs)
        self.norm = layer_norm(WIDTH, 1e-12, rngs)

    def __call__(self, x: jax.Array, residual: jax.Array) -> jax.Array:
        return self.norm(self.dense(x) + residual)


class BertLayer(nnx.Module):
    """A post-norm layer; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = BertAttention(rngs)
        self.attention_output = BertResidual(WIDTH, rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.output = BertResidual(HIDDEN, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.attention_output(self.attention(x), x)
        return self.output(jax.nn.gelu(self.up(x), approximate=False), x)


class Bert(nnx.Module):
    """Tokens ``[B, T]`` -> hidden states ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embeddings = BertEmbeddings(rngs)
        self.layers = nnx.List([BertLayer(rngs) for _ in range(LAYERS)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return x


BERT = with_rules("""
rule = [
  embed embeddings.word_embeddings embeddings/words
  embed embeddings.position_embeddings embeddings/positions
  embed embeddings.token_type_embeddings embeddings/types
  norm embeddings.LayerNorm embeddings/norm
  dense encoder.layer.{i}.attention.self.query layers/{i}/attention/query
  dense encoder.layer.{i}.attention.self.key layers/{i}/attention/key
  dense encoder.layer.{i}.attention.self.value layers/{i}/attention/value
  {torch = "encoder.layer.{i}.attention.output.dense.weight : o i", jax = [
    "layers/{i}/attention_output/dense/kernel : i o"]},
  {torch = "encoder.layer.{i}.attention.output.dense.bias", jax = "layers/{i}/attention_output/dense/bias"},
  norm encoder.layer.{i}.attention.output.LayerNorm layers/{i}/attention_output/norm
  dense encoder.layer.{i}.intermediate.dense layers/{i}/up
  dense encoder.layer.{i}.output.dense layers/{i}/output/dense
  norm encoder.layer.{i}.output.LayerNorm layers/{i}/output/norm
]
""")


def bert_pair(name: str, seed: int) -> Pair:
    """``BertModel`` without its pooler."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "use_cache": False,
        "attn_implementation": "eager",
    }
    model = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False).eval()
    randomize(model, seed)
    port, batch = Bert(nnx.Rngs(seed)), tokens(seed)
    return paired(name, model, port, parse_mapping(BERT, name), batch, loss="probe")


T5_HEAD, BUCKETS, FARTHEST = 10, 8, 12


class T5Attention(nnx.Module):
    """Attention with unscaled scores and a bias for each distance; the first layer has the table of biases.

    ``[B, T, 32]`` and the bias of the layer before, or None, to ``[B, T, 32]`` and the bias ``[1, heads, T, T]``.
    """

    def __init__(self, first: bool, rngs: nnx.Rngs) -> None:
        inner = HEADS * T5_HEAD
        self.query = nnx.Linear(WIDTH, inner, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(WIDTH, inner, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(WIDTH, inner, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(inner, WIDTH, use_bias=False, rngs=rngs)
        self.distances = embedding(BUCKETS, HEADS, rngs) if first else None

    def bias(self, length: int) -> jax.Array:
        """Bias ``[1, heads, T, T]`` by bucket: half of them for keys behind, half of those for single distances."""
        distance = np.arange(length)[None, :] - np.arange(length)[:, None]
        half, exact = BUCKETS // 2, BUCKETS // 4
        away = np.abs(distance)
        far = np.log(np.maximum(away, 1) / exact) / math.log(FARTHEST / exact) * (half - exact)
        bucket = np.where(away < exact, away, np.minimum(exact + far.astype(int), half - 1))
        assert self.distances is not None
        table = self.distances(jnp.asarray(bucket + half * (distance > 0)))
        return jnp.moveaxis(table, -1, 0)[None]

    def __call__(self, x: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        bias = self.bias(x.shape[1]) if bias is None else bias
        q, k, v = (heads_of(project(x), HEADS) for project in (self.query, self.key, self.value))
        return self.out(attend(q, k, v, scale=1.0, bias=bias)), bias


class T5MLP(nnx.Module):
    """ReLU between two projections; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


class T5Layer(nnx.Module):
    """A pre-norm layer; ``[B, T, 32]`` and the bias of the scores."""

    def __init__(self, first: bool, rngs: nnx.Rngs) -> None:
        self.attention_norm = rms_norm(WIDTH, 1e-6, rngs)
        self.attention = T5Attention(first, rngs)
        self.mlp_norm = rms_norm(WIDTH, 1e-6, rngs)
        self.mlp = T5MLP(rngs)

    def __call__(self, x: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        y, bias = self.attention(self.attention_norm(x), bias)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), bias


class T5Encoder(nnx.Module):
    """Tokens ``[B, T]`` -> hidden states ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = embedding(VOCABULARY, WIDTH, rngs)
        self.layers = nnx.List([T5Layer(i == 0, rngs) for i in range(LAYERS)])
        self.norm = rms_norm(WIDTH, 1e-6, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x, bias = self.embed(ids), None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return self.norm(x)


T5 = with_rules("""
rule = [
  embed shared embed
  kernel encoder.block.{i}.layer.0.SelfAttention.q layers/{i}/attention/query
  kernel encoder.block.{i}.layer.0.SelfAttention.k layers/{i}/attention/key
  kernel encoder.block.{i}.layer.0.SelfAttention.v layers/{i}/attention/value
  kernel encoder.block.{i}.layer.0.SelfAttention.o layers/{i}/attention/out
  {torch = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", jax = [
    "layers/0/attention/distances/embedding"]},
  scale encoder.block.{i}.layer.0.layer_norm layers/{i}/attention_norm
  kernel encoder.block.{i}.layer.1.DenseReluDense.wi layers/{i}/mlp/up
  kernel encoder.block.{i}.layer.1.DenseReluDense.wo layers/{i}/mlp/down
  scale encoder.block.{i}.layer.1.layer_norm layers/{i}/mlp_norm
  scale encoder.final_layer_norm norm
]
""")


def t5_pair(name: str, seed: int) -> Pair:
    """``T5EncoderModel``, whose embedding has two names."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "d_kv": T5_HEAD,
        "d_ff": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "relative_attention_num_buckets": BUCKETS,
        "relative_attention_max_distance": FARTHEST,
        "pad_token_id": None,
        "use_cache": False,
        "attn_implementation": "eager",
    }
    model = transformers.T5EncoderModel(transformers.T5Config(**sizes)).eval()
    randomize(model, seed)
    # T5's weights hold the scale of the scores.
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("SelfAttention.q.weight"):
                parameter.mul_(T5_HEAD**-0.5)
    port, batch = T5Encoder(nnx.Rngs(seed)), tokens(seed)
    return paired(name, model, port, parse_mapping(T5, name), batch, loss="probe")
