"""Packing tensors into one buffer of equal shards: which shard sizes are possible, and where each tensor goes.

A tensor of a *kind* ``(numel, block)`` is one contiguous range, and a shard boundary inside it must be a multiple of
``block`` elements from its start. There are three cases for shard size S::

    boundaries inside    none                one                  two or more
    shards               |..wwww.|.......|   |....www|www....|    |...www|wwwwww|ww....|
    needs                room                a shifted offset     block divides S

So a tensor fits somewhere exactly if its block divides S, or its *half*, the larger part of its most even cut, is at
most S. Sizes for which that holds for every tensor are *admissible*; no other size can work, and for an admissible size
``earliest`` always finds an offset. ``rules.md`` of the package has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MAX_GAPS = 32
_SMALL_STEPS = 48


class Kind(NamedTuple):
    """Tensors that pack alike: elements, and how many of them no boundary may separate (1 <= block <= numel)."""

    numel: int
    block: int

    @property
    def half(self) -> int:
        """The larger part of the most even cut between two blocks; ``numel`` if it is one block."""
        blocks = -(-self.numel // self.block)
        left = blocks // 2 * self.block
        return max(left, self.numel - left)


class Run(NamedTuple):
    """``many`` consecutive tensors of kind number ``kind``, from ``offset``."""

    kind: int
    offset: int
    many: int


class Packing(NamedTuple):
    """One buffer: elements of each shard, and its tensors in the order in which they were placed."""

    shard_size: int
    runs: tuple[Run, ...]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def admissible_steps(kinds: Sequence[Kind], align: int = 1) -> list[tuple[int, int]]:
    """The admissible sizes for tensors of these kinds, which are in order of decreasing halves, for ``admissible``.

    S, a multiple of ``align``, is admissible exactly if, for some j, the blocks of the first j kinds divide S and the
    halves of the other kinds are at most S. The list contains (largest of the other halves, common multiple of
    ``align`` and the first j blocks) for each j that matters.
    """
    steps: list[tuple[int, int]] = []
    multiple = align
    for kind in kinds:
        if multiple % kind.block:
            steps.append((kind.half, multiple))
            multiple = math.lcm(multiple, kind.block)
            if multiple > kinds[0].half:
                return steps  # such a large size is admissible even if no block divides it
    return [*steps, (0, multiple)]


def admissible(steps: Sequence[tuple[int, int]], size: int) -> int:
    """The smallest admissible size that is at least ``size`` (>= 1)."""
    return min([round_up(max(size, half), multiple) for half, multiple in steps])


def earliest(start: int, kind: Kind, size: int) -> int:
    """The first offset at or after ``start`` where no boundary cuts a block; ``size`` must be admissible."""
    numel, block = kind
    boundary = (start // size + 1) * size
    if start + numel <= boundary:
        return start
    if size % block == 0:
        return round_up(start, block)
    shifted = start + (boundary - start) % block
    return shifted if shifted + numel <= boundary + size else boundary + size % block


def pack(kinds: Sequence[Kind], counts: Sequence[int], size: int) -> tuple[list[tuple[int, int, int]], int]:
    """Place ``counts[i]`` tensors of each ``kinds[i]``, in this order, on shards of ``size``; and the end.

    Each tensor goes to the first of the 32 largest gaps that has room at its earliest offset, else to the end, where a
    skipped range becomes a gap.
    """
    runs: list[tuple[int, int, int]] = []  # names are assigned only if a packing is kept, and most are not
    gaps: list[tuple[int, int]] = []
    widest = end = 0
    for index, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        if kind.numel <= widest and count:
            filled: list[tuple[int, int]] = []
            for start, stop in gaps:
                if stop - start >= kind.numel:
                    for offset, many in _fill(start, stop, kind, count, size):
                        runs.append((index, offset, many))
                        count -= many
                        filled.append((start, offset))
                        start = offset + many * kind.numel
                filled.append((start, stop))
            gaps = [gap for gap in filled if gap[0] < gap[1]]
        for offset, many in _fill(end, None, kind, count, size):
            runs.append((index, offset, many))
            if offset > end:
                gaps.append((end, offset))
            end = offset + many * kind.numel
        if len(gaps) > _MAX_GAPS:
            gaps = sorted(sorted(gaps, key=lambda gap: (gap[0] - gap[1], gap[0]))[:_MAX_GAPS])
        widest = max((stop - start for start, stop in gaps), default=0)
    return runs, end


def _fill(start: int, stop: int | None, kind: Kind, count: int, size: int) -> Iterator[tuple[int, int]]:
    """``(offset, how many)`` of up to ``count`` tensors placed one after another in ``[start, stop)``."""
    numel, block = kind
    regular = size % block == 0 and numel % block == 0
    while count:
        many = (size - start % size) // numel  # this many fit before the next boundary, starting here
        offset = start if many else earliest(start, kind, size)
        if many > count or (regular and offset % block == 0):
            many = count
        if stop is not None:
            many = min(many or 1, (stop - offset) // numel)
            if many <= 0:
                return
        elif not many:
            many = 1
        yield offset, many
        count -= many
        start = offset + many * numel


def solve(
    kinds: Sequence[Kind], counts: Sequence[int], num_shards: int, limit: int | None = None, align: int = 1
) -> Packing | None:
    """A packing of one buffer with small shards: the smallest multiple of ``align`` that has room for everything.

    None if its shards would have ``limit`` elements or more.
    """
    total = sum(kind.numel * count for kind, count in zip(kinds, counts, strict=True))
    ideal = ideal_size(total, num_shards, align)
    used = [kind for kind, count in zip(kinds, counts, strict=True) if count]
    steps = admissible_steps(sorted(used, key=lambda kind: -kind.half), align)
    size, tries = admissible(steps, ideal), 0
    multiple = common_multiple(used, total, align)
    aligned = round_up(ideal, multiple)
    while limit is None or size < limit:
        runs, end = pack(kinds, counts, size)
        excess = end - num_shards * size
        if excess <= 0:
            return Packing(size, tuple(map(Run._make, runs)))
        if size == aligned:
            aligned += multiple
        step = max(1, -(-excess // num_shards), size >> 4 if tries >= _SMALL_STEPS else 0)
        size = min(aligned, admissible(steps, size + step))
        tries += 1
    return None


def ideal_size(total: int, num_shards: int, align: int) -> int:
    """The smallest multiple of ``align`` such that ``num_shards`` shards hold ``total`` elements."""
    return round_up(-(-total // num_shards), align)


def common_multiple(kinds: Sequence[Kind], most: int, align: int = 1) -> int:
    """The least common multiple of ``align`` and all blocks, or ``most`` rounded up to ``align`` if that is smaller."""
    multiple, most = align, round_up(most, align)
    for kind in kinds:
        multiple = math.lcm(multiple, kind.block)
        if multiple > most:
            return most
    return multiple
