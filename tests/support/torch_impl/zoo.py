"""Small models with odd sizes, so that shards are uneven, as PyTorch's own tests have them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


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
    """``forward`` is one of several ways in."""

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
