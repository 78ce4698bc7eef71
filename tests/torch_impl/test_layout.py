"""The layout planner's guarantees, on random groups and on the golden plans."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_impl.layout as layout_module
from tests.golden import layouts as golden
from torch_impl.layout import Layout, Slot, plan_layout, row_boxes, rows_of

DIMENSION = st.one_of(st.integers(0, 6), st.sampled_from([7, 11, 13, 16, 24, 31, 64, 97]))
SHAPE = st.lists(DIMENSION, max_size=4).map(tuple)
GROUP = st.lists(SHAPE, max_size=10).map(lambda shapes: {f"p{i}": shape for i, shape in enumerate(shapes)})
SHARDS = st.one_of(st.integers(1, 9), st.integers(1, 1000))
GRANULARITY = st.one_of(
    st.just(("row", 1)), st.just(("tensor", 1)), st.tuples(st.just("block"), st.integers(1, 9))
)


def _atom(shape: tuple[int, ...], granularity: str, rows: int) -> int:
    row_size, num_rows = rows_of(shape)
    return {"row": 1, "block": min(rows, num_rows), "tensor": num_rows}[granularity] * row_size


@settings(max_examples=400, deadline=None)
@given(GROUP, SHARDS, GRANULARITY)
def test_no_boundary_cuts_an_atom_and_no_two_tensors_overlap(shapes, num_shards, granularity):
    plan = plan_layout(shapes, num_shards, granularity=granularity[0], rows=granularity[1])
    assert [(s.name, s.shape) for s in plan.slots] == list(shapes.items())
    owner = np.full(min(plan.padded_size, 3_000_000), -1)
    for i, slot in enumerate(plan.slots):
        end = slot.offset + slot.numel
        assert slot.offset >= 0
        assert end <= plan.padded_size
        assert (owner[slot.offset : end] == -1).all()
        owner[slot.offset : end] = i
        if not slot.numel:
            assert (slot.offset, slot.row_size, slot.num_rows) == (0, 0, 0)
            continue
        for rank in range(slot.offset // plan.shard_size + 1, -(-end // plan.shard_size)):
            assert (rank * plan.shard_size - slot.offset) % _atom(slot.shape, *granularity) == 0


@settings(max_examples=300, deadline=None)
@given(GROUP, SHARDS, GRANULARITY)
def test_the_rows_of_all_ranks_tile_every_tensor_and_are_what_their_shards_hold(
    shapes, num_shards, granularity
):
    plan = plan_layout(shapes, num_shards, granularity=granularity[0], rows=granularity[1])
    bounds = {name: plan.row_bounds(name) for name in shapes}
    for name, shape in shapes.items():
        assert len(bounds[name]) == num_shards + 1
        assert bounds[name][0] == 0
        assert bounds[name][-1] == rows_of(shape)[1]
        assert all(a <= b for a, b in pairwise(bounds[name]))
    for rank in {0, num_shards // 2, num_shards - 1}:
        ranges = plan.row_ranges(rank)
        assert list(ranges) == list(shapes)
        for slot in plan.slots:
            assert ranges[slot.name] == bounds[slot.name][rank : rank + 2]
            start = max(slot.offset, rank * plan.shard_size)
            stop = min(slot.offset + slot.numel, (rank + 1) * plan.shard_size)
            rows = ranges[slot.name][1] - ranges[slot.name][0]
            assert rows * slot.row_size == max(0, stop - start)


@settings(max_examples=300, deadline=None)
@given(SHAPE.filter(lambda shape: math.prod(shape) <= 20_000), st.data())
def test_row_boxes_tile_the_tensor_exactly_and_in_row_order(shape, data):
    row_size, num_rows = rows_of(shape)
    assert row_size * num_rows == math.prod(shape)
    cuts = data.draw(st.lists(st.integers(0, num_rows), max_size=6))
    elements = np.arange(math.prod(shape)).reshape(shape)
    read = []
    for r0, r1 in pairwise([0, *sorted(cuts), num_rows]):
        boxes = row_boxes(shape, r0, r1)
        assert (boxes == ()) == (r0 == r1)
        assert len(boxes) <= max(1, 2 * len(shape) - 3)
        for box in boxes:
            assert len(box.offsets) == len(box.sizes) == len(shape)
            region = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert elements[region].shape == box.sizes
            read.append(elements[region].ravel())
    assert np.array_equal(np.concatenate([np.empty(0), *read]), elements.ravel())


@settings(max_examples=200, deadline=None)
@given(GROUP, SHARDS, GRANULARITY)
def test_a_layout_survives_json_and_its_fingerprint_tells_layouts_apart(shapes, num_shards, granularity):
    plan = plan_layout(shapes, num_shards, granularity=granularity[0], rows=granularity[1])
    again = Layout.from_json(plan.to_json())
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert plan.to_json() == json.dumps(json.loads(plan.to_json()), sort_keys=True, separators=(",", ":"))
    assert plan_layout({**shapes, "another": (3,)}, num_shards).fingerprint != plan.fingerprint


@settings(max_examples=200, deadline=None)
@given(GROUP, SHARDS, GRANULARITY)
def test_the_shard_is_at_least_ideal_and_never_above_the_strict_grid(shapes, num_shards, granularity):
    plan = plan_layout(shapes, num_shards, granularity=granularity[0], rows=granularity[1])
    total = sum(math.prod(shape) for shape in shapes.values())
    assert plan.padded_size >= total
    assert plan.overhead() == (plan.padded_size / total - 1 if total else 0.0)
    atoms = [_atom(shape, *granularity) for shape in shapes.values() if math.prod(shape)]
    if total:
        grid = math.lcm(*atoms)
        assert plan.padded_size - total <= num_shards * grid + sum(set(atoms)) + grid


def test_the_relaxed_search_beats_the_strict_grid_on_odd_rows():
    plan = plan_layout(golden.ODD_ROWS, 5)
    assert plan.shard_size < math.lcm(*(shape[1] for shape in golden.ODD_ROWS.values()))
    assert plan.overhead() < 0.1


def test_a_shard_size_of_a_multiple_of_the_row_lets_one_tensor_span_all_shards():
    plan = plan_layout({"w": (64, 48)}, 16)
    assert plan.shard_size == 192
    assert plan.row_bounds("w") == tuple(range(0, 65, 4))


def test_more_shards_than_rows_leave_ranks_empty():
    plan = plan_layout({"w": (2, 5), "none": (0, 3)}, 4)
    assert sorted(b - a for a, b in pairwise(plan.row_bounds("w"))) == [0, 0, 1, 1]
    assert plan.row_bounds("none") == (0, 0, 0, 0, 0)


def test_the_golden_file_holds_the_current_plans():
    assert golden.PATH.read_text() == golden.render(golden.golden())


def test_the_golden_plans_load_as_valid_layouts():
    for entry in json.loads(golden.PATH.read_text()):
        assert Layout.from_json(json.dumps(entry["layout"])).fingerprint == entry["fingerprint"]


def test_the_picture_in_the_module_docstring_is_what_the_layout_prints():
    plan = plan_layout({"wq": (7, 9), "wo": (5, 7), "scale": (6,), "head": (3, 11)}, 4)
    documented = [line.strip() for line in (layout_module.__doc__ or "").splitlines()]
    printed = str(plan).splitlines()
    start = documented.index(printed[0])
    assert documented[start : start + len(printed)] == printed


def test_the_rendering_elides_the_middle_of_many_shards_and_names_empty_tensors():
    text = plan_layout({"w": (500, 3), "none": (0,)}, 100).render(width=10)
    assert "  ...\n" in text
    assert "rank 99 |" in text
    assert "rank 50 |" not in text
    assert "none (0,): no elements" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"w": (-1, 2)}, 2, "row", 1), r"shape of 'w': expected .* ints >= 0, got \(-1, 2\)"),
        (({"w": (2.0,)}, 2, "row", 1), r"shape of 'w': expected .* got \(2.0,\)"),
        (({3: (2,)}, 2, "row", 1), "name of a tensor: expected a str, got 3"),
        (({"w": (2,)}, 0, "row", 1), "num_shards: expected an int >= 1, got 0"),
        (({"w": (2,)}, True, "row", 1), "num_shards: expected an int >= 1, got True"),
        (({"w": (2,)}, 2, "column", 1), "granularity: expected one of row, block, tensor, got 'column'"),
        (({"w": (2,)}, 2, "block", 0), "rows: expected an int >= 1, got 0"),
    ],
)
def test_bad_input_raises_with_what_was_expected_and_found(arguments, message):
    shapes, num_shards, granularity, rows = arguments
    with pytest.raises(ValueError, match=message):
        plan_layout(shapes, num_shards, granularity=granularity, rows=rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_size": 8}, "'b': expected to end within the 16 elements"),
        ({"shard_size": -1}, "shard_size: expected an int >= 0, got -1"),
        ({"shard_size": 12}, r"'a': expected shard boundaries at multiples of 5 .* got one at 12"),
        (
            {"slots": (Slot("a", (4, 5), 0), Slot("b", (3,), 19))},
            "'b': expected at least 20, the end of 'a', got 19",
        ),
        (
            {"slots": (Slot("a", (4, 5), 0), Slot("a", (3,), 20))},
            "expected each once, got 'a' more than once",
        ),
        ({"num_shards": 0}, "num_shards: expected an int >= 1, got 0"),
        ({"granularity": "tensor"}, r"'a': expected shard boundaries at multiples of 20"),
    ],
)
def test_a_layout_that_breaks_a_guarantee_cannot_be_made(change, message):
    plan = Layout(2, 15, "row", 1, (Slot("a", (4, 5), 0), Slot("b", (3,), 20)))
    with pytest.raises(ValueError, match=message):
        replace(plan, **change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ("[]", r"layout: expected an object with keys .*, got \[\]"),
        ('{"num_shards":1}', "layout: expected an object with keys .*, got num_shards"),
        (
            '{"granularity":"row","num_shards":1,"rows":1,"shard_size":2,"slots":[{"name":"a","shape":[2]}]}',
            "layout slot: expected an object with keys name, offset, shape",
        ),
        (
            '{"granularity":"row","num_shards":1,"rows":1,"shard_size":4,"slots":'
            '[{"name":"a","shape":[2],"offset":0},{"name":"a","shape":[2],"offset":2}]}',
            "expected each once, got 'a' more than once",
        ),
        (
            '{"granularity":[],"num_shards":1,"rows":1,"shard_size":2,"slots":[]}',
            "granularity: expected one of",
        ),
    ],
)
def test_malformed_layout_json_raises_with_what_was_expected_and_found(text, message):
    with pytest.raises(ValueError, match=message):
        Layout.from_json(text)


def test_unknown_names_ranks_and_row_ranges_raise():
    plan = plan_layout({"w": (4, 3)}, 2)
    with pytest.raises(ValueError, match=r"expected one of the layout .* got 'v'"):
        plan.row_bounds("v")
    with pytest.raises(ValueError, match="rank: expected 0 <= rank < 2, got 2"):
        plan.row_ranges(2)
    with pytest.raises(ValueError, match=r"expected 0 <= r0 <= r1 <= 4, got r0=3, r1=5"):
        row_boxes((4, 3), 3, 5)


def test_a_hundred_thousand_tensors_over_sixteen_thousand_shards_are_planned():
    shapes = {f"t{i}": (i % 97 + 1, (256, 300, 333, 1001, 1536, 4304)[i % 6]) for i in range(100_000)}
    plan = plan_layout(shapes, 16_384)
    assert plan.overhead() < 0.01
