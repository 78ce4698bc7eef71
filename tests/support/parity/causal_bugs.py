"""Planted bugs in the pairs of ``CausalLM`` besides Llama."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import torch

from jax_impl.models.causal_lm_layers import softcap
from tests.support.parity.bug_tools import (
    Bug,
    Planted,
    bug,
    call,
    config,
    doubled_gradient,
    edit,
    jax_weight,
    put,
    rolled,
    stale,
    stopped_input,
    torch_weight,
)
from tests.support.parity.llama_bugs import LLAMA, masked


def _window_of_four(mask: torch.Tensor) -> torch.Tensor:
    i = torch.arange(4, mask.shape[-1])
    mask[..., i, i - 4] = torch.finfo(mask.dtype).min
    return mask


def _untied(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(1.02 * model.lm_head.weight.detach().clone())


def _transposed(values: np.ndarray) -> np.ndarray:
    return values.reshape(40, 40).T.reshape(values.shape)


def _swapped(first: int, second: int) -> Any:
    """Two entries of the first axis exchanged."""

    def change(values: np.ndarray) -> np.ndarray:
        values[[first, second]] = values[[second, first]]
        return values

    return change


def _halves_swapped_in_expert(values: np.ndarray) -> np.ndarray:
    values[2] = np.roll(values[2], len(values[2]) // 2, axis=0)
    return values


def _straight_through(x: jax.Array, cap: float | None) -> jax.Array:
    return x + jax.lax.stop_gradient(softcap(x, cap) - x)


_BACKWARD: dict[str, Any] = {"direction": "backward"}
_L0, _L1, _L2 = (f"model.layers.{i}" for i in range(3))

_qwen3 = partial(bug, "qwen3")
QWEN3: tuple[Bug, ...] = (
    _qwen3(
        "keys without their norm",
        edit("jax", "layers/1/attention", ("self.key_norm(key)", "key")),
        f"{_L1}.self_attn",
    ),
    _qwen3("eps", put("torch", f"{_L2}.self_attn.q_norm", variance_epsilon=1e-3), f"{_L2}.self_attn.q_norm"),
    _qwen3(
        "norm of queries after their rotation",
        edit(
            "jax",
            "layers/0/attention",
            ("self.query_norm(query), self.key_norm(key)", "query, self.key_norm(key)"),
            (
                "rotate(query, tables), rotate(key, tables)",
                "self.query_norm(rotate(query, tables)), rotate(key, tables)",
            ),
        ),
        f"{_L0}.self_attn",
    ),
    _qwen3(
        "no bias",
        call("jax", "layers/1/attention/query", lambda module, original, x: original(x) - module.bias[...]),
        f"{_L1}.self_attn.q_proj",
    ),
    _qwen3(
        "no bias",
        edit("torch", f"{_L2}.self_attn.o_proj", ("self.weight, self.bias", "self.weight, None")),
        f"{_L2}.self_attn.o_proj",
    ),
    _qwen3(
        "bias of another layer",
        jax_weight("layers/0/attention/value/bias", stale(0.2)),
        f"{_L0}.self_attn.v_proj",
        f"{_L0}.self_attn.v_proj.bias",
    ),
    _qwen3(
        "stale norm of keys",
        torch_weight(f"{_L1}.self_attn.k_norm.weight", stale(0.1)),
        f"{_L1}.self_attn.k_norm",
        f"{_L1}.self_attn.k_norm.weight",
    ),
    _qwen3(
        "variance taken as a constant",
        edit(
            "torch", f"{_L1}.self_attn.q_norm", ("torch.rsqrt(variance +", "torch.rsqrt(variance.detach() +")
        ),
        f"{_L1}.self_attn.q_norm",
        **_BACKWARD,
    ),
    _qwen3(
        "gradient doubled",
        doubled_gradient("jax", "layers/1/attention/value"),
        f"{_L1}.self_attn.v_proj",
        **_BACKWARD,
    ),
)

_mixtral = partial(bug, "mixtral")
MIXTRAL: tuple[Bug, ...] = (
    _mixtral(
        "weights of experts not normalized",
        edit("jax", "layers/1/mlp", ("weights / jnp.sum(weights, axis=-1, keepdims=True)", "weights")),
        f"{_L1}.mlp",
    ),
    _mixtral(
        "weights of experts not normalized",
        edit("torch", f"{_L0}.mlp.gate", ("/= router_top_value.sum(dim=-1, keepdim=True)", "/= 1.0")),
        f"{_L0}.mlp.gate",
        also=f"{_L0}.mlp",
    ),
    _mixtral(
        "sigmoid instead of softmax of the router",
        edit(
            "jax",
            "layers/0/mlp",
            ("jax.nn.softmax(wide(self.router(x)), axis=-1)", "jax.nn.sigmoid(wide(self.router(x)))"),
        ),
        f"{_L0}.mlp",
    ),
    _mixtral("one expert too few", config("layers/0/mlp", experts_per_token=1), f"{_L0}.mlp"),
    _mixtral(
        "one expert too many",
        put("torch", f"{_L1}.mlp.gate", top_k=3),
        f"{_L1}.mlp.gate",
        also=f"{_L1}.mlp",
    ),
    _mixtral(
        "results left sorted by expert",
        edit("jax", "layers/1/mlp", ("results[jnp.argsort(order)]", "results[order]")),
        f"{_L1}.mlp",
    ),
    _mixtral(
        "two experts swapped",
        jax_weight("layers/1/mlp/down/kernel", _swapped(0, 1)),
        f"{_L1}.mlp",
        f"{_L1}.mlp.experts.down_proj",
    ),
    _mixtral(
        "gate and up swapped in one expert",
        torch_weight(f"{_L0}.mlp.experts.gate_up_proj", _halves_swapped_in_expert),
        f"{_L0}.mlp",
        f"{_L0}.mlp.experts.gate_up_proj",
    ),
    _mixtral(
        "two rows of the router swapped",
        torch_weight(f"{_L1}.mlp.gate.weight", _swapped(1, 3)),
        f"{_L1}.mlp.gate",
        f"{_L1}.mlp.gate.weight",
    ),
    _mixtral(
        "no gradient into the router",
        edit(
            "jax",
            "layers/0/mlp",
            (
                "weights = weights / jnp.sum",
                "weights = jax.lax.stop_gradient(weights)\n    weights = weights / jnp.sum",
            ),
        ),
        f"{_L0}.mlp",
        **_BACKWARD,
    ),
)

_gemma2 = partial(bug, "gemma2")
GEMMA2: tuple[Bug, ...] = (
    _gemma2("window longer by one", put("jax", "layers/0/attention", window=6), f"{_L0}.self_attn"),
    _gemma2(
        "window shorter by one",
        call("torch", f"{_L2}.self_attn", masked(_window_of_four)),
        f"{_L2}.self_attn",
    ),
    _gemma2("window in a full layer", put("jax", "layers/1/attention", window=5), f"{_L1}.self_attn"),
    _gemma2("cap of scores", config("layers/1/attention", attention_cap=2.0), f"{_L1}.self_attn"),
    _gemma2(
        "no cap of scores", put("torch", f"{_L0}.self_attn", attn_logit_softcapping=None), f"{_L0}.self_attn"
    ),
    _gemma2("cap of logits", config("", logit_cap=30.0), ""),
    _gemma2(
        "no cap of logits",
        Planted("torch", "", lambda model: setattr(model.config, "final_logit_softcapping", None)),
        "",
    ),
    _gemma2("embedding not scaled", config("", embedding_scale=1.0), "", also="model.embed_tokens"),
    _gemma2(
        "embedding not scaled",
        Planted("torch", "model.embed_tokens", lambda module: module.embed_scale.fill_(1.0)),
        "model.embed_tokens",
        also="",
    ),
    _gemma2(
        "scale without the one",
        put("jax", "layers/2/mlp_output_norm", kind="rms"),
        f"{_L2}.post_feedforward_layernorm",
    ),
    _gemma2("exact gelu", put("jax", "layers/1/mlp", activation="gelu"), f"{_L1}.mlp"),
    _gemma2("exact gelu", put("torch", f"{_L0}.mlp", act_fn=torch.nn.GELU()), f"{_L0}.mlp"),
    _gemma2(
        "scale from the size of a head",
        config("layers/2/attention", attention_scale=None),
        f"{_L2}.self_attn",
    ),
    _gemma2(
        "no norm of the attention's output",
        edit("jax", "layers/1", ("_normed(self.attention_output_norm, y)", "y")),
        _L1,
    ),
    _gemma2(
        "output norms swapped",
        edit(
            "torch",
            _L2,
            ("self.post_attention_layernorm(", "self.post_feedforward_layernorm_("),
            ("self.post_feedforward_layernorm(", "self.post_attention_layernorm("),
            ("self.post_feedforward_layernorm_(", "self.post_feedforward_layernorm("),
        ),
        _L2,
    ),
    _gemma2(
        "cap of scores without its gradient",
        edit("jax", "layers/0/attention", softcap=_straight_through),
        f"{_L0}.self_attn",
        **_BACKWARD,
    ),
    _gemma2(
        "no gradient into the norm",
        stopped_input("torch", f"{_L1}.pre_feedforward_layernorm"),
        f"{_L1}.pre_feedforward_layernorm",
        **_BACKWARD,
    ),
)

_gpt2 = partial(bug, "gpt2")
_H0, _H1, _H2 = (f"transformer.h.{i}" for i in range(3))
GPT2: tuple[Bug, ...] = (
    _gpt2("exact gelu", put("torch", f"{_H0}.mlp", act=torch.nn.GELU()), f"{_H0}.mlp"),
    _gpt2("exact gelu", put("jax", "layers/2/mlp", activation="gelu"), f"{_H2}.mlp"),
    _gpt2(
        "norm without subtracting the mean",
        edit("jax", "layers/1/mlp_norm", ("y = y - jnp.mean(y, axis=axes, keepdims=True)", "y = y + 0")),
        f"{_H1}.ln_2",
    ),
    _gpt2("eps", put("torch", "transformer.ln_f", eps=1e-4), "transformer.ln_f"),
    _gpt2("positions from one", edit("jax", "", ("jnp.arange(length)", "1 + jnp.arange(length)")), ""),
    _gpt2(
        "positions rolled",
        torch_weight("transformer.wpe.weight", rolled(0)),
        "transformer.wpe",
        "transformer.wpe.weight",
    ),
    _gpt2(
        "one kernel transposed",
        jax_weight("layers/1/attention/out/kernel", _transposed),
        f"{_H1}.attn.c_proj",
        f"{_H1}.attn.c_proj.weight",
    ),
    _gpt2(
        "query, key and value rolled",
        torch_weight(f"{_H2}.attn.c_attn.weight", rolled(1, 40)),
        f"{_H2}.attn",
        f"{_H2}.attn.c_attn.weight",
    ),
    _gpt2(
        "no bias",
        edit("torch", f"{_H1}.mlp.c_fc", ("torch.addmm(self.bias,", "torch.addmm(0 * self.bias,")),
        f"{_H1}.mlp.c_fc",
    ),
    _gpt2("output kernel untied", Planted("torch", "", _untied), "", "lm_head.weight"),
    _gpt2(
        "no gradient of the tied kernel",
        edit("jax", "", ("self.embed.attend(x)", "x @ jax.lax.stop_gradient(self.embed.embedding[...]).T")),
        "",
        **_BACKWARD,
    ),
    _gpt2("no gradient into attention", stopped_input("torch", f"{_H1}.attn"), f"{_H1}.attn", **_BACKWARD),
    _gpt2("gradient doubled", doubled_gradient("torch", f"{_H0}.ln_1"), f"{_H0}.ln_1", **_BACKWARD),
)

CAUSAL_BUGS = LLAMA + QWEN3 + MIXTRAL + GEMMA2 + GPT2
