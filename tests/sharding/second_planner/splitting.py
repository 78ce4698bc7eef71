"""Which tensors share a buffer: tensors of unlike units apart, and some moved to where a shard has room.

::

    a: 4 rows of 5    b: 3 rows of 7                    3 ranks

    one buffer    |....bbbbbbbbbbbbbb|bbbbbbb.aaaaaaaaaa|aaaaaaaaaa........|      18 a rank
    two buffers   |bbbbbbb|bbbbbbb|bbbbbbb|  |aaaaaaaaaa|aaaaaaaaaa|..........|   7 + 10 a rank

Rules 6 and 7 of the specification (``bridge/core/sharding/rules.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from tests.sharding.second_planner.packing import (
    AdmissibleSizes,
    Contents,
    Kind,
    common_multiple,
    ideal_size,
    round_up,
    solve,
)

# For each buffer, the number of its tensors of each kind.
Counts = tuple[int, ...]
Split = tuple[Counts, ...]

_MOST_CLASSES = 7
_BEST_STARTS = 3
_MOST_IMPROVED_KINDS = 64


class Solution(NamedTuple):
    """``split`` and the shard size of each of its buffers."""

    split: Split
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sizes)


def choose_buffers(
    kinds: Sequence[Kind], counts: Sequence[int], num_shards: int, max_buffers: int, align: int
) -> Solution:
    """As few buffers as come close to the smallest shards; ``kinds`` by falling unit, then falling numel."""
    search = _Search(kinds, tuple(counts), num_shards, align)
    whole = search.solved((search.counts,), None)
    assert whole is not None
    solutions = [whole]
    # Each buffer of a start has a class of its own.
    for num_buffers in range(2, min(max_buffers, len(search.classes)) + 1):
        smallest = min(solution.total for solution in solutions)
        if is_close(smallest, search.ideal):
            break
        best = search.best_split(num_buffers, smallest)
        if best is not None:
            solutions.append(best)
    smallest = min(solution.total for solution in solutions)
    return next(solution for solution in solutions if is_close(solution.total, smallest))


def is_close(size: int, to: int) -> bool:
    """At most one part in 2000 above."""
    return 2000 * size <= 2001 * to


class _Search:
    """One group's splits; whatever depends only on which kinds a buffer has is computed once."""

    def __init__(self, kinds: Sequence[Kind], counts: Counts, num_shards: int, align: int) -> None:
        self.kinds = kinds
        self.counts = counts
        self.num_shards = num_shards
        self.align = align
        self.total = sum(kind.numel * count for kind, count in zip(kinds, counts, strict=True))
        self.ideal = self.ideal_size(self.total)
        self.classes = self._classes()
        self._by_half = sorted(range(len(kinds)), key=lambda index: -kinds[index].half)
        self._sizes: dict[int, AdmissibleSizes] = {}
        self._solved: dict[Counts, int] = {}

    def ideal_size(self, elements: int) -> int:
        return ideal_size(elements, self.num_shards, self.align)

    def sizes(self, present: int) -> AdmissibleSizes:
        """Of a set of kinds, given as bits."""
        if present not in self._sizes:
            # No try reaches twice the elements in whole tiles: shards that hold everything fit.
            kinds = (self.kinds[index] for index in self._by_half if present >> index & 1)
            limit = 2 * round_up(self.total, self.align)
            self._sizes[present] = AdmissibleSizes(kinds, limit, self.align)
        return self._sizes[present]

    def solved(self, split: Split, below: int | None) -> Solution | None:
        """None when the sizes do not add up to less than ``below``."""
        estimates = [_Buffer(self, counts).estimate for counts in split]
        sizes: list[int] = []
        for counts in split:
            left = None if below is None else below - sum(sizes) - sum(estimates[len(sizes) + 1 :])
            size = self._solve(counts, left)
            if size is None:
                return None
            sizes.append(size)
        return Solution(split, tuple(sizes))

    def _solve(self, counts: Counts, below: int | None) -> int | None:
        if counts not in self._solved:
            contents = contents_of(counts)
            size = solve(self.kinds, contents, self.num_shards, self.sizes(_bits(counts)), below, self.align)
            if size is None:
                return None
            self._solved[counts] = size
        size = self._solved[counts]
        return size if below is None or size < below else None

    def best_split(self, num_buffers: int, below: int) -> Solution | None:
        """The first split over so many buffers that has the smallest sum, if that is ``below``."""
        starts = self._starts(num_buffers)
        improved = (
            [self._improved(start) for start in starts] if len(self.kinds) <= _MOST_IMPROVED_KINDS else []
        )
        best = None
        for split in sorted(dict.fromkeys([*improved, *starts]), key=self.estimate):
            # No solution is below its estimate.
            if self.estimate(split) >= below:
                break
            solution = self.solved(split, below)
            if solution is not None:
                best, below = solution, solution.total
        return best

    def estimate(self, split: Split) -> int:
        return sum(_Buffer(self, counts).estimate for counts in split)

    def _starts(self, num_buffers: int) -> list[Split]:
        classes = self.classes

        @cache
        def measures(part: tuple[int, ...]) -> tuple[int, int]:
            inside = sorted(index for each in part for index in classes[each])
            elements = sum(self.kinds[index].numel * self.counts[index] for index in inside)
            ideal = self.ideal_size(elements)
            step = common_multiple({self.kinds[index].unit for index in inside}, elements, self.align)
            return self.sizes(sum(1 << index for index in inside)).least(ideal), round_up(ideal, step)

        partitions = [_sets(numbers, num_buffers) for numbers in _partitions(len(classes), num_buffers)]
        chosen: dict[tuple[tuple[int, ...], ...], None] = {}
        for measure in range(2):
            sums = [sum(measures(part)[measure] for part in partition) for partition in partitions]
            order = sorted(range(len(partitions)), key=sums.__getitem__)
            chosen.update((partitions[i], None) for i in order[:_BEST_STARTS])
        splits = []
        for partition in chosen:
            owner = {index: i for i, part in enumerate(partition) for each in part for index in classes[each]}
            splits.append(
                tuple(
                    tuple(count if owner[index] == i else 0 for index, count in enumerate(self.counts))
                    for i in range(num_buffers)
                )
            )
        return splits

    def _classes(self) -> list[list[int]]:
        """Kinds that start out together, as their numbers."""
        by_unit: dict[int, list[int]] = {}
        large: dict[int, int] = {}
        for index, kind in enumerate(self.kinds):
            by_unit.setdefault(kind.unit, []).append(index)
            if kind.half > self.ideal:
                large[kind.unit] = large.get(kind.unit, 0) + kind.numel * self.counts[index]
        if len(by_unit) <= _MOST_CLASSES:
            return list(by_unit.values())
        chosen = set(sorted(large, key=lambda unit: (-large[unit], -unit))[: _MOST_CLASSES - 1])
        classes = [inside for unit, inside in by_unit.items() if unit in chosen]
        rest = [index for unit, inside in by_unit.items() if unit not in chosen for index in inside]
        return [*classes, rest] if rest else classes

    def _improved(self, split: Split) -> Split:
        """The split after the moves that each lower the estimate most."""
        buffers = [_Buffer(self, counts) for counts in split]
        while move := self._best_move(buffers):
            source, target, index, count = move
            buffers[source] = buffers[source].changed(index, -count)
            buffers[target] = buffers[target].changed(index, count)
        return tuple(buffer.counts for buffer in buffers)

    def _best_move(self, buffers: list[_Buffer]) -> tuple[int, int, int, int] | None:
        best, move = 0, None
        for s, source in enumerate(buffers):
            for t, target in enumerate(buffers):
                if s == t:
                    continue
                room = self.num_shards * target.estimate - target.elements
                for index, have in contents_of(source.counts):
                    fill = room // self.kinds[index].numel
                    for count in sorted({1, fill, fill + 1, have}):
                        if not 1 <= count <= have or count == source.tensors:
                            continue
                        gain = source.estimate - source.estimate_with(index, -count)
                        # The target does not shrink, so this is the most that the move can gain.
                        if gain > best:
                            gain += target.estimate - target.estimate_with(index, count)
                            if gain > best:
                                best, move = gain, (s, t, index, count)
        return move


class _Buffer:
    """What one buffer holds while splits are compared."""

    def __init__(self, search: _Search, counts: Counts) -> None:
        self._search = search
        self.counts = counts
        self.tensors = sum(counts)
        self.elements = sum(search.kinds[index].numel * count for index, count in contents_of(counts))
        self._present = _bits(counts)
        self.estimate = search.sizes(self._present).least(search.ideal_size(self.elements))

    def estimate_with(self, index: int, change: int) -> int:
        """The estimate with ``change`` more tensors of a kind."""
        search = self._search
        present = (
            self._present & ~(1 << index) if self.counts[index] == -change else self._present | 1 << index
        )
        elements = self.elements + change * search.kinds[index].numel
        return search.sizes(present).least(search.ideal_size(elements))

    def changed(self, index: int, change: int) -> _Buffer:
        counts = list(self.counts)
        counts[index] += change
        return _Buffer(self._search, tuple(counts))


def contents_of(counts: Sequence[int]) -> Contents:
    return [(index, count) for index, count in enumerate(counts) if count]


def _bits(counts: Sequence[int]) -> int:
    return sum(1 << index for index, count in enumerate(counts) if count)


def _partitions(items: int, sets: int) -> Iterator[tuple[int, ...]]:
    """The set of each item, item 0 in set 0 and a new set with the next number; all sets used; in order."""

    def extend(numbers: tuple[int, ...], used: int) -> Iterator[tuple[int, ...]]:
        if len(numbers) == items:
            if used == sets:
                yield numbers
            return
        for number in range(min(used + 1, sets)):
            yield from extend((*numbers, number), max(used, number + 1))

    yield from extend((), 0)


def _sets(numbers: tuple[int, ...], sets: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(i for i, number in enumerate(numbers) if number == s) for s in range(sets))
