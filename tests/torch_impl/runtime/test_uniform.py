"""Collectives do not depend on what one rank alone knows: edits of own rows, gradients that only some ranks have."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import counted
from tests.support.torch_impl.zoo import named
from torch_impl.dtensor.local import local_of


def layers() -> nn.Sequential:
    """The last layer has one row: of several ranks, all but one hold no row of it."""
    return named(first=nn.Linear(6, 6), tanh=nn.Tanh(), last=nn.Linear(6, 1, bias=False))


def sharded(strategy: str, keep_after: str | None = None) -> nn.Sequential:
    """``keep_after``: "forward" or "backward", after which weights stay although the strategy shards them."""
    torch.manual_seed(0)
    model, mesh = layers(), None
    if strategy in ("hsdp", "hfsdp"):
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    for module in (model.first, model.last, model):
        torch_impl.fully_shard(module, mesh=mesh, strategy=strategy)
    if keep_after == "forward":
        model.set_reshard_after_forward(False)
    elif keep_after == "backward":
        model.set_reshard_after_backward(False)
    return model


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def with_rows(rows: torch.Tensor, grad: torch.Tensor) -> bool:
    return rows.numel() > 0


def with_gradient(rows: torch.Tensor, grad: torch.Tensor) -> bool:
    return bool(grad.any())


def on_even_ranks(rows: torch.Tensor, grad: torch.Tensor) -> bool:
    return dist.get_rank() % 2 == 0


def trained(
    strategy: str, updates: Callable[[torch.Tensor, torch.Tensor], bool], keep_after: str | None = None
) -> None:
    """Steps of an optimizer that works on own rows, those for which ``updates`` says so."""
    model = sharded(strategy, keep_after)
    torch.manual_seed(0)
    reference = layers()
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        model(data(step, rank)).square().mean().backward()
        reference(torch.cat([data(step, k) for k in range(world)])).square().mean().backward()
        with torch.no_grad():
            for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
                rows, grad = param.to_local(), param.grad.to_local()
                torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-7)
                if updates(rows, grad):
                    rows.add_(grad, alpha=-0.1)
                # What the ranks made of their rows, for the reference to go on from.
                expected.copy_(param.full_tensor())
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("updates", [with_rows, with_gradient, on_even_ranks])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.pairwise
def test_an_optimizer_may_pass_over_rows_on_some_ranks(
    ranks: RankGroup, strategy: str, updates: Callable[[torch.Tensor, torch.Tensor], bool]
) -> None:
    ranks.run(3, trained, strategy, updates, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("keep_after", ["forward", "backward"])
def test_also_where_an_option_keeps_weights(ranks: RankGroup, keep_after: str) -> None:
    ranks.run(2, trained, "optim_grads_params", with_rows, keep_after, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
def test_also_with_two_axes(ranks: RankGroup, strategy: str) -> None:
    ranks.run(4, trained, strategy, with_rows, timeout=60)


def edited_alone(strategy: str) -> str:
    """What a rank says that is the only one to change weights between two forwards."""
    model = sharded(strategy)
    group = dist.group.WORLD
    assert group is not None
    group.get_group_store().set_timeout(timedelta(seconds=2))
    rank = dist.get_rank()
    with torch.no_grad():
        model(data(0, rank))
        for param in model.parameters():
            # On all ranks: no rank waits for another.
            param.mul_(0.5)
        model(data(0, rank))
        if rank == 1:
            local_of(model.first.weight).add_(1)
        try:
            model(data(1, rank))
        except RuntimeError as error:
            return str(error)
    return ""


def frozen_alone(strategy: str) -> str:
    """What a rank says that is the only one to freeze a parameter after sharding; then it trains as the others."""
    model = sharded(strategy)
    group = dist.group.WORLD
    assert group is not None
    group.get_group_store().set_timeout(timedelta(seconds=2))
    rank, said = dist.get_rank(), ""
    for step in range(2):
        # On all ranks: frozen and thawed again, as a program with two losses does.
        model.first.weight.requires_grad_(step == 1)
        model(data(step, rank)).sum().backward()
        assert (model.first.weight.grad is not None) == (step == 1)
        model.zero_grad()
    if rank == 1:
        model.first.weight.requires_grad_(False)
        model.first.bias.requires_grad_(False)
        try:
            model(data(2, rank))
        except RuntimeError as error:
            said = str(error)
        model.first.requires_grad_(True)
    model(data(2, rank)).sum().backward()
    assert model.first.weight.grad is not None
    return said


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@pytest.mark.each_value
def test_a_rank_that_alone_freezes_parameters_is_named(ranks: RankGroup, strategy: str) -> None:
    said = ranks.run(3, frozen_alone, strategy, timeout=60)
    assert said[0] == said[2] == ""
    for part in (
        "of unit first are frozen (",
        "bias",
        "on rank 1, but not on ranks [0, 2]",
        "requires_grad_()",
    ):
        assert part in said[1]


def test_a_rank_that_alone_changes_weights_between_forwards_is_named(ranks: RankGroup) -> None:
    said = ranks.run(3, edited_alone, "optim", timeout=60)
    assert said[0] == said[2] == ""
    assert "'weight' (unit first) were changed between forwards on rank 1, but not on ranks [0, 2]" in said[1]
    assert "must be made on all ranks" in said[1]


class Routed(nn.Module):
    """``used``: which of two parts take part, the second in another dtype, so that they are two groups of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.wide = nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor, used: tuple[bool, bool]) -> torch.Tensor:
        y = self.plain(x) if used[0] else x * 2
        return y + self.wide(x.double()).float() if used[1] else y * 3


class RoutedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.blocks, self.tail = (
            nn.Linear(6, 6),
            nn.ModuleList(Routed() for _ in range(2)),
            nn.Linear(6, 1),
        )

    def forward(self, x: torch.Tensor, used: tuple[bool, bool]) -> torch.Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x, used)
        return self.tail(x)


def routed(strategy: str, uses: list[tuple[bool, bool]], prefetch: int) -> None:
    """Gradients of blocks of which each rank uses other parts; ``uses`` by rank."""
    torch.manual_seed(0)
    model = RoutedModel()
    torch.manual_seed(0)
    reference = RoutedModel()
    for module in (*model.blocks, model):
        torch_impl.fully_shard(module, strategy=strategy, prefetch=prefetch)
    rank = dist.get_rank()
    for step in range(2):
        model(data(step, rank), uses[rank]).square().mean().backward()
        for k, used in enumerate(uses):
            (reference(data(step, k), used).square().mean() / len(uses)).backward()
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert param.grad is None, name
        else:
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-6)


USES = {
    "one-group": [(True, True), (True, False)],
    "all-of-a-unit": [(True, True), (False, False)],
    "each-another": [(True, False), (False, True)],
    "nobody": [(True, False), (True, False)],
}


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.pairwise
def test_groups_may_have_gradients_on_some_ranks_only(ranks: RankGroup, uses: str, strategy: str) -> None:
    ranks.run(2, routed, strategy, USES[uses], 1, timeout=60)


@on_ranks(2)
def test_gradients_of_inputs_alone_reduce_nothing() -> None:
    """Gradients of inputs alone reduce nothing."""
    model = sharded("optim_grads_params")
    x = data(0, dist.get_rank()).requires_grad_()
    with counted() as counts:
        torch.autograd.grad(model(x).sum(), x)
    assert counts.get("reduce_scatter", 0) == 0


def order_of_two_groups(prefetch: int) -> list[str]:
    """In which order the groups of units of two groups start and finish, and where the next backward begins."""
    log: list[str] = []
    policy = torch_impl.MixedPrecisionPolicy(gather_dtype="mxfp8")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)))
    for k, unit in enumerate(model):
        torch_impl.fully_shard(unit, mp_policy=policy, prefetch=prefetch)
        unit.register_full_backward_pre_hook(lambda *_, k=k: log.append(f"backward {k}"))
    torch_impl.fully_shard(model, mp_policy=policy, prefetch=prefetch)
    for k, unit in enumerate(model):
        for index, group in enumerate(unit._unit.groups):
            reduction, name = group.reduction, f"{k}.{index}"

            def start(*args: object, own: object = reduction.start, name: str = name) -> None:
                log.append(f"start {name}")
                own(*args)  # type: ignore[operator]  # a bound method

            def finish(
                own: object = reduction.finish, name: str = name, reduction: object = reduction
            ) -> None:
                if reduction.under_way:  # type: ignore[attr-defined]  # a GroupReduction
                    log.append(f"finish {name}")
                own()  # type: ignore[operator]

            reduction.start, reduction.finish = start, finish
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
    for _ in range(2):
        log.clear()
        model(x).square().mean().backward()
    return log


def test_groups_of_a_unit_are_reduced_side_by_side(ranks: RankGroup) -> None:
    for log in ranks.run(2, order_of_two_groups, 1, timeout=60):
        assert log[:4] == ["backward 1", "start 1.0", "start 1.1", "backward 0"]
        assert log[4:] == ["finish 1.0", "finish 1.1", "start 0.0", "start 0.1", "finish 0.0", "finish 0.1"]
