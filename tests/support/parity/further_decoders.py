"""Decoders of transformers and their nnx ports with different names: GPT-NeoX, OPT and OLMo 2."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import transformers
from flax import nnx

from bridge.core.mapping import parse_mapping
from tests.support.parity.nnx_parts import (
    GatedMLP,
    GeluMLP,
    attend,
    embedding,
    heads_of,
    layer_norm,
    rms_norm,
    rotary,
    rotate,
)
from tests.support.parity.pair_tools import VOCABULARY, Pair, paired, randomize, tokens, with_rules

WIDTH, HEADS, HIDDEN, LAYERS = 32, 4, 40, 2
HEAD = WIDTH // HEADS
THETA = 300.0
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SIZES: dict[str, Any] = NO_TOKENS | {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "use_cache": False,
    "attn_implementation": "eager",
}


class NeoXAttention(nnx.Module):
    """Causal attention that rotates the first quarter of each head; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.LinearGeneral(WIDTH, (HEADS, HEAD), rngs=rngs)
        self.key = nnx.LinearGeneral(WIDTH, (HEADS, HEAD), rngs=rngs)
        self.value = nnx.LinearGeneral(WIDTH, (HEADS, HEAD), rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        tables = rotary(x.shape[1], HEAD // 4, THETA)
        query, key = rotate(self.query(x), tables), rotate(self.key(x), tables)
        return self.out(attend(query, key, self.value(x), scale=HEAD**-0.5, causal=True))


class NeoXLayer(nnx.Module):
    """Attention and MLP side by side, each with a norm of its own; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = layer_norm(WIDTH, 1e-5, rngs)
        self.mlp_norm = layer_norm(WIDTH, 1e-5, rngs)
        self.attention = NeoXAttention(rngs)
        self.mlp = GeluMLP(WIDTH, HIDDEN, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attention(self.attention_norm(x)) + self.mlp(self.mlp_norm(x))


class NeoX(nnx.Module):
    """Tokens ``[B, T]`` -> logits ``[B, T, 61]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = embedding(VOCABULARY, WIDTH, rngs)
        self.layers = nnx.List([NeoXLayer(rngs) for _ in range(LAYERS)])
        self.norm = layer_norm(WIDTH, 1e-5, rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


NEOX = with_rules("""
axes = {k = "q", v = "q"}
rule = [
  embed gpt_neox.embed_in embed
  norm gpt_neox.layers.{i}.input_layernorm layers/{i}/attention_norm
  norm gpt_neox.layers.{i}.post_attention_layernorm layers/{i}/mlp_norm
  {torch = "gpt_neox.layers.{i}.attention.query_key_value.weight : (h (q + k + v)) m", jax = [
    "layers/{i}/attention/query/kernel : m h q", "layers/{i}/attention/key/kernel : m h k",
    "layers/{i}/attention/value/kernel : m h v"]},
  {torch = "gpt_neox.layers.{i}.attention.query_key_value.bias : (h (q + k + v))", jax = [
    "layers/{i}/attention/query/bias : h q", "layers/{i}/attention/key/bias : h k",
    "layers/{i}/attention/value/bias : h v"]},
  dense gpt_neox.layers.{i}.attention.dense layers/{i}/attention/out
  dense gpt_neox.layers.{i}.mlp.dense_h_to_4h layers/{i}/mlp/up
  dense gpt_neox.layers.{i}.mlp.dense_4h_to_h layers/{i}/mlp/down
  norm gpt_neox.final_layer_norm norm
  kernel lm_head head
]
""")


def neox_pair(name: str, seed: int) -> Pair:
    """``GPTNeoXForCausalLM``; its fused projection has query, key and value of one head side by side."""
    rope: Any = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25}
    config = transformers.GPTNeoXConfig(**SIZES, intermediate_size=HIDDEN, rope_parameters=rope)
    model = transformers.GPTNeoXForCausalLM(config).eval()
    randomize(model, seed)
    port = NeoX(nnx.Rngs(seed))
    return paired(name, model, port, parse_mapping(NEOX, name), tokens(seed), axes={"q": HEAD})


class OPTAttention(nnx.Module):
    """Causal attention; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.key = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.value = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (heads_of(project(x), HEADS) for project in (self.query, self.key, self.value))
        return self.out(attend(q, k, v, scale=HEAD**-0.5, causal=True))


class OPTLayer(nnx.Module):
    """A pre-norm layer with a ReLU; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = layer_norm(WIDTH, 1e-5, rngs)
        self.attention = OPTAttention(rngs)
        self.mlp_norm = layer_norm(WIDTH, 1e-5, rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(jax.nn.relu(self.up(self.mlp_norm(x))))


class OPT(nnx.Module):
    """Tokens ``[B, T]`` -> logits ``[B, T, 61]`` by the embedding; positions start at row 2 of their table."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = embedding(VOCABULARY, WIDTH, rngs)
        self.positions = embedding(66, WIDTH, rngs)
        self.layers = nnx.List([OPTLayer(rngs) for _ in range(LAYERS)])
        self.norm = layer_norm(WIDTH, 1e-5, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids) + self.positions(jnp.arange(ids.shape[1]) + 2)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


OPT_RULES = with_rules("""
rule = [
  embed model.decoder.embed_tokens embed
  embed model.decoder.embed_positions positions
  dense model.decoder.layers.{i}.self_attn.q_proj layers/{i}/attention/query
  dense model.decoder.layers.{i}.self_attn.k_proj layers/{i}/attention/key
  dense model.decoder.layers.{i}.self_attn.v_proj layers/{i}/attention/value
  dense model.decoder.layers.{i}.self_attn.out_proj layers/{i}/attention/out
  norm model.decoder.layers.{i}.self_attn_layer_norm layers/{i}/attention_norm
  norm model.decoder.layers.{i}.final_layer_norm layers/{i}/mlp_norm
  dense model.decoder.layers.{i}.fc1 layers/{i}/up
  dense model.decoder.layers.{i}.fc2 layers/{i}/down
  norm model.decoder.final_layer_norm norm
]
""")


def opt_pair(name: str, seed: int) -> Pair:
    """``OPTForCausalLM``, whose output kernel is its embedding."""
    config = transformers.OPTConfig(
        **SIZES, ffn_dim=HIDDEN, word_embed_proj_dim=WIDTH, tie_word_embeddings=True
    )
    model = transformers.OPTForCausalLM(config).eval()
    randomize(model, seed)
    return paired(name, model, OPT(nnx.Rngs(seed)), parse_mapping(OPT_RULES, name), tokens(seed))


class Olmo2Attention(nnx.Module):
    """Causal attention with norms over all heads of queries and of keys; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(WIDTH, WIDTH // 2, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(WIDTH, WIDTH // 2, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.query_norm = rms_norm(WIDTH, 1e-5, rngs)
        self.key_norm = rms_norm(WIDTH // 2, 1e-5, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        tables = rotary(x.shape[1], HEAD, THETA)
        query = rotate(heads_of(self.query_norm(self.query(x)), HEADS), tables)
        key = rotate(heads_of(self.key_norm(self.key(x)), HEADS // 2), tables)
        value = heads_of(self.value(x), HEADS // 2)
        return self.out(attend(query, key, value, scale=HEAD**-0.5, causal=True))


class Olmo2Layer(nnx.Module):
    """Norms on the outputs only; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = Olmo2Attention(rngs)
        self.mlp = GatedMLP(WIDTH, HIDDEN, rngs)
        self.attention_norm = rms_norm(WIDTH, 1e-5, rngs)
        self.mlp_norm = rms_norm(WIDTH, 1e-5, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention_norm(self.attention(x))
        return x + self.mlp_norm(self.mlp(x))


class Olmo2(nnx.Module):
    """Tokens ``[B, T]`` -> logits ``[B, T, 61]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = embedding(VOCABULARY, WIDTH, rngs)
        self.layers = nnx.List([Olmo2Layer(rngs) for _ in range(LAYERS)])
        self.norm = rms_norm(WIDTH, 1e-5, rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


OLMO2 = with_rules("""
rule = [
  embed model.embed_tokens embed
  kernel model.layers.{i}.self_attn.q_proj layers/{i}/attention/query
  kernel model.layers.{i}.self_attn.k_proj layers/{i}/attention/key
  kernel model.layers.{i}.self_attn.v_proj layers/{i}/attention/value
  kernel model.layers.{i}.self_attn.o_proj layers/{i}/attention/out
  scale model.layers.{i}.self_attn.q_norm layers/{i}/attention/query_norm
  scale model.layers.{i}.self_attn.k_norm layers/{i}/attention/key_norm
  kernel model.layers.{i}.mlp.gate_proj layers/{i}/mlp/gate
  kernel model.layers.{i}.mlp.up_proj layers/{i}/mlp/up
  kernel model.layers.{i}.mlp.down_proj layers/{i}/mlp/down
  scale model.layers.{i}.post_attention_layernorm layers/{i}/attention_norm
  scale model.layers.{i}.post_feedforward_layernorm layers/{i}/mlp_norm
  scale model.norm norm
  kernel lm_head head
]
""")


def olmo2_pair(name: str, seed: int) -> Pair:
    """``Olmo2ForCausalLM``, with two query heads for each key head."""
    rope: Any = {"rope_type": "default", "rope_theta": THETA}
    config = transformers.Olmo2Config(
        **SIZES, num_key_value_heads=HEADS // 2, intermediate_size=HIDDEN, rope_parameters=rope
    )
    model = transformers.Olmo2ForCausalLM(config).eval()
    randomize(model, seed)
    return paired(name, model, Olmo2(nnx.Rngs(seed)), parse_mapping(OLMO2, name), tokens(seed))
