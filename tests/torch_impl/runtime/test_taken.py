"""Optimizers built before sharding."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torch_impl
from tests.support.ranks import on_ranks
from tests.support.torch_impl.toy import Toy

OPTIMIZERS = ("AdamW", "SGD", "Adafactor", "RMSprop", "NAdam")


@on_ranks(2)
def test_a_stock_optimizer_built_before_sharding_raises_and_does_not_train_nothing() -> None:
    model = Toy()
    optimizers = [getattr(torch.optim, name)(model.parameters()) for name in OPTIMIZERS]
    early = list(model.parameters())
    torch_impl.fully_shard(model)
    late = torch.optim.SGD(early)
    for optimizer in (*optimizers, late):
        for method in (optimizer.step, optimizer.zero_grad):
            with pytest.raises(
                RuntimeError, match=r"shape \(9, 5\) was collected before fully_shard took it into a Toy"
            ):
                method()
    model(torch.tensor([1, 2])).sum().backward()
    sharded = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded.step()
    sharded.zero_grad()


class Tagged(nn.Parameter):
    """A subclass, as libraries use for what they know about a parameter."""


@on_ranks(2)
def test_parameters_of_other_classes_raise_as_well() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model[1].weight = Tagged(model[1].weight.detach())
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    tagged, tensor_parallel = model[1].weight, model[0].weight
    torch_impl.fully_shard(model, mesh=mesh["dp"])
    for param in (tagged, tensor_parallel):
        with pytest.raises(RuntimeError, match=r"was collected before fully_shard took it"):
            torch.optim.SGD([param]).step()
        assert isinstance(param, nn.Parameter)
    assert isinstance(tagged, Tagged)
    assert isinstance(tensor_parallel, DTensor)
