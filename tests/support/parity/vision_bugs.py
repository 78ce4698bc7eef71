"""Planted bugs in the convolutional network and in the vision transformer."""

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


def _by_position(module: Any, original: Any, x: jax.Array) -> jax.Array:
    """A batch norm that reduces the batch only, not the positions."""
    mean, var = jnp.mean(x, axis=0), jnp.var(x, axis=0)
    return (x - mean) * jax.lax.rsqrt(var + module.epsilon) * module.scale[...] + module.bias[...]


def _statistics_as_constants(module: Any, original: Any, x: torch.Tensor) -> torch.Tensor:
    """A batch norm through whose statistics no gradient flows."""
    var, mean = torch.var_mean(x.detach(), (0, 2, 3), correction=0, keepdim=True)
    weight, bias = module.weight[:, None, None], module.bias[:, None, None]
    return (x - mean) * torch.rsqrt(var + module.eps) * weight + bias


def _unbiased(values: np.ndarray) -> np.ndarray:
    """Variances over 20 values with the divisor 19."""
    return (values * np.float32(20 / 19)).astype(values.dtype)


def _flipped(values: np.ndarray) -> np.ndarray:
    return values[::-1, ::-1]


def _height_and_width_swapped(values: np.ndarray) -> np.ndarray:
    return values.swapaxes(0, 1)


_convnet, _train, _vit = (partial(bug, name) for name in ("convnet", "convnet_train", "vit"))

CONVNET: tuple[Bug, ...] = (
    _convnet("eps", put("torch", "body.norm", eps=1e-3), "body.norm"),
    _convnet("eps", put("jax", "down/norm", epsilon=1e-6), "down.norm"),
    _convnet("batch norm still in training", put("jax", "down/norm", use_running_average=False), "down.norm"),
    _convnet("batch norm still in training", put("torch", "stem.norm", training=True), "stem.norm"),
    _convnet("stale mean", jax_weight("body/norm/mean", stale()), "body.norm", "body.norm.running_mean"),
    _convnet("stale variance", jax_weight("stem/norm/var", _unbiased), "stem.norm", "stem.norm.running_var"),
    _convnet("another alignment of strides", put("jax", "stem/conv", padding="SAME"), "stem.conv"),
    _convnet("padding goes around", put("torch", "body.conv", padding_mode="circular"), "body.conv"),
    _convnet("transposed kernel flipped", jax_weight("up/kernel", _flipped), "up", "up.weight"),
    _convnet(
        "height and width swapped",
        jax_weight("stem/conv/kernel", _height_and_width_swapped),
        "stem.conv",
        "stem.conv.weight",
    ),
    _convnet(
        "no ReLU in a block",
        edit("torch", "down", ("torch.relu(self.norm(self.conv(x)))", "self.norm(self.conv(x))")),
        "down",
    ),
    _convnet(
        "ReLU before the norm",
        edit("jax", "body", ("jax.nn.relu(self.norm(self.conv(x)))", "self.norm(jax.nn.relu(self.conv(x)))")),
        "body",
    ),
    _convnet(
        "channels last when flattened",
        edit("torch", "", ("x.flatten(1)", "x.movedim(1, -1).flatten(1)")),
        "",
    ),
    _convnet("gradient doubled", doubled_gradient("jax", "up"), "up", **_BACKWARD),
    _convnet("no gradient into a block", stopped_input("torch", "down"), "down", **_BACKWARD),
)

TRAIN: tuple[Bug, ...] = (
    _train("batch norm frozen", put("jax", "stem/norm", use_running_average=True), "stem.norm"),
    _train("batch norm frozen", put("torch", "down.norm", training=False), "down.norm"),
    _train("axes of the statistics", call("jax", "body/norm", _by_position), "body.norm"),
    _train("eps", put("jax", "body/norm", epsilon=1e-3), "body.norm"),
    _train(
        "statistics taken as constants",
        call("torch", "body.norm", _statistics_as_constants),
        "body.norm",
        **_BACKWARD,
    ),
)

_E, _P = "vit.embeddings", "vit.embeddings.patch_embeddings.projection"
_L0, _L1 = "vit.layers.0", "vit.layers.1"
VIT: tuple[Bug, ...] = (
    _vit(
        "patches by column",
        edit(
            "jax",
            "embeddings",
            ("x = x.reshape(len(x), -1, VIT_WIDTH)", "x = x.swapaxes(1, 2).reshape(len(x), -1, VIT_WIDTH)"),
        ),
        _E,
    ),
    _vit(
        "class token last",
        edit(
            "jax",
            "embeddings",
            ("jnp.concatenate([first, x], axis=1)", "jnp.concatenate([x, first], axis=1)"),
        ),
        _E,
    ),
    _vit(
        "no position for the class token",
        edit(
            "torch",
            _E,
            (
                "embeddings = embeddings + self.position_embeddings\n",
                "embeddings = torch.cat((embeddings[:, :1], embeddings[:, 1:] + self.position_embeddings[:, 1:]), 1)\n",
            ),
        ),
        _E,
    ),
    _vit(
        "positions rolled",
        torch_weight(f"{_E}.position_embeddings", rolled(1)),
        _E,
        f"{_E}.position_embeddings",
    ),
    _vit(
        "height and width of patches swapped",
        jax_weight("embeddings/patches/kernel", _height_and_width_swapped),
        _P,
        f"{_P}.weight",
    ),
    _vit("channels in reverse", torch_weight(f"{_P}.weight", lambda x: x[:, ::-1]), _P, f"{_P}.weight"),
    _vit("eps", put("jax", "layers/0/before", epsilon=1e-4), f"{_L0}.layernorm_before"),
    _vit("eps", put("torch", "vit.layernorm", eps=1e-4), "vit.layernorm"),
    _vit(
        "approximate gelu",
        edit("jax", "layers/1/mlp", ("approximate=False", "approximate=True")),
        f"{_L1}.mlp",
    ),
    _vit("scores scaled twice", put("torch", f"{_L1}.attention", scaling=1 / 8), f"{_L1}.attention"),
    _vit(
        "keys and queries swapped",
        edit(
            "jax",
            "layers/0/attention",
            ("self.query, self.key, self.value", "self.key, self.query, self.value"),
        ),
        f"{_L0}.attention",
    ),
    _vit("mean of all patches", edit("jax", "", ("self.norm(x)[:, 0]", "self.norm(x).mean(axis=1)")), ""),
    _vit(
        "norm after the MLP",
        edit("jax", "layers/1", ("self.mlp(self.after(x))", "self.after(self.mlp(x))")),
        _L1,
    ),
    _vit(
        "no gradient of the class token",
        edit("torch", _E, ("self.cls_token.expand(", "self.cls_token.detach().expand(")),
        _E,
        **_BACKWARD,
    ),
    _vit(
        "no gradient into attention",
        stopped_input("jax", "layers/1/attention"),
        f"{_L1}.attention",
        **_BACKWARD,
    ),
    _vit("gradient doubled", doubled_gradient("torch", f"{_L0}.mlp.fc2"), f"{_L0}.mlp.fc2", **_BACKWARD),
)

VISION_BUGS = CONVNET + TRAIN + VIT
