"""A network of layers of equal sizes, its rows, and a few steps of training, for ``torch_impl`` and torch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import torch_impl
from tests.gpu.devices import DEVICE

WIDTH, LAYERS = 128, 4


class Layer(nn.Module):
    """``half``: whether the second product, and with it a parameter of the unit, is left out."""

    half = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        return x + (y[..., : x.shape[-1]] if self.half else self.down(y))


class Network(nn.Module):
    """Layers whose numbers are in ``skipped`` are not used. Without ``whole`` the output layer is left to the loss."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
            self.output = nn.Linear(width, width, bias=False)
        self.skipped: frozenset[int] = frozenset()
        self.whole = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.skipped:
                x = layer(x)
        return self.output(x) if self.whole else x


def network(dtype: torch.dtype = torch.float32, **sizes: int) -> Network:
    """On the device, the same at each call."""
    return Network(**sizes).to(DEVICE, dtype)


def sharded(
    model: nn.Module | None = None, shard: Callable[..., Any] = torch_impl.fully_shard, **options: Any
) -> Any:
    """Each layer a unit, then the root."""
    model = network() if model is None else model
    for layer in model.layers:  # type: ignore[union-attr]
        shard(layer, **options)
    return shard(model, **options)


def rows(step: int, count: int = 64, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(step)).to(DEVICE, dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (model(x).float() - x.float().roll(1, 0)).square().mean()
    return result


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int] = range(4),
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Losses of inputs in ``dtype``, each before its step."""
    losses = []
    for step in steps:
        loss = loss_of(model, rows(step, dtype=dtype))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, **options)


def values(model: nn.Module) -> list[torch.Tensor]:
    """Whole weights, in the host's memory."""
    return [
        (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().cpu()
        for param in model.parameters()
    ]


def same_bits(mine: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(mine) == len(other) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bytes_of(a), bytes_of(b))
        for a, b in zip(mine, other, strict=True)
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
