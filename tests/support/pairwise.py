"""Fast matrices: of the cases of a test marked ``pairwise``, so many that any two values that occur together still do.

``make test`` runs those rows, ``make test-all`` all of them: the others are marked slow.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence

import pytest


def pairs(row: Sequence[Hashable]) -> set[Hashable]:
    """Any two values of the row, with their places; the value of a row that has one only."""
    places = list(enumerate(row))
    return set(itertools.combinations(places, 2) if len(places) > 1 else places)


def covering(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Indices of rows that together hold every pair of values that any of ``rows`` holds, greedily."""
    left = [pairs(row) for row in rows]
    missing = set().union(*left)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(left[index] & missing))
        chosen.append(best)
        missing -= left[best]
    return sorted(chosen)


def axes(item: pytest.Item) -> list[Hashable]:
    """The values a test is called with; the fields of a named tuple count as values of their own."""
    callspec = getattr(item, "callspec", None)
    values = [] if callspec is None else [callspec.params[name] for name in sorted(callspec.params)]
    flat = itertools.chain.from_iterable(
        v if isinstance(v, tuple) and hasattr(v, "_fields") else [v] for v in values
    )
    return [repr(value) for value in flat]


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark slow what the covering of each test marked ``pairwise`` can do without."""
    matrices: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise") and not item.get_closest_marker("slow"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for cases in matrices.values():
        fast = set(covering([axes(item) for item in cases]))
        for index, item in enumerate(cases):
            if index not in fast:
                item.add_marker("slow")
