"""Decoders of transformers, and ports to nnx with names of their own: GPT-NeoX, OPT and OLMo 2."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import transformers
from flax import nnx

from bridge.core.mapping import parse_mapping
from tests.support.parity.nnx_parts import attend, embedding, heads_of, layer_norm, rms_norm, rotary, rotate
from tests.support.parity.pair_tools import VOCABULARY, Pair, paired, randomize, tokens

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


class NeoXMLP(nnx.Module):
    """GELU between two projections; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class NeoXLayer(nnx.Module):
    """Attention and MLP side by side, each with a norm of its own; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = layer_norm(WIDTH, 1e-5, rngs)
        self.mlp_norm = layer_norm(WIDTH, 1e-5, rngs)
        self.attention = NeoXAttention(rngs)
        self.mlp = NeoXMLP(rngs)

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


NEOX = """
axes = {k = "q", v = "q"}
rule = [
  {torch = "gpt_neox.embed_in.weight", jax = "embed/embedding"},
  {torch = "gpt_neox.layers.{i}.input_layernorm.weight", jax = "layers/{i}/attention_norm/scale"},
  {torch = "gpt_neox.layers.{i}.input_layernorm.bias", jax = "layers/{i}/attention_norm/bias"},
  {torch = "gpt_neox.layers.{i}.post_attention_layernorm.weight", jax = "layers/{i}/mlp_norm/scale"},
  {torch = "gpt_neox.layers.{i}.post_attention_layernorm.bias", jax = "layers/{i}/mlp_norm/bias"},
  {torch = "gpt_neox.layers.{i}.attention.query_key_value.weight : (h (q + k + v)) m", jax = [
    "layers/{i}/attention/query/kernel : m h q", "layers/{i}/attention/key/kernel : m h k",
    "layers/{i}/attention/value/kernel : m h v"]},
  {torch = "gpt_neox.layers.{i}.attention.query_key_value.bias : (h (q + k + v))", jax = [
    "layers/{i}/attention/query/bias : h q", "layers/{i}/attention/key/bias : h k",
    "layers/{i}/attention/value/bias : h v"]},
  {torch = "gpt_neox.layers.{i}.attention.dense.weight : o i", jax = "layers/{i}/attention/out/kernel : i o"},
  {torch = "gpt_neox.layers.{i}.attention.dense.bias", jax = "layers/{i}/attention/out/bias"},
  {torch = "gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight : o i", jax = "layers/{i}/mlp/up/kernel : i o"},
  {torch = "gpt_neox.layers.{i}.mlp.dense_h_to_4h.bias", jax = "layers/{i}/mlp/up/bias"},
  {torch = "gpt_neox.layers.{i}.mlp.dense_4h_to_h.weight : o i", jax = "layers/{i}/mlp/down/kernel : i o"},
  {torch = "gpt_neox.layers.{i}.mlp.dense_4h_to_h.bias", jax = "layers/{i}/mlp/down/bias"},
  {torch = "gpt_neox.final_layer_norm.weight", jax = "norm/scale"},
  {torch = "gpt_neox.final_layer_norm.bias", jax = "norm/bias"},
  {torch = "lm_head.weight : o i", jax = "head/kernel : i o"},
]
"""


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


OPT_RULES = """
rule = [
  {torch = "model.decoder.embed_tokens.weight", jax = "embed/embedding"},
  {torch = "model.decoder.embed_positions.weight", jax = "positions/embedding"},
  {torch = "model.decoder.layers.{i}.self_attn.q_proj.weight : o i", jax = "layers/{i}/attention/query/kernel : i o"},
  {torch = "model.decoder.layers.{i}.self_attn.q_proj.bias", jax = "layers/{i}/attention/query/bias"},
  {torch = "model.decoder.layers.{i}.self_attn.k_proj.weight : o i", jax = "layers/{i}/attention/key/kernel : i o"},
  {torch = "model.decoder.layers.{i}.self_attn.k_proj.bias", jax = "layers/{i}/attention/key/bias"},
  {torch = "model.decoder.layers.{i}.self_attn.v_proj.weight : o i", jax = "layers/{i}/attention/value/kernel : i o"},
  {torch = "model.decoder.layers.{i}.self_attn.v_proj.bias", jax = "layers/{i}/attention/value/bias"},
  {torch = "model.decoder.layers.{i}.self_attn.out_proj.weight : o i", jax = "layers/{i}/attention/out/kernel : i o"},
  {torch = "model.decoder.layers.{i}.self_attn.out_proj.bias", jax = "layers/{i}/attention/out/bias"},
  {torch = "model.decoder.layers.{i}.self_attn_layer_norm.weight", jax = "layers/{i}/attention_norm/scale"},
  {torch = "model.decoder.layers.{i}.self_attn_layer_norm.bias", jax = "layers/{i}/attention_norm/bias"},
  {torch = "model.decoder.layers.{i}.final_layer_norm.weight", jax = "layers/{i}/mlp_norm/scale"},
  {torch = "model.decoder.layers.{i}.final_layer_norm.bias", jax = "layers/{i}/mlp_norm/bias"},
  {torch = "model.decoder.layers.{i}.fc1.weight : o i", jax = "layers/{i}/up/kernel : i o"},
  {torch = "model.decoder.layers.{i}.fc1.bias", jax = "layers/{i}/up/bias"},
  {torch = "model.decoder.layers.{i}.fc2.weight : o i", jax = "layers/{i}/down/kernel : i o"},
  {torch = "model.decoder.layers.{i}.fc2.bias", jax = "layers/{i}/down/bias"},
  {torch = "model.decoder.final_layer_norm.weight", jax = "norm/scale"},
  {torch = "model.decoder.final_layer_norm.bias", jax = "norm/bias"},
]
"""


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


class Olmo2MLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))``; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Olmo2Layer(nnx.Module):
    """Norms on the outputs only; ``[B, T, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = Olmo2Attention(rngs)
        self.mlp = Olmo2MLP(rngs)
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


OLMO2 = """
rule = [
  {torch = "model.embed_tokens.weight", jax = "embed/embedding"},
  {torch = "model.layers.{i}.self_attn.q_proj.weight : o i", jax = "layers/{i}/attention/query/kernel : i o"},
  {torch = "model.layers.{i}.self_attn.k_proj.weight : o i", jax = "layers/{i}/attention/key/kernel : i o"},
  {torch = "model.layers.{i}.self_attn.v_proj.weight : o i", jax = "layers/{i}/attention/value/kernel : i o"},
  {torch = "model.layers.{i}.self_attn.o_proj.weight : o i", jax = "layers/{i}/attention/out/kernel : i o"},
  {torch = "model.layers.{i}.self_attn.q_norm.weight", jax = "layers/{i}/attention/query_norm/scale"},
  {torch = "model.layers.{i}.self_attn.k_norm.weight", jax = "layers/{i}/attention/key_norm/scale"},
  {torch = "model.layers.{i}.mlp.gate_proj.weight : o i", jax = "layers/{i}/mlp/gate/kernel : i o"},
  {torch = "model.layers.{i}.mlp.up_proj.weight : o i", jax = "layers/{i}/mlp/up/kernel : i o"},
  {torch = "model.layers.{i}.mlp.down_proj.weight : o i", jax = "layers/{i}/mlp/down/kernel : i o"},
  {torch = "model.layers.{i}.post_attention_layernorm.weight", jax = "layers/{i}/attention_norm/scale"},
  {torch = "model.layers.{i}.post_feedforward_layernorm.weight", jax = "layers/{i}/mlp_norm/scale"},
  {torch = "model.norm.weight", jax = "norm/scale"},
  {torch = "lm_head.weight : o i", jax = "head/kernel : i o"},
]
"""


def olmo2_pair(name: str, seed: int) -> Pair:
    """``Olmo2ForCausalLM``, with two query heads for each key head."""
    rope: Any = {"rope_type": "default", "rope_theta": THETA}
    config = transformers.Olmo2Config(
        **SIZES, num_key_value_heads=HEADS // 2, intermediate_size=HIDDEN, rope_parameters=rope
    )
    model = transformers.Olmo2ForCausalLM(config).eval()
    randomize(model, seed)
    return paired(name, model, Olmo2(nnx.Rngs(seed)), parse_mapping(OLMO2, name), tokens(seed))
