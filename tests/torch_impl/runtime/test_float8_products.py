"""Linear modules that multiply in float8, held to products of rounded factors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_impl
from tests.support.ranks import RankGroup
from tests.support.torch_impl.quantized import policy, straight_through
from tests.support.torch_impl.toy import assert_same_gradients
from tests.support.torch_impl.zoo import named
from torch_impl.runtime.gather import float8_products


def product() -> nn.Sequential:
    """Two linear modules whose sizes fit the kernels, and one whose do not."""
    torch.manual_seed(3)
    linears = nn.Linear(32, 48), nn.Linear(48, 16, bias=False), nn.Linear(16, 5)
    return named(first=linears[0], tanh=nn.Tanh(), second=linears[1], odd=linears[2])


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To numbers of ``dtype`` times the least power of two with which none is too large."""
    largest, amax = torch.finfo(dtype).max, values.abs().max().item()
    power = 2.0 ** math.ceil(math.log2(amax / largest))
    return (values / power).to(dtype).to(values.dtype) * power


class Emulated(torch.autograd.Function):
    """A product of rounded factors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return rounded(x, torch.float8_e4m3fn) @ rounded(weight, torch.float8_e4m3fn).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return rounded(grad, torch.float8_e5m2) @ rounded(weight, torch.float8_e4m3fn), grad.t() @ x


def emulate(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(Emulated.apply(x, model.first.weight) + model.first.bias)
    return model.odd(Emulated.apply(hidden, model.second.weight))


def multiplies(unit_of_linears: bool) -> list[int]:
    chosen = policy("float8_e4m3fn", float8_products=True)
    model, reference = product(), product()
    for linear in (model.first, model.second) if unit_of_linears else ():
        torch_impl.fully_shard(linear, mp_policy=chosen)
    torch_impl.fully_shard(model, mp_policy=chosen)
    calls, original = [], float8_products._multiply

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return original(*args, **kwargs)

    float8_products._multiply = counting
    try:
        xs = [torch.randn(6, 32, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        model(xs[dist.get_rank()]).square().sum().backward()
    finally:
        float8_products._multiply = original
    # Scales are those of a rank's product.
    straight_through(
        reference,
        "float8_e4m3fn",
        lambda module: torch.stack([emulate(module, x).square().sum() for x in xs]).mean(),
    )
    assert_same_gradients(model, reference, rtol=1e-3, atol=1e-4)
    assert isinstance(model.first, nn.Linear)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in reference.named_parameters()
    ]
    with torch.no_grad():
        batch = xs[0].view(2, 3, 32)
        assert model(batch).shape == (2, 3, 5)
    return [len(calls)]


@pytest.mark.parametrize("unit_of_linears", [False, True])
def test_linear_modules_multiply_in_float8(ranks: RankGroup, unit_of_linears: bool) -> None:
    # Forward of both, and the backward of the second: the input of the first needs no gradient.
    assert ranks.run(2, multiplies, unit_of_linears) == [[3], [3]]


def test_products_need_one_scale_a_weight() -> None:
    for gather in (None, "mxfp8"):
        with pytest.raises(
            ValueError, match=r"float8_products: expected gather_dtype=torch\.float8_e4m3fn, with which"
        ):
            torch_impl.MixedPrecisionPolicy(gather_dtype=gather, float8_products=True)
