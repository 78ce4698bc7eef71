"""Units that take no part in the last microbatch of a step: what they kept of earlier ones is reduced all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import torch_impl
from tests.support.ranks import RankGroup
from tests.support.torch_impl.toy import (
    Block,
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    counted,
    seeded,
)

WORLD = 4
BLOCKS = 3
# Which blocks the microbatches of a step use; all ranks the same, as ranks must.
STEPS = [([0, 1, 2], [0, 1, 2]), ([0, 1], [2]), ([2, 0], [1], []), ([1], [], [0, 0])]
ONE_AXIS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, route: Sequence[int], recompute: bool) -> torch.Tensor:
        for k in route:
            x = checkpoint(self.blocks[k], x, use_reentrant=True) if recompute else self.blocks[k](x)
        return self.head(x)


def sharded(shape: tuple[int, ...], **options: Any) -> Routed:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    model = seeded(Routed)
    for block in model.blocks:
        torch_impl.fully_shard(block, mesh=mesh, **options)
    return torch_impl.fully_shard(model, mesh=mesh, **options)


def routed(shape: tuple[int, ...], strategy: str, mark: str, recompute: bool) -> None:
    model, reference = sharded(shape, strategy=strategy), seeded(Routed)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    rank = dist.get_rank()
    for step, routes in enumerate(STEPS):
        everyone = torch.randn(len(routes), WORLD, 4, 5, generator=torch.Generator().manual_seed(step))
        for k, route in enumerate(routes):
            getattr(model, mark)(k == len(routes) - 1)
            mine = everyone[k, rank].clone().requires_grad_(recompute)
            model(mine, route, recompute).square().mean().backward()
            whole = everyone[k].view(-1, 5).clone().requires_grad_(recompute)
            reference(whole, route, recompute).square().mean().backward()
        assert_same_gradients(model, reference, rtol=1e-4, atol=1e-6)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        for opt in (optimizer, expected):
            opt.step()
            opt.zero_grad()
        assert_at_rest(model)
    assert_same_weights(model, reference)


@pytest.mark.fast_cases(
    "shape0-no_shard-set_is_last_backward",
    "shape1-optim-set_requires_gradient_sync",
    "shape5-hfsdp-set_is_last_backward",
    "shape3-optim_grads_params-set_requires_gradient_sync",
)
@pytest.mark.parametrize("mark", ["set_requires_gradient_sync", "set_is_last_backward"])
@pytest.mark.parametrize(
    ("shape", "strategy"),
    [((4,), strategy) for strategy in ONE_AXIS] + [((2, 2), strategy) for strategy in ("hsdp", "hfsdp")],
)
def test_a_unit_unused_in_the_last_microbatch_has_its_gradients_reduced(
    ranks: RankGroup, shape: tuple[int, ...], strategy: str, mark: str
) -> None:
    ranks.run(WORLD, routed, shape, strategy, mark, False)


@pytest.mark.slow
def test_also_when_units_are_recomputed_in_nested_backwards(ranks: RankGroup) -> None:
    ranks.run(WORLD, routed, (4,), "optim_grads_params", "set_requires_gradient_sync", True)


def reductions() -> list[int]:
    """Reduce-scatters of two microbatches that use all blocks, and of two of which the last uses none."""
    model, scatters = sharded((4,)), []
    for last in ([0, 1, 2], []):
        with counted() as counts:
            for sync, route in ((False, [0, 1, 2]), (True, last)):
                model.set_requires_gradient_sync(sync)
                model(torch.ones(2, 5), route, False).sum().backward()
        scatters.append(counts["reduce_scatter"])
        model.zero_grad()
    return scatters


def test_every_unit_is_reduced_once(ranks: RankGroup) -> None:
    assert ranks.run(WORLD, reductions) == [[BLOCKS + 1, BLOCKS + 1]] * WORLD
