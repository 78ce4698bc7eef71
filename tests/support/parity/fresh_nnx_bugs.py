"""Planted bugs in ports to nnx that were written after the thresholds were chosen."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tests.support.parity.bug_tools import (
    Bug,
    bug,
    edit,
    jax_weight,
    put,
    rolled,
    stale,
    stopped_input,
    torch_weight,
)

_BACKWARD: dict[str, Any] = {"direction": "backward"}
_phi3, _convnext, _tied = partial(bug, "phi3"), partial(bug, "convnext"), partial(bug, "tied")
_STAGE, _LAYER = "encoder.stages.1", "encoder.stages.1.layers.0"


def _up_and_gate(values: np.ndarray) -> np.ndarray:
    """The two halves of the fused projection in another order."""
    return np.roll(values, len(values) // 2, 0)


PHI3: tuple[Bug, ...] = (
    _phi3(
        "gate and up swapped",
        edit("torch", "model.layers.0.mlp", ("gate, up_states = up", "up_states, gate = up")),
        "model.layers.0.mlp",
    ),
    _phi3("eps", put("jax", "layers/1/mlp_norm", epsilon=1e-3), "model.layers.1.post_attention_layernorm"),
    _phi3("rope base", edit("jax", "layers/1/attention", ("1000.0", "10000.0")), "model.layers.1.self_attn"),
    _phi3(
        "keys not rotated",
        edit(
            "jax",
            "layers/0/attention",
            ("rotate(heads_of(self.k(x), KEYS), tables)", "heads_of(self.k(x), KEYS)"),
        ),
        "model.layers.0.self_attn",
    ),
    _phi3(
        "scale of scores", put("torch", "model.layers.1.self_attn", scaling=0.25), "model.layers.1.self_attn"
    ),
    _phi3(
        "residual from the norm",
        edit("jax", "layers/0", ("return x + self.mlp", "return self.mlp_norm(x) + self.mlp")),
        "model.layers.0",
    ),
    _phi3("norm left out", edit("jax", "", ("self.head(self.norm(x))", "self.head(x)")), ""),
    _phi3(
        "fused rows in another order",
        torch_weight("model.layers.1.mlp.gate_up_proj.weight", _up_and_gate),
        "model.layers.1.mlp.gate_up_proj",
        "model.layers.1.mlp.gate_up_proj.weight",
    ),
    _phi3(
        "no gradient into attention",
        stopped_input("jax", "layers/1/attention"),
        "model.layers.1.self_attn",
        **_BACKWARD,
    ),
)
CONVNEXT: tuple[Bug, ...] = (
    _convnext(
        "GELU, tanh form", edit("jax", "stages/1/layer", ("approximate=False", "approximate=True")), _LAYER
    ),
    _convnext(
        "no factor", edit("torch", _LAYER, ("self.layer_scale_parameter * features", "features")), _LAYER
    ),
    _convnext("eps", put("jax", "norm", epsilon=1e-3), "layernorm"),
    _convnext(
        "circular padding",
        put("jax", "stages/0/layer/depthwise", padding="CIRCULAR"),
        "encoder.stages.0.layers.0.dwconv",
    ),
    _convnext(
        "norm over positions", put("jax", "patches_norm", reduction_axes=(1, 2)), "embeddings.layernorm"
    ),
    _convnext("maximum in place of the mean", edit("jax", "", ("x.mean((1, 2))", "x.max((1, 2))")), ""),
    _convnext(
        "norm after the convolution left out",
        edit("jax", "stages/1", ("self.conv(self.norm(x))", "self.conv(x)")),
        _STAGE,
    ),
    _convnext(
        "residual lost",
        edit(
            "torch",
            "encoder.stages.0.layers.0",
            ("residual + self.drop_path(features)", "self.drop_path(features)"),
        ),
        "encoder.stages.0.layers.0",
    ),
    _convnext(
        "kernel transposed",
        jax_weight("stages/1/layer/depthwise/kernel", lambda v: v.swapaxes(0, 1)),
        f"{_LAYER}.dwconv",
        f"{_LAYER}.dwconv.weight",
    ),
    _convnext("no gradient into a layer", stopped_input("torch", _LAYER), _LAYER, **_BACKWARD),
)
TIED: tuple[Bug, ...] = (
    _tied("SELU", edit("jax", "", ("jax.nn.elu", "jax.nn.selu")), ""),
    _tied("one loop less", edit("torch", "", ("range(LOOPS)", "range(LOOPS - 1)")), ""),
    _tied("one loop more", edit("jax", "", ("range(LOOPS)", "range(LOOPS + 1)")), ""),
    _tied("SiLU", edit("jax", "refine", ("jax.nn.softplus", "jax.nn.silu")), "refine"),
    _tied("eps", put("torch", "refine.norm", eps=1e-3), "refine.norm"),
    _tied("no bias", edit("jax", "", (" + self.bias[...]", "")), ""),
    _tied(
        "kernel not trained by the decoder",
        edit("torch", "", ("self.encoder.weight.T", "self.encoder.weight.detach().T")),
        "",
        **_BACKWARD,
    ),
    _tied(
        "kernel not trained by the decoder",
        edit("jax", "", ("self.encoder.kernel[...].T", "jax.lax.stop_gradient(self.encoder.kernel[...]).T")),
        "",
        **_BACKWARD,
    ),
    _tied("code is not the last", edit("jax", "", ('"code": code', '"code": self.refine(code)')), ""),
    _tied(
        "stale kernel", torch_weight("refine.inner.weight", stale()), "refine.inner", "refine.inner.weight"
    ),
    _tied("bias moved", jax_weight("bias", rolled(0)), "", "bias"),
)
NNX_BUGS: tuple[Bug, ...] = PHI3 + CONVNEXT + TIED
