"""Which shard orthogonalizes a matrix whose rows are on several shards: Muon's owners and rounds.

Shard boundaries separate rows of a parameter. A parameter of more than two dimensions is a stack of matrices::

    3 matrices of 4 rows      a a a a|b b b b|c c c c        on one shard: belongs to that shard
    3 shards                 |a a a a b b|b b c|c c c|       on several: to the one with the smallest load
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Final

MUON_DIMENSIONS: Final = {"torch": (2, 3), "jax": (2,)}
"""Dimensions of a matrix, or a stack, for each runtime's Muon, unless a rule says otherwise."""


@cache
def rows_by_shard(shape: tuple[int, ...], bounds: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For each matrix of a parameter of this shape, how many of its rows each shard has.

    ``bounds``: of the shards' rows, as in ``Layout.row_bounds``.
    """
    height = shape[-2]
    return tuple(
        tuple(
            max(0, min(last, (number + 1) * height) - max(first, number * height))
            for first, last in itertools.pairwise(bounds)
        )
        for number in range(math.prod(shape[:-2]))
    )


def num_cut(shape: Sequence[int], bounds: Sequence[int]) -> int:
    """How many matrices of a parameter are on several shards: those that contain a shard boundary."""
    height, rows = shape[-2], math.prod(shape[:-1])
    return len({bound // height for bound in bounds if bound < rows and bound % height})


def owner_of_all(rows: Sequence[int]) -> int | None:
    """The only shard that has any rows; None if several have; the first if none has."""
    holders = [shard for shard, count in enumerate(rows) if count]
    return None if len(holders) > 1 else (holders or [0])[0]


def cost(shape: tuple[int, int]) -> float:
    """The cost of orthogonalizing a matrix, proportional to the multiplications in an iteration."""
    short, long = sorted(shape)
    return float(short * short * (2 * long + short))


def balanced(costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """An owner for each matrix, chosen so that ranks with ``loads`` finish at about the same time."""
    total, owners = list(loads), [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        owners[number] = min(range(len(total)), key=lambda rank: (total[rank], rank))
        total[owners[number]] += costs[number]
    return owners


def rounds(owners: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Numbers of the matrices in each round: per owner up to ``most`` elements, or one matrix."""
    runs: dict[int, list[list[int]]] = {}
    # Large ones first, so that matrices in one round take about equally long.
    for number in sorted(range(len(owners)), key=lambda n: (-sizes[n], n)):
        own = runs.setdefault(owners[number], [])
        if not own or sum(sizes[n] for n in own[-1]) + sizes[number] > most:
            own.append([])
        own[-1].append(number)
    return [
        sorted(itertools.chain.from_iterable(filter(None, together)))
        for together in itertools.zip_longest(*runs.values())
    ]
