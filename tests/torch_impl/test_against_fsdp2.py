"""The table of programs: what each does with FSDP2 it does with ours, or what differs does so by design."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import RankError, RankGroup
from tests.support.torch_impl.comparison import (
    BY_DESIGN,
    FAILED,
    NOT_SHOWN,
    SAME,
    Program,
    Raised,
    compared,
    show,
)
from tests.torch_impl.beside_stock.table import ITEMS, PROGRAMS


def test_every_item_is_there() -> None:
    assert sorted({program.item for program in ITEMS}) == list(range(1, 15))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=[pytest.mark.slow] if program.slow else [], id=program.name)
        for program in PROGRAMS
    ],
)
def test_programs_do_the_same_as_with_fsdp2_or_differ_by_design(ranks: RankGroup, program: Program) -> None:
    shown = show(ranks, program)
    if shown.status == NOT_SHOWN:
        pytest.skip(str(shown))
    assert shown.status == (BY_DESIGN if program.by_design else SAME), str(shown)
    # A reason that nothing needs any more is taken out.
    assert {line.name for line in shown.lines if line.status == BY_DESIGN} == set(program.by_design), str(
        shown
    )


def test_a_fact_fails_that_differs_without_a_reason_on_any_rank() -> None:
    item = next(program for program in ITEMS if program.item == 4)
    same = {"a": 1.0, "b": "x"}
    for other in ({"a": 1.1, "b": "x"}, {"a": 1.0}, {"a": 1.0, "b": Raised("x")}, {"a": 1, "b": "x"}):
        lines = compared(item, [[same, same], [same, other]])
        assert [line.status for line in lines].count(FAILED) == 1
    assert [line.status for line in compared(item, [[same, same]])] == [SAME, SAME]
    # An error of both is none that counts as the same.
    raised = {"a": Raised("x")}
    assert compared(item, [[raised, raised]])[0].status == FAILED
    # Facts inside of facts are compared, too, and may have a tolerance of their own.
    deep = [{"a": {"b": [1.0, 2.0]}}, {"a": {"b": [1.0, 2.0001]}}]
    assert compared(item, [deep])[0].status == FAILED
    loose = Program(item.run, within={"a": 1e-3})
    assert compared(loose, [deep])[0].status == SAME


def test_ranks_that_do_not_answer_are_a_verdict() -> None:
    class Silent(RankGroup):
        def run(self, *_: Any, **__: Any) -> list[Any]:
            raise RankError("rank 1 of 2: no answer within 240 s")

    shown = show(Silent(), next(program for program in ITEMS if program.item == 4))
    assert shown.status == FAILED
    assert "no answer" in str(shown)
