"""The flax causal language model against further dense decoders of ``transformers``, with random weights everywhere."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_impl.models.causal_lm import CausalLM
from jax_impl.models.causal_lm_config import CausalLMConfig, Rotary
from tests.parity.test_causal_lm import TOLERANCE, as_json, assert_same_gradients, error
from tests.support.bridge.dense_families import MODELS, dense_config, dense_model, family_of, hand_made_tree
from tests.support.bridge.family_models import flax_model, hf_logits, tokens
from tests.support.bridge.published_decoders import PUBLISHED

HELD = [name for name in MODELS if not name.startswith("falcon") and name != "mistral-ministral3"]
"""The models that ``CausalLM`` can be."""

HELD_FAMILIES = {*map(family_of, HELD), "gemma3_multimodal"}


@pytest.mark.fast_cases("granite-biases", "gemma3-biases", "gpt_neox")
@pytest.mark.parametrize("name", HELD)
def test_logits_equal_those_of_transformers(name: str) -> None:
    model = dense_model(name)
    ours = flax_model(as_json(model.config), hand_made_tree(name, model))
    logits = ours(tokens())
    assert logits.dtype == jnp.float32
    assert error(logits, hf_logits(model, tokens())) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "granite-biases", "olmo2", "gemma3", "phi3", "gpt_neox"])
def test_gradients_equal_those_of_transformers(name: str) -> None:
    model = dense_model(name)
    ours = flax_model(as_json(model.config), hand_made_tree(name, model))
    assert_same_gradients(model, ours, partial(hand_made_tree, name))


# What is broken, and in which model it must be seen.
CONFIG_MUTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"windows": ()}),
    ("granite", {"residual_scale": 1.0}),
    ("granite", {"logit_scale": 1.0}),
    ("granite", {"embedding_scale": 1.0}),
    ("granite", {"attention_scale": None}),
    ("gemma3", {"window_rotary": None}),
    ("gemma3", {"rotary": Rotary(theta=900.0)}),
    ("gemma3", {"windows": (None, 5, None)}),
    ("gpt_neox", {"parallel": False}),
    ("gpt_neox", {"rotary": Rotary(theta=300.0, fraction=0.5)}),
    ("gpt_neox", {"activation": "gelu_tanh"}),
    ("phi3-mini", {"rotary": Rotary(theta=300.0)}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), CONFIG_MUTATIONS)
def test_logits_show_every_variation_of_the_config(name: str, changes: dict[str, Any]) -> None:
    torch_model = dense_model(name)
    model = flax_model(as_json(torch_model.config), hand_made_tree(name, torch_model))
    changed = CausalLM(dataclasses.replace(model.config, **changes), rngs=nnx.Rngs(0))
    nnx.update(changed, nnx.state(model))
    assert error(changed(tokens()), hf_logits(torch_model, tokens())) > 5 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "olmo2", "phi3", "gpt_neox"])
def test_a_stack_of_layers_computes_the_same(name: str) -> None:
    model = dense_model(name)
    weights = hand_made_tree(name, model)
    layers = sorted({path.split("/", 2)[2] for path in weights if path.startswith("layers/")})
    stacked = {path: a for path, a in weights.items() if not path.startswith("layers/")}
    stacked |= {
        f"layers/{layer}": np.stack([weights[f"layers/{i}/{layer}"] for i in range(3)]) for layer in layers
    }
    logits = flax_model(as_json(model.config), stacked, stacked=True)(tokens())
    assert error(logits, hf_logits(model, tokens())) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, model in PUBLISHED.items() if model.family in HELD_FAMILIES])
def test_published_models_have_the_parameters_of_their_files(name: str) -> None:
    published = PUBLISHED[name]
    config = CausalLMConfig.from_hf(published.config)
    model = nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0)))
    shapes = {"/".join(map(str, path)): v.shape for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    text = {
        path: shape
        for path, shape in published.shapes.items()
        if not path.startswith(("vision", "projector"))
    }
    assert text.items() <= shapes.items()
    numel = sum(int(np.prod(shape)) for shape in shapes.values())
    if published.family == "gemma3_multimodal":
        # Without the vision tower and the projector, a kernel and a norm.
        assert numel == published.parameters - 416866032 - 1153 * 2560 + (2560 - 1152)
    else:
        assert numel == published.parameters


@pytest.mark.parametrize("name", HELD)
def test_configs_of_transformers_4_read_the_same(name: str) -> None:
    new = as_json(dense_config(name))
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types", "dtype")}
    rope = copy.deepcopy(new["rope_parameters"])
    if "full_attention" in rope:
        full, local = rope["full_attention"], rope["sliding_attention"]
        old |= {
            "rope_theta": full.pop("rope_theta"),
            "rope_scaling": full if full["rope_type"] != "default" else None,
        }
        old |= {"rope_local_base_freq": local["rope_theta"]}
        old |= {"layer_types": new["layer_types"]}
    elif name.startswith("gpt_neox"):
        old |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
    else:
        old |= {"rope_theta": rope.pop("rope_theta")}
        if "partial_rotary_factor" in rope:
            old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        old |= {"rope_scaling": rope if rope["rope_type"] != "default" else None}
    assert CausalLMConfig.from_hf(old) == CausalLMConfig.from_hf(new)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"num_key_value_heads": None}, "'num_key_value_heads': expected int, got None"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "expected known keys, got 'layer_types'"),
    ("granite", {"logits_scaling": 0}, "'logits_scaling': expected a value > 0, got 0"),
    ("granite", {"residual_multiplier": 0}, "residual_scale: expected a value > 0, got 0"),
    ("olmo2", {"clip_qkv": 8.0}, "expected known keys, got 'clip_qkv': 8.0"),
    ("olmo2-olmo3", {"sliding_window": None}, "'sliding_window': expected int, got None"),
    ("phi3", {"attention_bias": True}, "'attention_bias': expected False .*got True"),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope"}},
        "'rope_type': expected 'default', 'linear' or 'llama3', got 'longrope'",
    ),
    (
        "phi3-mini",
        {"rope_parameters": {"partial_rotary_factor": 1.5}},
        "fraction: expected at most 1, got 1.5",
    ),
    ("gpt_neox", {"num_attention_heads": 5}, "'num_attention_heads': expected a divisor of hidden_size = 48"),
    ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "head_dim: expected an even size"),
    ("gemma3", {"use_bidirectional_attention": True}, "'use_bidirectional_attention': expected False"),
    ("gemma3", {"sliding_window_pattern": 0}, "'sliding_window_pattern': expected a value >= 1, got 0"),
    ("gemma3", {"rope_parameters": {"rope_theta": 3.0}}, "rope_parameters: .*'rope_theta': 3.0"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLMConfig.from_hf(as_json(dense_config(name)) | changes)


def test_a_window_that_a_file_of_mistral_leaves_out_is_that_of_the_class() -> None:
    config = as_json(dense_config("mistral"))
    del config["sliding_window"]
    assert CausalLMConfig.from_hf(config).windows == (4096,) * 3
    assert CausalLMConfig.from_hf(config | {"sliding_window": None}).windows == ()
