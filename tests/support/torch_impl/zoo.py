"""Models that tests share. They are small and have odd sizes, so that shards are uneven.

The first four are those of PyTorch's own tests of FSDP2. ``toy.py`` has a model with scalars and stacks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class MLP(nn.Module):
    def __init__(self, size: int = 8, hidden: int = 13) -> None:
        super().__init__()
        self.inner = nn.Linear(size, hidden)
        self.outer = nn.Linear(hidden, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.outer(F.relu(self.inner(x))))


class Stack(nn.Module):
    """Blocks of different widths, and parameters of the root itself."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.blocks = nn.ModuleList(MLP(8, 13 + 4 * index) for index in range(blocks))
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Tied(nn.Module):
    """A language model's shape: the head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x.argsort(dim=-1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class TwoParts(nn.Module):
    """``forward`` is one of several entry points."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MLP()
        self.second = MLP(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x)


def named(**modules: nn.Module) -> nn.Sequential:
    """Named modules that are called in turn."""
    return nn.Sequential(OrderedDict(modules))


class Chain(nn.Module):
    """Calls ``layers`` in turn, and then each module of ``after``.

    residual: adds a layer's output to its input. between: applied to each layer's output.
    recompute: None, or ``use_reentrant`` of the checkpoint that each layer is called in.
    """

    def __init__(
        self,
        *layers: nn.Module,
        residual: bool = False,
        between: Callable[[torch.Tensor], torch.Tensor] = lambda y: y,
        recompute: bool | None = None,
        **after: nn.Module,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.residual, self.between, self.recompute, self.after = residual, between, recompute, list(after)
        for name, module in after.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
            x = x + self.between(y) if self.residual else self.between(y)
        for name in self.after:
            x = getattr(self, name)(x)
        return x


class Adapted(nn.Module):
    """A frozen base with a trained low-rank path, as in LoRA: ``[B, columns] -> [B, rows]``."""

    def __init__(self, base: nn.Module, columns: int, rows: int, *, bias: bool = False) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(columns, 2, bias=False), nn.Linear(2, rows, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Headless(nn.Module):
    """Returns what its head, a layer of the root, would be applied to: a loss reads the head's weight."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))


class Experts(nn.Module):
    """A dense layer, then experts of which a rank computes those that it has."""

    def __init__(self, columns: int, width: int, rows: int, *, experts: int = 4) -> None:
        super().__init__()
        self.dense = nn.Linear(columns, width)
        self.experts = nn.Parameter(torch.randn(experts, width, rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        return torch.einsum("bi,eio->beo", torch.tanh(self.dense(x)), own).tanh()
