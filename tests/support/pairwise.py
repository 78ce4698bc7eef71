"""Fast matrices: of the cases of a test marked ``pairwise``, so many that any two values that occur together still do.

Of a test marked ``each_value``, whose cases cost much, so many that each value occurs. Of one marked
``fast_cases("id", ...)`` the cases with these ids, which see what the others see for less. Of all tests those cases
that `covered_cases.txt` does not list. ``make test`` runs those cases, ``make test-all`` all of them: the others are
marked slow.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest

COVERED = Path(__file__).with_name("covered_cases.txt")


def together(row: Sequence[Hashable], strength: int) -> set[Hashable]:
    """Any ``strength`` values of the row, with their places; all values of a row that has no more."""
    return set(itertools.combinations(enumerate(row), min(strength, len(row))))


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Indices of rows that hold all pairs (or single values, or triples) that any of ``rows`` holds, greedily."""
    left = [together(row, strength) for row in rows]
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


def mark_unnamed_slow(items: Sequence[pytest.Item]) -> None:
    """Mark slow the cases that a test's ``fast_cases`` does not name; none where some were chosen by hand."""
    matrices: dict[tuple[str, tuple[str, ...]], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("fast_cases"):
            matrices[item.nodeid.partition("[")[0], mark.args].append(item)
    for (test, ids), cases in matrices.items():
        others = [item for item in cases if item.nodeid not in {f"{test}[{case_id}]" for case_id in ids}]
        if len(others) + len(ids) == len(cases):
            for item in others:
                item.add_marker("slow")


def covered_cases() -> frozenset[str]:
    """Node ids of cases that cheaper ones stand for: `tests/support/mutants/covered.py` has chosen them."""
    return frozenset(COVERED.read_text(encoding="utf-8").splitlines())


def mark_covered_slow(items: Sequence[pytest.Item]) -> None:
    """Mark slow the cases of ``covered_cases``; none of a test of which others were not chosen by hand."""
    covered, tests = covered_cases(), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        chosen = [item for item in cases if item.nodeid in covered]
        if len(chosen) < len(cases):
            for item in chosen:
                item.add_marker("slow")


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark slow what each test with one of the three marks can do without."""
    mark_unnamed_slow(items)
    matrices: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        for mark, strength in (("each_value", 1), ("pairwise", 2)):
            if item.get_closest_marker(mark) and not item.get_closest_marker("slow"):
                matrices[item.nodeid.partition("[")[0], strength].append(item)
    for (_, strength), cases in matrices.items():
        fast = set(covering([axes(item) for item in cases], strength))
        for index, item in enumerate(cases):
            if index not in fast:
                item.add_marker("slow")
