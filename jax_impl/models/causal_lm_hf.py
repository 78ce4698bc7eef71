"""The families of ``CausalLM``; each is read from Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax_impl.models.causal_lm_hf_keys import Keys


def _rotary(keys: Keys, theta: float, fraction: float | None = None) -> dict[str, Any]:
    """Keywords of ``Rotary``: transformers 5 has one dictionary, transformers 4 a number and a dictionary.

    ``fraction``: the default share of a head that rotates; ``None``: the whole head, in models without such a setting.
    """
    theta = keys.take("rope_theta", float, theta)
    if fraction is None:
        keys.must_be("partial_rotary_factor", 1.0)
    else:
        fraction = keys.take("partial_rotary_factor", float, fraction)
    rope_keys = keys.take("rope_parameters", dict, {}) | keys.take("rope_scaling", dict, {})
    return _rope(keys, rope_keys, theta, fraction)


def _rope(
    keys: Keys, rope_keys: Mapping[str, Any], theta: float, fraction: float | None = None
) -> dict[str, Any]:
    rope = Keys(rope_keys, "config.json: rope_parameters")
    rope_type = rope.take("type", str, "default")
    rope_type = rope.take("rope_type", str, rope_type)
    result: dict[str, Any] = {"theta": rope.take("rope_theta", float, theta)}
    if rope_type == "llama3":
        result["factor"] = rope.take("factor", float)
        result["low_frequency_factor"] = rope.take("low_freq_factor", float)
        result["high_frequency_factor"] = rope.take("high_freq_factor", float)
        length = keys.take("max_position_embeddings", int, 8192)
        result["original_length"] = rope.take("original_max_position_embeddings", int, length)
    elif rope_type == "linear":
        result["linear_factor"] = rope.take("factor", float)
    elif rope_type != "default":
        raise rope.fail("rope_type", "'default', 'linear' or 'llama3'", rope_type)
    if fraction is None:
        rope.must_be("partial_rotary_factor", 1.0)
    else:
        result["fraction"] = rope.take("partial_rotary_factor", float, fraction)
    rope.finish()
    return result


def _rotaries(keys: Keys, theta: float, of_windows: float | None) -> dict[str, Any]:
    """``rotary`` and ``window_rotary``. transformers 5 has a dictionary for each kind of layer; in files of
    transformers 4, scaling applies to layers without a window. ``of_windows``: their theta, by default the same.
    """
    theta = keys.take("rope_theta", float, theta)
    of_windows = keys.take("rope_local_base_freq", float, theta if of_windows is None else of_windows)
    by_attention = Keys(keys.take("rope_parameters", dict, {}), "config.json: rope_parameters")
    wide, narrow = (
        by_attention.take(f"{attention}_attention", dict, {}) for attention in ("full", "sliding")
    )
    by_attention.finish()
    wide = wide | keys.take("rope_scaling", dict, {})
    return {"rotary": _rope(keys, wide, theta), "window_rotary": _rope(keys, narrow, of_windows)}


def _windows(keys: Keys, n_layers: int, default: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Each layer's window; ``default(i)`` tells whether layer ``i`` has a window if ``layer_types`` is missing."""
    size = keys.take("sliding_window", int, None)
    layer_types = keys.take("layer_types", list, None)
    if layer_types is None:
        layer_types = [
            "sliding_attention" if size and default(i) else "full_attention" for i in range(n_layers)
        ]
    if len(layer_types) != n_layers or set(layer_types) - {"sliding_attention", "full_attention"}:
        raise keys.fail(
            "layer_types", f"{n_layers} times 'sliding_attention' or 'full_attention'", layer_types
        )
    if size is None and "sliding_attention" in layer_types:
        raise keys.fail("sliding_window", "int, since a layer has sliding attention", None)
    windows = tuple(size if layer_type == "sliding_attention" else None for layer_type in layer_types)
    return windows if any(windows) else ()


def _equal_windows(keys: Keys, n_layers: int, default: int | None = None) -> tuple[int, ...]:
    """The same window for all layers, or none; ``default``: the window without an entry."""
    size = keys.take("sliding_window", int, default)
    return () if size is None else (size,) * n_layers


def _common(
    keys: Keys, *, theta: float = 10000.0, tied: bool = False, rotary: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The common part of the Llama-like families; missing keys take the defaults of the classes in transformers.

    ``rotary``: keywords of ``Rotary`` that have already been read.
    """
    d_model, n_heads = keys.take("hidden_size", int), keys.take("num_attention_heads", int)
    return {
        "vocab_size": keys.take("vocab_size", int),
        "d_model": d_model,
        "n_layers": keys.take("num_hidden_layers", int),
        "n_heads": n_heads,
        "n_kv_heads": keys.take("num_key_value_heads", int, n_heads),
        "head_dim": keys.take("head_dim", int, d_model // n_heads if n_heads > 0 else 0),
        "d_ff": keys.take("intermediate_size", int),
        "norm_eps": keys.take("rms_norm_eps", float),
        "rotary": _rotary(keys, theta) if rotary is None else rotary,
        "tied": keys.take("tie_word_embeddings", bool, tied),
        "init_std": keys.take("initializer_range", float, 0.02),
    }


def _attention_bias(keys: Keys, default: bool = False) -> dict[str, bool]:
    bias = keys.take("attention_bias", bool, default)
    return {"qkv_bias": bias, "out_bias": bias}


def _llama(keys: Keys) -> dict[str, Any]:
    return _common(keys) | {
        "activation": keys.activation("hidden_act", "silu"),
        **_attention_bias(keys),
        "mlp_bias": keys.take("mlp_bias", bool, False),
    }


def _qwen(keys: Keys) -> dict[str, Any]:
    result = _common(keys) | {"activation": keys.activation("hidden_act", "silu")}
    used = keys.take("use_sliding_window", bool, False)
    first = keys.take("max_window_layers", int, 28)
    windows = _windows(keys, result["n_layers"], lambda i: used and i >= first)
    return result | {"windows": windows if used else ()}


def _qwen2(keys: Keys) -> dict[str, Any]:
    return _qwen(keys) | {"qkv_bias": True}


def _qwen3(keys: Keys) -> dict[str, Any]:
    keys.take("head_dim", int)  # the class defaults to 128 for any other sizes, so do not derive it
    return _qwen(keys) | {**_attention_bias(keys), "query_key_norms": True}


def _mixtral(keys: Keys) -> dict[str, Any]:
    result = _common(keys, theta=1e6)
    return result | {
        "activation": keys.activation("hidden_act", "silu"),
        "n_experts": keys.take("num_local_experts", int),
        "experts_per_token": keys.take("num_experts_per_tok", int),
        "windows": _equal_windows(keys, result["n_layers"]),
    }


def _mistral(keys: Keys) -> dict[str, Any]:
    # The class defaults to 8 key/value heads for any other sizes, and to a window of 4096 without an entry.
    keys.take("num_key_value_heads", int)
    result = _common(keys)
    windows = _equal_windows(keys, result["n_layers"], None if keys.has("sliding_window") else 4096)
    return result | {"activation": keys.activation("hidden_act", "silu"), "windows": windows}


def _granite(keys: Keys) -> dict[str, Any]:
    return _llama(keys) | {
        "embedding_scale": keys.take("embedding_multiplier", float, 1.0),
        "attention_scale": keys.take("attention_multiplier", float, 1.0),
        "residual_scale": keys.take("residual_multiplier", float, 1.0),
        "logit_scale": 1 / keys.positive("logits_scaling", 1.0),
    }


def _olmo2(keys: Keys, *, rotary: dict[str, Any] | None = None) -> dict[str, Any]:
    return _common(keys, rotary=rotary) | {
        "activation": keys.activation("hidden_act", "silu"),
        **_attention_bias(keys),
        "query_key_norms": True,
        "norms_across_heads": True,
        "input_norms": False,
        "output_norms": True,
    }


def _olmo3(keys: Keys) -> dict[str, Any]:
    rotaries = _rotaries(keys, 10000.0, None)
    result = _olmo2(keys, rotary=rotaries["rotary"])
    keys.take("sliding_window", int)
    return result | rotaries | {"windows": _windows(keys, result["n_layers"], lambda i: (i + 1) % 4 != 0)}


def _phi3(keys: Keys) -> dict[str, Any]:
    keys.take("original_max_position_embeddings", int, 0)  # the class reads this number only for longrope
    keys.must_be("attention_bias", False)
    result = _common(keys, rotary=_rotary(keys, 10000.0, 1.0))
    windows = _equal_windows(keys, result["n_layers"])
    return result | {"activation": keys.activation("hidden_act", "silu"), "windows": windows}


def _common_gpt(keys: Keys, d_model_key: str, n_heads_key: str, n_layers_key: str) -> dict[str, Any]:
    """The common part of the families with layer norms and ungated MLPs; ``..._key``: the names of their sizes."""
    d_model, n_heads = keys.take(d_model_key, int), keys.take(n_heads_key, int)
    if n_heads < 1 or d_model % n_heads:
        raise keys.fail(n_heads_key, f"a divisor of {d_model_key} = {d_model}", n_heads)
    return {
        "vocab_size": keys.take("vocab_size", int),
        "d_model": d_model,
        "n_layers": keys.take(n_layers_key, int),
        "n_heads": n_heads,
        "n_kv_heads": n_heads,
        "head_dim": d_model // n_heads,
        "norm": "layer",
        "gated": False,
        "mlp_bias": True,
        "init_std": keys.take("initializer_range", float, 0.02),
    }


def _gpt_neox(keys: Keys) -> dict[str, Any]:
    result = _common_gpt(keys, "hidden_size", "num_attention_heads", "num_hidden_layers")
    theta = keys.take("rotary_emb_base", float, 10000.0)
    return result | {
        "d_ff": keys.take("intermediate_size", int),
        "norm_eps": keys.take("layer_norm_eps", float, 1e-5),
        "activation": keys.activation("hidden_act", "gelu"),
        **_attention_bias(keys, default=True),
        "parallel": keys.take("use_parallel_residual", bool, True),
        "rotary": _rotary(keys, theta, keys.take("rotary_pct", float, 0.25)),
        "tied": keys.take("tie_word_embeddings", bool, False),
    }


def _gemma2(keys: Keys) -> dict[str, Any]:
    return _gemma(keys, _common(keys, tied=True), lambda i: i % 2 == 0)


def _gemma3_text(keys: Keys) -> dict[str, Any]:
    rotaries = _rotaries(keys, 1e6, 10000.0)
    every = keys.take("sliding_window_pattern", int, keys.take("_sliding_window_pattern", int, 6))
    if every < 1:
        raise keys.fail("sliding_window_pattern", "a value >= 1", every)
    result = _common(keys, tied=True, rotary=rotaries["rotary"])
    result = _gemma(keys, result, lambda i: (i + 1) % every != 0)
    return result | rotaries | {"query_key_norms": True}


def _gemma(keys: Keys, result: dict[str, Any], windowed: Callable[[int], bool]) -> dict[str, Any]:
    """The common part of Gemma 2 and 3; ``windowed``: whether a layer has a window, as ``default`` in ``_windows``."""
    keys.take("head_dim", int)  # the class defaults to 256 for any other sizes, so do not derive it
    keys.take("hidden_act", str, "")  # older files have both keys; transformers reads the other one
    keys.must_be("use_bidirectional_attention", False)
    return result | {
        "norm": "rms_one_plus",
        "output_norms": True,
        "activation": keys.activation("hidden_activation", "gelu_pytorch_tanh"),
        **_attention_bias(keys),
        "windows": _windows(keys, result["n_layers"], windowed),
        "attention_scale": keys.take("query_pre_attn_scalar", float) ** -0.5,
        "attention_cap": keys.take("attn_logit_softcapping", float, None),
        "logit_cap": keys.take("final_logit_softcapping", float, None),
        "embedding_scale": result["d_model"] ** 0.5,
    }


def _gpt2(keys: Keys) -> dict[str, Any]:
    result = _common_gpt(keys, "n_embd", "n_head", "n_layer")
    keys.must_be("scale_attn_weights", True)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("add_cross_attention", False)
    return result | {
        "d_ff": keys.take("n_inner", int, 4 * result["d_model"]),
        "norm_eps": keys.take("layer_norm_epsilon", float),
        "activation": keys.activation("activation_function", "gelu_new"),
        "qkv_bias": True,
        "out_bias": True,
        "rotary": None,
        "max_length": keys.take("n_positions", int),
        "tied": keys.take("tie_word_embeddings", bool, True),
    }


_FAMILIES: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "mixtral": _mixtral, "mistral": _mistral,
    "granite": _granite, "olmo2": _olmo2, "olmo3": _olmo3, "phi3": _phi3, "gpt_neox": _gpt_neox,
    "gemma2": _gemma2, "gemma3_text": _gemma3_text, "gpt2": _gpt2,
}  # fmt: skip


# Gemma 3 files with images omit keys of their text_config; these are the defaults of the class.
_GEMMA3_TEXT: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def keywords_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of ``CausalLMConfig``, ``rotary`` as those of ``Rotary`` or ``None``; see ``CausalLMConfig.from_hf``."""
    keys = Keys(config)
    model_type = keys.take("model_type", str)
    if model_type == "gemma3":
        tied = keys.take("tie_word_embeddings", bool, True)
        text = _GEMMA3_TEXT | {"tie_word_embeddings": tied} | keys.take("text_config", dict)
        return keywords_from_hf(text | {"model_type": "gemma3_text"})
    if model_type not in _FAMILIES:
        raise keys.fail("model_type", f"one of {sorted([*_FAMILIES, 'gemma3'])}", model_type)
    keywords = _FAMILIES[model_type](keys)
    keys.finish()
    return keywords
