"""Two independent implementations of the layout rules must cut alike."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import jax_impl.layout
import torch_impl.layout

DIMENSION = st.one_of(st.integers(0, 8), st.sampled_from([11, 13, 16, 24, 31, 64, 97, 331, 883]))
SHAPE = st.lists(DIMENSION, max_size=4).map(tuple)
GROUP = st.lists(SHAPE, max_size=12).map(lambda shapes: {f"p{i}": shape for i, shape in enumerate(shapes)})
SHARDS = st.one_of(st.integers(1, 9), st.integers(1, 1000))
GRANULARITY = st.one_of(
    st.just(("row", 1)), st.just(("tensor", 1)), st.tuples(st.just("block"), st.integers(1, 40))
)


@settings(max_examples=1000, deadline=None)
@given(GROUP, SHARDS, GRANULARITY)
def test_both_packages_plan_the_same_layout(shapes, num_shards, granularity):
    ours = torch_impl.layout.plan_layout(shapes, num_shards, granularity=granularity[0], rows=granularity[1])
    theirs = jax_impl.layout.plan_layout(shapes, num_shards, granularity=granularity[0], rows=granularity[1])
    assert theirs.to_json() == ours.to_json()
    assert theirs.fingerprint == ours.fingerprint
    assert theirs.overhead() == ours.overhead()
    assert theirs.padded_size == ours.padded_size
    for rank in {0, num_shards // 2, num_shards - 1}:
        assert theirs.row_ranges(rank) == ours.row_ranges(rank)
    for name in shapes:
        assert tuple(theirs.row_bounds(name)) == ours.row_bounds(name)


@settings(max_examples=500, deadline=None)
@given(GROUP, SHARDS)
def test_each_package_reads_the_layout_json_of_the_other(shapes, num_shards):
    ours = torch_impl.layout.plan_layout(shapes, num_shards)
    theirs = jax_impl.layout.plan_layout(shapes, num_shards)
    assert torch_impl.layout.Layout.from_json(theirs.to_json()) == ours
    assert jax_impl.layout.Layout.from_json(ours.to_json()) == theirs


@settings(max_examples=500, deadline=None)
@given(SHAPE, st.data())
def test_both_packages_cut_row_ranges_into_the_same_boxes(shape, data):
    _, num_rows = torch_impl.layout.rows_of(shape)
    r0 = data.draw(st.integers(0, num_rows))
    r1 = data.draw(st.integers(r0, num_rows))
    ours = [(tuple(b.offsets), tuple(b.sizes)) for b in torch_impl.layout.row_boxes(shape, r0, r1)]
    theirs = [(tuple(b.offsets), tuple(b.sizes)) for b in jax_impl.layout.row_boxes(shape, r0, r1)]
    assert theirs == ours
