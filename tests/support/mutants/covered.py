"""Find tests that the fast tier can skip: ``python -m tests.support.mutants.covered [FOLDER]``.

FOLDER has the record of the fast tier by ``python -m tests.support.mutants --record tests``, including tests that the
current list leaves out. A test, or a case of a test, is left out if at least ``OTHERS`` others reach each function that
it reaches. The most expensive ones go first. Tests below ``SECONDS`` of CPU time stay, and so do tests of the house and
of texts, which reach no function. Writes ``covered_cases.txt``; ``tests/support/pairwise.py`` marks each test of this
list slow. Tests that alone see a fault stay fast: run ``python -m tests.support.mutations`` and ``python -m
tests.support.mutants``, and add to ``needed_cases.txt`` one test that sees each fault which the fast tier lost.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path

from tests.support.mutants.reached import Record
from tests.support.pairwise import COVERED

OTHERS = 5
SECONDS = 0.25
NEEDED = COVERED.with_name("needed_cases.txt")


def covered(record: Record, needed: Collection[str] = ()) -> list[str]:
    """The cases that are left out, sorted. ``needed``: cases that stay, or tests of which all cases stay."""
    reaching = Counter({function: len(tests) for function, tests in record.tests.items()})
    reached: dict[str, list[str]] = defaultdict(list)
    for function, tests in record.tests.items():
        for test in tests:
            reached[test].append(function)
    left_out = []
    for test in sorted(record.seconds, key=lambda test: (-record.seconds[test], test)):
        if test in needed or test.partition("[")[0] in needed:
            continue
        spare = test in reached and all(reaching[function] > OTHERS for function in reached[test])
        if spare and record.seconds[test] >= SECONDS:
            reaching.subtract(reached[test])
            left_out.append(test)
    return sorted(left_out)


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else Path(tempfile.gettempdir()) / "twinshard-mutants"
    record = Record.load(folder / "reached.json")
    if not record.seconds:
        raise SystemExit(
            f"{folder / 'reached.json'}: expected a record of the fast tier, found none: run "
            "python -m tests.support.mutants --record tests"
        )
    left_out = covered(record, NEEDED.read_text(encoding="utf-8").splitlines())
    COVERED.write_text("".join(f"{test}\n" for test in left_out), encoding="utf-8")
    seconds = sum(record.seconds[test] for test in left_out)
    print(
        f"{len(left_out)} of {len(record.seconds)} cases, {seconds:.0f} of {sum(record.seconds.values()):.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
