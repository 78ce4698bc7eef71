"""Programs of pool and schedule compute the same where transfers end only when they are waited for.

Random programs run with such transfers, too: ``test_random_programs.py``.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_impl
from tests.support.ranks import RankGroup
from tests.support.torch_impl.late_transfers import late_collectives, late_lanes
from tests.support.torch_impl.pool_programs import STEPS, WARM_UP, WORLD, Tower, data
from tests.support.torch_impl.toy import assert_same_weights, seeded
from torch_impl.comm import collectives

LATE = {"collectives": late_collectives, "lanes": late_lanes}


def train(model: Tower, name: str) -> None:
    """Steps as planned, then two of the program, then one as planned."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sharded = isinstance(model, torch_impl.FSDPModule)
    for step in range(WARM_UP + 3):
        first, second = (data(step)[dist.get_rank()] if sharded else data(step).transpose(0, 1))[:2]
        program: Any = STEPS[name if WARM_UP <= step < WARM_UP + 2 else "plain"]
        program(model, first, second)
        optimizer.step()
        optimizer.zero_grad()


def compare_late(names: list[str], late: str, options: dict[str, Any]) -> None:
    for name in names:
        reference = seeded(Tower)
        train(reference, name)
        model = seeded(Tower)
        with LATE[late]():
            for block in model.blocks:
                torch_impl.fully_shard(block, **options)
            torch_impl.fully_shard(model, **options)
            train(model, name)
            assert_same_weights(model, reference)


def gather_several() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    shards = [torch.full((size,), float(10 * size + rank)) for size in (2, 3)]
    outputs = [torch.empty(WORLD * len(shard)) for shard in shards]
    # The other ranks see whether the call waits for this one.
    time.sleep(0.3 * (rank == WORLD - 1))
    assert collectives.all_gather(outputs, shards, group=group) is None
    for output, shard in zip(outputs, shards, strict=True):
        expected = [[10.0 * len(shard) + other] * len(shard) for other in range(WORLD)]
        assert output.view(WORLD, -1).tolist() == expected


def test_a_gather_of_several_shards_has_ended_when_it_returns(ranks: RankGroup) -> None:
    ranks.run(WORLD, gather_several)


STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
FEW = ("crossing", "kept_unreduced", "the_same_backward_twice")


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.fast_cases("optim-collectives", "optim_grads-lanes", "optim_grads_params-collectives")
def test_a_few_programs(ranks: RankGroup, strategy: str, late: str) -> None:
    ranks.run(WORLD, compare_late, FEW, late, {"strategy": strategy, "prefetch": 1})


@pytest.mark.slow
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_programs(ranks: RankGroup, strategy: str, late: str) -> None:
    ranks.run(WORLD, compare_late, [*STEPS], late, {"strategy": strategy, "prefetch": 1})


def reading_early(late: str) -> list[bool]:
    """Whether a rank's output is NaN until its collective is waited for, and right then."""
    mine, output = torch.full((2,), float(dist.get_rank())), torch.zeros(2 * WORLD)
    with LATE[late]():
        work = collectives.all_gather([output], [mine], dist.group.WORLD, async_op=True)
    before = bool(output.isnan().all())
    work.wait()
    return [before, output.tolist() == [0.0, 0.0, 1.0, 1.0]]


def test_a_program_that_does_not_wait_reads_no_right_values(ranks: RankGroup) -> None:
    assert ranks.run(WORLD, reading_early, "collectives") == [[True, True]] * WORLD
