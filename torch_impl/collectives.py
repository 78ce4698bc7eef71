"""The three collectives of the runtime, each over one process group.

Everything that training communicates goes through here, so that calls can be counted, and so that one place knows the
names torch has had for them and its private way to issue several as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# torch 2.13 renamed the single-tensor collectives and warns about the old names.
_gather_one = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_one = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(
    outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Fill each contiguous output (N x len(shard)) with the ranks' shards, rank 0 first, as one operation."""
    with _as_one(len(shards), group):
        for output, shard in zip(outputs, shards, strict=True):
            _gather_one(output, shard, group=group)


def reduce_scatter(
    shards: Sequence[torch.Tensor], values: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Sum the ranks' contiguous values (N x len(shard)), leaving this rank's part in each shard, as one operation."""
    with _as_one(len(shards), group):
        for shard, value in zip(shards, values, strict=True):
            _scatter_one(shard, value, op=dist.ReduceOp.SUM, group=group)


def all_reduce(
    values: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Combine ``values`` over the ranks, in place."""
    dist.all_reduce(values, op=op, group=group)


@contextmanager
def _as_one(count: int, group: dist.ProcessGroup) -> Iterator[None]:
    """Issue the collectives called inside as one, when there are several."""
    if count <= 1:
        yield
        return
    try:
        with distributed_c10d._coalescing_manager(group):
            yield
    except BaseException:
        # torch leaves a list open that would swallow the group's later collectives without a word.
        distributed_c10d._world.pg_coalesce_state.pop(group, None)
        raise
