"""Checkpoints of models that torch.compile or activation checkpointing wraps: names are the bare model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torch_impl
from tests.support.ranks import on_ranks


class Wrapped(nn.Module):
    """As an OptimizedModule: one module, under the name that ``torch.compile`` gives it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(x)


def trained(wrapping: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    if wrapping == "recomputed":
        model[0] = checkpoint_wrapper(model[0])
    torch_impl.fully_shard(model[0])
    torch_impl.fully_shard(model)
    if wrapping == "compiled":
        model = Wrapped(model)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        rows = torch.arange(8.0).reshape(2, 4) * (dist.get_rank() + step + 1)
        (model(rows) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("saved", ["recomputed", "compiled", ""])
@on_ranks(2)
def test_a_wrapped_model_goes_on_from_the_checkpoint_of_the_bare_one_and_back(
    tmp_path: Path, saved: str
) -> None:
    """Recomputing or compiling may change between two runs. Names are the bare model's, also in stock DCP's eyes."""
    model, optimizer = trained(saved, 2)
    torch_impl.save_checkpoint(tmp_path / "c", model, optimizer)
    names = dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    assert not any(word in name for name in names for word in ("_orig_mod", "_checkpoint_wrapped_module"))
    train(model, optimizer, 1)
    expected = [parameter.full_tensor() for parameter in model.parameters()]
    for loaded in ("recomputed", "compiled", ""):
        other, other_optimizer = trained(loaded, 0)
        torch_impl.load_checkpoint(tmp_path / "c", other, other_optimizer)
        train(other, other_optimizer, 1)
        for parameter, value in zip(other.parameters(), expected, strict=True):
            assert torch.equal(parameter.full_tensor(), value)


def test_wrappers_in_the_names_of_an_earlier_checkpoint_are_left_out(tmp_path: Path) -> None:
    """Earlier versions saved the names of wrapped models as they were."""
    bare, optimizer = nn.Linear(4, 3), None
    torch_impl.save_checkpoint(tmp_path / "bare", bare, optimizer)
    old = {"model": {f"_orig_mod.{name}": value for name, value in bare.state_dict().items()}}
    dcp.save(old, checkpoint_id=tmp_path / "old", no_dist=True)
    for model in (nn.Linear(4, 3), Wrapped(nn.Linear(4, 3))):
        torch_impl.load_checkpoint(tmp_path / "old", model)
        for parameter, value in zip(model.parameters(), bare.parameters(), strict=True):
            assert torch.equal(parameter, value)
