"""``python -m tests.torch_impl.beside_stock``: what programs written for FSDP2 do is the same, or differs by design."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import RankError, RankGroup
from tests.torch_impl.beside_stock.items import ITEMS
from tests.torch_impl.beside_stock.loading import by_process
from tests.torch_impl.beside_stock.shown import (
    BY_DESIGN,
    FAILED,
    NOT_SHOWN,
    SAME,
    Item,
    Raised,
    compared,
    show,
)
from tests.torch_impl.beside_stock.training import policy_file


def test_every_item_is_there() -> None:
    assert sorted({item.number for item in ITEMS}) == list(range(1, 15))


@pytest.mark.parametrize(
    "item",
    [
        # They start processes, which import torch or JAX.
        pytest.param(item, marks=[pytest.mark.slow] if item.program in (by_process, policy_file) else [])
        for item in ITEMS
    ],
    ids=lambda item: f"{item.number}-{item.program.__name__}",
)
def test_an_item_is_the_same_or_differs_by_design(ranks: RankGroup, item: Item) -> None:
    shown = show(ranks, item)
    if shown.status == NOT_SHOWN:
        pytest.skip(str(shown))
    assert shown.status == (BY_DESIGN if item.by_design else SAME), str(shown)
    # A reason that nothing needs any more is taken out.
    assert {line.name for line in shown.lines if line.status == BY_DESIGN} == set(item.by_design), str(shown)


def test_a_fact_fails_that_differs_without_a_reason_on_any_rank() -> None:
    item = next(item for item in ITEMS if item.number == 4)
    same = {"a": 1.0, "b": "x"}
    for other in ({"a": 1.1, "b": "x"}, {"a": 1.0}, {"a": 1.0, "b": Raised("x")}, {"a": 1, "b": "x"}):
        lines = compared(item, [[same, same], [same, other]])
        assert [line.status for line in lines].count(FAILED) == 1
    assert [line.status for line in compared(item, [[same, same]])] == [SAME, SAME]
    # An error of both is none that counts as the same.
    raised = {"a": Raised("x")}
    assert compared(item, [[raised, raised]])[0].status == FAILED


def test_ranks_that_do_not_answer_are_a_verdict() -> None:
    class Silent(RankGroup):
        def run(self, *_: Any, **__: Any) -> list[Any]:
            raise RankError("rank 1 of 2: no answer within 240 s")

    shown = show(Silent(), next(item for item in ITEMS if item.number == 4))
    assert shown.status == FAILED
    assert "no answer" in str(shown)
