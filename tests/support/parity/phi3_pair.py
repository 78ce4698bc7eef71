"""``Phi3ForCausalLM`` of transformers with fused projections, and an nnx port with separate projections."""

from __future__ import annotations

from typing import Any

import jax
import transformers
from flax import nnx

from bridge.core.mapping import parse_mapping
from tests.support.parity.nnx_parts import GatedMLP, attend, embedding, heads_of, rms_norm, rotary, rotate
from tests.support.parity.pair_tools import VOCABULARY, Pair, paired, randomize, tokens, with_rules

WIDTH, HEADS, KEYS, HEAD, HIDDEN, LAYERS = 16, 4, 2, 4, 20, 2


class Phi3Attention(nnx.Module):
    """Causal attention, two heads for each head of keys; ``[B, T, 16]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q = nnx.Linear(WIDTH, HEADS * HEAD, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(WIDTH, KEYS * HEAD, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(WIDTH, KEYS * HEAD, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(HEADS * HEAD, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        tables = rotary(x.shape[1], HEAD, 1000.0)
        query = rotate(heads_of(self.q(x), HEADS), tables)
        key = rotate(heads_of(self.k(x), KEYS), tables)
        value = heads_of(self.v(x), KEYS)
        return self.o(attend(query, key, value, scale=HEAD**-0.5, causal=True))


class Phi3Layer(nnx.Module):
    """Attention and MLP with norms before; ``[B, T, 16]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = rms_norm(WIDTH, 1e-5, rngs)
        self.attention = Phi3Attention(rngs)
        self.mlp_norm = rms_norm(WIDTH, 1e-5, rngs)
        self.mlp = GatedMLP(WIDTH, HIDDEN, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Phi3(nnx.Module):
    """Tokens ``[B, T]`` -> logits ``[B, T, 61]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = embedding(VOCABULARY, WIDTH, rngs)
        self.layers = nnx.List([Phi3Layer(rngs) for _ in range(LAYERS)])
        self.norm = rms_norm(WIDTH, 1e-5, rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


RULES = with_rules("""
axes = {v = "k", u = "g"}
rule = [
  embed model.embed_tokens embed
  scale model.layers.{i}.input_layernorm layers/{i}/attention_norm
  scale model.layers.{i}.post_attention_layernorm layers/{i}/mlp_norm
  {torch = "model.layers.{i}.self_attn.qkv_proj.weight : (q + k + v) m", jax = [
    "layers/{i}/attention/q/kernel : m q", "layers/{i}/attention/k/kernel : m k",
    "layers/{i}/attention/v/kernel : m v"]},
  kernel model.layers.{i}.self_attn.o_proj layers/{i}/attention/o
  {torch = "model.layers.{i}.mlp.gate_up_proj.weight : (g + u) m", jax = [
    "layers/{i}/mlp/gate/kernel : m g", "layers/{i}/mlp/up/kernel : m u"]},
  kernel model.layers.{i}.mlp.down_proj layers/{i}/mlp/down
  scale model.norm norm
  kernel lm_head head
]
""")


def phi3_pair(name: str, seed: int) -> Pair:
    """The pair and a batch for the next token."""
    rope: Any = {"rope_type": "default", "rope_theta": 1000.0}
    config = transformers.Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        intermediate_size=HIDDEN,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        max_position_embeddings=64,
        original_max_position_embeddings=64,
        sliding_window=None,
        pad_token_id=None,
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    randomize(model, seed)
    axes = {"q": HEADS * HEAD, "k": KEYS * HEAD}
    return paired(
        name, model, Phi3(nnx.Rngs(seed)), parse_mapping(RULES, name), tokens(seed, length=9), axes=axes
    )
