"""Every documented option has its effect, and exactly that."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import Toy, assert_at_rest, counted, local_loss, sharded_toy, whole
from torch_impl.dtensor.local import is_partial

WORLD = 2
Policy = torch_impl.MixedPrecisionPolicy


class Scale(nn.Module):
    """Multiplies by a parameter and remembers the dtypes that it saw."""

    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, x: torch.Tensor, *, more: list[torch.Tensor]) -> torch.Tensor:
        self.seen = [x.dtype, more[0].dtype, more[1].dtype]
        return x * self.weight


def dtypes_of(policy: torch_impl.MixedPrecisionPolicy) -> tuple[torch.dtype, list[torch.dtype]]:
    model = torch_impl.fully_shard(Scale(), mp_policy=policy)
    output = model(torch.ones(5), more=[torch.ones(5, dtype=torch.float64), torch.ones(5, dtype=torch.int32)])
    return output.dtype, model.seen


def test_inputs_and_outputs_are_cast_as_the_policy_says(ranks: RankGroup) -> None:
    low, single, double, whole_number = torch.bfloat16, torch.float32, torch.float64, torch.int32
    for policy, expected in (
        (Policy(), (single, [single, double, whole_number])),
        (Policy(param_dtype=low), (low, [low, low, whole_number])),
        (Policy(param_dtype=low, cast_forward_inputs=False), (single, [single, double, whole_number])),
        (Policy(param_dtype=low, output_dtype=double), (double, [low, low, whole_number])),
        (Policy(output_dtype=low), (low, [single, double, whole_number])),
    ):
        assert ranks.run(1, dtypes_of, policy) == [expected]


def gradient_with(
    policy: torch_impl.MixedPrecisionPolicy, factor: float | None, value: float, options: dict[str, object]
) -> float:
    model = torch_impl.fully_shard(Scale(), mp_policy=policy, **options)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    x = torch.full((5,), value * (dist.get_rank() + 1))
    model(x, more=[x, x]).sum().backward()
    gradient = whole(model.weight.grad)
    assert torch.equal(gradient, torch.full((5,), gradient[0].item()))
    return gradient[0].item()


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_gradients_are_divided_once_by_the_factor_that_was_set(ranks: RankGroup, strategy: str) -> None:
    half = Policy(reduce_dtype=torch.float16)
    for policy, factor, value, divisor, expected in (
        (Policy(), None, 1.0, None, 1.5),
        (Policy(), 1.0, 1.0, None, 3.0),
        (Policy(), 12.0, 1.0, None, 0.25),
        (Policy(), None, 1.0, 12.0, 0.25),
        (Policy(), 1.0, 1.0, 12.0, 3.0),
        (half, None, 1.0, None, 1.5),
        (half, 12.0, 1.0, None, 0.25),
        # The sum of both ranks is beyond the range of float16, the average is not.
        (half, None, 24000.0, None, 36000.0),
    ):
        options = {"strategy": strategy, "grad_divisor": divisor}
        assert ranks.run(WORLD, gradient_with, policy, factor, value, options) == [expected] * WORLD


def setters() -> None:
    model = sharded_toy(reshard_after_forward=True)
    units = [model, *model.blocks]

    def flags(name: str) -> list[bool]:
        return [attrgetter(name)(module._unit) for module in units]

    for setter, name in (
        (model.set_requires_gradient_sync, "gradients.requires_gradient_sync"),
        (model.set_reshard_after_forward, "reshard_after_forward"),
    ):
        setter(False, recurse=False)
        assert flags(name) == [False, True, True]
        setter(False)
        assert flags(name) == [False, False, False]
        setter(True, recurse=False)
        assert flags(name) == [True, False, False]
        setter(True)
        assert flags(name) == [True, True, True]


def unreduced_root() -> list[bool]:
    """Which units' gradients are reduced when only the root was told not to."""
    model = sharded_toy()
    model.set_requires_gradient_sync(False, recurse=False)
    with counted() as counts:
        local_loss(model).backward()
    assert counts["reduce_scatter"] == 2
    return [not is_partial(p.grad) for p in (model.head.weight, model.blocks[1].gain)]


def test_setters_reach_the_units_below_unless_told_not_to(ranks: RankGroup) -> None:
    ranks.run(1, setters)
    assert ranks.run(WORLD, unreduced_root) == [[False, True]] * WORLD


@on_ranks(2)
def test_an_asynchronous_unshard_shows_the_weights_when_it_is_waited_for() -> None:
    model = sharded_toy()
    with counted() as counts:
        handle = model.unshard(async_op=True)
        assert type(model.head.weight) is not nn.Parameter
        handle.wait()
        handle.wait()
        assert torch.equal(model.head.weight, Toy().head.weight)
        assert model.unshard(async_op=False) is None
    assert counts["all_gather"] == 1
    model.reshard()
    assert_at_rest(model)


def bounds_of(options: dict[str, object]) -> tuple[int, ...]:
    model = torch_impl.fully_shard(Scale(12), align=1, **options)
    return torch_impl.dtensor.local.row_bounds_of(model.weight)


def test_shards_are_cut_between_blocks_of_the_rows_asked_for(ranks: RankGroup) -> None:
    for options, expected in (
        ({}, (0, 4, 8, 12)),
        ({"granularity": "block", "rows": 6}, (0, 6, 12, 12)),
        ({"granularity": "block", "rows": 5}, (0, 5, 10, 12)),
    ):
        assert ranks.run(3, bounds_of, options) == [expected] * 3


@on_ranks(1)
def test_conversions_reach_buffers_and_ignored_parameters() -> None:
    model = Scale().double()
    model.offset = model.offset.float()
    model.extra = nn.Parameter(torch.ones(3))
    extra = model.extra
    torch_impl.fully_shard(model, ignored_params=[extra])
    model.to(torch.float64)
    assert model.extra is extra
    assert extra.dtype == torch.float64
    assert model.offset.dtype == torch.float64
    assert model.weight.dtype == torch.float64
    with pytest.raises(TypeError, match=r"stays torch.float64 on cpu, got a conversion to torch.float32"):
        model.to(torch.float32)
    assert (extra.dtype, model.offset.dtype) == (torch.float64, torch.float64)


class Watch(torch.autograd.Function):
    """Calls ``report`` in the middle of backward."""

    report = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        Watch.report()
        return grad


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Watch.apply(self.first(x)))


def gradient_bytes(strategy: str) -> list[int]:
    """What is reported in the middle of four backwards: the first, with a reduced gradient, and after ``no_sync``."""
    model = torch_impl.fully_shard(Layers(), strategy=strategy, align=1)
    nbytes: list[int] = []
    Watch.report = staticmethod(lambda: nbytes.append(model.memory_report().gradients))
    x = torch.full((2, 5), dist.get_rank() + 1.0)
    for step in range(4):
        if step == 2:
            model.zero_grad()
        model.set_is_last_backward(step != 2)
        model(x).sum().backward()
    return nbytes


def test_a_memory_report_in_backward_counts_the_gradients_being_collected(ranks: RankGroup) -> None:
    # One of two weights' gradients has come: it is held as it is until more are there, but added to kept sums.
    held = 4 * 25
    # Buffers have a flag for each of two parameters, and of whole gradients for each shard.
    whole, shards, reduced = 4 * (50 + 2), 4 * (50 + 2 * WORLD), 4 * (50 // WORLD + 2)
    for strategy, expected in (
        ("no_shard", [held, whole + held, whole, whole]),
        ("optim", [held, reduced + held, shards, shards]),
        ("optim_grads_params", [held, reduced + held, held, reduced + held]),
    ):
        assert ranks.run(WORLD, gradient_bytes, strategy) == [expected] * WORLD, strategy
