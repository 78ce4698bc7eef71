"""From shapes to places: equal tensors counted as kinds, buffers chosen, and every tensor given its place.

Rules 1, 8 and 9 of the specification (``bridge/sharding/rules.md``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.sharding.second_planner.aligned import pack_aligned
from tests.sharding.second_planner.boxes import rows_of
from tests.sharding.second_planner.packing import kind_of, offsets_of, pack
from tests.sharding.second_planner.splitting import choose_buffers, contents_of

# (buffer, offset)
Place = tuple[int, int]


def plan_places(
    shapes: Sequence[tuple[int, ...]], blocks: Sequence[int], num_shards: int, max_buffers: int
) -> tuple[tuple[int, ...], list[Place]]:
    """Shard sizes, and the place of each tensor of these shapes, which have elements, in ``blocks`` rows."""
    if not shapes:
        return (), []
    numels = [math.prod(shape) for shape in shapes]
    units = [block * rows_of(shape)[0] for shape, block in zip(shapes, blocks, strict=True)]
    members: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(zip(numels, units, strict=True)):
        members.setdefault(key, []).append(i)
    order = sorted(members, key=lambda key: (-key[1], -key[0]))
    kinds = [kind_of(*key) for key in order]
    counts = [len(members[key]) for key in order]
    solution = choose_buffers(kinds, counts, num_shards, max_buffers)

    aligned, below = None, solution.total
    for tried in _aligned_units(shapes, blocks, units):
        found = pack_aligned(numels, tried, num_shards, below)
        if found is not None:
            aligned, below = found, found[0]
    if aligned is not None:
        return (aligned[0],), [(0, offset) for offset in aligned[1]]

    places: list[Place] = [(0, 0)] * len(shapes)
    waiting = [iter(members[key]) for key in order]
    for buffer, (split, size) in enumerate(zip(solution.split, solution.sizes, strict=True)):
        for run in pack(kinds, contents_of(split), size)[1]:
            for offset in offsets_of(run, kinds[run.kind], size):
                places[next(waiting[run.kind])] = buffer, offset
    return solution.sizes, places


def _aligned_units(
    shapes: Sequence[tuple[int, ...]], blocks: Sequence[int], units: list[int]
) -> list[list[int]]:
    """The units to align to: blocks of rows, and blocks of slices of stacks where there are any."""
    slices = [
        min(block * (math.prod(shape) // shape[0]), math.prod(shape)) if len(shape) > 2 else unit
        for shape, block, unit in zip(shapes, blocks, units, strict=True)
    ]
    return [units, slices] if slices != units else [units]
