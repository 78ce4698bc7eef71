"""Small random dense decoders of transformers, and the same weights in the tree of their family, written by hand.

Nothing here uses the mapping language. Fused projections are split by the class's own method, with a kernel's columns
in place of tokens, or as in its forward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import transformers

from tests.support.bridge.family_models import LLAMA3_ROPE, LLAMA_LIKE, PLAIN_ROPE

Arrays = Mapping[str, np.ndarray]
Named = Iterator[tuple[str, np.ndarray]]

_PLAIN = LLAMA_LIKE | {"rope_parameters": PLAIN_ROPE, "pad_token_id": 0, "eos_token_id": 1}
_LOCAL: Any = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
}
_GEMMA3 = _PLAIN | {
    "head_dim": 10,
    "sliding_window": 5,
    "query_pre_attn_scalar": 7,
    "rope_parameters": _LOCAL,
}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA3 |= {"layer_types": _KINDS}
_GRANITE = _PLAIN | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4}
_GRANITE |= {"attention_multiplier": 0.2, "logits_scaling": 2.5}
_QUARTER = PLAIN_ROPE | {"partial_rotary_factor": 0.25}
_NEOX = {name: value for name, value in _PLAIN.items() if name != "num_key_value_heads"}
_NEOX |= {"rope_parameters": _QUARTER}
_FALCON = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
_FALCON |= {"ffn_hidden_size": 40, "bos_token_id": 0, "eos_token_id": 1, "rope_parameters": PLAIN_ROPE}
_NEW = _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", _PLAIN | {"head_dim": 10, "sliding_window": 5}),
    "mistral-without-window": ("Mistral", _PLAIN | {"sliding_window": None, "rope_parameters": LLAMA3_ROPE}),
    # The class has its own rotary positions, which need extra fields.
    "mistral-ministral3": ("Ministral3", LLAMA_LIKE | {"head_dim": 10, "eos_token_id": 1}),
    "granite": ("Granite", _GRANITE),
    "granite-biases": ("Granite", _GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "olmo2": ("Olmo2", _PLAIN),
    "olmo2-biases": ("Olmo2", _PLAIN | {"attention_bias": True}),
    "olmo2-olmo3": (
        "Olmo3",
        _PLAIN | {"rope_parameters": _LOCAL, "sliding_window": 5, "layer_types": _KINDS},
    ),
    "gemma3": ("Gemma3", _GEMMA3),
    "gemma3-biases": ("Gemma3", _GEMMA3 | {"attention_bias": True, "final_logit_softcapping": 2.0}),
    "phi3": ("Phi3", _PLAIN | {"sliding_window": 5}),
    "phi3-mini": ("Phi3", _PLAIN | {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.75}}),
    "gpt_neox": ("GPTNeoX", _NEOX),
    "gpt_neox-sequential": ("GPTNeoX", _NEOX | {"use_parallel_residual": False, "attention_bias": False}),
    "falcon-7b": ("Falcon", _FALCON),
    "falcon-40b": ("Falcon", _NEW),
    "falcon-11b": ("Falcon", _NEW | {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
    "falcon-rw": (
        "Falcon",
        _FALCON | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    "falcon-one-group-in-turn": ("Falcon", _FALCON | {"parallel_attn": False, "bias": True}),
    "falcon-heads-beside-mlp": ("Falcon", _FALCON | {"multi_query": False}),
}
"""Class (without its ending) and config, by name. Each name begins with its family."""


def family_of(name: str) -> str:
    return name.partition("-")[0]


def dense_config(name: str, **changes: Any) -> transformers.PreTrainedConfig:
    stem, values = MODELS[name]
    config_class = getattr(transformers, f"{stem}TextConfig" if stem == "Gemma3" else f"{stem}Config")
    return config_class(**copy.deepcopy(values | changes))


def dense_model(name: str, *, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A float32 model whose parameters are all random, including biases and norms, and all affect the logits."""
    stem, config = MODELS[name][0], dense_config(name, **changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    randomize(model, seed, centre=0.0 if stem == "Gemma3" else 1.0)
    return model


def randomize(model: torch.nn.Module, seed: int, centre: float = 1.0) -> None:
    """Random values for every parameter. Scales of norms lie around ``centre``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_((centre if path.endswith("weight") else 0.0) + 0.3 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)


def hand_made_tree(name: str, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The weights of ``model`` under the names and in the shapes of its family's tree."""
    state = {key: value.detach().numpy() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    writers = {"gpt_neox": _gpt_neox, "falcon": _falcon}
    return dict(writers.get(family_of(name), _llama_like)(model, state))


_PARTS = {"q": "query", "k": "key", "v": "value"}


def _llama_like(model: Any, state: Arrays) -> Named:
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    both = "model.layers.0.pre_feedforward_layernorm.weight" in state
    norms = {"input_layernorm": "attention_norm", "pre_feedforward_layernorm": "mlp_norm"}
    norms |= {"post_feedforward_layernorm": "mlp_output_norm", "post_attention_layernorm": "mlp_norm"}
    if both or config.model_type in ("olmo2", "olmo3"):
        norms["post_attention_layernorm"] = "attention_output_norm"
    yield "embed/embedding", state["model.embed_tokens.weight"]
    yield "norm/scale", state["model.norm.weight"]
    if "lm_head.weight" in state:
        yield "lm_head/kernel", state["lm_head.weight"].T
    for name, value in state.items():
        if not name.startswith("model.layers."):
            continue
        _, _, i, *rest = name.split(".")
        at = f"layers/{i}/"
        match rest:
            case ["self_attn", "qkv_proj", "weight"]:
                cut = config.num_attention_heads * size
                end = cut + config.num_key_value_heads * size
                rows = {"query": value[:cut], "key": value[cut:end], "value": value[end:]}
                for part, kernel in rows.items():
                    yield f"{at}attention/{part}/kernel", kernel.T.reshape(config.hidden_size, -1, size)
            case ["mlp", "gate_up_proj", "weight"]:
                for part, kernel in zip(("gate", "up"), np.split(value, 2), strict=True):
                    yield f"{at}mlp/{part}/kernel", kernel.T
            case ["self_attn", "o_proj", "weight"]:
                yield at + "attention/out/kernel", value.T.reshape(-1, size, len(value))
            case ["self_attn", "o_proj", "bias"]:
                yield at + "attention/out/bias", value
            case ["self_attn", ("q_norm" | "k_norm") as part, "weight"]:
                wide = config.model_type in ("olmo2", "olmo3")
                yield (
                    f"{at}attention/{_PARTS[part[0]]}_norm/scale",
                    value.reshape(-1, size) if wide else value,
                )
            case ["self_attn", part, "weight"]:
                kernel = value.T.reshape(config.hidden_size, -1, size)
                yield f"{at}attention/{_PARTS[part[0]]}/kernel", kernel
            case ["self_attn", part, "bias"]:
                yield f"{at}attention/{_PARTS[part[0]]}/bias", value.reshape(-1, size)
            case ["mlp", part, "weight"]:
                yield f"{at}mlp/{part.removesuffix('_proj')}/kernel", value.T
            case ["mlp", part, "bias"]:
                yield f"{at}mlp/{part.removesuffix('_proj')}/bias", value
            case [norm, "weight"]:
                yield f"{at}{norms[norm]}/scale", value
            case _:
                raise AssertionError(name)


def _gpt_neox(model: Any, state: Arrays) -> Named:
    config = model.config
    heads = config.num_attention_heads
    yield "embed/embedding", state["gpt_neox.embed_in.weight"]
    if "lm_head.weight" in state:
        yield "lm_head/kernel", state["lm_head.weight"].T
    for suffix, ours in (("weight", "scale"), ("bias", "bias")):
        yield f"norm/{ours}", state[f"gpt_neox.final_layer_norm.{suffix}"]
    for i in range(config.num_hidden_layers):
        theirs, at = f"gpt_neox.layers.{i}.", f"layers/{i}/"
        for norm, our in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")):
            yield f"{at}{our}/scale", state[f"{theirs}{norm}.weight"]
            yield f"{at}{our}/bias", state[f"{theirs}{norm}.bias"]
        for suffix, leaf in (("weight", "kernel"), ("bias", "bias")):
            fused = state.get(f"{theirs}attention.query_key_value.{suffix}")
            if fused is not None:
                # As in the forward: query, key and value of a head are adjacent.
                tokens = torch.from_numpy(fused.T.reshape(-1, heads, 3 * (len(fused) // heads // 3)))
                for part, chunk in zip(_PARTS.values(), tokens.chunk(3, dim=-1), strict=True):
                    array = chunk.numpy()
                    yield f"{at}attention/{part}/{leaf}", array if suffix == "weight" else array[0]
        size = config.hidden_size // heads
        yield at + "attention/out/kernel", _out(state[theirs + "attention.dense.weight"], size)
        if f"{theirs}attention.dense.bias" in state:
            yield at + "attention/out/bias", state[theirs + "attention.dense.bias"]
        yield from _mlp(state, theirs + "mlp.", at + "mlp/")


def _falcon(model: Any, state: Arrays) -> Named:
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    yield "embed/embedding", state["transformer.word_embeddings.weight"]
    if "lm_head.weight" in state:
        yield "lm_head/kernel", state["lm_head.weight"].T
    for suffix, ours in (("weight", "scale"), ("bias", "bias")):
        yield f"norm/{ours}", state[f"transformer.ln_f.{suffix}"]
    norms = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attention_norm"}
    norms |= {"ln_attn": "attention_norm", "ln_mlp": "mlp_norm"}
    for i in range(config.num_hidden_layers):
        theirs, at = f"transformer.h.{i}.", f"layers/{i}/"
        for norm, our in norms.items():
            if f"{theirs}{norm}.weight" in state:
                yield f"{at}{our}/scale", state[f"{theirs}{norm}.weight"]
                yield f"{at}{our}/bias", state[f"{theirs}{norm}.bias"]
        split = model.transformer.h[i].self_attention._split_heads
        for suffix, leaf in (("weight", "kernel"), ("bias", "bias")):
            fused = state.get(f"{theirs}self_attention.query_key_value.{suffix}")
            if fused is None:
                continue
            tokens = torch.from_numpy(np.atleast_2d(fused.T).copy())[None]
            query, key, value = (part[0].numpy() for part in split(tokens))
            if config.new_decoder_architecture:
                # The class repeats keys and values for all heads of a group.
                each = config.num_attention_heads // config.num_kv_heads
                key, value = key[:, ::each], value[:, ::each]
            for part, array in (("query", query), ("key", key), ("value", value)):
                yield f"{at}attention/{part}/{leaf}", array if suffix == "weight" else array[0]
        yield at + "attention/out/kernel", _out(state[theirs + "self_attention.dense.weight"], size)
        if f"{theirs}self_attention.dense.bias" in state:
            yield at + "attention/out/bias", state[theirs + "self_attention.dense.bias"]
        yield from _mlp(state, theirs + "mlp.", at + "mlp/")


def _out(weight: np.ndarray, size: int) -> np.ndarray:
    return weight.T.reshape(-1, size, len(weight))


def _mlp(state: Arrays, theirs: str, at: str) -> Named:
    for part, our in (("dense_h_to_4h", "up"), ("dense_4h_to_h", "down")):
        yield f"{at}{our}/kernel", state[f"{theirs}{part}.weight"].T
        if f"{theirs}{part}.bias" in state:
            yield f"{at}{our}/bias", state[f"{theirs}{part}.bias"]
