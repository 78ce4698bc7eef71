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
from tests.support.parity.pair_tools import Pair, paired, randomize

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


RULES = """
rule = [
  {torch = "embeddings.patch_embeddings.weight : o i y x", jax = "patches/kernel : y x i o"},
  {torch = "embeddings.patch_embeddings.bias", jax = "patches/bias"},
  {torch = "embeddings.layernorm.weight", jax = "patches_norm/scale"},
  {torch = "embeddings.layernorm.bias", jax = "patches_norm/bias"},
  {torch = "encoder.stages.1.downsampling_layer.0.weight", jax = "stages/1/norm/scale"},
  {torch = "encoder.stages.1.downsampling_layer.0.bias", jax = "stages/1/norm/bias"},
  {torch = "encoder.stages.1.downsampling_layer.1.weight : o i y x", jax = "stages/1/conv/kernel : y x i o"},
  {torch = "encoder.stages.1.downsampling_layer.1.bias", jax = "stages/1/conv/bias"},
  {torch = "encoder.stages.{s}.layers.0.dwconv.weight : o i y x", jax = "stages/{s}/layer/depthwise/kernel : y x i o"},
  {torch = "encoder.stages.{s}.layers.0.dwconv.bias", jax = "stages/{s}/layer/depthwise/bias"},
  {torch = "encoder.stages.{s}.layers.0.layernorm.weight", jax = "stages/{s}/layer/norm/scale"},
  {torch = "encoder.stages.{s}.layers.0.layernorm.bias", jax = "stages/{s}/layer/norm/bias"},
  {torch = "encoder.stages.{s}.layers.0.pwconv1.weight : o i", jax = "stages/{s}/layer/up/kernel : i o"},
  {torch = "encoder.stages.{s}.layers.0.pwconv1.bias", jax = "stages/{s}/layer/up/bias"},
  {torch = "encoder.stages.{s}.layers.0.pwconv2.weight : o i", jax = "stages/{s}/layer/down/kernel : i o"},
  {torch = "encoder.stages.{s}.layers.0.pwconv2.bias", jax = "stages/{s}/layer/down/bias"},
  {torch = "encoder.stages.{s}.layers.0.layer_scale_parameter", jax = "stages/{s}/layer/factor"},
  {torch = "layernorm.weight", jax = "norm/scale"},
  {torch = "layernorm.bias", jax = "norm/bias"},
]
"""


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
