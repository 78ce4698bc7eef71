"""Programs of an ordinary PyTorch user on several ranks: train, save and load FSDP2, HSDP and FSDP x TP with DCP.

This file imports nothing of this package. Every rank trains on its own data.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ROWS = 12
"""Of every step's batch, cut among the data-parallel ranks."""


class Lonely(nn.Module):
    """One row, so all ranks except one have no part of it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 4).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.float().sum()


def build(lonely: torch.dtype = torch.bfloat16, seed: int = 5) -> nn.Sequential:
    """Row counts that no world size divides, and fewer rows than ranks."""
    torch.manual_seed(seed)
    linear = nn.Linear(14, 3, bias=False)
    return nn.Sequential(nn.Linear(6, 14), nn.LayerNorm(14), linear, nn.Linear(3, 5), Lonely(lonely))


def shard(model: nn.Sequential, sharding: str) -> tuple[int, int]:
    """Shard a model as `kind` says, "alone" not at all; this rank's number among the data-parallel ones, and theirs."""
    if sharding == "alone":
        return 0, 1
    mesh: DeviceMesh | None = None
    rank, world = dist.get_rank(), dist.get_world_size()
    if sharding == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    elif sharding == "fsdp x tp":
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        columns, rows = (
            ColwiseParallel(output_layouts=Replicate()),
            RowwiseParallel(input_layouts=Replicate()),
        )
        parallelize_module(model, both["tp"], {"0": columns, "2": rows})
        mesh = both["dp"]
        rank, world = mesh.get_local_rank(), mesh.size()
    fully_shard(model[-1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return rank, world


def optimizer_of(model: nn.Module, lr: float = 0.01) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.8, 0.9))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, share: tuple[int, int], steps: range
) -> list[float]:
    """The mean loss of the whole batch for each step, of which this rank sees a part."""
    losses = []
    for step in steps:
        rows = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step))[share[0] :: share[1]]
        loss = model(rows).square().sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().double()
        dist.all_reduce(whole)
        losses.append(float(whole) / dist.get_world_size())
    return losses


def trees(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state, "step": torch.tensor(2), "note": ("x", 1)}


def save_and_go_on(
    sharding: str, path: str, lonely: torch.dtype = torch.float32, how: str = "save"
) -> list[float]:
    """Two steps, a save, two more steps: the losses of all four."""
    model = build(lonely)
    share = shard(model, sharding)
    optimizer = optimizer_of(model)
    losses = train(model, optimizer, share, range(2))
    if how == "async":
        dcp.async_save(trees(model, optimizer), checkpoint_id=path).result()
    else:
        dcp.save(trees(model, optimizer), checkpoint_id=path)
    return losses + train(model, optimizer, share, range(2, 4))


def load_and_go_on(sharding: str, path: str, lonely: torch.dtype = torch.float32) -> list[float]:
    """The losses of two more steps after a load into a different model and optimizer."""
    model = build(lonely, seed=6)
    share = shard(model, sharding)
    optimizer = optimizer_of(model, lr=1.0)
    state = trees(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = train(model, optimizer, share, range(2, 4))
    ours = {"bridge", "torch_impl", "jax_impl"} & {name.partition(".")[0] for name in sys.modules}
    assert not ours, f"expected a program without this package, found {ours}"
    return losses
