"""A U-Net with group norms, dilated, grouped and transposed convolutions and resizing, and its linen port."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F

from bridge.core.mapping import parse_mapping
from tests.support.parity.pair_tools import Pair, randomize
from tests.support.parity.ported import ported


class TorchUnit(torch.nn.Module):
    """Group norm, SiLU, convolution; a projection of the input is added. ``[B, C, H, W]``."""

    def __init__(self, channels: int, out: int, stride: int = 1, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.norm = torch.nn.GroupNorm(4, channels)
        self.conv = torch.nn.Conv2d(
            channels, out, 3, stride=stride, padding=dilation, dilation=dilation, groups=groups
        )
        self.skip = torch.nn.Conv2d(channels, out, 1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.skip(x) + self.conv(F.silu(self.norm(x)))


class TorchUNet(torch.nn.Module):
    """Images ``[B, 3, 12, 8]`` -> ``[B, 2, 12, 8]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 5, padding=2)
        self.down1 = TorchUnit(8, 12, stride=2)
        self.down2 = TorchUnit(12, 16)
        self.middle = TorchUnit(16, 16, dilation=2, groups=2)
        self.up2 = TorchUnit(28, 12)
        self.raise1 = torch.nn.ConvTranspose2d(12, 8, 4, stride=2, padding=1)
        self.up1 = TorchUnit(16, 8)
        self.head = torch.nn.Conv2d(8, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.stem(images)
        second = self.down1(first)
        x = F.avg_pool2d(second, 3, stride=2, padding=1)
        x = self.middle(self.down2(x))
        x = F.interpolate(x, size=second.shape[2:], mode="bilinear", align_corners=False)
        x = self.up2(torch.cat([second, x], 1))
        x = self.up1(torch.cat([first, self.raise1(x)], 1))
        return self.head(x)


class Unit(nn.Module):
    """Group norm, SiLU, convolution; a projection of the input is added. ``[B, H, W, C]``."""

    out: int
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.GroupNorm(4, epsilon=self.eps, use_fast_variance=False, name="norm")(x)
        pad = ((self.dilation,) * 2,) * 2
        conv = nn.Conv(
            self.out,
            (3, 3),
            strides=self.stride,
            padding=pad,
            kernel_dilation=self.dilation,
            feature_group_count=self.groups,
            name="conv",
        )
        return nn.Conv(self.out, (1, 1), strides=self.stride, name="skip")(x) + conv(jax.nn.silu(y))


class UNet(nn.Module):
    """Images ``[B, 3, 12, 8]`` -> ``[B, 2, 12, 8]``; channels are last inside."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        first = nn.Conv(8, (5, 5), name="stem")(jnp.moveaxis(images, 1, -1))
        second = Unit(12, stride=2, name="down1")(first)
        pad = ((1, 1), (1, 1))
        x = nn.avg_pool(second, (3, 3), strides=(2, 2), padding=pad, count_include_pad=True)
        x = Unit(16, name="down2")(x)
        x = Unit(16, dilation=2, groups=2, name="middle")(x)
        x = jax.image.resize(x, (*second.shape[:3], x.shape[-1]), "bilinear")
        x = Unit(12, name="up2")(jnp.concatenate([second, x], -1))
        x = nn.ConvTranspose(8, (4, 4), strides=(2, 2), transpose_kernel=True, name="raise1")(x)
        x = Unit(8, name="up1")(jnp.concatenate([first, x], -1))
        return jnp.moveaxis(nn.Conv(2, (1, 1), name="head")(x), -1, 1)


PORT = UNet()


def _rules() -> str:
    lines = []
    for unit in ("down1", "down2", "middle", "up2", "up1"):
        lines += [f'{{torch = "{unit}.norm.weight", jax = "{unit}/norm/scale"}}']
        lines += [f'{{torch = "{unit}.norm.bias", jax = "{unit}/norm/bias"}}']
    units = [f"{u}.{c}" for u in ("down1", "down2", "middle", "up2", "up1") for c in ("conv", "skip")]
    for conv in ("stem", "head", "raise1", *units):
        path, axes = conv.replace(".", "/"), "i o y x" if conv == "raise1" else "o i y x"
        to = "y x o i" if conv == "raise1" else "y x i o"
        lines += [f'{{torch = "{conv}.weight : {axes}", jax = "{path}/kernel : {to}"}}']
        lines += [f'{{torch = "{conv}.bias", jax = "{path}/bias"}}']
    return "rule = [\n" + ",\n".join(lines) + "\n]"


def unet_pair(name: str, seed: int) -> Pair:
    """The pair and a batch of three images."""
    torch.manual_seed(seed)
    model = TorchUNet().eval()
    randomize(model, seed)
    images = np.random.default_rng(seed).standard_normal((3, 3, 12, 8)).astype(np.float32)
    return ported(name, model, PORT, parse_mapping(_rules(), "unet"), images)
