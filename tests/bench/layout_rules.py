"""The layouts that ours is compared with, and what no layout can go below: padded elements as functions of shapes.

A *row* here is a slice of dimension 0, ``numel(shape[1:])`` elements, and one element of a vector or scalar, except in
``row_bound``, where it is the last dimension, as in ``bridge.core.sharding.layout.rows``. All count elements over all
ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

Shape = tuple[int, ...]


class LcmLayout(NamedTuple):
    """One flat buffer: the chunk that shards are multiples of, each tensor's offset, and the end of the last one."""

    chunk: int
    offsets: tuple[int, ...]
    end: int


def lcm_rule(shapes: Sequence[Shape], num_shards: int, align: int = 1) -> int:
    """Padded elements of the layout of ``lcm_layout`` over ``num_shards`` shards: whole chunks on every shard."""
    layout = lcm_layout(tuple(shapes), align)
    return _round_up(layout.end, layout.chunk * num_shards)


@lru_cache(maxsize=64)
def lcm_layout(shapes: tuple[Shape, ...], align: int = 1) -> LcmLayout:
    """Megatron-FSDP's layout, the one-chunk planner in ``megatron_fsdp/experimental/layout.py`` at d98e8a64.

    The chunk is the least common multiple of all rows and ``align``, so that no shard boundary cuts one. Tensors of a
    chunk or more start on chunks, in model order; into what one leaves of its last chunk goes the start of the first
    later one whose remainder fits there, so that this ends on a chunk; then the tensors smaller than a chunk, by
    falling size, each on a multiple of its row. Small tensors that remain follow at the end. Offsets do not depend on
    the number of shards.

    Independent of ``bridge.core.sharding.layout.aligned_packing``. Tensors of equal size and row wait in one queue, so
    that a search takes time by distinct shapes.
    """
    sizes = [(math.prod(shape), math.prod(shape[1:])) for shape in shapes]
    chunk = math.lcm(align, *(row for numel, row in sizes if numel))
    offsets = [0] * len(shapes)
    large: dict[tuple[int, int], deque[int]] = {}
    small: dict[int, dict[int, deque[int]]] = {}
    for i, (numel, row) in enumerate(sizes):
        if numel >= chunk:
            large.setdefault((numel, row), deque()).append(i)
        elif numel:
            small.setdefault(numel, {}).setdefault(row, deque()).append(i)
    by_size = sorted(small, reverse=True)

    def fill(start: int, stop: int | None) -> int:
        """Place small tensors in ``[start, stop)``; the end of the last."""
        for numel in by_size:
            if stop is not None and start + numel > stop:
                continue
            waiting = {row: queue for row, queue in small[numel].items() if queue}
            while waiting:
                row = min(waiting, key=lambda row: waiting[row][0])
                offset = _round_up(start, row)
                if stop is not None and offset + numel > stop:
                    del waiting[row]  # a later one of this kind starts no earlier
                    continue
                offsets[waiting[row].popleft()] = offset
                start = offset + numel
                if not waiting[row]:
                    del waiting[row]
        return start

    end = 0
    while large:
        numel_and_row = min(large, key=lambda numel_and_row: large[numel_and_row][0])
        offsets[_pop(large, numel_and_row)] = end
        gap = end + numel_and_row[0]
        end = stop = _round_up(gap, chunk)
        fitting = [other for other in large if 0 < other[0] % chunk <= end - gap]
        if fitting:
            numel_and_row = min(fitting, key=lambda numel_and_row: large[numel_and_row][0])
            stop = end - numel_and_row[0] % chunk
            offsets[_pop(large, numel_and_row)] = stop
            end = stop + numel_and_row[0]
        fill(gap, stop)
    end = fill(end, None)
    return LcmLayout(chunk, tuple(offsets), end)


def fsdp2_rule(shapes: Sequence[Shape], num_shards: int) -> int:
    """Padded elements when each parameter is sharded by itself, as PyTorch's ``fully_shard`` does.

    Every rank stores ``ceil(shape[0] / num_shards)`` rows of every parameter, as ``FSDPParam`` in
    ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py`` pads them; a scalar, which it refuses, counts as one row.
    """
    total = 0
    for shape in shapes:
        rows = shape[0] if shape else 1
        total += _round_up(rows, num_shards) * math.prod(shape[1:])
    return total


def row_bound(shapes: Sequence[Shape], num_shards: int, align: int = 1) -> int:
    """Elements that any layout with equal shards and whole rows pads to, over any number of buffers, or more.

    Shards are multiples of ``align``.

    Some rank holds a longest row. All rows longer than one element have ``g`` elements as a common divisor, so each
    rank holds a multiple of ``g`` of those tensors, and some rank at least the average.
    """
    sizes = [(math.prod(shape), shape[-1] if len(shape) > 1 else 1) for shape in shapes]
    sizes = [(numel, row) for numel, row in sizes if numel]
    if not sizes:
        return 0
    total = sum(numel for numel, _ in sizes)
    in_rows = sum(numel for numel, row in sizes if row > 1)
    shard = max(-(-total // num_shards), max(row for _, row in sizes))
    if in_rows:
        divisor = math.gcd(*(row for _, row in sizes if row > 1))
        shard = max(shard, _round_up(-(-in_rows // num_shards), divisor))
    return _round_up(shard, align) * num_shards


def _pop(queues: dict[tuple[int, int], deque[int]], numel_and_row: tuple[int, int]) -> int:
    index = queues[numel_and_row].popleft()
    if not queues[numel_and_row]:
        del queues[numel_and_row]
    return index


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
