"""Kernels that write main gradients directly, played by an autograd function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import assert_at_rest, assert_same_gradients, rank_inputs, seeded, whole
from tests.support.torch_impl.zoo import named

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
SEEN: list[tuple[str, bool]] = []


class FusedLinear(torch.autograd.Function):
    """x W^T whose backward adds to ``main_grad``, as fused kernels do, and returns a gradient of NaN or none at all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, placeholder: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.placeholder, ctx.weight = placeholder, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        param = ctx.weight
        overwrite = param.overwrite_main_grad and not param.grad_added_to_main_grad
        SEEN.append((str(param.main_grad.dtype), overwrite))
        # What is in the memory before the first write must not matter.
        kept = torch.full_like(param.main_grad, float("nan")) if overwrite else param.main_grad
        product = (grads[0].t() @ x).to(param.main_grad.dtype)
        param.main_grad.copy_(product if overwrite else kept + product)
        param.grad_added_to_main_grad = True
        placeholder = torch.full_like(weight, float("nan")) if ctx.placeholder else None
        return grads[0] @ weight, placeholder, None


class Layer(nn.Module):
    fused, placeholder, calls = False, True, 1

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5) * 0.4)
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            y = FusedLinear.apply(x, self.weight, self.placeholder) if self.fused else x @ self.weight.t()
            x = torch.tanh(y + self.bias)
        return x


def three_layers() -> nn.Sequential:
    return named(layers=nn.Sequential(*(Layer() for _ in range(3))))


def fused_training(
    strategy: str, placeholder: bool, calls: int, reduce: torch.dtype | None
) -> list[tuple[str, bool]]:
    model, reference = seeded(three_layers), seeded(three_layers)
    policy = torch_impl.MixedPrecisionPolicy(reduce_dtype=reduce)
    for layer in model.layers:
        layer.fused, layer.placeholder, layer.calls = True, placeholder, calls
        torch_impl.fully_shard(layer, strategy=strategy, mp_policy=policy)
    torch_impl.fully_shard(model, strategy=strategy, mp_policy=policy)
    model.set_main_gradients(True)
    for layer in reference.layers:
        layer.calls = calls
    SEEN.clear()
    inputs = rank_inputs()
    for step in range(2):
        for k, scale in enumerate((1.0, 2.0)):
            model.set_is_last_backward(k == 1)
            model(inputs[dist.get_rank()] * scale).square().mean().backward()
            for part in inputs:
                (reference(part * scale).square().mean() / len(inputs)).backward()
        tolerance = {"rtol": 2e-2, "atol": 1e-3} if reduce == torch.float16 else {}
        assert_same_gradients(model, reference, **tolerance)
        assert_at_rest_and_bare(model)
        model.zero_grad(set_to_none=step == 0)
        reference.zero_grad()
    return list(SEEN)


def assert_at_rest_and_bare(model: nn.Module) -> None:
    assert_at_rest(model)
    for module in model.modules():
        if isinstance(module, torch_impl.FSDPModule):
            for group in module._unit.groups:
                for param in (*group.unsharded, *group.params):
                    assert not hasattr(param, "main_grad")
                    assert not hasattr(param, "grad_added_to_main_grad")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kernels_write_main_gradients_of_all_microbatches(ranks: RankGroup, strategy: str) -> None:
    for placeholder, calls in ((True, 1), (False, 1), (True, 2)):
        seen = ranks.run(2, fused_training, strategy, placeholder, calls, None)[0]
        assert len(seen) == 2 * 2 * 3 * calls
        # Sums that are kept between microbatches are added to; everything else is written anew.
        keeps = strategy in ("no_shard", "optim")
        first = sum(overwrite for _, overwrite in seen)
        assert first == (2 if keeps else 4) * 3


def test_directly_written_gradients_are_scaled_before_a_reduction_in_half_precision(ranks: RankGroup) -> None:
    seen = ranks.run(2, fused_training, "optim_grads_params", True, 1, torch.float16)[0]
    assert {dtype for dtype, _ in seen} == {"torch.float16"}


@on_ranks(2)
def test_parameters_whose_gradients_come_by_autograd_or_not_at_all_are_as_without() -> None:
    model = seeded(three_layers)
    for layer in model.layers:
        torch_impl.fully_shard(layer)
    torch_impl.fully_shard(model)
    model.set_main_gradients(True)
    for param in model.layers[1].parameters():
        param.requires_grad_(False)
    model(rank_inputs()[dist.get_rank()]).sum().backward()
    assert [param.grad is None for param in model.layers[1].parameters()] == [True, True]
    assert whole(model.layers[0].weight.grad).abs().sum() > 0
