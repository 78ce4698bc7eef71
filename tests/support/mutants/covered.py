"""Find tests that the fast tier can skip: ``python -m tests.support.mutants.covered [FOLDER]``.

FOLDER has the record of the fast tier by ``python -m tests.support.mutants --record tests``, including tests that the
current list leaves out. A case of a test is left out if at least ``OTHERS`` others reach each function and each block
that it reaches; the most expensive cases go first. A test keeps its cheapest case unless that case takes ``ALONE``
seconds. Cases below ``SECONDS`` of CPU time stay, and so do tests of the house and of texts, which reach no function.
Writes ``covered_cases.txt``; ``tests/support/pairwise.py`` marks each case of this list slow. What alone sees a fault
stays fast: run ``python -m tests.support.mutations`` and ``python -m tests.support.mutants``, and add to
``needed_cases.txt`` one case for each fault that the fast tier lost.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path

from tests.support.mutants.reached import Record
from tests.support.pairwise import COVERED

OTHERS = 3
SECONDS, ALONE = 0.1, 1.0
"""With these numbers 987 of 9,078 cases are left out, 500 of 1,259 CPU seconds. The fast tier then kills 173 of 195
mutants that it has not seen before (seeds 20261204 and 20261205)."""
NEEDED = COVERED.with_name("needed_cases.txt")


def covered(record: Record, needed: Collection[str] = ()) -> list[str]:
    """The cases that are left out, sorted. ``needed``: cases that stay, or tests of which all cases stay."""
    reaching = Counter({function: len(tests) for function, tests in record.tests.items()})
    reached: dict[str, list[str]] = defaultdict(list)
    for function, tests in record.tests.items():
        for test in tests:
            reached[test].append(function)
    by_cost = sorted(record.seconds, key=lambda case: (-record.seconds[case], case))
    cheapest = {case.partition("[")[0]: case for case in by_cost}
    left_out = []
    for case in by_cost:
        test = case.partition("[")[0]
        least = ALONE if cheapest[test] == case else SECONDS
        if case in needed or test in needed or record.seconds[case] < least or case not in reached:
            continue
        if all(reaching[function] > OTHERS for function in reached[case]):
            reaching.subtract(reached[case])
            left_out.append(case)
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
