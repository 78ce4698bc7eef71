"""The rank harness itself: it must report failures of any rank and never lose a result."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the rank processes run torch")

from tests.support.ranks import RankError, RankGroup


def sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


def fail_on_last_rank() -> None:
    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("only here")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rank_joins_a_group_of_the_asked_size(ranks: RankGroup, world: int) -> None:
    assert ranks.run(world, sum_of_ranks) == [world * (world + 1) / 2] * world


def test_an_error_on_one_rank_fails_the_call_and_leaves_the_group_usable(ranks: RankGroup) -> None:
    with pytest.raises(RankError, match=r"rank 2 of 3(.|\n)*only here"):
        ranks.run(3, fail_on_last_rank)
    assert ranks.run(2, sum_of_ranks) == [3.0, 3.0]
