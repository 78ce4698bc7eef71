"""Pairs of transformers' classes and ``jax_impl.models.CausalLM``, by the shipped mappings."""

from __future__ import annotations

import json
from typing import Any

import transformers
from flax import nnx

from bridge.core.mapping import load_mapping
from jax_impl.models.causal_lm import CausalLM
from jax_impl.models.causal_lm_config import CausalLMConfig
from tests.support.parity.pair_tools import VOCABULARY, Pair, paired, randomize, tokens

HEAD = 10
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", SIZES | {"attention_bias": True}),
    "mixtral": (
        "MixtralForCausalLM",
        SIZES | {"num_hidden_layers": 2, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        SIZES
        | {
            "sliding_window": 5,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 40, "n_layer": 3, "n_head": 4, "n_positions": 64}
        | {"bos_token_id": None, "eos_token_id": None},
    ),
}


def causal_pair(family: str, seed: int) -> Pair:
    """A family's pair; heads have 10 channels in all of them."""
    class_name, values = FAMILIES[family]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**values, use_cache=False, attn_implementation="eager")
    # Grouped matrix products know no float64.
    config._experts_implementation = "eager"
    model = model_class(config).eval()
    gemma = family == "gemma2"
    randomize(model, seed, norm=0.0 if gemma else 1.0, embedding=0.2 if gemma else 0.5)
    parsed = CausalLMConfig.from_hf(json.loads(config.to_json_string(use_diff=False)))
    port = CausalLM(parsed, rngs=nnx.Rngs(seed))
    return paired(family, model, port, load_mapping(family), tokens(seed), axes={"d": HEAD})
