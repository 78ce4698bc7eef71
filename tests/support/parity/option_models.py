"""Small torch models whose code has options: two models with different options differ as a port with a fault does."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 13


@dataclass(frozen=True)
class Options:
    """The options of all models; a model reads those that it has a use for.

    ``swapped``: gate and up projection of an MLP, or reset and update gate of a cell. ``residual``, ``scale``: factors
    of the residual and of the scores. ``coarse``: what computes in the model's dtype, also in bfloat16. ``detach``: the
    value through which no gradient flows. ``last``: images have their channels last. ``backwards``: in time.
    """

    norm: str = "rms"
    eps: float = 1e-6
    activation: str = "silu"
    swapped: bool = False
    residual: float = 1.0
    scale: float = 1.0
    mask: str = "causal"
    window: int = 0
    softcap: float = 0.0
    heads: str = "repeat"
    rotate: str = "half"
    theta: float = 100.0
    fused: str = ""
    coarse: str = "softmax norm"
    detach: str = ""
    momentum: float = 0.1
    last: bool = False
    padding: str = "zeros"
    pool: str = "mean"
    backwards: bool = False


class Norm(nn.Module):
    def __init__(self, width: int, options: Options) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        if "norm" not in self.options.coarse and dtype == torch.bfloat16:
            x = x.float()
        if self.options.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        size = (x * x).mean(-1, keepdim=True)
        y = x * torch.rsqrt(size + self.options.eps)
        weight = 1 + self.weight if self.options.norm == "plus one" else self.weight
        return (y.to(dtype) * weight).to(dtype)


class MLP(nn.Module):
    def __init__(self, width: int, options: Options) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        if self.options.swapped:
            gate, up = up, gate
        if self.options.detach == "up":
            up = up.detach()
        act = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}[self.options.activation]
        return self.down(act(gate) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, how: str) -> Tensor:
    """``x [B, T, H, D]``; tables ``[T, D / 2]``."""
    cos, sin = cos[None, :, None], sin[None, :, None]
    if how == "backwards":
        sin = -sin
    if how == "pairs":
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Four heads, and two of keys and values."""

    def __init__(self, width: int, options: Options) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, width // 4
        if options.fused:
            self.qkv = nn.Linear(width, 2 * width)
        else:
            self.q = nn.Linear(width, width)
            self.k, self.v = nn.Linear(width, width // 2), nn.Linear(width, width // 2)
        self.o = nn.Linear(width, width, bias=False)
        self.options = options

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        o, (batch, length, width) = self.options, x.shape
        if o.fused == "blocks":
            q, k, v = self.qkv(x).split([width, width // 2, width // 2], -1)
        elif o.fused == "heads":
            q, k, v = self.qkv(x).view(batch, length, 2, 4, -1).split([2, 1, 1], 3)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        if o.detach == "key":
            k = k.detach()
        q, k, v = (part.reshape(batch, length, -1, self.head_dim) for part in (q, k, v))
        if o.rotate:
            q, k = rotated(q, cos, sin, o.rotate), rotated(k, cos, sin, o.rotate)
        if o.heads == "tile":
            k, v = k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)
        else:
            k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        scores = torch.einsum("bthd,bshd->bhts", q, k) * o.scale / math.sqrt(self.head_dim)
        if o.softcap:
            scores = torch.tanh(scores / o.softcap) * o.softcap
        at = torch.arange(length)
        apart = at[:, None] - at[None]
        seen = {"causal": apart >= 0, "next": apart >= -1, "none": apart == apart}[o.mask]
        if o.window:
            seen = seen & (apart < o.window)
        scores = scores.masked_fill(~seen, -math.inf)
        fine = "softmax" not in o.coarse and scores.dtype == torch.bfloat16
        weights = torch.softmax(scores.float() if fine else scores, -1).to(scores.dtype)
        return self.o(torch.einsum("bhts,bshd->bthd", weights, v).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, options: Options) -> None:
        super().__init__()
        self.norm, self.attention = Norm(width, options), Attention(width, options)
        # Only the first norm computes otherwise: a norm is odd among others that are alike.
        self.mlp_norm = Norm(width, replace(options, coarse=Options.coarse))
        self.mlp = MLP(width, options)
        self.options = options

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), cos, sin)
        return self.options.residual * x + self.mlp(self.mlp_norm(x))


class Rotary(nn.Module):
    def __init__(self, size: int, options: Options) -> None:
        super().__init__()
        self.size, self.options = size, options

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        powers = torch.arange(self.size // 2, dtype=x.dtype) * 2 / self.size
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / self.options.theta**powers
        return angles.cos(), angles.sin()


class Decoder(nn.Module):
    """Tokens ``[B, T]`` to logits ``[B, T, 13]``. The last block has ``options``; ``rest``: of everything else."""

    def __init__(self, options: Options, rest: Options, blocks: int = 1, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.rotary = Rotary(width // 4, rest)
        others = [Block(width, rest) for _ in range(blocks - 1)]
        self.blocks = nn.ModuleList([*others, Block(width, options)])
        self.norm = Norm(width, rest)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.rotary(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class Conv(nn.Module):
    """A convolution whose images are ``[B, C, Y, X]``, or ``[B, Y, X, C]`` if ``last``."""

    def __init__(self, inputs: int, outputs: int, options: Options, stride: int = 1) -> None:
        super().__init__()
        mode = "zeros" if options.padding == "zeros" else "circular"
        self.inner = nn.Conv2d(inputs, outputs, 3, stride, padding=1, padding_mode=mode)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        if self.options.last:
            return self.inner(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.inner(x)


class Statistics(nn.Module):
    """Batch norm with running statistics."""

    def __init__(self, width: int, options: Options) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        if self.options.last:
            x = x.permute(0, 3, 1, 2)
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        with torch.no_grad():
            count = x.numel() / x.shape[1]
            stored = var * count / (count - 1) if self.options.norm == "unbiased" else var
            for buffer, value in ((self.mean, mean), (self.var, stored)):
                buffer.lerp_(value.to(buffer.dtype), self.options.momentum)
            self.count += 1
        y = (x - mean[:, None, None]) * torch.rsqrt(var[:, None, None] + self.options.eps)
        y = y * self.weight[:, None, None]
        return y.permute(0, 2, 3, 1) if self.options.last else y


class ConvNet(nn.Module):
    """Images ``[B, 3, Y, X]`` to a pair of ``[B, 5]`` and ``[B, Y, X, 4]``."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.conv, self.statistics = Conv(3, 4, options), Statistics(4, options)
        self.second, self.head = Conv(4, 6, options, 2), nn.Linear(6, 5)
        self.options = options

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        o = self.options
        x = images.permute(0, 2, 3, 1) if o.last else images
        first = torch.relu(self.statistics(self.conv(x)))
        x = self.second(first)
        places = (1, 2) if o.last else (2, 3)
        x = x.mean(places) if o.pool == "mean" else x.amax(places)
        return self.head(x), first if o.last else first.permute(0, 2, 3, 1)


class Cell(nn.Module):
    """A GRU cell: inputs ``[B, I]`` and state ``[B, H]`` to the next state."""

    def __init__(self, inputs: int, width: int, options: Options) -> None:
        super().__init__()
        self.i, self.h = nn.Linear(inputs, 3 * width), nn.Linear(width, 3 * width)
        self.options = options

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        a, b, c = self.i(x).chunk(3, -1)
        d, e, f = self.h(state).chunk(3, -1)
        reset, update = torch.sigmoid(a + d), torch.sigmoid(b + e)
        if self.options.swapped:
            reset, update = update, reset
        new = torch.tanh(c + reset * f)
        return new + update * (state - new)


class Recurrent(nn.Module):
    """``[B, T, 3]`` to ``[B, 4]``: one cell that is called T times, forwards or backwards in time."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.cell, self.head = Cell(3, 4, options), nn.Linear(4, 4)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4)
        steps = range(x.shape[1])
        for step in reversed(steps) if self.options.backwards else steps:
            state = self.cell(x[:, step], state)
        return self.head(state)


def filled(model: nn.Module, seed: int) -> nn.Module:
    """The model with random weights of a size at which each of them matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(noise * 0.2 + (1.0 if "norm" in name or "statistics" in name else 0.0))
            else:
                parameter.copy_(noise * 1.5 / math.sqrt(math.prod(parameter.shape[1:])))
        for _, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model
