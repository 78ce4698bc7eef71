"""Planning a layout: every parameter of a group gets a place in one to three flat buffers, with little padding.

``packing`` finds the shard size and the offsets of one buffer, ``partition`` chooses the buffers, and
``aligned_packing`` is a bound: the answer is never worse. Everything is deterministic integer arithmetic without a
framework, so two programs that plan the same shapes get the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bridge.core.sharding.layout.aligned_packing import pack_aligned
from bridge.core.sharding.layout.alignment import AUTO, DEFAULT_ALIGN, MOST_AUTO_ALIGN, Align, check_align
from bridge.core.sharding.layout.layout import Layout, check_count
from bridge.core.sharding.layout.packing import Kind, ideal_size
from bridge.core.sharding.layout.partition import is_close, plan_buffers, total_size
from bridge.core.sharding.layout.rows import rows_of, rows_together
from bridge.core.sharding.layout.slot import Granularity, Slot, blocks_of, check_shape, is_size

Shapes = Mapping[str, Sequence[int]] | Iterable[tuple[str, Sequence[int]]]
Places = tuple[tuple[int, ...], list[tuple[int, int]]]
"""Shard sizes, and the ``(buffer, offset)`` of each tensor."""
_MOST_COST = 8  # an automatic alignment may add at most one part in so many to a shard


def plan_layout(
    shapes: Shapes,
    num_shards: int,
    *,
    granularity: Granularity = "row",
    rows: int = 1,
    max_buffers: int = 3,
    align: Align = DEFAULT_ALIGN,
) -> Layout:
    """Place parameters in at most ``max_buffers`` flat buffers of ``num_shards`` equal shards, with little padding.

    Args:
        shapes: parameter name -> shape, or pairs of them, in model order.
        num_shards: shards to cut each buffer into, >= 1; may exceed the number of rows.
        granularity: the block, which no boundary cuts: "row", "block" (of ``rows`` rows), "block(n)" or "tensor"; or a
            mapping from parameter to one of these, with "row" for others. Blocks restart at each matrix ``shape[-2:]``
            of a stack; matrices stay whole if blocks do not divide their rows.
        rows: rows of a "block".
        max_buffers: >= 1; fewer buffers pad more. All buffers of a group travel in one collective anyway.
        align: elements, >= 1. Every shard of every buffer is a multiple of this number; and so are the start of every
            tensor and every cut of one, unless that would enlarge shards by more than one part in 2000. "auto" is the
            largest of 128, 64, ..., 1 whose shards are at most an eighth larger than with 1; see ``Layout.align``.

    Raises:
        ValueError: a negative dimension, a name twice, an unknown granularity or parameter, ``num_shards``, ``rows``,
            ``max_buffers`` or ``align`` below 1.
    """
    check_count("num_shards", num_shards)
    check_align(align)
    if not is_size(max_buffers) or max_buffers == 0:
        raise ValueError(f"max_buffers: expected an int >= 1, got {max_buffers!r}")
    named = _named(shapes)
    block_of = blocks_of([name for name, _ in named], granularity, rows)
    tensors: list[Kind] = []
    coarse: list[Kind] = []
    # There may be a hundred thousand tensors, but few shapes.
    known: dict[tuple[tuple[int, ...], int | None], tuple[int, Kind, Kind]] = {}
    blocks = []
    for name, shape in named:
        key = shape, block_of(name)
        if key not in known:
            known[key] = _blocks_of_shape(*key)
        block, tensor, slices = known[key]
        blocks.append(block)
        if tensor.numel:
            tensors.append(tensor)
            coarse.append(slices)
    if align == AUTO:
        align, plan = _plan_auto(tensors, coarse, num_shards, max_buffers)
    else:
        plan = _plan_aligned(tensors, coarse, num_shards, max_buffers, align)
    sizes, places = plan
    starts = iter(places)
    slots = [
        Slot(name, shape, block, *(next(starts) if math.prod(shape) else (0, 0)))
        for (name, shape), block in zip(named, blocks, strict=True)
    ]
    return Layout(num_shards, sizes, tuple(slots), align)


def _plan_auto(
    tensors: Sequence[Kind], coarse: Sequence[Kind], num_shards: int, max_buffers: int
) -> tuple[int, Places]:
    """The largest alignment, halved while it costs too much, and its plan."""

    def is_cheap(plan: Places, unaligned: int) -> bool:
        return sum(plan[0]) <= unaligned + unaligned // _MOST_COST

    lowest = ideal_size(sum(kind.numel for kind in tensors), num_shards, 1)
    align = MOST_AUTO_ALIGN
    plan = _plan_aligned(tensors, coarse, num_shards, max_buffers, align)
    if is_cheap(plan, lowest):
        return align, plan
    unaligned = _plan_aligned(tensors, coarse, num_shards, max_buffers, 1)
    while align > 1 and not is_cheap(plan, sum(unaligned[0])):
        align //= 2
        plan = _plan_aligned(tensors, coarse, num_shards, max_buffers, align) if align > 1 else unaligned
    return align, plan


def _plan_aligned(
    tensors: Sequence[Kind], coarse: Sequence[Kind], num_shards: int, max_buffers: int, align: int
) -> Places:
    """Places in whole tiles of ``align`` elements, or, if these pad more, in shards that are whole tiles."""
    if not tensors:
        return (), []
    if align == 1:
        return _plan(tensors, coarse, num_shards, max_buffers, 1)
    tiles = [_in_tiles(kind, align) for kind in tensors]
    sizes, places = _plan(tiles, [_in_tiles(kind, align) for kind in coarse], num_shards, max_buffers, 1)
    tiled = tuple(size * align for size in sizes), [(buffer, offset * align) for buffer, offset in places]
    size = sum(tiled[0])
    if size == ideal_size(sum(kind.numel for kind in tensors), num_shards, align):
        return tiled
    shards = _plan(tensors, coarse, num_shards, max_buffers, align)
    if not is_close(size, sum(shards[0])):
        return shards
    # Being close is not enough if the bound of the padding is in between.
    above = size > sum(shards[0]) and any(
        pack_aligned(kinds, num_shards, size, align) is not None for kinds in (tensors, coarse)
    )
    return shards if above else tiled


def _in_tiles(kind: Kind, align: int) -> Kind:
    """A tensor as whole tiles; it starts, and is cut, only between tiles."""
    numel = -(-kind.numel // align)
    return Kind(numel, min(math.lcm(kind.block, align) // align, numel))


def _plan(
    tensors: Sequence[Kind], coarse: Sequence[Kind], num_shards: int, max_buffers: int, align: int
) -> Places:
    """Places in shards of multiples of ``align``."""
    members: dict[Kind, list[int]] = {}
    for i, tensor in enumerate(tensors):
        members.setdefault(tensor, []).append(i)
    kinds = sorted(members, key=lambda kind: (-kind.block, -kind.numel))
    packings = plan_buffers(kinds, [len(members[kind]) for kind in kinds], num_shards, max_buffers, align)
    size = total_size(packings)
    best = None
    for candidate in [tensors] if coarse == tensors else [tensors, coarse]:
        aligned = pack_aligned(candidate, num_shards, size, align)
        if aligned is not None:
            best, size = aligned, aligned[0]
    if best is not None:
        return (best[0],), [(0, offset) for offset in best[1]]
    waiting = {kind: iter(indices) for kind, indices in members.items()}
    places = [(0, 0)] * len(tensors)
    for buffer, packing in enumerate(packings):
        for run in packing.runs:
            kind = kinds[run.kind]
            for i in range(run.many):
                places[next(waiting[kind])] = buffer, run.offset + i * kind.numel
    return tuple(packing.shard_size for packing in packings), places


def _named(shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, each checked; a shape may be a list."""
    if not isinstance(shapes, Iterable):
        raise ValueError(f"shapes: expected a mapping or pairs of a name and a shape, got {shapes!r}")
    named: list[tuple[str, tuple[int, ...]]] = []
    pairs: Iterable[Any] = shapes.items() if isinstance(shapes, Mapping) else shapes
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"shapes: expected pairs of a name and a shape, got {pair!r}")
        name, shape = pair
        shape = tuple(shape) if isinstance(shape, tuple | list) else shape
        check_shape(name, shape)
        named.append((name, shape))
    return named


def _blocks_of_shape(shape: tuple[int, ...], block: int | None) -> tuple[int, Kind, Kind]:
    """The rows that stay together; the tensor in such blocks; and in blocks of slices of dimension 0.

    Planners that do not know rows inside a slice see stacks of three or more dimensions in the latter way.
    """
    row_size, num_rows = rows_of(shape)
    block = rows_together(shape, block)
    tensor = Kind(row_size * num_rows, block * row_size)
    if len(shape) <= 2 or not num_rows:
        return block, tensor, tensor
    return block, tensor, Kind(tensor.numel, min(block * (tensor.numel // shape[0]), tensor.numel))
