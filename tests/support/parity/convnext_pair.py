"""``ConvNextModel`` of transformers, with two outputs, and its port to nnx with channels last."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from bridge.core.mapping import parse_mapping
from tests.support.parity.nnx_parts import layer_norm
from tests.support.parity.pair_tools import Pair, paired, randomize, with_rules

SIZES = (8, 12)


class ConvNextLayer(nnx.Module):
    """Depthwise convolution, norm, two projections, a factor for each channel; ``[B, H, W, C]``."""

    def __init__(self, size: int, rngs: nnx.Rngs) -> None:
        self.depthwise = nnx.Conv(size, size, (7, 7), feature_group_count=size, rngs=rngs)
        self.norm = layer_norm(size, 1e-6, rngs)
        self.up = nnx.Linear(size, 4 * size, rngs=rngs)
        self.down = nnx.Linear(4 * size, size, rngs=rngs)
        self.factor = nnx.Param(jnp.ones(size))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.up(self.norm(self.depthwise(x)))
        y = self.down(jax.nn.gelu(y, approximate=False))
        return x + self.factor[...] * y


class ConvNextStage(nnx.Module):
    """A smaller image if ``smaller``, then one layer; ``[B, H, W, C]``."""

    def __init__(self, size: int, out: int, smaller: bool, rngs: nnx.Rngs) -> None:
        self.smaller = smaller
        if smaller:
            self.norm = layer_norm(size, 1e-6, rngs)
            self.conv = nnx.Conv(size, out, (2, 2), strides=2, padding="VALID", rngs=rngs)
        self.layer = ConvNextLayer(out, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.smaller:
            x = self.conv(self.norm(x))
        return self.layer(x)


class ConvNext(nnx.Module):
    """Images ``[B, 3, 16, 16]`` -> ``[B, 12, 4, 4]`` and ``[B, 12]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, SIZES[0], (2, 2), strides=2, padding="VALID", rngs=rngs)
        self.patches_norm = layer_norm(SIZES[0], 1e-6, rngs)
        self.stages = nnx.List([ConvNextStage(SIZES[max(i - 1, 0)], SIZES[i], i > 0, rngs) for i in range(2)])
        self.norm = layer_norm(SIZES[-1], 1e-12, rngs)

    def __call__(self, images: jax.Array) -> dict[str, jax.Array]:
        x = self.patches_norm(self.patches(jnp.moveaxis(images, 1, -1)))
        for stage in self.stages:
            x = stage(x)
        pooled = self.norm(x.mean((1, 2)))
        return {"last_hidden_state": jnp.moveaxis(x, -1, 1), "pooler_output": pooled}


RULES = with_rules("""
rule = [
  conv embeddings.patch_embeddings patches
  norm embeddings.layernorm patches_norm
  norm encoder.stages.1.downsampling_layer.0 stages/1/norm
  conv encoder.stages.1.downsampling_layer.1 stages/1/conv
  conv encoder.stages.{s}.layers.0.dwconv stages/{s}/layer/depthwise
  norm encoder.stages.{s}.layers.0.layernorm stages/{s}/layer/norm
  dense encoder.stages.{s}.layers.0.pwconv1 stages/{s}/layer/up
  dense encoder.stages.{s}.layers.0.pwconv2 stages/{s}/layer/down
  {torch = "encoder.stages.{s}.layers.0.layer_scale_parameter", jax = "stages/{s}/layer/factor"},
  norm layernorm norm
]
""")


def convnext_pair(name: str, seed: int) -> Pair:
    """The pair and a batch of two images."""
    config = transformers.ConvNextConfig(
        num_channels=3, patch_size=2, num_stages=2, hidden_sizes=list(SIZES), depths=[1, 1]
    )
    torch.manual_seed(seed)
    model = transformers.ConvNextModel(config).eval()
    randomize(model, seed)
    images = np.random.default_rng(seed).standard_normal((2, 3, 16, 16)).astype(np.float32)
    rules = parse_mapping(RULES, name)
    return paired(name, model, ConvNext(nnx.Rngs(seed)), rules, images, loss="probe")
