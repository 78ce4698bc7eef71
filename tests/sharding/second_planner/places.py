"""From shapes to places: equal tensors counted as kinds, buffers chosen, and every tensor given its place.

Rules 1, 8 to 11 of the specification (``bridge/core/sharding/rules.md``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from tests.sharding.second_planner.aligned import pack_aligned
from tests.sharding.second_planner.boxes import rows_of
from tests.sharding.second_planner.packing import ideal_size, kind_of, offsets_of, pack
from tests.sharding.second_planner.splitting import choose_buffers, contents_of, is_close

# (buffer, offset)
Place = tuple[int, int]
# Shard sizes, and the place of each tensor.
Plan = tuple[tuple[int, ...], list[Place]]


def plan_places(
    shapes: Sequence[tuple[int, ...]],
    blocks: Sequence[int],
    num_shards: int,
    max_buffers: int,
    align: int | Literal["auto"],
) -> tuple[int, Plan]:
    """The alignment, and the plan of tensors of these shapes, which have elements, in ``blocks`` rows."""
    if align != "auto":
        return align, _plan_aligned(shapes, blocks, num_shards, max_buffers, align)
    without = sum(_plan_aligned(shapes, blocks, num_shards, max_buffers, 1)[0])
    for tile in (128, 64, 32, 16, 8, 4, 2, 1):
        plan = _plan_aligned(shapes, blocks, num_shards, max_buffers, tile)
        if tile == 1 or sum(plan[0]) - without <= without // 8:
            return tile, plan
    raise AssertionError("the last tile is always taken")


def _plan_aligned(
    shapes: Sequence[tuple[int, ...]], blocks: Sequence[int], num_shards: int, max_buffers: int, align: int
) -> Plan:
    """Shards of whole tiles of ``align``; tensors too, if this costs next to nothing.

    ::

        a: 5 elements    b: 3 elements    2 ranks    tiles of 4

        whole tiles    |aaaa|a...|bbb.|    as tensors of 2 and 1 tiles: 3 tiles over 2 ranks are 8 elements a rank
        shards only    |aaaabbb.|........|   also 8: so the first is taken
    """
    if not shapes:
        return (), []
    numels = [math.prod(shape) for shape in shapes]
    units = [block * rows_of(shape)[0] for shape, block in zip(shapes, blocks, strict=True)]
    coarse = _slices(shapes, blocks, units)
    if align == 1:
        return _plan(numels, units, coarse, num_shards, max_buffers, 1)
    in_tiles = [-(-numel // align) for numel in numels]
    sizes, places = _plan(
        in_tiles,
        _tile_units(in_tiles, units, align),
        _tile_units(in_tiles, coarse, align),
        num_shards,
        max_buffers,
        1,
    )
    tiled = tuple(align * size for size in sizes), [(buffer, align * offset) for buffer, offset in places]
    if sum(tiled[0]) == ideal_size(sum(numels), num_shards, align):
        return tiled
    shards_only = _plan(numels, units, coarse, num_shards, max_buffers, align)
    if sum(tiled[0]) <= sum(shards_only[0]):
        return tiled
    bounds = [pack_aligned(numels, each, num_shards, sum(tiled[0]), align) for each in (units, coarse)]
    close = is_close(sum(tiled[0]), sum(shards_only[0]))
    return tiled if close and bounds == [None, None] else shards_only


def _tile_units(in_tiles: Sequence[int], units: Sequence[int], align: int) -> list[int]:
    """Tiles between two places where a tensor of so many tiles may be cut."""
    return [min(unit // math.gcd(unit, align), tiles) for tiles, unit in zip(in_tiles, units, strict=True)]


def _plan(
    numels: Sequence[int],
    units: Sequence[int],
    coarse: Sequence[int],
    num_shards: int,
    max_buffers: int,
    align: int,
) -> Plan:
    members: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(zip(numels, units, strict=True)):
        members.setdefault(key, []).append(i)
    order = sorted(members, key=lambda key: (-key[1], -key[0]))
    kinds = [kind_of(*key) for key in order]
    counts = [len(members[key]) for key in order]
    solution = choose_buffers(kinds, counts, num_shards, max_buffers, align)

    aligned, below = None, solution.total
    for tried in [units] if coarse == units else [units, coarse]:
        packed = pack_aligned(numels, tried, num_shards, below, align)
        if packed is not None:
            aligned, below = packed, packed[0]
    if aligned is not None:
        return (aligned[0],), [(0, offset) for offset in aligned[1]]

    places: list[Place] = [(0, 0)] * len(numels)
    waiting = [iter(members[key]) for key in order]
    for buffer, (split, size) in enumerate(zip(solution.split, solution.sizes, strict=True)):
        for run in pack(kinds, contents_of(split), size)[1]:
            for offset in offsets_of(run, kinds[run.kind], size):
                places[next(waiting[run.kind])] = buffer, offset
    return solution.sizes, places


def _slices(shapes: Sequence[tuple[int, ...]], blocks: Sequence[int], units: list[int]) -> list[int]:
    """The units, blocks of slices of stacks where there are any."""
    return [
        min(block * (math.prod(shape) // shape[0]), math.prod(shape)) if len(shape) > 2 else unit
        for shape, block, unit in zip(shapes, blocks, units, strict=True)
    ]
