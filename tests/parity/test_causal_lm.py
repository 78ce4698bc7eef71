"""The flax causal language model against the classes of ``transformers``, with random weights in every parameter.

In float32 the logits differ by at most 1e-5 of their standard deviation, in every family.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jax_impl import data_parallel_mesh, fully_shard, main_weight_adamw, make_train_step, unshard
from jax_impl.models import next_token_loss
from jax_impl.models.causal_lm import CausalLM, rotary_frequencies
from jax_impl.models.causal_lm_config import CausalLMConfig, Rotary
from tests.support.bridge.family_models import (
    LLAMA3_ROPE,
    flax_model,
    flax_weights,
    hf_config,
    hf_logits,
    hf_model,
    tokens,
)
from tests.support.jax_impl.tiny import named

TOLERANCE = 2e-5  # of the standard deviation of the logits

# Those of the mapping's families that CausalLM has.
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "gemma2", "gpt2")

VARIATIONS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": None}),
    ("llama", {"num_key_value_heads": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "hidden_act": "gelu"},
    ),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("mixtral", {"sliding_window": 7, "num_experts_per_tok": 3}),
    ("gemma2", {"tie_word_embeddings": False, "attention_bias": True, "attn_logit_softcapping": None}),
    ("gpt2", {"tie_word_embeddings": False, "n_inner": 70, "activation_function": "gelu"}),
]


def as_json(config: Any) -> dict[str, Any]:
    """What ``save_pretrained`` writes as config.json."""
    return json.loads(config.to_json_string(use_diff=False))


def error(actual: Any, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(actual, np.float32) - expected).max() / expected.std())


def loss(model: CausalLM, rows: Any) -> jax.Array:
    return next_token_loss(model(rows[:, :-1]), rows[:, 1:])


def pair(family: str, **changes: Any) -> tuple[torch.nn.Module, CausalLM]:
    """A model of transformers and ours, with the same weights."""
    model = hf_model(family, **changes)
    return model, flax_model(as_json(model.config), flax_weights(model))


def assert_same_gradients(
    torch_model: torch.nn.Module, model: CausalLM, weights_of: Callable[[torch.nn.Module], dict[str, Any]]
) -> None:
    """Of the same loss; ``weights_of``: the weights of a model of transformers, as our model has them."""
    rows = tokens(2, 20, seed=3)
    ids = torch.from_numpy(rows).long()
    logits = torch_model(input_ids=ids[:, :-1], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = copy.deepcopy(torch_model)
    with torch.no_grad():
        for path, parameter in torch_model.named_parameters():
            gradients.get_parameter(path).copy_(parameter.grad)
    jax_gradients = named(nnx.jit(nnx.grad(loss))(model, rows))
    expected = weights_of(gradients)
    assert sorted(jax_gradients) == sorted(expected)
    for path, value in expected.items():
        assert np.abs(value).max() > 0, path
        # The same vector added to all keys changes no weight: without rotations its gradient is rounding.
        floor = 1e-6 if path.endswith("key/bias") else 0
        np.testing.assert_allclose(
            jax_gradients[path], value, rtol=0, atol=5e-5 * np.abs(value).max() + floor, err_msg=path
        )


@pytest.mark.fast_cases("mixtral-changes10", "gpt2-changes12", "gemma2-changes11", "qwen3-changes9")
@pytest.mark.parametrize(("family", "changes"), VARIATIONS)
def test_logits_equal_those_of_transformers(family, changes):
    torch_model, model = pair(family, **changes)
    expected = hf_logits(torch_model, tokens())
    logits = model(tokens())
    assert logits.dtype == jnp.float32
    assert error(logits, expected) < TOLERANCE


@pytest.mark.fast_cases("gpt2")
@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gemma2", "gpt2"])
def test_gradients_equal_those_of_transformers(family):
    torch_model, model = pair(family, num_hidden_layers=2)
    assert_same_gradients(torch_model, model, flax_weights)


# What is broken, and in which family it must be seen.
CONFIG_MUTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rotary": Rotary(theta=900.0)}),
    ("llama", {"rotary": Rotary(theta=901.0, factor=8.0, original_length=32)}),
    ("llama", {"rotary": Rotary(theta=900.0, factor=8.0, original_length=64)}),
    ("llama", {"norm_eps": 1e-3}),
    ("llama", {"activation": "gelu"}),
    ("mixtral", {"experts_per_token": 1}),
    ("mixtral", {"windows": (39, 39, 39)}),
    ("gemma2", {"attention_cap": None}),
    ("gemma2", {"logit_cap": None}),
    ("gemma2", {"embedding_scale": 1.0}),
    ("gemma2", {"attention_scale": None}),
    ("gemma2", {"norm": "rms"}),
    ("gemma2", {"activation": "gelu"}),
    ("gemma2", {"windows": ()}),
    ("gemma2", {"windows": (None, 5, None)}),
    ("gemma2", {"windows": (6, None, 6)}),
    ("gpt2", {"activation": "gelu"}),
]


@pytest.fixture(scope="module")
def originals() -> dict[str, tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray]]:
    models = {family: hf_model(family) for family in ("llama", "mixtral", "gemma2", "gpt2")}
    return {
        family: (as_json(model.config), flax_weights(model), hf_logits(model, tokens()))
        for family, model in models.items()
    }


@pytest.mark.parametrize(("family", "changes"), CONFIG_MUTATIONS)
def test_logits_show_every_variation_of_the_config(originals, family, changes):
    config, weights, expected = originals[family]
    model = flax_model(config, weights)
    changed = CausalLM(dataclasses.replace(model.config, **changes), rngs=nnx.Rngs(0))
    nnx.update(changed, nnx.state(model))
    assert error(changed(tokens()), expected) > 5 * TOLERANCE


def _interleave(kernel: np.ndarray) -> np.ndarray:
    """From halves to pairs side by side, as Meta's models have them."""
    return kernel.reshape(*kernel.shape[:2], 2, -1).swapaxes(2, 3).reshape(kernel.shape)


def _swap(weights: dict[str, np.ndarray], first: str, second: str) -> dict[str, np.ndarray]:
    return {
        path: weights[path.replace(first, second)] if first in path else a for path, a in weights.items()
    } | {path: weights[path.replace(second, first)] for path in weights if second in path}


@pytest.mark.parametrize(
    "mutate",
    [
        lambda w: w | {p: _interleave(a) for p, a in w.items() if "query/" in p or "key/" in p},
        lambda w: w | {p: a[:, ::-1] for p, a in w.items() if "query/" in p},
        lambda w: _swap(w, "/gate/", "/up/"),
        lambda w: _swap(w, "layers/0/", "layers/1/"),
        lambda w: _swap(w, "/attention_norm/", "/mlp_norm/"),
    ],
    ids=["interleaved rotary", "order of heads", "gate and up", "layer index", "norms"],
)
def test_logits_show_weights_in_the_wrong_place(originals, mutate):
    config, weights, expected = originals["llama"]
    assert error(flax_model(config, mutate(weights))(tokens()), expected) > 0.1


@pytest.mark.fast_cases("mixtral")
@pytest.mark.parametrize("family", ["gemma2", "mixtral", "gpt2"])
def test_bfloat16_stays_bfloat16_and_close(family):
    torch_model, model = pair(family)
    expected = hf_logits(torch_model, tokens())
    graphdef, state = nnx.split(model)
    half = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    logits = half(tokens())
    assert logits.dtype == jnp.bfloat16
    # A router's close call can go the other way, for few tokens.
    errors = np.abs(np.asarray(logits, np.float32) - expected).max(-1) / expected.std()
    assert 1e-4 < np.median(errors) < 0.1


def test_an_expert_without_tokens_has_no_part(originals):
    config, weights, _ = originals["mixtral"]
    ids = tokens(1, 1)
    expected = hf_logits(hf_model("mixtral"), ids)
    assert error(flax_model(config, weights)(ids), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_a_stack_of_layers_computes_the_same(family):
    model = hf_model(family)
    weights = flax_weights(model)
    layers = sorted({path.split("/", 2)[2] for path in weights if path.startswith("layers/")})
    stacked = {path: a for path, a in weights.items() if not path.startswith("layers/")}
    stacked |= {
        f"layers/{name}": np.stack([weights[f"layers/{i}/{name}"] for i in range(3)]) for name in layers
    }
    logits = flax_model(as_json(model.config), stacked, stacked=True)(tokens())
    assert error(logits, hf_logits(model, tokens())) < TOLERANCE


def test_a_stack_of_layers_with_different_windows_is_refused():
    config = CausalLMConfig.from_hf(as_json(hf_config("gemma2")))
    with pytest.raises(
        ValueError, match=r"expected layers with equal windows for a stack, got \(5, None, 5\)"
    ):
        CausalLM(config, rngs=nnx.Rngs(0), stacked=True)


@pytest.mark.slow
def test_sharded_gradients_equal_the_plain_ones():
    config = CausalLMConfig.from_hf(as_json(hf_config("mixtral", num_hidden_layers=2)))
    model = CausalLM(dataclasses.replace(config, init_std=0.2), rngs=nnx.Rngs(1), stacked=True)
    rows = tokens(4, 9, seed=5)
    value, gradients = nnx.jit(nnx.value_and_grad(loss))(model, rows)
    plan, weights = fully_shard(model, data_parallel_mesh(2), "fsdp", stacked=["layers"])
    assert set(plan.units) == {"layers", ""}
    sharded_value, sharded = make_train_step(plan, loss, main_weight_adamw(1e-3)).gradients(weights, rows)
    assert float(sharded_value) == pytest.approx(float(value), rel=1e-5)
    sharded = unshard(plan, sharded)
    for path, expected in named(gradients).items():
        atol = 5e-5 * float(np.abs(expected).max()) + 1e-7
        np.testing.assert_allclose(sharded[path], expected, rtol=0, atol=atol, err_msg=path)


def test_more_tokens_than_learned_positions_are_refused():
    config = CausalLMConfig.from_hf(as_json(hf_config("gpt2")))
    with pytest.raises(ValueError, match="expected at most 64 tokens in a row, got 65"):
        CausalLM(config, rngs=nnx.Rngs(0))(tokens(1, 65))


LLAMA31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("theta", "head_dim", "scaling"),
    [
        (10000.0, 64, None),
        (1e6, 128, None),
        (500000.0, 128, LLAMA31),
        (500000.0, 64, LLAMA31 | {"factor": 32.0}),
    ],
)
def test_rotary_frequencies_are_those_of_transformers_to_the_last_bit_or_two(theta, head_dim, scaling):
    rope = {"rope_type": "default", "rope_theta": theta}
    if scaling:
        rope = {"rope_type": "llama3", "rope_theta": theta, **scaling}
    config = hf_config("llama", head_dim=head_dim, rope_parameters=rope)
    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    frequencies = rotary_frequencies(CausalLMConfig.from_hf(as_json(config)).rotary, head_dim)
    assert frequencies.dtype == np.float32
    np.testing.assert_array_max_ulp(frequencies, expected, maxulp=2)


def test_rotary_frequencies_that_nothing_stretches_are_powers_to_the_last_bit():
    for theta, head_dim in itertools.product((1e4, 1e5, 5e5, 1e6, 8e6), (64, 80, 96, 128, 256)):
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        expected = 1 / np.power(np.float32(theta), exponents)
        assert np.array_equal(rotary_frequencies(Rotary(theta), head_dim), expected)


def test_layers_without_windows_are_by_default_the_first_28():
    config = as_json(hf_config("qwen2", num_hidden_layers=30, use_sliding_window=True, sliding_window=6))
    known = {key: value for key, value in config.items() if key not in ("layer_types", "max_window_layers")}
    assert CausalLMConfig.from_hf(known).windows == (*[None] * 28, 6, 6)


@pytest.mark.parametrize(("family", "changes"), VARIATIONS)
def test_configs_of_transformers_4_read_the_same(family, changes):
    new = as_json(hf_config(family, **changes))
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types", "dtype")}
    old["torch_dtype"] = "float32"
    if "rope_parameters" in new:
        rope = dict(new["rope_parameters"])
        old["rope_theta"] = rope.pop("rope_theta")
        old["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    assert CausalLMConfig.from_hf(old) == CausalLMConfig.from_hf(new)
    assert CausalLMConfig.from_hf(hf_config(family, **changes).to_dict()) == CausalLMConfig.from_hf(new)


def test_missing_keys_have_the_values_of_the_classes():
    config = as_json(hf_config("llama"))
    for key in (
        "num_key_value_heads",
        "head_dim",
        "rope_parameters",
        "tie_word_embeddings",
        "attention_bias",
    ):
        del config[key]
    parsed = CausalLMConfig.from_hf(config)
    assert (parsed.n_kv_heads, parsed.head_dim, parsed.rotary, parsed.tied) == (
        6,
        8,
        Rotary(theta=10000.0),
        False,
    )
    for family, tied in {"gemma2": True, "gpt2": True, "mixtral": False}.items():
        config = as_json(hf_config(family))
        del config["tie_word_embeddings"]
        assert CausalLMConfig.from_hf(config).tied is tied


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "falcon"}, r"'model_type': expected one of \['gemma2', .*\], got 'falcon'"),
    ("llama", {"model_type": None}, "'model_type': expected str, got None"),
    ("llama", {"hidden_size": None}, "'hidden_size': expected int, got None"),
    ("llama", {"hidden_size": "48"}, "'hidden_size': expected int, got '48'"),
    ("llama", {"num_hidden_layers": True}, "'num_hidden_layers': expected int, got True"),
    ("llama", {"num_hidden_layers": 0}, "n_layers: expected a value >= 1, got 0"),
    ("llama", {"num_key_value_heads": 4}, "n_heads: expected a multiple of n_kv_heads = 4, got 6"),
    ("llama", {"head_dim": 7}, "head_dim: expected an even size"),
    ("llama", {"hidden_act": "relu"}, "'hidden_act': expected one of .*'silu'.* got 'relu'"),
    ("llama", {"quantization_config": {"bits": 4}}, "'quantization_config': {'bits': 4}"),
    ("llama", {"residual_multiplier": 0.2}, "expected known keys, got 'residual_multiplier': 0.2"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn"}},
        "'rope_type': expected 'default', 'linear' or 'llama3', got 'yarn'",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3"}},
        "rope_parameters: 'factor': expected float, got None",
    ),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"beta": 2}}, "rope_parameters: .*'beta': 2"),
    (
        "llama",
        {"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}},
        "expected more than low_frequency_factor",
    ),
    ("llama", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor': expected 1.0 .*got 0.5"),
    ("qwen3", {"head_dim": None}, "'head_dim': expected int, got None"),
    ("mixtral", {"num_experts_per_tok": 6}, "experts_per_token: expected from 1 to n_experts = 5, got 6"),
    (
        "gemma2",
        {"use_bidirectional_attention": True},
        "'use_bidirectional_attention': expected False .*got True",
    ),
    (
        "gemma2",
        {"layer_types": ["full_attention"]},
        "'layer_types': expected 3 times .*got .'full_attention'",
    ),
    ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "'layer_types': expected 3 times"),
    (
        "gemma2",
        {"sliding_window": None},
        "'sliding_window': expected int, since a layer has sliding attention",
    ),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attention_cap: expected None or a value > 0, got 0.0"),
    ("gpt2", {"n_head": 5}, "'n_head': expected a divisor of n_embd = 48, got 5"),
    ("gpt2", {"add_cross_attention": True}, "'add_cross_attention': expected False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx': expected False"),
    ("gpt2", {"scale_attn_weights": False}, "'scale_attn_weights': expected True"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(family, changes, message):
    with pytest.raises(ValueError, match=message):
        CausalLMConfig.from_hf(as_json(hf_config(family)) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "batch"}, r"norm: expected one of \['rms', 'rms_one_plus', 'layer'\], got 'batch'"),
        ({"n_experts": 4, "gated": False}, "gated: expected True with experts, got False"),
        ({"n_experts": 4, "mlp_bias": True}, "mlp_bias: expected False with experts, got True"),
        ({"rotary": None}, "max_length: expected a value >= 1, for learned positions, got None"),
        ({"max_length": 8}, "max_length: expected None, since rotary positions have no last one, got 8"),
        ({"windows": (3,)}, r"windows: expected none or 3 of them, got \(3,\)"),
        ({"windows": (3, 0, None)}, "windows: expected values >= 1 or None"),
        ({"activation": "tanh"}, "activation: expected one of .*, got 'tanh'"),
    ],
)
def test_sizes_and_variations_that_do_not_fit_are_refused(changes, message):
    config = CausalLMConfig.from_hf(as_json(hf_config("llama")))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"theta": 0.0}, "Rotary.theta: expected a value > 0, got 0.0"),
        ({"linear_factor": -2.0}, "Rotary.linear_factor: expected a value > 0, got -2.0"),
        ({"fraction": 1.5}, "Rotary.fraction: expected at most 1, got 1.5"),
        (
            {"low_frequency_factor": 4.0},
            "Rotary.high_frequency_factor: expected more than low_frequency_factor = 4.0, got 4.0",
        ),
    ],
)
def test_rotary_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Rotary(**changes)
