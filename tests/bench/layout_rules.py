"""Padded elements of other layouts, and a lower bound for every layout, as functions of shapes.

A *row* is a slice of dimension 0 (``numel(shape[1:])`` elements), or one element of a vector or scalar. In
``row_bound`` a row is the last dimension, as in ``bridge.core.sharding.layout.rows``. All functions count elements over
all ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

Shape = tuple[int, ...]


class LcmLayout(NamedTuple):
    """One flat buffer: the chunk that divides every shard, each tensor's offset, and the end of the last tensor."""

    chunk: int
    offsets: tuple[int, ...]
    end: int


def lcm_rule(shapes: Sequence[Shape], num_shards: int, align: int = 1) -> int:
    """Padded elements of ``lcm_layout`` over ``num_shards`` shards; every shard is a number of whole chunks."""
    layout = lcm_layout(tuple(shapes), align)
    return _round_up(layout.end, layout.chunk * num_shards)


@lru_cache(maxsize=64)
def lcm_layout(shapes: tuple[Shape, ...], align: int = 1) -> LcmLayout:
    """Megatron-FSDP's layout, the one-chunk planner in ``megatron_fsdp/experimental/layout.py`` at d98e8a64.

    The chunk is the least common multiple of all rows and ``align``, so that no shard boundary cuts a row. Tensors of a
    chunk or more start on chunks, in model order. The gap in the last chunk of such a tensor takes the start of the
    first later tensor whose remainder fits, so that the later tensor ends on a chunk. Then the gap takes tensors
    smaller than a chunk, by falling size, each on a multiple of its row. The remaining small tensors follow at the end.
    Offsets do not depend on the number of shards.

    This code is independent of ``bridge.core.sharding.layout.aligned_packing``. Tensors of equal size and row wait in
    one queue, so the time of a search depends on the number of distinct shapes.
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
        """Place small tensors in ``[start, stop)``. Returns the end of the last tensor."""
        for numel in by_size:
            if stop is not None and start + numel > stop:
                continue
            waiting = {row: queue for row, queue in small[numel].items() if queue}
            while waiting:
                row = min(waiting, key=lambda row: waiting[row][0])
                offset = _round_up(start, row)
                if stop is not None and offset + numel > stop:
                    del waiting[row]  # a later tensor of this kind starts no earlier
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
    """Padded elements if each parameter is sharded by itself, as in PyTorch's ``fully_shard``.

    Every rank stores ``ceil(shape[0] / num_shards)`` rows of every parameter, like ``FSDPParam`` in
    ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``. FSDP2 refuses scalars; here a scalar counts as one row.
    """
    total = 0
    for shape in shapes:
        rows = shape[0] if shape else 1
        total += _round_up(rows, num_shards) * math.prod(shape[1:])
    return total


def row_bound(shapes: Sequence[Shape], num_shards: int, align: int = 1) -> int:
    """A lower bound on the padded elements of any layout with equal shards and whole rows, over any number of buffers.

    Shards are multiples of ``align``.

    Some rank holds a longest row. All rows longer than one element have the common divisor ``g``. So each rank holds a
    multiple of ``g`` elements of these tensors, and some rank holds at least the average.
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
