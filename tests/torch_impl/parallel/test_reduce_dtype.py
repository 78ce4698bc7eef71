"""Gradients whose terms lie on several ranks are added up in the policy's reduce dtype, whatever axis they lie on.

Rank 0's term is 1, the other's 2**-10: their sum is a float32, and in bfloat16 it is 1.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_impl
from tests.support.ranks import RankGroup
from torch_impl import ParallelPolicy, PrecisionPolicy, ShardingPolicy, UnitPolicy

EXACT = 1 + 2**-10


def term() -> float:
    return [1.0, 2.0**-10][dist.get_rank()]


class Scaled(nn.Module):
    """A whole scalar or vector between a colwise and a rowwise layer."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.gain = nn.Parameter(torch.ones(shape))
        with torch.no_grad():
            self.up.weight.fill_(1.0)
            self.down.weight.copy_(torch.tensor([[1.0, 2.0**-10]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gain * self.up(x))


def in_a_region(reduce: str, shape: tuple[int, ...] = (), microbatches: int = 1) -> float:
    model = nn.Sequential(Scaled(shape))
    ShardingPolicy(
        (UnitPolicy(""),),
        {"dp": 1, "tp": 2},
        PrecisionPolicy(compute="bfloat16", reduce=reduce),
        parallel=(ParallelPolicy(("0.up",), "tp", "colwise"), ParallelPolicy(("0.down",), "tp", "rowwise")),
    ).apply(model)
    for k in range(microbatches):
        model.set_requires_gradient_sync(k == microbatches - 1)
        model(torch.ones(1, 1)).sum().backward()
    return model[0].gain.grad.full_tensor().sum().item() / microbatches


def of_a_vector(reduce: str) -> float:
    return in_a_region(reduce, (1,))


def of_microbatches(reduce: str) -> float:
    return in_a_region(reduce, (), 2)


class Gain(nn.Module):
    """A replicated weight that scales values of which each rank of the axis has some, as a norm of a sequence."""

    def __init__(self, mesh: torch.distributed.device_mesh.DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.gain = nn.Parameter(DTensor.from_local(torch.ones(1), mesh, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spread = DTensor.from_local(x, self.mesh, [Shard(0)])
        return (spread * self.gain).to_local()


def of_a_sequence(reduce: str) -> float:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Gain(mesh["tp"])
    policy = torch_impl.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=getattr(torch, reduce))
    torch_impl.fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    model(torch.full((1,), term())).sum().backward()
    return model.gain.grad.full_tensor().item()


def of_a_stack(reduce: str) -> float:
    """A whole weight of a module that computes on DTensors, since another weight of it is cut by expert."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.gain = (
                nn.Parameter(torch.tensor([[1.0], [2.0**-10]])),
                nn.Parameter(torch.ones(1)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * self.gain * x).sum()

    model = nn.Sequential(Experts())
    ShardingPolicy(
        (UnitPolicy(""),),
        {"dp": 1, "ep": 2},
        PrecisionPolicy(compute="bfloat16", reduce=reduce),
        parallel=(ParallelPolicy(("0.weight",), "ep", dimension=0),),
    ).apply(model)
    model(torch.ones(1)).backward()
    return model[0].gain.grad.full_tensor().item()


def on_the_outer_axis(reduce: str) -> float:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    model = nn.Linear(1, 1, bias=False)
    policy = torch_impl.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=getattr(torch, reduce))
    torch_impl.fully_shard(model, mesh=mesh, mp_policy=policy)
    model(torch.full((1, 1), term())).sum().backward()
    return model.weight.grad.full_tensor().item() * 2


@pytest.mark.parametrize(
    "gradient", [in_a_region, of_a_vector, of_microbatches, of_a_sequence, of_a_stack, on_the_outer_axis]
)
def test_terms_are_added_up_in_the_reduce_dtype(ranks: RankGroup, gradient: Callable[[str], float]) -> None:
    assert ranks.run(2, gradient, "float32", timeout=100) == [EXACT, EXACT]
    assert ranks.run(2, gradient, "bfloat16", timeout=100) == [1.0, 1.0]
