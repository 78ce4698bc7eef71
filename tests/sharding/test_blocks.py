"""Blocks of rows in stacks of matrices start anew at each matrix."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.sharding import Layout, plan_layout
from tests.support.examples import examples

STACK = st.lists(st.integers(1, 7), min_size=3, max_size=4).map(tuple)


def assert_no_block_is_cut(layout: Layout, rows: int) -> None:
    for slot in layout.slots:
        matrix = slot.shape[-2]
        for bound in layout.row_bounds(slot.name):
            assert bound % matrix % rows == 0, (slot.name, bound)


@examples(500)
@given(st.lists(STACK, min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 9))
def test_no_boundary_lies_within_a_block_of_a_matrix(
    shapes: list[tuple[int, ...]], num_shards: int, rows: int
) -> None:
    named = {f"p{i}": shape for i, shape in enumerate(shapes)}
    layout = plan_layout(named, num_shards, granularity=f"block({rows})", align=1)
    assert_no_block_is_cut(layout, rows)
    for name, shape in named.items():
        assert layout.row_bounds(name)[-1] == math.prod(shape[:-1])


@pytest.mark.parametrize(
    ("rows", "shape", "bounds"),
    [
        (3, (4, 6, 5), (0, 6, 12, 18, 24)),
        # Ranks may begin within a matrix.
        (2, (2, 6, 5), (0, 4, 8, 12, 12)),
        # Seven rows are no blocks of three, so that matrices stay whole.
        (3, (4, 7, 5), (0, 7, 14, 21, 28)),
        (3, (2, 7, 5), (0, 7, 14, 14, 14)),
        # One matrix has room for a short last block.
        (3, (1, 7, 5), (0, 3, 6, 7, 7)),
        (9, (4, 7, 5), (0, 7, 14, 21, 28)),
    ],
)
def test_stacks_are_cut_at_their_matrices_blocks(
    rows: int, shape: tuple[int, ...], bounds: tuple[int, ...]
) -> None:
    layout = plan_layout({"experts": shape}, 4, granularity=f"block({rows})", align=1)
    assert_no_block_is_cut(layout, rows)
    assert layout.row_bounds("experts") == bounds


def test_a_layout_file_whose_blocks_run_on_is_read_as_it_is() -> None:
    text = (
        '{"num_shards":2,"shard_sizes":[75],"slots":'
        '[{"block":3,"buffer":0,"name":"experts","offset":0,"shape":[4,7,5]}]}'
    )
    layout = Layout.from_json(text)
    assert layout.to_json() == text
    assert layout.row_bounds("experts") == (0, 15, 28)
