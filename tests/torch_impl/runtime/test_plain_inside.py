"""Inside of forward and backward a unit's parameters are plain tensors, whose views autograd may keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_impl
from tests.support.ranks import on_ranks
from tests.support.torch_impl.toy import (
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    rank_inputs,
    seeded,
)
from tests.support.torch_impl.zoo import named

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class Watch(torch.autograd.Function):
    """The identity, which notes the type that the weight has meanwhile, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        module.seen.append(type(module.weight))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.module.seen.append(type(ctx.module.weight))
        return grad, None


class Views(nn.Module):
    """Products with views of a weight, which autograd keeps from forward to backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))
        self.seen: list[type] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.weight.t()
        x = Watch.apply(x @ columns, self)
        return x[:, 1:6] @ columns.t()[2:].reshape(5, 5) * self.weight.view(-1)[3:8]


def two() -> nn.Sequential:
    return named(a=Views(), b=Views())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_parameters_are_plain_and_views_of_them_outlive_the_free_after_forward(strategy: str) -> None:
    # In float32 elements that cancel would round otherwise on some processors.
    model, reference = seeded(two).double(), seeded(two).double()
    inputs = [rows.double() for rows in rank_inputs()]
    for child in (model.a, model.b):
        torch_impl.fully_shard(child, strategy=strategy)
    torch_impl.fully_shard(model, strategy=strategy)
    assert_at_rest(model)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (model, reference)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(inputs[dist.get_rank()]).square().mean().backward()
        reference(torch.cat(inputs)).square().mean().backward()
        assert_at_rest(model)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_weights(model, reference)
    assert model.a.seen == model.b.seen == [nn.Parameter] * 4
