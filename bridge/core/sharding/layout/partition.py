"""Which tensors share a buffer: a search over the ways to split a group over at most three buffers.

Only the blocks of a buffer's own tensors cost padding, so blocks with a large common multiple are better kept apart::

    classes     kinds of one block           {4096}  {14336}  {1}
    starts      classes over k buffers       {4096, 1} {14336}     {4096} {14336, 1}     ...
    improve     move tensors of one kind to another buffer, while the estimate falls
    pack        the best estimates first; the fewest buffers within 0.05 % of the least size win

The *estimate* of a buffer is the smallest admissible size that holds its elements. No packing is smaller, and few are
larger, so the estimate replaces the packing while splits are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from bridge.core.sharding.layout.packing import (
    Kind,
    Packing,
    admissible,
    admissible_steps,
    common_multiple,
    ideal_size,
    round_up,
    solve,
)

_MAX_CLASSES = 7
_MAX_IMPROVED_KINDS = 64
_STARTS = 3
_TOLERANCE = 2000  # sizes count as equal if they differ by at most one part in this many

Counts = tuple[int, ...]
Split = tuple[Counts, ...]


class _Move(NamedTuple):
    """Move ``many`` tensors of a kind from one buffer to another."""

    kind: int
    many: int
    source: int
    target: int


def plan_buffers(
    kinds: Sequence[Kind], counts: Sequence[int], num_shards: int, max_buffers: int, align: int = 1
) -> list[Packing]:
    """Packings of at most ``max_buffers`` buffers that together hold ``counts[i]`` tensors of each ``kinds[i]``.

    Shards are multiples of ``align``.

    ``kinds`` are distinct, by decreasing block, then decreasing numel; at least one.
    """
    return _Search(kinds, tuple(counts), num_shards, align).run(max_buffers)


class _Search:
    def __init__(self, kinds: Sequence[Kind], counts: Counts, num_shards: int, align: int) -> None:
        self.kinds, self.counts, self.num_shards, self.align = kinds, counts, num_shards, align
        self.ideal = self._per_shard(self._total(counts))
        self._by_half = sorted(range(len(kinds)), key=lambda i: -kinds[i].half)
        self.classes = self._classes()
        self._steps: dict[bytes, list[tuple[int, int]]] = {}
        self._packings: dict[Counts, Packing] = {}

    def run(self, max_buffers: int) -> list[Packing]:
        whole = solve(self.kinds, self.counts, self.num_shards, align=self.align)
        assert whole is not None, "without a limit there is a packing"
        answers = [[whole]]
        # Each buffer of a start has its own class.
        for k in range(2, min(max_buffers, len(self.classes)) + 1):
            if is_close(total_size(answers[-1]), self.ideal):
                break
            smaller = self._smallest(k, total_size(answers[-1]))
            if smaller is not None:
                answers.append(smaller)
        least = total_size(answers[-1])
        return next(answer for answer in answers if is_close(total_size(answer), least))

    def _smallest(self, k: int, limit: int) -> list[Packing] | None:
        """The best packing found over k buffers; None if none is smaller than ``limit``."""
        starts = self._starts(k)
        improved = starts
        if len(self.kinds) <= _MAX_IMPROVED_KINDS:
            improved = [self._improve(split) for split in starts]
        best = None
        for split in sorted(dict.fromkeys([*improved, *starts]), key=self._estimate):
            packings = self._pack(split, limit)
            if packings is not None:
                best, limit = packings, total_size(packings)
        return best

    def _pack(self, split: Split, limit: int) -> list[Packing] | None:
        """A packing of each buffer; None if their sizes add up to ``limit`` or more."""
        spare = limit - self._estimate(split)
        packings = []
        for counts in split:
            least = self._estimate([counts])
            packing = self._packings.get(counts)
            packing = packing or solve(self.kinds, counts, self.num_shards, least + spare, self.align)
            if packing is None or packing.shard_size >= least + spare:
                return None
            self._packings[counts] = packing
            spare -= packing.shard_size - least
            packings.append(packing)
        return packings

    def _starts(self, k: int) -> list[Split]:
        """Splits of whole classes over k buffers: the smallest by estimate, then the smallest with aligned buffers."""
        known: dict[int, tuple[Counts, int, int]] = {}

        def content(chosen: int) -> tuple[Counts, int, int]:
            if chosen not in known:
                members = {i for c, kinds in enumerate(self.classes) if chosen >> c & 1 for i in kinds}
                counts = tuple(count if i in members else 0 for i, count in enumerate(self.counts))
                known[chosen] = counts, self._estimate([counts]), self._aligned(counts)
            return known[chosen]

        splits = [[content(chosen) for chosen in sets] for sets in set_partitions(len(self.classes), k)]
        least = sorted(splits, key=lambda split: sum([estimate for _, estimate, _ in split]))[:_STARTS]
        least += sorted(splits, key=lambda split: sum([aligned for _, _, aligned in split]))[:_STARTS]
        return list(dict.fromkeys(tuple(counts for counts, _, _ in split) for split in least))

    def _classes(self) -> list[list[int]]:
        """Kinds by block. Of many blocks, those with most elements in tensors longer than two shards, and the rest."""
        amounts = dict.fromkeys((kind.block for kind in self.kinds), 0)
        if len(amounts) > _MAX_CLASSES:
            for kind, count in zip(self.kinds, self.counts, strict=True):
                if kind.half > self.ideal:
                    amounts[kind.block] += kind.numel * count
            long = [block for block, amount in amounts.items() if amount]
            amounts = dict.fromkeys(sorted(long, key=lambda block: -amounts[block])[: _MAX_CLASSES - 1], 0)
        members: dict[int, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            members.setdefault(kind.block if kind.block in amounts else 0, []).append(i)
        return [members[block] for block in sorted(members, reverse=True)]

    def _improve(self, split: Split) -> Split:
        """Move tensors between the buffers, the most profitable move first, until none lowers the estimate."""
        counts = [list(shard) for shard in split]
        while (move := self._best_move(counts)) is not None:
            counts[move.source][move.kind] -= move.many
            counts[move.target][move.kind] += move.many
        return tuple(map(tuple, counts))

    def _best_move(self, counts: list[list[int]]) -> _Move | None:
        totals = [self._total(shard) for shard in counts]
        used = [_used(shard) for shard in counts]
        sizes = [self._least(total, mask) for total, mask in zip(totals, used, strict=True)]
        best, most = None, 0
        for move in self._moves(counts, totals, sizes):
            source, target = move.source, move.target
            amount = move.many * self.kinds[move.kind].numel
            left = _marked(used[source], move.kind, move.many < counts[source][move.kind])
            gain = sizes[source] - self._least(totals[source] - amount, left)
            # The target never shrinks, so the move cannot gain more than this.
            if gain > most:
                more = _marked(used[target], move.kind, True)
                gain += sizes[target] - self._least(totals[target] + amount, more)
                if gain > most:
                    best, most = move, gain
        return best

    def _moves(self, counts: list[list[int]], totals: list[int], sizes: list[int]) -> Iterator[_Move]:
        """One tensor, as many as fit without raising the target's estimate, one more, all; never the last kind."""
        for source, target in permutations(range(len(counts)), 2):
            slack = self.num_shards * sizes[target] - totals[target]
            for kind, (have, (numel, _)) in enumerate(zip(counts[source], self.kinds, strict=True)):
                if have:
                    for many in sorted({1, slack // numel, slack // numel + 1, have}):
                        if 0 < many <= have and many * numel < totals[source]:
                            yield _Move(kind, many, source, target)

    def _estimate(self, split: Iterable[Counts]) -> int:
        return sum([self._least(self._total(counts), _used(counts)) for counts in split])

    def _least(self, total: int, used: bytes) -> int:
        if used not in self._steps:
            self._steps[used] = admissible_steps(
                [self.kinds[i] for i in self._by_half if used[i]], self.align
            )
        return admissible(self._steps[used], self._per_shard(total))

    def _aligned(self, counts: Counts) -> int:
        total = self._total(counts)
        kinds = [kind for kind, count in zip(self.kinds, counts, strict=True) if count]
        return round_up(self._per_shard(total), common_multiple(kinds, total, self.align))

    def _total(self, counts: Iterable[int]) -> int:
        return sum([kind.numel * count for kind, count in zip(self.kinds, counts, strict=True)])

    def _per_shard(self, total: int) -> int:
        return ideal_size(total, self.num_shards, self.align)


def total_size(packings: Iterable[Packing]) -> int:
    """Elements in a rank's shards of all buffers."""
    return sum(packing.shard_size for packing in packings)


def set_partitions(n: int, k: int) -> Iterator[tuple[int, ...]]:
    """Partitions of ``range(n)`` into k sets, as bit masks, in the order of their smallest members.

    Sorted by the set of 0, then the set of 1, and so on: {0 1}{2}, {0 2}{1}, {0}{1 2}.
    """

    def extend(sets: tuple[int, ...], thing: int) -> Iterator[tuple[int, ...]]:
        if k - len(sets) > n - thing:
            return
        if thing == n:
            yield sets
            return
        for j, members in enumerate(sets):
            yield from extend((*sets[:j], members | 1 << thing, *sets[j + 1 :]), thing + 1)
        if len(sets) < k:
            yield from extend((*sets, 1 << thing), thing + 1)

    yield from extend((), 0)


def _used(counts: Iterable[int]) -> bytes:
    return bytes(map(bool, counts))


def _marked(used: bytes, kind: int, present: bool) -> bytes:
    return used[:kind] + bytes([present]) + used[kind + 1 :]


def is_close(size: int, least: int) -> bool:
    """Whether ``size`` exceeds ``least`` by at most one part in 2000."""
    return size * _TOLERANCE <= least * (_TOLERANCE + 1)
