"""Two independent implementations of the layout rules must cut alike."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_impl.layout
import torch_impl.layout
from tests.bench.layout_groups import reference_groups

DIMENSION = st.one_of(st.integers(0, 8), st.sampled_from([11, 13, 16, 24, 31, 64, 97, 331, 883]))
SHAPE = st.lists(DIMENSION, max_size=4).map(tuple)
GROUP = st.lists(SHAPE, max_size=14).map(lambda shapes: {f"p{i}": shape for i, shape in enumerate(shapes)})
SHARDS = st.one_of(st.integers(1, 9), st.integers(1, 1000))
GRAIN = st.one_of(
    st.sampled_from(["row", "tensor", "block"]), st.integers(1, 40).map(lambda n: f"block({n})")
)
# Seven units at most are told apart while buffers are chosen, and sixty-four kinds improved.
MANY = (
    st.integers(8, 90)
    .flatmap(lambda n: st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=n, max_size=n))
    .map(lambda shapes: {f"p{i}": shape for i, shape in enumerate(shapes)})
)


@st.composite
def requests(draw: st.DrawFn, groups: st.SearchStrategy[dict[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Arguments of ``plan_layout``."""
    shapes = draw(groups)
    return {
        "shapes": shapes,
        "num_shards": draw(SHARDS),
        "granularity": {name: draw(GRAIN) for name in shapes if draw(st.booleans())}
        if draw(st.booleans())
        else draw(GRAIN),
        "rows": draw(st.integers(1, 40)),
        "max_buffers": draw(st.integers(1, 3)),
    }


def unit_of(shape: tuple[int, ...], granularity: str, rows: int) -> int:
    """Elements that stay together, from the words of the contract."""
    row = shape[-1] if len(shape) > 1 else 1
    if granularity == "row":
        return row
    if granularity == "tensor":
        return math.prod(shape)
    blocks = rows if granularity == "block" else int(granularity.removeprefix("block(")[:-1])
    return min(blocks * row, math.prod(shape))


def assert_guarantees(layout: torch_impl.layout.Layout, arguments: dict[str, Any]) -> None:
    """Every tensor once, whole and in bounds; no overlap; equal shards whose boundaries cut no unit; little padding."""
    shapes, grains = arguments["shapes"], arguments["granularity"]
    assert [(slot.name, slot.shape) for slot in layout.slots] == list(shapes.items())
    assert len(layout.shard_sizes) <= arguments["max_buffers"]
    assert layout.num_shards == arguments["num_shards"]
    held: list[list[tuple[int, int]]] = [[] for _ in layout.shard_sizes]
    for slot in layout.slots:
        if not math.prod(slot.shape):
            continue
        size, end = layout.shard_sizes[slot.buffer], slot.offset + math.prod(slot.shape)
        held[slot.buffer].append((slot.offset, end))
        grain = grains.get(slot.name, "row") if isinstance(grains, dict) else grains
        unit = unit_of(slot.shape, grain, arguments["rows"])
        first = (slot.offset // size + 1) * size
        assert not any((boundary - slot.offset) % unit for boundary in range(first, end, size))
    for size, ranges in zip(layout.shard_sizes, held, strict=True):
        ends = [0, *itertools.chain(*sorted(ranges)), layout.num_shards * size]
        assert ends == sorted(ends)
    total = sum(math.prod(shape) for shape in shapes.values())
    assert total <= layout.padded_size <= total * layout.num_shards


def assert_same(arguments: dict[str, Any]) -> None:
    ours = torch_impl.layout.plan_layout(**arguments)
    theirs = jax_impl.layout.plan_layout(**arguments)
    assert_guarantees(ours, arguments)
    assert torch_impl.layout.Layout.from_json(theirs.to_json()) == ours
    assert jax_impl.layout.Layout.from_json(ours.to_json()) == theirs
    assert theirs.to_json() == ours.to_json()
    assert theirs.fingerprint == ours.fingerprint
    assert theirs.overhead() == ours.overhead()
    assert theirs.shard_size == ours.shard_size
    assert theirs.padded_size == ours.padded_size
    for rank in {0, ours.num_shards // 2, ours.num_shards - 1}:
        assert theirs.row_ranges(rank) == ours.row_ranges(rank)
    for name in arguments["shapes"]:
        assert tuple(theirs.row_bounds(name)) == ours.row_bounds(name)


@settings(max_examples=2500, deadline=None)
@given(requests(GROUP))
def test_both_packages_plan_the_same_layout(arguments):
    assert_same(arguments)


@settings(max_examples=250, deadline=None)
@given(requests(MANY))
def test_both_packages_plan_the_same_layout_of_many_kinds(arguments):
    assert_same(arguments)


@pytest.mark.parametrize("name", reference_groups())
def test_both_packages_plan_the_same_layout_of_real_groups(name):
    shapes = reference_groups()[name]
    if len(shapes) > 2000:
        shapes = dict(itertools.islice(shapes.items(), 2000))
    for num_shards in (8, 64, 256, 1024, 4096, 16384):
        ours = torch_impl.layout.plan_layout(shapes, num_shards)
        assert jax_impl.layout.plan_layout(shapes, num_shards).to_json() == ours.to_json()


@settings(max_examples=500, deadline=None)
@given(SHAPE, st.data())
def test_both_packages_cut_row_ranges_into_the_same_boxes(shape, data):
    _, num_rows = torch_impl.layout.rows_of(shape)
    r0 = data.draw(st.integers(0, num_rows))
    r1 = data.draw(st.integers(r0, num_rows))
    ours = [(tuple(b.offsets), tuple(b.sizes)) for b in torch_impl.layout.row_boxes(shape, r0, r1)]
    theirs = [(tuple(b.offsets), tuple(b.sizes)) for b in jax_impl.layout.row_boxes(shape, r0, r1)]
    assert theirs == ours
