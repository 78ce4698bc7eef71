"""The one-buffer packing with shards that are a multiple of all blocks: the planner must never be worse than this.

Every boundary is a multiple of the common multiple C of all blocks and ``align``, so any offset is safe. Tensors of at
least C elements start on multiples of C, except that two may share one, and small tensors fill the gaps.
Rows of 6 in a and e, of 4 in b and c, of 2 in d; C = 12::

    |aaaaaaaaaaaa|bbbbbbbbbbbb|bbbbdd..cccc|cccccccccccc|eeeeee......|

This is the rule of Megatron-FSDP. It pads up to C elements per rank, but on some small groups it happens to win.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import groupby

from bridge.core.sharding.layout.packing import Kind, round_up

_MAX_STEPS = 1 << 23


def pack_aligned(
    tensors: Sequence[Kind], num_shards: int, limit: int, align: int = 1
) -> tuple[int, list[int]] | None:
    """``(shard size, offset of each tensor)``; None if the shards would have ``limit`` elements or more.

    ``tensors`` are in model order, which decides ties. None also if it would take more than ``2**23`` steps; each step
    tries one queue of equal tensors for one gap.
    """
    lowest = -(-sum(tensor.numel for tensor in tensors) // num_shards)
    multiple = align
    for block in dict.fromkeys(tensor.block for tensor in tensors):
        multiple = math.lcm(multiple, block)
        if round_up(lowest, multiple) >= limit:
            return None
    large = [i for i, tensor in enumerate(tensors) if tensor.numel >= multiple]
    small = sorted((i for i, t in enumerate(tensors) if t.numel < multiple), key=lambda i: -tensors[i].numel)
    # Equal tensors share a queue: if the first one does not fit, none does.
    partners: dict[int, deque[int]] = {}
    for i in large:
        if remainder := _remainder(tensors[i], multiple):
            partners.setdefault(remainder, deque()).append(i)
    queues = [deque(run) for _, run in groupby(small, key=lambda i: tensors[i])]
    gaps = sum(map(len, partners.values()))
    if gaps * (len(partners) + len(queues)) > _MAX_STEPS:
        return None
    offsets = [-1] * len(tensors)
    end = 0
    for first in large:
        if offsets[first] >= 0:
            continue
        offsets[first], gap = end, end + tensors[first].numel
        end = stop = round_up(gap, multiple)
        if remainder := _remainder(tensors[first], multiple):
            partners[remainder].popleft()
        fitting = [queue[0] for remainder, queue in partners.items() if queue and remainder <= stop - gap]
        if fitting:
            partner = min(fitting)
            remainder = _remainder(tensors[partner], multiple)
            partners[remainder].popleft()
            stop = offsets[partner] = end - remainder
            end = stop + tensors[partner].numel
        for queue in queues if gap < stop else ():
            while (
                queue and (offset := round_up(gap, tensors[queue[0]].block)) + tensors[queue[0]].numel <= stop
            ):
                gap = offset + tensors[queue[0]].numel
                offsets[queue.popleft()] = offset
    for queue in queues:
        for i in queue:
            offsets[i] = round_up(end, tensors[i].block)
            end = offsets[i] + tensors[i].numel
    size = round_up(end, multiple * num_shards) // num_shards
    return (size, offsets) if size < limit else None


def _remainder(tensor: Kind, multiple: int) -> int:
    """Elements after the last multiple; 0 for a tensor with a short last block, which must start on a multiple."""
    return 0 if tensor.numel % tensor.block else tensor.numel % multiple
