"""The collectives of the runtime, each over one process group.

All communication of training goes through this module. So calls can be counted, and one place knows torch's different
names for collectives and its private way to issue several collectives as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# torch 2.13 renamed the single-tensor collectives and warns about the old names.
_gather_one = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_one = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


PURPOSE: ContextVar[str | None] = ContextVar("purpose", default=None)
"""A label for the collectives that no unit begins, by which counters report them; see ``labelled``."""


@contextmanager
def labelled(purpose: str) -> Iterator[None]:
    """Label the collectives of the context."""
    token = PURPOSE.set(purpose)
    try:
        yield
    finally:
        PURPOSE.reset(token)


class Work(Protocol):
    """A collective in progress; its tensors must not change until ``wait`` returns."""

    def wait(self) -> Any: ...


def all_gather(
    outputs: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Work | None:
    """Fill each contiguous output (N x len(shard)) with the ranks' shards, rank 0 first.

    Issued as one operation, except on the CPU: when two of gloo's threads finish coalesced gathers at once, both write
    the operation's name without a lock. This string is too long to be stored in place, so its memory is freed twice.
    """
    work: Work | None = None
    if len(shards) == 1:
        work = _gather_one(outputs[0], shards[0], group=group, async_op=async_op)
    elif shards and shards[0].is_cpu:
        work = _gather_each(outputs, shards, group)
        if not async_op:
            work.wait()
    elif shards:
        with _as_one(group, async_op) as work:
            for output, shard in zip(outputs, shards, strict=True):
                _gather_one(output, shard, group=group, async_op=async_op)
    return work if async_op else None


def reduce_scatter(
    shards: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Work | None:
    """Sum the ranks' contiguous values (N x len(shard)), leaving this rank's part in each shard, as one operation."""
    work: Work | None = None
    op = dist.ReduceOp.SUM
    if len(shards) == 1:
        work = _scatter_one(shards[0], values[0], op=op, group=group, async_op=async_op)
    elif shards:
        with _as_one(group, async_op) as work:
            for shard, value in zip(shards, values, strict=True):
                _scatter_one(shard, value, op=op, group=group, async_op=async_op)
    return work if async_op else None


def all_reduce(
    values: torch.Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> Work | None:
    """Combine ``values`` over the ranks, in place."""
    work: Work | None = dist.all_reduce(values, op=op, group=group, async_op=async_op)
    return work


def all_to_all(
    outputs: torch.Tensor,
    values: torch.Tensor,
    output_sizes: Sequence[int],
    value_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> None:
    """Send the k-th part of flat ``values`` to rank k, and fill the k-th part of ``outputs`` with rank k's data.

    The sizes are the parts' sizes in elements, by rank.
    """
    # As bytes, because gloo supports few dtypes.
    width = values.element_size()
    dist.all_to_all_single(
        outputs.view(torch.uint8),
        values.view(torch.uint8),
        [width * size for size in output_sizes],
        [width * size for size in value_sizes],
        group=group,
    )


class _Several:
    """Several collectives in progress at the same time."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _gather_each(
    outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> _Several:
    several = _Several()
    try:
        for output, shard in zip(outputs, shards, strict=True):
            several.works.append(_gather_one(output, shard, group=group, async_op=True))
    except BaseException:
        # The caller will free memory that the earlier gathers write to.
        several.wait()
        raise
    return several


@contextmanager
def _as_one(group: dist.ProcessGroup, async_op: bool) -> Iterator[Work]:
    """Issue the collectives that are called inside the context as one."""
    try:
        with distributed_c10d._coalescing_manager(group, async_ops=async_op) as together:
            yield together
    except BaseException:
        # torch leaves a list open that would silently swallow the group's later collectives.
        distributed_c10d._world.pg_coalesce_state.pop(group, None)
        raise
