"""Find cases that the fast tier can skip: ``python -m tests.support.mutants.covered [FOLDER]``.

FOLDER has the record of the fast tier by ``python -m tests.support.mutants --record tests``, including cases that the
current list leaves out. A case is left out if at least ``OTHERS`` other cases reach each function that it reaches, and
if its test keeps at least one case. The most expensive cases go first. Cases below ``SECONDS`` of CPU time stay. Writes
``covered_cases.txt``; ``tests/support/pairwise.py`` marks each case of this list slow. After that run ``python -m
tests.support.mutations``, and take out of the list each case that alone sees a fault.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from tests.support.mutants.reached import Record
from tests.support.pairwise import COVERED

OTHERS = 5
SECONDS = 0.25
"""With these two numbers 810 cases are left out of a fast tier of 2,726 CPU seconds: 809 seconds. No killer of the 47
mutants that had been judged before was among them; 8 for ``OTHERS`` and 0.15 for ``SECONDS`` lost three."""


def covered(record: Record) -> list[str]:
    """The cases that are left out, sorted."""
    reaching = Counter({function: len(tests) for function, tests in record.tests.items()})
    reached: dict[str, list[str]] = defaultdict(list)
    for function, tests in record.tests.items():
        for test in tests:
            reached[test].append(function)
    cases = Counter(test.partition("[")[0] for test in record.seconds)
    left_out = []
    for test in sorted(record.seconds, key=lambda test: (-record.seconds[test], test)):
        name = test.partition("[")[0]
        spare = cases[name] > 1 and all(reaching[function] > OTHERS for function in reached[test])
        if spare and record.seconds[test] >= SECONDS:
            cases[name] -= 1
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
    left_out = covered(record)
    COVERED.write_text("".join(f"{test}\n" for test in left_out), encoding="utf-8")
    seconds = sum(record.seconds[test] for test in left_out)
    print(
        f"{len(left_out)} of {len(record.seconds)} cases, {seconds:.0f} of {sum(record.seconds.values()):.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
