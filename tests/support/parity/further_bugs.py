"""Planted bugs in the LSTM and in the classes without a shipped mapping."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tests.support.parity.bug_tools import (
    Bug,
    bug,
    call,
    doubled_gradient,
    edit,
    jax_weight,
    put,
    rolled,
    stale,
    stopped_input,
    torch_weight,
)

_BACKWARD: dict[str, Any] = {"direction": "backward"}


def _gates_in_another_order(values: np.ndarray) -> np.ndarray:
    """Input, cell, forget, output."""
    first, second, third, fourth = np.split(values, 4)
    return np.concatenate([first, third, second, fourth])


def _by_kind(values: np.ndarray) -> np.ndarray:
    """All queries, all keys, all values, instead of the three of one head after the other."""
    return values.reshape(4, 3, 8, -1).swapaxes(0, 1).reshape(values.shape)


def _norm_of_each_head(module: Any, original: Any, x: jax.Array) -> jax.Array:
    heads = x.reshape(*x.shape[:-1], -1, 8)
    square = jnp.mean(heads * heads, axis=-1, keepdims=True)
    return (heads * jax.lax.rsqrt(square + module.epsilon)).reshape(x.shape) * module.scale[...]


_lstm = partial(bug, "lstm")
_GATES = "sigmoid(y[0]), sigmoid(y[1]), jnp.tanh(y[2]), sigmoid(y[3])"
LSTM: tuple[Bug, ...] = (
    _lstm(
        "input and forget gate swapped",
        edit(
            "jax",
            "layers/0",
            (_GATES, "sigmoid(y[1]), sigmoid(y[0]), jnp.tanh(y[2]), sigmoid(y[3])"),
            method="gates",
        ),
        "layers.0",
    ),
    _lstm(
        "order of gates",
        torch_weight("layers.1.weight_ih_l0", _gates_in_another_order),
        "layers.1",
        "layers.1.weight_ih_l0",
    ),
    _lstm(
        "one of two biases missing",
        edit("jax", "layers/1", (" + self.state_bias[...][:, None]", ""), method="gates"),
        "layers.1",
    ),
    _lstm(
        "forget gate biased by one",
        edit("jax", "layers/1", ("sigmoid(y[1])", "sigmoid(y[1] + 1)"), method="gates"),
        "layers.1",
    ),
    _lstm(
        "no tanh of the cell",
        edit("jax", "layers/0", ("out * jnp.tanh(cell)", "out * cell"), method="step"),
        "layers.0",
    ),
    _lstm(
        "outputs one position late",
        edit(
            "jax",
            "layers/1",
            ("jnp.moveaxis(outputs, 0, 1)", "jnp.roll(jnp.moveaxis(outputs, 0, 1), 1, axis=1)"),
        ),
        "layers.1",
    ),
    _lstm(
        "initial state of ones",
        edit("jax", "layers/0", ("zero = jnp.zeros(", "zero = jnp.ones(")),
        "layers.0",
    ),
    _lstm(
        "stale state kernel",
        torch_weight("layers.0.weight_hh_l0", stale()),
        "layers.0",
        "layers.0.weight_hh_l0",
    ),
    _lstm(
        "no gradient through the state",
        edit(
            "jax",
            "layers/1",
            ("self.gates(x, hidden)", "self.gates(x, jax.lax.stop_gradient(hidden))"),
            method="step",
        ),
        "layers.1",
        **_BACKWARD,
    ),
    _lstm("gradient doubled", doubled_gradient("torch", "norm"), "norm", **_BACKWARD),
)

_neox, _opt, _olmo2, _bert, _t5 = (
    partial(bug, name) for name in ("gpt_neox", "opt", "olmo2", "bert", "t5_encoder")
)

NEOX: tuple[Bug, ...] = (
    _neox(
        "MLP after attention",
        put("torch", "gpt_neox.layers.1", use_parallel_residual=False),
        "gpt_neox.layers.1",
    ),
    _neox(
        "whole head rotated",
        edit("jax", "layers/0/attention", ("HEAD // 4", "HEAD")),
        "gpt_neox.layers.0.attention",
    ),
    _neox(
        "fused kernel by kind instead of by head",
        torch_weight("gpt_neox.layers.1.attention.query_key_value.weight", _by_kind),
        "gpt_neox.layers.1.attention",
        "gpt_neox.layers.1.attention.query_key_value.weight",
    ),
    _neox(
        "one norm for both",
        edit("jax", "layers/1", ("self.mlp(self.mlp_norm(x))", "self.mlp(self.attention_norm(x))")),
        "gpt_neox.layers.1",
    ),
)

OPT: tuple[Bug, ...] = (
    _opt(
        "positions without their offset",
        edit("jax", "", ("jnp.arange(ids.shape[1]) + 2", "jnp.arange(ids.shape[1])")),
        "",
        also="model.decoder.embed_positions",
    ),
    _opt(
        "positions without their offset",
        put("torch", "model.decoder.embed_positions", offset=1),
        "model.decoder.embed_positions",
    ),
    _opt(
        "gelu instead of ReLU",
        put("torch", "model.decoder.layers.1", activation_fn=torch.nn.GELU()),
        "model.decoder.layers.1",
    ),
    _opt(
        "attention sees the future",
        edit("jax", "layers/0/attention", ("causal=True", "causal=False")),
        "model.decoder.layers.0.self_attn",
    ),
    _opt(
        "stale bias",
        jax_weight("layers/1/attention/out/bias", stale(0.1)),
        "model.decoder.layers.1.self_attn.out_proj",
        "model.decoder.layers.1.self_attn.out_proj.bias",
    ),
)

OLMO2: tuple[Bug, ...] = (
    _olmo2(
        "norm before attention",
        edit(
            "jax",
            "layers/0",
            ("self.attention_norm(self.attention(x))", "self.attention(self.attention_norm(x))"),
        ),
        "model.layers.0",
    ),
    _olmo2(
        "norm of each head",
        call("jax", "layers/1/attention/query_norm", _norm_of_each_head),
        "model.layers.1.self_attn.q_norm",
    ),
    _olmo2(
        "no norm of queries",
        edit(
            "torch",
            "model.layers.0.self_attn",
            ("self.q_norm(self.q_proj(hidden_states))", "self.q_proj(hidden_states)"),
        ),
        "model.layers.0.self_attn",
    ),
    _olmo2(
        "no gradient into attention",
        stopped_input("jax", "layers/1/attention"),
        "model.layers.1.self_attn",
        **_BACKWARD,
    ),
)

_B0, _B1 = "encoder.layer.0", "encoder.layer.1"
BERT: tuple[Bug, ...] = (
    _bert(
        "no type vectors",
        edit("jax", "embeddings", (" + self.types(jnp.zeros_like(ids))", "")),
        "embeddings",
    ),
    _bert(
        "no residual",
        edit("jax", "layers/1/attention_output", ("self.dense(x) + residual", "self.dense(x)")),
        f"{_B1}.attention.output",
    ),
    _bert(
        "norm before the residual",
        edit(
            "torch",
            f"{_B0}.output",
            ("self.LayerNorm(hidden_states + input_tensor)", "self.LayerNorm(hidden_states) + input_tensor"),
        ),
        f"{_B0}.output",
    ),
    _bert("approximate gelu", edit("jax", "layers/0", ("approximate=False", "approximate=True")), _B0),
    _bert("eps", put("torch", "embeddings.LayerNorm", eps=1e-4), "embeddings.LayerNorm"),
    _bert(
        "causal attention",
        edit("jax", "layers/1/attention", ("scale=HEAD**-0.5", "scale=HEAD**-0.5, causal=True")),
        f"{_B1}.attention.self",
    ),
    _bert(
        "no gradient of one kernel",
        edit("torch", f"{_B1}.output.dense", ("self.weight", "self.weight.detach()")),
        f"{_B1}.output.dense",
        **_BACKWARD,
    ),
)

_T0, _T1 = "encoder.block.0.layer", "encoder.block.1.layer"
T5: tuple[Bug, ...] = (
    _t5(
        "scores scaled",
        edit("jax", "layers/1/attention", ("scale=1.0", "scale=T5_HEAD**-0.5")),
        f"{_T1}.0.SelfAttention",
    ),
    _t5("scores scaled", put("torch", f"{_T0}.0.SelfAttention", scaling=10**-0.5), f"{_T0}.0.SelfAttention"),
    _t5(
        "same bias before and behind",
        edit("jax", "layers/0/attention", ("bucket + half * (distance > 0)", "bucket"), method="bias"),
        f"{_T0}.0.SelfAttention",
    ),
    _t5(
        "farthest distance",
        put("torch", f"{_T0}.0.SelfAttention", relative_attention_max_distance=128),
        f"{_T0}.0.SelfAttention",
    ),
    _t5(
        "no bias in the second layer",
        edit("jax", "layers/1/attention", ("scale=1.0, bias=bias", "scale=1.0")),
        f"{_T1}.0.SelfAttention",
    ),
    _t5(
        "gelu instead of ReLU",
        put("torch", f"{_T1}.1.DenseReluDense", act=torch.nn.GELU()),
        f"{_T1}.1.DenseReluDense",
    ),
    _t5(
        "table of biases rolled",
        jax_weight("layers/0/attention/distances/embedding", rolled(0)),
        f"{_T0}.0.SelfAttention.relative_attention_bias",
        f"{_T0}.0.SelfAttention.relative_attention_bias.weight",
    ),
)

FURTHER_BUGS = LSTM + NEOX + OPT + OLMO2 + BERT + T5
