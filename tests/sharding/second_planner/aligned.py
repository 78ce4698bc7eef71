"""Shards of whole common multiples of all units: the layout of Megatron-FSDP, taken where it pads less.

::

    a: 5 rows of 2    b: 13 elements    c: 1 row of 3    2 ranks    common multiple 6, shards of 18

    |aaaaaaaaaa.bbbbbbb|bbbbbbccc.........|

Tensors of the common multiple and more start at a multiple of it, or end at one (b, whose first element fills a hole);
smaller ones fill what is left, and follow at the end.
Rule 8 of the specification (``bridge/core/sharding/rules.md``).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from tests.sharding.second_planner.packing import common_multiple, round_up

_MOST_STEPS = 1 << 23  # looks at a run of equal tensors for one gap


def pack_aligned(
    numels: Sequence[int], units: Sequence[int], num_shards: int, below: int, align: int
) -> tuple[int, list[int]] | None:
    """The shard size and each tensor's offset; None when the size would not be ``below`` that bound.

    None also when finding out would take too long, by the number of gaps times the runs of equal tensors.
    """
    multiple = common_multiple(set(units), below, align)
    if multiple >= below or round_up(sum(numels), multiple * num_shards) // num_shards >= below:
        return None
    offsets = [0] * len(numels)
    large = [i for i, numel in enumerate(numels) if numel >= multiple]
    remainders = {i: numels[i] % multiple if numels[i] % units[i] == 0 else 0 for i in large}
    by_remainder: dict[int, deque[int]] = {}
    for i in large:
        if remainders[i]:
            by_remainder.setdefault(remainders[i], deque()).append(i)
    small = sorted((i for i, numel in enumerate(numels) if numel < multiple), key=lambda i: -numels[i])
    runs = [deque(run) for _, run in itertools.groupby(small, key=lambda i: (numels[i], units[i]))]
    if sum(map(len, by_remainder.values())) * (len(by_remainder) + len(runs)) > _MOST_STEPS:
        return None
    taken: set[int] = set()
    end = 0
    for first in large:
        if first in taken:
            continue
        if remainders[first]:
            by_remainder[remainders[first]].popleft()
        offsets[first] = end
        start = end + numels[first]
        end = stop = round_up(start, multiple)
        if start == stop:
            continue  # it ends on a multiple: no gap
        fitting = [waiting[0] for r, waiting in by_remainder.items() if waiting and r <= stop - start]
        if fitting:
            second = min(fitting)
            by_remainder[remainders[second]].popleft()
            taken.add(second)
            stop -= remainders[second]
            offsets[second] = stop
            end = stop + numels[second]
        for run in runs:
            start = _fill(run, numels, units, start, stop, offsets)
        runs = [run for run in runs if run]
    for run in runs:
        end = _fill(run, numels, units, end, None, offsets)
    shard_size = round_up(end, multiple * num_shards) // num_shards
    return (shard_size, offsets) if shard_size < below else None


def _fill(
    run: deque[int],
    numels: Sequence[int],
    units: Sequence[int],
    start: int,
    stop: int | None,
    offsets: list[int],
) -> int:
    """Place equal tensors from ``start`` on while they end before ``stop``; the end of the last."""
    while run:
        offset = round_up(start, units[run[0]])
        if stop is not None and offset + numels[run[0]] > stop:
            break
        offsets[run[0]] = offset
        start = offset + numels[run.popleft()]
    return start
