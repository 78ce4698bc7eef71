"""A small decoder trained and saved by stock PyTorch (`torch.distributed.checkpoint`), without this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.support.bridge.decoder_trees import MODEL, torch_shapes


class Weights(nn.Module):
    """The decoder's parameters under their names, without the computation."""

    def __init__(self, *, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in torch_shapes(tied=tied).items():
            module: nn.Module = self
            *parents, leaf = name.split(".")
            for parent in parents:
                if not hasattr(module, parent):
                    module.add_module(parent, nn.Module())
                module = getattr(module, parent)
            module.register_parameter(leaf, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss in which every parameter has its own gradient."""
        losses = [((p - k / 7) ** 3 * x).sum() for k, p in enumerate(self.parameters())]
        return torch.stack(losses).sum()


def trained(*, tied: bool = False, steps: int = 3) -> tuple[Weights, torch.optim.AdamW]:
    """Parameters, and an AdamW optimizer after some steps."""
    model = Weights(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.05)
    step(model, optimizer, steps)
    return model, optimizer


def step(model: Weights, optimizer: torch.optim.AdamW, count: int = 1) -> None:
    for k in range(count):
        optimizer.zero_grad()
        model(torch.tensor(0.1 * (k + 1))).backward()
        optimizer.step()


def state(model: Weights, optimizer: torch.optim.AdamW, steps: int = 3) -> dict[str, Any]:
    """The three trees of a checkpoint."""
    weights, optim = get_state_dict(model, optimizer)
    train: dict[str, Any] = {
        "step": torch.tensor(steps),
        "model": {k: torch.tensor(v) for k, v in MODEL.items()},
    }
    train["data"] = {"seed": torch.tensor(7), "corpus_sha256": torch.arange(32, dtype=torch.uint8)}
    return {"model": weights, "optimizer": optim, "train": train}


def save(path: Path, **options: Any) -> tuple[Weights, torch.optim.AdamW]:
    """Train, and save with stock DCP in one process."""
    model, optimizer = trained(**options)
    dcp.save(state(model, optimizer), checkpoint_id=path, no_dist=True)
    return model, optimizer


def load(path: Path, **options: Any) -> tuple[Weights, torch.optim.AdamW]:
    """A fresh model and optimizer, loaded with stock DCP."""
    model, optimizer = trained(**options)
    target = state(model, optimizer, steps=0)
    dcp.load(target, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    return model, optimizer
