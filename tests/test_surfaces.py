"""A part of one half that the other half lacks is a defect, unless ``tests/support/surface_rows.py`` tells why."""

from __future__ import annotations

from collections import Counter

import pytest

import jax_impl
import torch_impl
from jax_impl.options import ShardingOptions
from tests.support.surface_rows import ROWS
from tests.support.surfaces import atoms, on_page, table

HIDDEN = {"fully_shard": list(ShardingOptions.__annotations__)}
TORCH, JAX = atoms(torch_impl, {}), atoms(jax_impl, HIDDEN)


def told(side: str) -> list[str]:
    return [code for row in ROWS for code in getattr(row, side) if not code.startswith("~")]


@pytest.mark.parametrize(("side", "own", "others"), [("torch", TORCH, JAX), ("jax", JAX, TORCH)])
def test_each_part_of_one_half_is_in_the_other_or_has_a_reason(
    side: str, own: set[str], others: set[str]
) -> None:
    missing = sorted(own - others - set(told(side)))
    assert not missing, (
        f"{side}_impl has {', '.join(missing)}, which the other half has not: build the twin, or say in "
        "tests/support/surface_rows.py what answers it, or why nothing does"
    )


@pytest.mark.parametrize(("side", "own"), [("torch", TORCH), ("jax", JAX)])
def test_rows_speak_of_what_there_is(side: str, own: set[str]) -> None:
    assert sorted(set(told(side)) - own) == []


def test_a_row_with_an_empty_side_says_why() -> None:
    silent = [row for row in ROWS if not (row.torch and row.jax) and not row.why]
    assert not silent
    idle = [row for row in ROWS if row.torch and row.jax and row.why]
    assert not idle, "a reason is for an empty side"


def test_each_feature_has_one_row() -> None:
    names = Counter(row.feature for row in ROWS if row.feature)
    assert [name for name, count in names.items() if count > 1] == []


def test_the_page_of_features_shows_the_table() -> None:
    assert on_page() == table(ROWS), "run python -m tests.support.surfaces --write"
