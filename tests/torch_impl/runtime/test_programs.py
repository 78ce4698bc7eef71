"""Programs whose ranks behave differently, or that use a sharded module in ways that training loops do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import (
    assert_at_rest,
    assert_same_gradients,
    counted,
    rank_inputs,
    seeded,
    whole,
)
from tests.support.torch_impl.zoo import Chain
from torch_impl.comm import collectives

WORLD = 2
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class Scores(nn.Module):
    """Units of a single row each, of which most ranks hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(5, 1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([unit(x) for unit in self.units], dim=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(WORLD)
def test_a_plain_dcp_load_into_live_weights_is_seen_by_all_ranks(tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "checkpoint")
    model, reference = seeded(Scores), seeded(Scores)
    for unit in model.units:
        torch_impl.fully_shard(unit, strategy=strategy)
    torch_impl.fully_shard(model, strategy=strategy)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.5)
    mine = rank_inputs()[dist.get_rank()]
    model(mine).square().mean().backward()
    optimizer.step()
    assert not torch.allclose(model(mine), reference(mine))
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    torch.testing.assert_close(model(mine), reference(mine))


def assert_same_two_steps(
    model: nn.Module, reference: nn.Module, inputs: list[torch.Tensor], act_as: Callable[[int], None]
) -> None:
    """Backward on this rank's input, against a reference that acts as one rank after another."""
    for _ in range(2):
        model(inputs[dist.get_rank()]).square().mean().backward()
        for rank, part in enumerate(inputs):
            act_as(rank)
            (reference(part).square().mean() / len(inputs)).backward()
        assert_same_gradients(model, reference)
        assert_at_rest(model)


class Branches(nn.Module):
    """``b`` is used in one of the two calls of a step, another one on every rank."""

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, call: int) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        return x + self.b(x) if call == self.rank % 2 else x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branches() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for call in range(2):
            for branch in self.branches:
                x = branch(x, call)
        return x


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(WORLD)
def test_ranks_may_use_different_parameters_in_each_call_of_a_unit(strategy: str) -> None:
    model, reference = seeded(Twice), seeded(Twice)
    for branch in model.branches:
        torch_impl.fully_shard(branch, strategy=strategy)
        branch.rank = dist.get_rank()
    torch_impl.fully_shard(model, strategy=strategy)

    def act_as(rank: int) -> None:
        for branch in reference.branches:
            branch.rank = rank

    assert_same_two_steps(model, reference, [x.requires_grad_() for x in rank_inputs()], act_as)


class Join(nn.Module):
    """Uses those of its inputs that ``used`` names; the gradient of ``y`` is complete before the others."""

    used: tuple[int, ...] = (0, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
        output = torch.tanh(self.linear(x + more[0] if 2 in self.used else x))
        return output + y if 1 in self.used else output


class Skips(nn.Module):
    """Every join also gets the first activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 5)
        self.joins = nn.ModuleList(Join() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.embed(x)
        x = first
        for join in self.joins:
            x = join(x, first * 2, more=[first * 3])
        return x


USED = {0: ((0, 1, 2), (0, 2), (0, 1, 2)), 1: ((0,), (0, 1, 2), (0, 1)), 2: ((0, 1), (0,), (0, 2))}


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(3, timeout=60)
def test_ranks_may_use_different_inputs_of_a_unit(strategy: str) -> None:
    model, reference = seeded(Skips), seeded(Skips)
    for join, used in zip(model.joins, USED[dist.get_rank()], strict=True):
        torch_impl.fully_shard(join, strategy=strategy)
        join.used = used
    torch_impl.fully_shard(model, strategy=strategy)

    def act_as(rank: int) -> None:
        for join, used in zip(reference.joins, USED[rank], strict=True):
            join.used = used

    assert_same_two_steps(model, reference, rank_inputs(), act_as)


class Stopped(nn.Module):
    """Stops in its own forward or, inside the first unit, in that of a plain module."""

    stop_in = ""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 5), Stop())
        self.last = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first[1].stop = self.stop_in == "submodule"
        x = self.first(x)
        if self.stop_in == "root":
            raise KeyboardInterrupt
        return self.last(x)


class Stop(nn.Module):
    stop = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stop:
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("where", ["submodule", "root"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(WORLD)
def test_a_forward_stopped_by_the_keyboard_can_be_tried_again(strategy: str, where: str) -> None:
    model, reference = seeded(Stopped), seeded(Stopped)
    torch_impl.fully_shard(model.first, strategy=strategy)
    torch_impl.fully_shard(model, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = torch.optim.SGD(reference.parameters(), lr=0.5)
    inputs = rank_inputs()
    for _ in range(2):
        model.stop_in = where
        with pytest.raises(KeyboardInterrupt):
            model(inputs[dist.get_rank()])
        assert_at_rest(model)
        model.stop_in = ""
        model(inputs[dist.get_rank()]).square().mean().mul(100).backward()
        for part in inputs:
            (reference(part).square().mean().mul(100) / len(inputs)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
        assert_same_gradients(model, reference)
        for opt in (optimizer, expected):
            opt.step()
            opt.zero_grad()
        for param, want in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(param), want.detach())


@on_ranks(WORLD)
def test_weights_of_an_interrupted_gather_are_not_used() -> None:
    model = torch_impl.fully_shard(seeded(segments_of_linears))
    mine = rank_inputs()[dist.get_rank()]
    with torch.no_grad():
        expected = model(mine)
        gather = collectives.all_gather
        try:
            collectives.all_gather = interrupted
            with pytest.raises(KeyboardInterrupt):
                model(mine)
        finally:
            collectives.all_gather = gather
        assert all(type(param) is torch_impl.dtensor.tensor.RowDTensor for param in model.parameters())
        torch.testing.assert_close(model(mine), expected)


def interrupted(outputs: Sequence[torch.Tensor], *_: object, **__: object) -> None:
    for output in outputs:
        output.fill_(float("nan"))
    raise KeyboardInterrupt


def segments_of_linears() -> Chain:
    return Chain(*(nn.Linear(5, 5) for _ in range(4)), between=torch.tanh, recompute=True)


def segments() -> dict[str, int]:
    model, reference = seeded(segments_of_linears), seeded(segments_of_linears)
    torch_impl.fully_shard(model, reshard_after_forward=True)
    inputs = rank_inputs()
    with counted() as counts:
        model(inputs[dist.get_rank()].clone().requires_grad_(True)).square().mean().backward()
    for part in inputs:
        (reference(part.clone().requires_grad_(True)).square().mean() / len(inputs)).backward()
    assert_same_gradients(model, reference)
    return dict(counts)


def test_recomputed_segments_inside_a_unit_are_reduced_once(ranks: RankGroup) -> None:
    for counts in ranks.run(WORLD, segments):
        assert counts == {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 0}


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(WORLD)
def test_hooks_for_accumulated_gradients_run_with_the_reduced_gradient(strategy: str) -> None:
    model, reference = torch_impl.fully_shard(seeded(Scores), strategy=strategy), seeded(Scores)
    seen: list[torch.Tensor] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.full_tensor()))
    inputs = rank_inputs()
    model(inputs[dist.get_rank()]).square().mean().backward()
    for part in inputs:
        (reference(part).square().mean() / len(inputs)).backward()
    for grad, param in zip(seen, reference.parameters(), strict=True):
        torch.testing.assert_close(grad, param.grad)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(
        self, x: torch.Tensor, *, cache: dict[str, torch.Tensor], kept: list[torch.Tensor]
    ) -> torch.Tensor:
        y = self.linear(x)
        cache["key"] = y.detach()
        kept.append(y)
        return y


@on_ranks(1)
def test_a_module_can_write_into_the_containers_it_is_given() -> None:
    policy = torch_impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for model in (torch_impl.fully_shard(Caching()), torch_impl.fully_shard(Caching(), mp_policy=policy)):
        for needs_grad in (False, True):
            cache: dict[str, torch.Tensor] = {}
            kept: list[torch.Tensor] = []
            model(torch.randn(2, 5, requires_grad=needs_grad), cache=cache, kept=kept).sum().backward()
            assert list(cache) == ["key"]
            assert len(kept) == 1
