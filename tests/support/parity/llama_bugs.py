"""Planted bugs in the Llama pair."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.models.llama import modeling_llama

from jax_impl.models.causal_lm_config import Rotary
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


def masked(wrong: Any) -> Any:
    """A torch attention that gets another mask."""

    def forward(module: Any, original: Any, *args: Any, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        return original(*args, attention_mask=wrong(attention_mask.clone()), **kwargs)

    return forward


def _sees_one_more(mask: torch.Tensor) -> torch.Tensor:
    i = torch.arange(mask.shape[-1] - 1)
    mask[..., i, i + 1] = 0
    return mask


def _another_theta(model: Any) -> None:
    rotary = model.model.rotary_emb
    with torch.no_grad():
        exponents = torch.arange(0, 10, 2, dtype=torch.float32) / 10
        rotary.inv_freq.copy_(1.0 / 10000.0**exponents)


def _later(tables: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    cos, sin = tables
    return jnp.roll(cos, -1, 0), jnp.roll(sin, -1, 0)


_eager = partial(edited, modeling_llama.eager_attention_forward)
_BACKWARD: dict[str, Any] = {"direction": "backward"}
_BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
_L0, _L1, _L2 = (f"model.layers.{i}" for i in range(3))

_llama = partial(bug, "llama")
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
        edit("jax", "layers/2", ("return after + self._scaled(", "return self._scaled(")),
        _L2,
    ),
    _llama(
        "norm after instead of before attention",
        edit(
            "jax",
            "layers/0",
            (
                "self.attention(_normed(self.attention_norm, x), tables)",
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
        call("torch", f"{_L2}.self_attn", masked(_sees_one_more)),
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
    _llama(
        "norm in bfloat16",
        edit("jax", "norm", ("y, scale = wide(x),", "y, scale = x,")),
        "model.norm",
        **_BFLOAT16,
    ),
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
            (", self.scale[...]", ", jax.lax.stop_gradient(self.scale[...])"),
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
