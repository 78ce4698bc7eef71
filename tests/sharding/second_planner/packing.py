"""One flat buffer: the shard sizes that can work, tensors placed for one of them, and the least that holds all.

::

    a tensor of three units of 5, shards of 12

    two boundaries inside  |.........aaa|aaaaaaaaaaaa|........   12 apart, so 5 would have to divide 12: never
    one boundary inside    |..aaaaaaaaaa|aaaaa.......|           anywhere with whole units before the boundary

One boundary leaves at least ``half`` of the tensor on one rank, so a shard size is *admissible* when the unit divides
it or ``half`` fits in it. Equal tensors are treated at once, so that the time grows with neither tensors nor shards.
Rules 2 to 5 of the specification (``bridge/core/sharding/rules.md``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# (kind, number of tensors) in the order of kinds.
Contents = Sequence[tuple[int, int]]
Gap = tuple[int, int]

_KEPT_GAPS = 32
_EAGER_TRIES = 48


class Kind(NamedTuple):
    """Tensors of ``numel`` elements, cut at multiples of ``unit`` only; ``half``: see above."""

    numel: int
    unit: int
    half: int


class Run(NamedTuple):
    """So many ``tensors`` of one kind: contiguous from ``start`` on, or ``spread`` (see ``_spread``)."""

    kind: int
    start: int
    tensors: int
    spread: bool = False


def kind_of(numel: int, unit: int) -> Kind:
    left = -(-numel // unit) // 2 * unit
    return Kind(numel, unit, max(left, numel - left))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def common_multiple(units: Iterable[int], limit: int, align: int) -> int:
    """The least common multiple of all units and ``align``; ``limit``, as whole tiles, if that is smaller."""
    multiple, limit = align, round_up(limit, align)
    for unit in units:
        multiple = math.lcm(multiple, unit)
        # The multiple of many coprime units would have thousands of digits.
        if multiple >= limit:
            return limit
    return multiple


def ideal_size(elements: int, num_shards: int, align: int) -> int:
    """What a shard holds at least, in whole tiles."""
    return round_up(elements, num_shards * align) // num_shards


class AdmissibleSizes:
    """The shard sizes that some kinds allow."""

    def __init__(self, kinds: Iterable[Kind], limit: int, align: int) -> None:
        """``kinds`` by falling half. Exact for answers up to ``limit``."""
        # (half, multiple): a multiple of ``multiple``, which the units before divide, need only hold this half.
        self._steps: list[tuple[int, int]] = []
        multiple = align
        for kind in kinds:
            if multiple % kind.unit:
                self._steps.append((kind.half, multiple))
                multiple = math.lcm(multiple, kind.unit)
                if multiple > limit:
                    return
        self._steps.append((0, multiple))

    def least(self, at_least: int) -> int:
        """The smallest admissible size from ``at_least`` on."""
        best = 0
        for half, multiple in self._steps:
            size = -(-(half if half > at_least else at_least) // multiple) * multiple
            if not best or size < best:
                best = size
            if half <= at_least:
                break
        return best


def solve(
    kinds: Sequence[Kind],
    contents: Contents,
    num_shards: int,
    sizes: AdmissibleSizes,
    below: int | None,
    align: int,
) -> int | None:
    """The shard size at which one buffer holds ``contents``; None when it would not be ``below`` that bound."""
    total = sum(kinds[index].numel * count for index, count in contents)
    ideal = ideal_size(total, num_shards, align)
    step = common_multiple({kinds[index].unit for index, _ in contents}, total, align)
    aligned, size, tries = round_up(ideal, step), sizes.least(ideal), 0
    while below is None or size < below:
        excess = pack(kinds, contents, size)[0] - num_shards * size
        if excess <= 0:
            return size
        if size == aligned:
            aligned += step
        slow = 0 if tries < _EAGER_TRIES else size // 16
        tries += 1
        size = min(aligned, sizes.least(size + max(1, -(-excess // num_shards), slow)))
    return None


def pack(kinds: Sequence[Kind], contents: Contents, shard_size: int) -> tuple[int, list[Run]]:
    """Where all that is placed ends, and the places in the order of placing; ``shard_size`` is admissible."""
    runs: list[Run] = []
    gaps: list[Gap] = []
    widest, end = 0, 0
    for index, count in contents:
        kind, placed = kinds[index], len(runs)
        if kind.numel <= widest:
            before, gaps = gaps, []
            for gap in before:
                if not count or gap[1] - gap[0] < kind.numel:
                    gaps.append(gap)
                    continue
                start, count = _place(index, kind, count, gap[0], gap[1], shard_size, runs, gaps)
                if start < gap[1]:
                    gaps.append((start, gap[1]))
        if count:
            end, _ = _place(index, kind, count, end, None, shard_size, runs, gaps)
        if len(gaps) > _KEPT_GAPS:
            gaps = sorted(heapq.nlargest(_KEPT_GAPS, gaps, key=lambda gap: gap[1] - gap[0]))
        if placed < len(runs):
            widest = max((stop - start for start, stop in gaps), default=0)
    return end, runs


def _place(
    index: int,
    kind: Kind,
    count: int,
    start: int,
    stop: int | None,
    shard_size: int,
    runs: list[Run],
    gaps: list[Gap],
) -> tuple[int, int]:
    """Place tensors in ``[start, stop)`` while they fit; skipped elements are gaps. The start and count left."""
    numel, unit, _ = kind
    divides, whole = shard_size % unit == 0, numel % unit == 0
    while count:
        boundary = start - start % shard_size + shard_size
        offset, fit = start, (boundary - start) // numel
        if not fit:
            if divides:
                # Where one unit ends on a boundary all do, and what follows is aligned as well.
                offset, fit = round_up(start, unit), count if whole else 1
            elif stop is None and whole and numel <= shard_size:
                return _spread(index, kind, count, start, shard_size, runs, gaps), 0
            else:
                offset, fit = start + (boundary - start) % unit, 1
                if offset + numel > boundary + shard_size:
                    offset = boundary if numel <= shard_size else boundary + shard_size % unit
        fit = min(fit, count)
        if stop is not None:
            fit = min(fit, (stop - offset) // numel)
        if fit <= 0:
            break
        if offset > start:
            gaps.append((start, offset))
        runs.append(Run(index, offset, fit))
        start = offset + fit * numel
        count -= fit
    return start, count


def _spread(
    index: int, kind: Kind, count: int, start: int, shard_size: int, runs: list[Run], gaps: list[Gap]
) -> int:
    """Place tensors that fit in a shard whose unit does not divide it, at the end of the buffer; where they end.

    The first has no room before the next boundary. From it on every shard holds as many units as fit, and every
    boundary skips the same ``shard_size % unit`` elements, before the tensor that crosses it::

        unit 5, tensors of 10, S = 12    ...aaaaa|aaaaa..bbbbb|bbbbb..ccccc|ccccc
    """
    numel, unit, _ = kind
    boundary = start - start % shard_size + shard_size
    first = start + (boundary - start) % unit
    if first > start:
        gaps.append((start, first))
    run = Run(index, first, count, spread=True)
    runs.append(run)
    per_shard, skipped = divmod(shard_size, unit)
    per_tensor, before = numel // unit, (boundary - first) // unit
    crossed = -(-(count * per_tensor - before) // per_shard) - 1
    # Of equal gaps the first are kept, so more than are kept at all need not be listed.
    for shard in range(min(crossed, _KEPT_GAPS)):
        # The tensor with the first unit after the boundary starts this many units after the first boundary.
        units = (before + per_shard * (shard + 1)) // per_tensor * per_tensor - before
        gap = boundary + shard * shard_size + (units - shard * per_shard) * unit
        gaps.append((gap, gap + skipped))
    return _spread_offsets(run, kind, shard_size, range(count - 1, count))[0] + numel


def _spread_offsets(run: Run, kind: Kind, shard_size: int, which: range) -> list[int]:
    numel, unit, _ = kind
    boundary = round_up(run.start, shard_size)
    per_shard, skipped = divmod(shard_size, unit)
    per_tensor, before = numel // unit, (boundary - run.start) // unit
    offsets = []
    for i in which:
        shard, units = divmod(i * per_tensor - before, per_shard)
        crosses = units + per_tensor > per_shard
        offsets.append(boundary + shard * shard_size + units * unit + (skipped if crosses else 0))
    return offsets


def offsets_of(run: Run, kind: Kind, shard_size: int) -> Iterable[int]:
    """Where each of the run's tensors starts."""
    if run.spread:
        return _spread_offsets(run, kind, shard_size, range(run.tensors))
    return range(run.start, run.start + run.tensors * kind.numel, kind.numel)
