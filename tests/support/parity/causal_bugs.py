"""Planted bugs in the pairs of ``CausalLM``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.models.llama import modeling_llama

from jax_impl.models.causal_lm_config import Rotary
from jax_impl.models.causal_lm_layers import softcap
from tests.support.parity.bug_tools import (
    Bug,
    Planted,
    bug,
    call,
    config,
    doubled_gradient,
    edit,
    edited,
    jax_weight,
    put,
    rolled,
    stale,
    stopped_input,
    torch_weight,
)


def _interleaved(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate channels side by side instead of halves."""
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = tables
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


def _rotate_half_backwards(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def _tiled_heads(x: torch.Tensor, times: int) -> torch.Tensor:
    """Key head j for the query heads j, j + n, ... instead of neighbours."""
    return x.repeat(1, times, 1, 1)


def _masked(wrong: Any) -> Any:
    """A torch attention that gets another mask."""

    def forward(module: Any, original: Any, *args: Any, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        return original(*args, attention_mask=wrong(attention_mask.clone()), **kwargs)

    return forward


def _sees_one_more(mask: torch.Tensor) -> torch.Tensor:
    i = torch.arange(mask.shape[-1] - 1)
    mask[..., i, i + 1] = 0
    return mask


def _window_of_four(mask: torch.Tensor) -> torch.Tensor:
    i = torch.arange(4, mask.shape[-1])
    mask[..., i, i - 4] = torch.finfo(mask.dtype).min
    return mask


def _another_theta(model: Any) -> None:
    rotary = model.model.rotary_emb
    with torch.no_grad():
        exponents = torch.arange(0, 10, 2, dtype=torch.float32) / 10
        rotary.inv_freq.copy_(1.0 / 10000.0**exponents)


def _untied(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(1.02 * model.lm_head.weight.detach().clone())


def _later(tables: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    cos, sin = tables
    return jnp.roll(cos, -1, 0), jnp.roll(sin, -1, 0)


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


_eager = partial(edited, modeling_llama.eager_attention_forward)
_BACKWARD: dict[str, Any] = {"direction": "backward"}
_BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}

_llama = partial(bug, "llama")
_L0, _L1, _L2 = (f"model.layers.{i}" for i in range(3))
LLAMA: tuple[Bug, ...] = (
    _llama("eps", put("torch", f"{_L1}.input_layernorm", variance_epsilon=1e-5), f"{_L1}.input_layernorm"),
    _llama("eps", put("jax", "layers/2/mlp_norm", eps=1e-5), f"{_L2}.post_attention_layernorm"),
    _llama("rope base", Planted("torch", "", _another_theta), ""),
    _llama("rope base", config("", rotary=Rotary(theta=10000.0)), ""),
    _llama("rope interleaved", edit("jax", "layers/1/attention", rotate=_interleaved), f"{_L1}.self_attn"),
    _llama(
        "rope turns backwards",
        edit(
            "torch",
            f"{_L0}.self_attn",
            apply_rotary_pos_emb=edited(
                modeling_llama.apply_rotary_pos_emb, rotate_half=_rotate_half_backwards
            ),
        ),
        f"{_L0}.self_attn",
    ),
    _llama(
        "rope one position later for keys",
        edit(
            "jax", "layers/0/attention", ("rotate(key, tables)", "rotate(key, later(tables))"), later=_later
        ),
        f"{_L0}.self_attn",
    ),
    _llama(
        "order of query heads",
        edit(
            "jax",
            "layers/2/attention",
            (
                "query.reshape(batch, length, c.n_kv_heads, -1, c.head_dim)",
                "query.reshape(batch, length, -1, c.n_kv_heads, c.head_dim).swapaxes(2, 3)",
            ),
        ),
        f"{_L2}.self_attn",
    ),
    _llama(
        "key heads tiled instead of repeated",
        edit("torch", f"{_L2}.self_attn", eager_attention_forward=_eager(repeat_kv=_tiled_heads)),
        f"{_L2}.self_attn",
    ),
    _llama("gelu instead of silu", put("jax", "layers/0/mlp", activation="gelu"), f"{_L0}.mlp"),
    _llama("gelu instead of silu", put("torch", f"{_L2}.mlp", act_fn=torch.nn.GELU()), f"{_L2}.mlp"),
    _llama(
        "gate and up swapped",
        edit("jax", "layers/1/mlp", ("act(self.gate(x)) * self.up(x)", "act(self.up(x)) * self.gate(x)")),
        f"{_L1}.mlp",
    ),
    _llama(
        "gate and up swapped",
        edit(
            "torch",
            f"{_L0}.mlp",
            (
                "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
                "self.act_fn(self.up_proj(x)) * self.gate_proj(x)",
            ),
        ),
        f"{_L0}.mlp",
    ),
    _llama(
        "residual from after the norm",
        edit(
            "torch",
            _L1,
            (
                "residual = hidden_states\n    hidden_states = self.post_attention_layernorm(hidden_states)",
                "hidden_states = self.post_attention_layernorm(hidden_states)\n    residual = hidden_states",
            ),
        ),
        _L1,
    ),
    _llama(
        "no residual around the MLP",
        edit("jax", "layers/2", ("return x + (y if", "return (y if")),
        _L2,
    ),
    _llama(
        "norm after instead of before attention",
        edit(
            "jax",
            "layers/0",
            (
                "self.attention(self.attention_norm(x), tables)",
                "self.attention_norm(self.attention(x, tables))",
            ),
        ),
        _L0,
    ),
    _llama("scores not scaled", config("layers/1/attention", attention_scale=1.0), f"{_L1}.self_attn"),
    _llama("scores not scaled", put("torch", f"{_L0}.self_attn", scaling=1.0), f"{_L0}.self_attn"),
    _llama(
        "mask lets the next token through",
        edit("jax", "layers/1/attention", ("distance >= 0", "distance >= -1")),
        f"{_L1}.self_attn",
    ),
    _llama(
        "mask lets the next token through",
        call("torch", f"{_L2}.self_attn", _masked(_sees_one_more)),
        f"{_L2}.self_attn",
    ),
    _llama(
        "scale plus one", put("jax", "layers/1/attention_norm", kind="rms_one_plus"), f"{_L1}.input_layernorm"
    ),
    _llama(
        "stale weight",
        jax_weight("layers/1/mlp/down/kernel", stale()),
        f"{_L1}.mlp.down_proj",
        f"{_L1}.mlp.down_proj.weight",
    ),
    _llama(
        "stale norm",
        torch_weight(f"{_L2}.input_layernorm.weight", stale()),
        f"{_L2}.input_layernorm",
        f"{_L2}.input_layernorm.weight",
    ),
    _llama(
        "heads of the query kernel rolled",
        torch_weight(f"{_L0}.self_attn.q_proj.weight", rolled(0, 10)),
        f"{_L0}.self_attn.q_proj",
        f"{_L0}.self_attn.q_proj.weight",
    ),
    _llama("vocabulary rolled", torch_weight("lm_head.weight", rolled(0)), "lm_head", "lm_head.weight"),
    _llama(
        "vocabulary rolled",
        jax_weight("embed/embedding", rolled(0)),
        "model.embed_tokens",
        "model.embed_tokens.weight",
    ),
    _llama(
        "softmax in bfloat16",
        edit(
            "jax",
            "layers/1/attention",
            ("wide(grouped), wide(key)", "grouped, key"),
        ),
        f"{_L1}.self_attn",
        **_BFLOAT16,
    ),
    _llama(
        "softmax in bfloat16",
        edit("torch", f"{_L1}.self_attn", eager_attention_forward=_eager((", dtype=torch.float32", ""))),
        f"{_L1}.self_attn",
        **_BFLOAT16,
    ),
    _llama(
        "norm in bfloat16",
        edit("torch", f"{_L0}.input_layernorm", (".to(torch.float32)", "")),
        f"{_L0}.input_layernorm",
        **_BFLOAT16,
    ),
    _llama("norm in bfloat16", edit("jax", "norm", ("y = wide(x)", "y = x")), "model.norm", **_BFLOAT16),
    _llama("no gradient into the MLP", stopped_input("jax", "layers/1/mlp"), f"{_L1}.mlp", **_BACKWARD),
    _llama(
        "no gradient through keys",
        edit(
            "torch",
            f"{_L1}.self_attn",
            ("self.k_proj(hidden_states)", "self.k_proj(hidden_states).detach()"),
        ),
        f"{_L1}.self_attn",
        **_BACKWARD,
    ),
    _llama(
        "gradient doubled",
        doubled_gradient("jax", "layers/0/mlp_norm"),
        f"{_L0}.post_attention_layernorm",
        **_BACKWARD,
    ),
    _llama(
        "gradient doubled",
        doubled_gradient("torch", f"{_L2}.self_attn.o_proj"),
        f"{_L2}.self_attn.o_proj",
        **_BACKWARD,
    ),
    _llama(
        "no gradient of one scale",
        edit(
            "jax",
            "layers/2/attention_norm",
            ("= self.scale[...]", "= jax.lax.stop_gradient(self.scale[...])"),
        ),
        f"{_L2}.input_layernorm",
        **_BACKWARD,
    ),
    _llama(
        "no gradient of one kernel",
        edit("torch", f"{_L1}.mlp.up_proj", ("self.weight", "self.weight.detach()")),
        f"{_L1}.mlp.up_proj",
        **_BACKWARD,
    ),
)

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
    _mixtral("one expert too many", put("torch", f"{_L1}.mlp.gate", top_k=3), f"{_L1}.mlp.gate"),
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
        call("torch", f"{_L2}.self_attn", _masked(_window_of_four)),
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
    _gemma2("embedding not scaled", config("", embedding_scale=1.0), ""),
    _gemma2(
        "embedding not scaled",
        Planted("torch", "model.embed_tokens", lambda module: module.embed_scale.fill_(1.0)),
        "model.embed_tokens",
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
        edit("jax", "layers/1", ("else self.attention_output_norm(y)", "else y")),
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
        edit("jax", "layers/1/mlp_norm", ("y = y - jnp.mean(y, axis=-1, keepdims=True)", "y = y + 0")),
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
