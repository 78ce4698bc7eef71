"""A convolutional network with batch norms and a vision transformer of transformers, with their nnx ports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from bridge.core.mapping import parse_mapping
from tests.support.parity.nnx_parts import GeluMLP, attend, heads_of, layer_norm
from tests.support.parity.pair_tools import Pair, paired, randomize, with_rules

CLASSES = 7
HEIGHT, WIDTH = 8, 12


class TorchBlock(torch.nn.Module):
    """Convolution, batch norm, ReLU; ``[B, C, H, W]``."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class TorchConvNet(torch.nn.Module):
    """Images ``[B, 3, 8, 12]`` -> logits ``[B, 7]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = TorchBlock(3, 8, 2)
        self.body = TorchBlock(8, 8, 1)
        self.down = TorchBlock(8, 12, 2)
        self.up = torch.nn.ConvTranspose2d(12, 8, 4, stride=2, padding=1)
        self.head = torch.nn.Linear(8 * HEIGHT * WIDTH // 4, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        x = x + self.body(x)
        x = x + self.up(self.down(x))
        return self.head(x.flatten(1))


class Block(nnx.Module):
    """Convolution, batch norm, ReLU; ``[B, H, W, C]``."""

    def __init__(self, channels: int, out: int, stride: int, rngs: nnx.Rngs) -> None:
        pad = ((1, 1), (1, 1))
        self.conv = nnx.Conv(channels, out, (3, 3), strides=stride, padding=pad, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(out, momentum=0.9, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(self.norm(self.conv(x)))


class ConvNet(nnx.Module):
    """Images ``[B, 3, 8, 12]`` -> logits ``[B, 7]``; channels are last inside."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = Block(3, 8, 2, rngs)
        self.body = Block(8, 8, 1, rngs)
        self.down = Block(8, 12, 2, rngs)
        self.up = nnx.ConvTranspose(
            12, 8, (4, 4), strides=2, padding="SAME", transpose_kernel=True, rngs=rngs
        )
        self.head = nnx.Linear(8 * HEIGHT * WIDTH // 4, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.stem(jnp.moveaxis(images, 1, -1))
        x = x + self.body(x)
        x = x + self.up(self.down(x))
        return self.head(x.reshape(len(x), -1))


CONVNET = with_rules("""
drop = ["*num_batches_tracked"]
rule = [
  {torch = "stem.conv.weight : o i y x", jax = "stem/conv/kernel : y x i o"},
  norm stem.norm stem/norm
  {torch = "stem.norm.running_mean", jax = "stem/norm/mean", optional = true},
  {torch = "stem.norm.running_var", jax = "stem/norm/var", optional = true},
  {torch = "body.conv.weight : o i y x", jax = "body/conv/kernel : y x i o"},
  norm body.norm body/norm
  {torch = "body.norm.running_mean", jax = "body/norm/mean", optional = true},
  {torch = "body.norm.running_var", jax = "body/norm/var", optional = true},
  {torch = "down.conv.weight : o i y x", jax = "down/conv/kernel : y x i o"},
  norm down.norm down/norm
  {torch = "down.norm.running_mean", jax = "down/norm/mean", optional = true},
  {torch = "down.norm.running_var", jax = "down/norm/var", optional = true},
  {torch = "up.weight : i o y x", jax = "up/kernel : y x o i"},
  {torch = "up.bias", jax = "up/bias"},
  {torch = "head.weight : o (c h w)", jax = "head/kernel : (h w c) o"},
  {torch = "head.bias", jax = "head/bias"},
]
""")


def convnet_pair(name: str, seed: int) -> Pair:
    """``convnet``: in eval mode. ``convnet_train``: batch norms use the statistics of the batch.

    Their running variances are torch's unbiased and flax's biased ones, and no part of the comparison.
    """
    model, port = TorchConvNet(), ConvNet(nnx.Rngs(seed))
    randomize(model, seed)
    train = name == "convnet_train"
    model.train(train)
    port.train() if train else port.eval()
    images = np.random.default_rng(seed).standard_normal((5, 3, HEIGHT, WIDTH)).astype(np.float32)
    mapping = parse_mapping(CONVNET, "convnet")
    pair = paired(name, model, port, mapping, images, axes={"h": HEIGHT // 2, "c": 8}, loss="probe")
    if train:
        rules = "\n".join(line for line in CONVNET.splitlines() if "running_var" not in line)
        rules = rules.replace("drop = [", 'drop = ["*.running_var", "*/norm/var", ')
        pair = replace(pair, mapping=parse_mapping(rules, "convnet"))
    return pair


VIT_WIDTH, VIT_HEADS, VIT_HIDDEN, PATCH = 32, 4, 40, 4


class ViTEmbeddings(nnx.Module):
    """Images ``[B, 3, 8, 12]`` -> class token and patches ``[B, 7, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, VIT_WIDTH, (PATCH, PATCH), strides=PATCH, padding="VALID", rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros((1, 1, VIT_WIDTH)))
        self.positions = nnx.Param(jnp.zeros((1, 1 + HEIGHT * WIDTH // PATCH**2, VIT_WIDTH)))

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(jnp.moveaxis(images, 1, -1))
        x = x.reshape(len(x), -1, VIT_WIDTH)
        first = jnp.broadcast_to(self.class_token[...], (len(x), 1, VIT_WIDTH))
        return jnp.concatenate([first, x], axis=1) + self.positions[...]


class ViTAttention(nnx.Module):
    """Attention of all patches; ``[B, N, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Linear(VIT_WIDTH, VIT_WIDTH, rngs=rngs)
        self.key = nnx.Linear(VIT_WIDTH, VIT_WIDTH, rngs=rngs)
        self.value = nnx.Linear(VIT_WIDTH, VIT_WIDTH, rngs=rngs)
        self.out = nnx.Linear(VIT_WIDTH, VIT_WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (heads_of(project(x), VIT_HEADS) for project in (self.query, self.key, self.value))
        return self.out(attend(q, k, v, scale=(VIT_WIDTH // VIT_HEADS) ** -0.5))


class ViTLayer(nnx.Module):
    """A pre-norm layer; ``[B, N, 32]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.before = layer_norm(VIT_WIDTH, 1e-12, rngs)
        self.attention = ViTAttention(rngs)
        self.after = layer_norm(VIT_WIDTH, 1e-12, rngs)
        self.mlp = GeluMLP(VIT_WIDTH, VIT_HIDDEN, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class ViT(nnx.Module):
    """Images ``[B, 3, 8, 12]`` -> logits ``[B, 7]`` of the class token."""

    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.embeddings = ViTEmbeddings(rngs)
        self.layers = nnx.List([ViTLayer(rngs) for _ in range(layers)])
        self.norm = layer_norm(VIT_WIDTH, 1e-12, rngs)
        self.head = nnx.Linear(VIT_WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.embeddings(images)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


VIT = with_rules("""
rule = [
  {torch = "vit.embeddings.cls_token", jax = "embeddings/class_token"},
  {torch = "vit.embeddings.position_embeddings", jax = "embeddings/positions"},
  {torch = "vit.embeddings.patch_embeddings.projection.weight : o i h w", jax = "embeddings/patches/kernel : h w i o"},
  {torch = "vit.embeddings.patch_embeddings.projection.bias", jax = "embeddings/patches/bias"},
  dense vit.layers.{i}.attention.q_proj layers/{i}/attention/query
  dense vit.layers.{i}.attention.k_proj layers/{i}/attention/key
  dense vit.layers.{i}.attention.v_proj layers/{i}/attention/value
  dense vit.layers.{i}.attention.o_proj layers/{i}/attention/out
  norm vit.layers.{i}.layernorm_before layers/{i}/before
  norm vit.layers.{i}.layernorm_after layers/{i}/after
  dense vit.layers.{i}.mlp.fc1 layers/{i}/mlp/up
  dense vit.layers.{i}.mlp.fc2 layers/{i}/mlp/down
  norm vit.layernorm norm
  dense classifier head
]
""")


def vit_pair(name: str, seed: int) -> Pair:
    """``ViTForImageClassification`` with two layers and six patches."""
    sizes: dict[str, Any] = {
        "hidden_size": VIT_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": VIT_HEADS,
        "intermediate_size": VIT_HIDDEN,
        "image_size": (HEIGHT, WIDTH),
        "patch_size": PATCH,
        "num_labels": CLASSES,
        "attn_implementation": "eager",
    }
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes)).eval()
    randomize(model, seed)
    images = np.random.default_rng(seed).standard_normal((5, 3, HEIGHT, WIDTH)).astype(np.float32)
    mapping = parse_mapping(VIT, "vit")
    return paired(name, model, ViT(2, nnx.Rngs(seed)), mapping, images, loss="probe")
