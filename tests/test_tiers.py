"""The fast tier leaves no pair of values out, and the list of faults that it must see is up to date."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.mutants.covered import NEEDED, OTHERS, SECONDS, covered
from tests.support.mutants.reached import Record
from tests.support.mutations import MUTATIONS, ROOT, file_of
from tests.support.pairwise import covered_cases, covering, mark_covered_slow, together
from tests.support.slow_share import in_order, shares_of


@pytest.mark.parametrize("sizes", [(4,), (4, 3), (4, 2, 3), (2, 2, 2, 2, 2), (5, 4, 2, 2, 2)])
def test_rows_chosen_of_a_product_hold_every_pair_and_are_few(sizes: tuple[int, ...]) -> None:
    rows = list(itertools.product(*(range(size) for size in sizes)))
    chosen = [rows[index] for index in covering(rows)]
    assert set().union(*(together(row, 2) for row in chosen)) == set().union(
        *(together(row, 2) for row in rows)
    )
    largest = sorted(sizes)[-2:]
    assert len(chosen) <= max(8, 1.3 * largest[0] * largest[-1])
    assert chosen == [rows[index] for index in covering(rows)]


def test_only_pairs_that_occur_are_asked_for() -> None:
    rows = [("a", 1), ("b", 1), ("b", 2)]
    assert covering(rows) == [0, 1, 2]
    assert covering([]) == []
    assert covering([("a", 1), ("b", 1), ("b", 2)], strength=1) == [0, 2]


@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("c", range(3))
def test_cases_beyond_the_covering_are_slow(request: pytest.FixtureRequest, a: int, b: int, c: int) -> None:
    name = request.node.originalname
    mine = [item for item in request.session.items if item.originalname == name]
    fast = [item.callspec.params for item in mine if not item.get_closest_marker("slow")]
    # There are none if only slow tests run.
    assert len(fast) in (0, 6, len(mine)), "of one or some cases chosen by hand all are run"


@pytest.mark.fast_cases("0-b", "2-a")
@pytest.mark.parametrize("letter", ["a", "b"])
@pytest.mark.parametrize("number", range(3))
def test_cases_that_are_not_named_are_slow(request: pytest.FixtureRequest, number: int, letter: str) -> None:
    name = request.node.originalname
    mine = [item for item in request.session.items if item.originalname == name]
    fast = [item.callspec.id for item in mine if not item.get_closest_marker("slow")]
    # There are none if only slow tests run, and all of them if they were chosen by hand.
    assert fast in ([], ["0-b", "2-a"], [item.callspec.id for item in mine])


def test_cases_that_are_named_exist(request: pytest.FixtureRequest) -> None:
    ids_of: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    for item in request.session.items:
        if mark := item.get_closest_marker("fast_cases"):
            ids_of.setdefault((item.nodeid.partition("[")[0], mark.args), set()).add(item.callspec.id)
    # If there are fewer, they were chosen by hand.
    wrong = [(test, set(ids) - all_) for (test, ids), all_ in ids_of.items() if len(all_) > len(ids)]
    assert [(test, missing) for test, missing in wrong if missing] == []


def test_covered_and_needed_cases_exist(request: pytest.FixtureRequest) -> None:
    needed = NEEDED.read_text(encoding="utf-8").splitlines()
    assert len(covered_cases()) > 0
    assert not covered_cases() & set(needed)
    collected: dict[str, set[str]] = {}
    for item in request.session.items:
        collected.setdefault(item.nodeid.partition("[")[0], set()).add(item.nodeid)
    every = request.config.option.markexpr == "slow or not slow"
    for case in (*covered_cases(), *needed):
        name = case.partition("[")[0]
        file, _, function = name.partition("::")
        assert f"def {function.rpartition('::')[2]}(" in (ROOT / file).read_text(encoding="utf-8"), case
        # Slow cases are collected only if slow tests run, too.
        if every and name in collected and case != name and len(collected[name]) > 1:
            assert case in collected[name], f"{case}: no such case"


def test_covered_cases_are_slow_unless_chosen_by_hand() -> None:
    left, kept = (SimpleNamespace(nodeid=name) for name in (min(covered_cases()), "tests/test_x.py::test_x"))
    marks: list[tuple[str, str]] = []
    for case in (left, kept):
        case.add_marker = lambda mark, case=case: marks.append((case.nodeid, mark))
    mark_covered_slow([left], ["tests/test_x.py::test_x", left.nodeid])  # type: ignore[list-item]
    assert marks == []
    mark_covered_slow([left, kept], ["tests", left.nodeid])  # type: ignore[list-item]
    assert marks == [(left.nodeid, "slow")]


def test_a_case_is_left_out_where_enough_others_reach_what_it_reaches() -> None:
    names = [f"t.py::test_a[{k}]" for k in range(OTHERS + 5)]
    record = Record(seconds={name: SECONDS * (9 - k) for k, name in enumerate(names)})
    record.seconds |= {"t.py::test_b": 9.0, "t.py::test_d": 9.0, "t.py::test_e[0]": 9.0, "t.py::test_f": 0.8}
    record.tests["f"] |= record.seconds.keys() - {"t.py::test_d"}
    record.tests["g"] |= {names[0]}
    # test_d reaches no function, test_e is needed, test_f is the only case and cheap, and names[0] alone reaches g.
    assert covered(record, ["t.py::test_e"]) == [*names[1:-1], "t.py::test_b"]
    # Then what is left is too little.
    record.tests["f"] -= {"t.py::test_e[0]", "t.py::test_f", names[0]}
    assert covered(record, ["t.py::test_e"]) == [*names[1:5], "t.py::test_b"]


def test_every_fault_of_the_list_can_be_put_into_the_code() -> None:
    for mutation in MUTATIONS:
        file_of(mutation, ROOT)
        assert all((ROOT / "tests" / test).exists() for test in mutation.tests.split()), mutation


def test_each_slow_file_is_in_one_share_and_shares_are_alike() -> None:
    counts = {f"tests/test_{k}.py": 1 + k % 7 for k in range(60)}
    share_of = shares_of(counts, 5)
    assert set(share_of) == set(counts)
    sizes = [sum(counts[file] for file in counts if share_of[file] == share) for share in range(5)]
    assert max(sizes) - min(sizes) <= 2
    assert share_of == shares_of(dict(reversed(counts.items())), 5)


def test_each_round_starts_a_share_at_a_later_file() -> None:
    files = [f"tests/test_{k}.py" for k in range(12)]
    rounds = [in_order(files, number, 5) for number in range(5, 10)]
    assert all(sorted(order) == sorted(files) for order in rounds)
    assert [files.index(order[0]) for order in rounds] == [0, 2, 4, 7, 9]
    # In a round that leaves a quarter of the files, another round begins with these files.
    assert set().union(*(order[:9] for order in rounds)) == set(files)
    assert in_order([], 3, 5) == []


SLOW_TESTS = """
import pytest

def test_without_a_limit(): pass

@pytest.mark.timeout(20)
def test_short(): pass

@pytest.mark.timeout(timeout=600)
def test_long(): pass
"""


@pytest.mark.parametrize(
    ("minutes", "passed", "said"),
    [
        ("9", 2, ["1 slow tests of this share were left out: their time limit is above the minutes left"]),
        ("0", 0, ["3 slow tests of this share were not begun: the slow share's minutes are over"]),
    ],
)
def test_slow_tests_that_could_outlast_the_minutes_are_not_begun(
    tmp_path: Path, minutes: str, passed: int, said: list[str]
) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW_TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.support.slow_share", "--slow-share", "1"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--slow-minutes", minutes],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line for line in run.stdout.splitlines() if "of this share" in line] == said
    assert (f"{passed} passed" in run.stdout) == (passed > 0)
