"""Tests of the rank harness: it must report a failure of any rank, and never lose a result."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

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


def redistribute() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    torch.nn.functional.layer_norm(rows.redistribute(mesh, [Replicate()]), (4,))


def gloo_threads() -> int:
    gc.collect()
    names = [thread.joinpath("comm") for thread in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name.read_text() for name in names if name.exists())


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
def test_groups_of_earlier_calls_leave_no_threads(ranks: RankGroup) -> None:
    before = ranks.run(2, gloo_threads)
    for _ in range(3):
        ranks.run(2, redistribute)
    # There are fewer if an earlier test still held a group.
    after = ranks.run(2, gloo_threads)
    assert all(left <= there for left, there in zip(after, before, strict=True)), (before, after)


def receive_from_each_other() -> None:
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1), src=1 - dist.get_rank())


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_given_up_soon(
    ranks: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.ranks.RESTING_SECONDS", 3.0)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 of 2: no answer and no rank has computed for [3-9] s"):
        ranks.run(2, receive_from_each_other)
    # The time depends on the machine's load, but must be far from gloo's limit of 120 s.
    assert time.monotonic() - start < 60
    assert ranks.run(2, sum_of_ranks) == [3.0, 3.0]
