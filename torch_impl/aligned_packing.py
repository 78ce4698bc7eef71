"""The one-buffer packing of shards that are a multiple of all units: what the planner must never be worse than.

Every boundary is a multiple of the common multiple C of all units, so no offset needs care. Tensors of at least C
elements start on multiples of C, except that two may share one, and small tensors fill what that leaves. Rows of 6 in a
and e, of 4 in b and c, of 2 in d; C = 12::

    |aaaaaaaaaaaa|bbbbbbbbbbbb|bbbbdd..cccc|cccccccccccc|eeeeee......|

This is the rule of Megatron-FSDP. It pays up to C elements a rank, but on some small groups it happens to win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_impl.packing import Kind, round_up

MAX_TENSORS = 4096


def pack_aligned(tensors: Sequence[Kind], num_shards: int, limit: int) -> tuple[int, list[int]] | None:
    """``(shard size, offset of each tensor)``; None when the shards would have ``limit`` elements or more.

    ``tensors`` are in model order, which decides ties. None also for more than ``MAX_TENSORS``: takes quadratic time.
    """
    if len(tensors) > MAX_TENSORS:
        return None
    lowest = -(-sum(tensor.numel for tensor in tensors) // num_shards)
    multiple = 1
    for tensor in tensors:
        multiple = math.lcm(multiple, tensor.unit)
        if round_up(lowest, multiple) >= limit:
            return None
    offsets = [0] * len(tensors)
    large = [i for i, tensor in enumerate(tensors) if tensor.numel >= multiple]
    small = sorted((i for i, t in enumerate(tensors) if t.numel < multiple), key=lambda i: -tensors[i].numel)
    end = 0
    while large:
        first = large.pop(0)
        offsets[first], gap = end, end + tensors[first].numel
        end = stop = round_up(gap, multiple)
        partner = next((i for i in large if 0 < _remainder(tensors[i], multiple) <= end - gap), None)
        if partner is not None:
            large.remove(partner)
            stop = offsets[partner] = end - _remainder(tensors[partner], multiple)
            end = stop + tensors[partner].numel
        left = []
        for i in small:
            offset = round_up(gap, tensors[i].unit)
            if offset + tensors[i].numel <= stop:
                offsets[i], gap = offset, offset + tensors[i].numel
            else:
                left.append(i)
        small = left
    for i in small:
        offsets[i] = round_up(end, tensors[i].unit)
        end = offsets[i] + tensors[i].numel
    size = round_up(end, multiple * num_shards) // num_shards
    return (size, offsets) if size < limit else None


def _remainder(tensor: Kind, multiple: int) -> int:
    """Elements after the last multiple; 0 for a tensor with a short last unit, which must start on a multiple."""
    return 0 if tensor.numel % tensor.unit else tensor.numel % multiple
