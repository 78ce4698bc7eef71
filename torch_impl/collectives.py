"""The three collectives of the runtime, each on a contiguous tensor over one process group.

Everything that training communicates goes through here, so that calls can be counted, and so that one place knows the
two names torch has had for them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# torch 2.13 renamed the single-tensor collectives and warns about the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``output`` (N x len(shard)) with the ranks' equally long shards, rank 0 first."""
    _gather(output, shard, group=group)


def reduce_scatter(shard: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum the ranks' ``values`` (N x len(shard)) and leave this rank's part in ``shard``."""
    _scatter(shard, values, op=dist.ReduceOp.SUM, group=group)


def all_reduce(
    values: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Combine ``values`` over the ranks, in place."""
    dist.all_reduce(values, op=op, group=group)
