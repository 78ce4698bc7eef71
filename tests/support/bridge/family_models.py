"""Small random models of Hugging Face's classes, and the same weights under our flax names, written by hand.

Nothing here uses the mapping language, because tests compare the shipped families with these models.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

if TYPE_CHECKING:
    from jax_impl.models.causal_lm import CausalLM

# No two sizes are equal, except that GPT-2 has as many key/value heads as heads.
LLAMA_LIKE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 900.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 300.0}
GEMMA2 = {"sliding_window": 5, "query_pre_attn_scalar": 7, "head_dim": 10}
GEMMA2 |= {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA_LIKE | {"rope_parameters": LLAMA3_ROPE, "head_dim": 10}),
    "qwen2": ("Qwen2", LLAMA_LIKE | {"rope_parameters": PLAIN_ROPE}),
    "qwen3": ("Qwen3", LLAMA_LIKE | {"rope_parameters": PLAIN_ROPE, "head_dim": 10}),
    "mixtral": (
        "Mixtral",
        LLAMA_LIKE | {"rope_parameters": PLAIN_ROPE, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "gemma2": ("Gemma2", LLAMA_LIKE | {"rope_parameters": PLAIN_ROPE} | GEMMA2),
    "qwen3_moe": (
        "Qwen3Moe",
        LLAMA_LIKE
        | {"rope_parameters": PLAIN_ROPE, "head_dim": 10, "num_experts": 5, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16},
    ),
    "qwen3_next": (
        "Qwen3Next",
        LLAMA_LIKE
        | {"rope_parameters": PLAIN_ROPE, "head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 20, "mlp_only_layers": [2]}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
        | {"linear_key_head_dim": 6, "linear_value_head_dim": 10},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LLAMA_LIKE
        | {"rope_parameters": PLAIN_ROPE, "num_key_value_heads": 6, "first_k_dense_replace": 1}
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"moe_intermediate_size": 16, "q_lora_rank": 9, "kv_lora_rank": 12}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 7, "v_head_dim": 5},
    ),
    "gpt2": ("GPT2", {"vocab_size": 61, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}),
}


def hf_config(family: str, **changes: Any) -> transformers.PreTrainedConfig:
    """The small config of a family, with ``changes``."""
    name, values = FAMILIES[family]
    # Some configs write their defaults into the mappings of their caller.
    return getattr(transformers, f"{name}Config")(**copy.deepcopy(values | changes))


def hf_model(family: str, *, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A float32 model whose parameters are all random, including biases and norms, and all affect the logits."""
    name = FAMILIES[family][0]
    suffix = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    config = hf_config(family, **changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, name + suffix)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                # A scale of about one, a Gemma scale of about zero, a bias.
                centre = 1.0 if path.endswith("weight") and family != "gemma2" else 0.0
                parameter.copy_(centre + 0.3 * noise)
            elif "embed" in path or "wte" in path or "wpe" in path:
                parameter.copy_(noise if family != "gemma2" else 0.2 * noise)
            else:
                fan_in = parameter.shape[0] if family == "gpt2" else parameter.shape[-1]
                parameter.copy_(1.5 * noise / fan_in**0.5)
    return model


def tokens(rows: int = 3, length: int = 40, *, seed: int = 0, vocab_size: int = 61) -> np.ndarray:
    """Int32 ``[rows, length]``, each row different."""
    return np.random.default_rng(seed).integers(0, vocab_size, (rows, length)).astype(np.int32)


def hf_logits(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids).long(), use_cache=False).logits.numpy()


def flax_model(config: dict[str, Any], weights: dict[str, np.ndarray], **options: Any) -> CausalLM:
    """Our model of a ``config.json`` with the parameters ``{path: array}``, which must be complete."""
    # Imported here, so that tests of torch_impl need no JAX.
    from flax import nnx

    from jax_impl.models.causal_lm import CausalLM
    from jax_impl.models.causal_lm_config import CausalLMConfig

    model = CausalLM(CausalLMConfig.from_hf(config), rngs=nnx.Rngs(0), **options)
    graphdef, state = nnx.split(model)
    flat = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    shapes = {path: variable.get_raw_value().shape for path, variable in flat.items()}
    assert {path: array.shape for path, array in weights.items()} == shapes
    values = [(path, v.replace(weights["/".join(map(str, path))])) for path, v in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(values))


def flax_weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The weights of a Hugging Face model under the names and in the shapes of our flax model."""
    config = model.config
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    renamed = _gpt2(state, config) if config.model_type == "gpt2" else _llama_like(state, config)
    weights = dict(renamed)
    if config.tie_word_embeddings:
        del weights["lm_head/kernel"]
    return weights


def _llama_like(state: dict[str, np.ndarray], config: Any) -> Iterator[tuple[str, np.ndarray]]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    gemma = config.model_type == "gemma2"
    norms = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_output_norm" if gemma else "mlp_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_output_norm",
    }
    attention = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
    yield "embed/embedding", state.pop("model.embed_tokens.weight")
    yield "norm/scale", state.pop("model.norm.weight")
    yield "lm_head/kernel", state.pop("lm_head.weight").T
    for name, value in state.items():
        _, _, i, *rest = name.split(".")
        match rest:
            case ["self_attn", ("q_proj" | "k_proj" | "v_proj") as part, "weight"]:
                at, value = f"attention/{attention[part]}/kernel", value.T.reshape(len(value.T), -1, head_dim)
            case ["self_attn", "o_proj", "weight"]:
                at, value = "attention/out/kernel", value.T.reshape(-1, head_dim, len(value))
            case ["self_attn", "o_proj", "bias"]:
                at = "attention/out/bias"
            case ["self_attn", part, "bias"]:
                at, value = f"attention/{attention[part]}/bias", value.reshape(-1, head_dim)
            case ["self_attn", ("q_norm" | "k_norm") as part, "weight"]:
                at = f"attention/{'query' if part == 'q_norm' else 'key'}_norm/scale"
            case ["mlp", "gate", "weight"]:
                at, value = "mlp/router/kernel", value.T
            case ["mlp", "experts", "gate_up_proj"]:
                gate, up = np.split(value, 2, axis=1)
                yield f"layers/{i}/mlp/gate/kernel", gate.swapaxes(1, 2)
                at, value = "mlp/up/kernel", up.swapaxes(1, 2)
            case ["mlp", "experts", "down_proj"]:
                at, value = "mlp/down/kernel", value.swapaxes(1, 2)
            case ["mlp", part, "weight"]:
                at, value = f"mlp/{part.removesuffix('_proj')}/kernel", value.T
            case ["mlp", part, "bias"]:
                at = f"mlp/{part.removesuffix('_proj')}/bias"
            case [norm, "weight"]:
                at = f"{norms[norm]}/scale"
            case _:
                raise AssertionError(name)
        yield f"layers/{i}/{at}", value


def _gpt2(state: dict[str, np.ndarray], config: Any) -> Iterator[tuple[str, np.ndarray]]:
    d, heads = config.n_embd, config.n_head
    yield "embed/embedding", state["transformer.wte.weight"]
    yield "positions/embedding", state["transformer.wpe.weight"]
    yield "norm/scale", state["transformer.ln_f.weight"]
    yield "norm/bias", state["transformer.ln_f.bias"]
    yield "lm_head/kernel", state["lm_head.weight"].T
    for i in range(config.n_layer):
        t, x = f"transformer.h.{i}.", f"layers/{i}/"
        for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            yield f"{x}{ours}/scale", state[f"{t}{theirs}.weight"]
            yield f"{x}{ours}/bias", state[f"{t}{theirs}.bias"]
        kernels = np.split(state[t + "attn.c_attn.weight"], 3, axis=1)
        biases = np.split(state[t + "attn.c_attn.bias"], 3)
        for name, kernel, bias in zip(("query", "key", "value"), kernels, biases, strict=True):
            yield f"{x}attention/{name}/kernel", kernel.reshape(d, heads, -1)
            yield f"{x}attention/{name}/bias", bias.reshape(heads, -1)
        yield x + "attention/out/kernel", state[t + "attn.c_proj.weight"].reshape(heads, -1, d)
        yield x + "attention/out/bias", state[t + "attn.c_proj.bias"]
        for theirs, ours in (("c_fc", "up"), ("c_proj", "down")):
            yield f"{x}mlp/{ours}/kernel", state[f"{t}mlp.{theirs}.weight"]
            yield f"{x}mlp/{ours}/bias", state[f"{t}mlp.{theirs}.bias"]
