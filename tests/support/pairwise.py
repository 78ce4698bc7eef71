"""Choose the fast cases of tests with many cases, and mark the other cases slow.

A test marked ``pairwise`` keeps enough cases that any two values which occur together still do. A test marked
``each_value``, whose cases are expensive, keeps enough cases that each value occurs. A test marked
``fast_cases("id", ...)`` keeps the cases with these ids, which see the same faults for less time. Tests and cases in
`covered_cases.txt` are slow, too. ``make test`` runs the fast cases, ``make test-all`` runs all cases.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest

COVERED = Path(__file__).with_name("covered_cases.txt")


def together(row: Sequence[Hashable], strength: int) -> set[Hashable]:
    """Every combination of ``strength`` values of the row, with their positions; all values of a shorter row."""
    return set(itertools.combinations(enumerate(row), min(strength, len(row))))


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Indices of a few rows, chosen greedily, that together hold every pair (or value, or triple) of ``rows``."""
    left = [together(row, strength) for row in rows]
    missing = set().union(*left)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(left[index] & missing))
        chosen.append(best)
        missing -= left[best]
    return sorted(chosen)


def axes(item: pytest.Item) -> list[Hashable]:
    """The parameter values of a case. Each field of a named tuple counts as a value."""
    callspec = getattr(item, "callspec", None)
    values = [] if callspec is None else [callspec.params[name] for name in sorted(callspec.params)]
    flat = itertools.chain.from_iterable(
        v if isinstance(v, tuple) and hasattr(v, "_fields") else [v] for v in values
    )
    return [repr(value) for value in flat]


def mark_unnamed_slow(items: Sequence[pytest.Item]) -> None:
    """Mark slow the cases that ``fast_cases`` does not name, unless some cases of the test were chosen by hand."""
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
    """Node ids of cases that cheaper cases cover, as chosen by `tests/support/mutants/covered.py`."""
    return frozenset(COVERED.read_text(encoding="utf-8").splitlines())


def mark_covered_slow(items: Sequence[pytest.Item], arguments: Sequence[str]) -> None:
    """Mark slow the cases of ``covered_cases``, unless pytest's ``arguments`` name tests instead of files."""
    if arguments and all("::" in argument for argument in arguments):
        return
    covered = covered_cases()
    for item in items:
        if item.nodeid in covered:
            item.add_marker("slow")


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark slow the cases that a test with one of the three marks can skip."""
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
