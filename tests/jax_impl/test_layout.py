import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_impl.layout import GRANULARITIES, Layout, Slot, plan_layout, row_boxes

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "layouts.json").read_text())

dimension = st.one_of(st.integers(0, 9), st.sampled_from([16, 31, 64, 97]))
shape = st.lists(dimension, max_size=4).map(tuple)
group = st.lists(shape, max_size=9).map(lambda shapes: {f"p{i}": s for i, s in enumerate(shapes)})
shards = st.one_of(st.integers(1, 9), st.integers(1, 400))


@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_layouts_equal_the_golden_ones(case):
    golden = GOLDEN[case]
    shapes = {name: tuple(dims) for name, dims in golden["shapes"]}
    layout = plan_layout(shapes, golden["num_shards"], granularity=golden["granularity"], rows=golden["rows"])
    assert json.loads(layout.to_json()) == golden["layout"]
    assert layout.fingerprint == golden["fingerprint"]


@settings(max_examples=300, deadline=None)
@given(group, shards, st.sampled_from(GRANULARITIES), st.integers(1, 5))
def test_tensors_do_not_overlap_and_no_boundary_cuts_an_atom(shapes, num_shards, granularity, rows):
    layout = plan_layout(shapes, num_shards, granularity=granularity, rows=rows)
    assert {slot.name: slot.shape for slot in layout.slots} == shapes
    for slot in layout.slots:
        row = 1 if len(slot.shape) < 2 else slot.shape[-1]
        atom = {"row": row, "block": min(rows * row, slot.numel), "tensor": slot.numel}[granularity]
        boundaries = (rank * layout.shard_size - slot.offset for rank in range(1, num_shards))
        assert not any(cut % atom for cut in boundaries if 0 < cut < slot.numel)
    intervals = sorted((slot.offset, slot.offset + slot.numel) for slot in layout.slots if slot.numel)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(intervals))
    assert not intervals or intervals[-1][1] <= num_shards * layout.shard_size


@settings(max_examples=300, deadline=None)
@given(group, shards, st.sampled_from(GRANULARITIES))
def test_the_ranks_row_ranges_partition_every_parameter_as_their_shards_do(shapes, num_shards, granularity):
    layout = plan_layout(shapes, num_shards, granularity=granularity)
    for slot in layout.slots:
        bounds = layout.row_bounds(slot.name)
        assert bounds[0] == 0
        assert bounds[-1] == slot.num_rows
        owners = (slot.offset + np.arange(slot.num_rows) * slot.row_size) // max(layout.shard_size, 1)
        for rank, (r0, r1) in enumerate(itertools.pairwise(bounds)):
            assert np.array_equal(np.flatnonzero(owners == rank), np.arange(r0, r1))
    for rank in {0, num_shards // 2, num_shards - 1}:
        ranges = layout.row_ranges(rank)
        assert ranges == {s.name: layout.row_bounds(s.name)[rank : rank + 2] for s in layout.slots}


@settings(max_examples=200, deadline=None)
@given(group, shards)
def test_padding_never_exceeds_that_of_shards_of_whole_multiples_of_all_rows(shapes, num_shards):
    layout = plan_layout(shapes, num_shards)
    step = math.lcm(*(slot.row_size or 1 for slot in layout.slots))
    ideal = -(-layout.numel // num_shards)
    assert layout.shard_size <= -(-ideal // step) * step


@settings(max_examples=200, deadline=None)
@given(group, shards, st.sampled_from(GRANULARITIES))
def test_json_gives_the_same_layout_back_and_is_canonical(shapes, num_shards, granularity):
    layout = plan_layout(shapes, num_shards, granularity=granularity)
    again = Layout.from_json(json.dumps(json.loads(layout.to_json()), indent=2))
    assert again == layout
    assert again.to_json() == layout.to_json()
    assert again.fingerprint == layout.fingerprint


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.data())
def test_row_boxes_cover_exactly_the_rows_in_row_order(shape, data):
    slot = Slot("", shape, 0)
    r0 = data.draw(st.integers(0, slot.num_rows))
    r1 = data.draw(st.integers(r0, slot.num_rows))
    values = np.arange(slot.numel).reshape(shape)
    boxes = row_boxes(shape, r0, r1)
    found = [values[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes, strict=True))] for b in boxes]
    flat = np.concatenate([np.ravel(v) for v in found]) if found else np.zeros(0, int)
    assert np.array_equal(flat, np.arange(r0 * slot.row_size, r1 * slot.row_size))
    assert all(0 not in box.sizes for box in boxes)


def test_the_picture_in_the_module_is_true():
    layout = plan_layout({"w": (5, 4), "b": (3,)}, num_shards=3)
    assert (layout.shard_size, layout.padded_size) == (8, 24)
    assert [layout.row_ranges(rank)["w"] for rank in range(3)] == [(0, 2), (2, 4), (4, 5)]
    assert [layout.row_ranges(rank)["b"] for rank in range(3)] == [(0, 0), (0, 0), (0, 3)]
    assert layout.overhead() == pytest.approx(1 / 23)
    assert "rows 0: 0-2, 1: 2-4, 2: 4-5" in str(layout)


def test_a_layout_that_cuts_a_row_is_refused():
    with pytest.raises(
        ValueError, match=r"between rows of parameter 'w' \(every 4 elements\), got one after 6"
    ):
        Layout(2, 8, "row", 1, (Slot("w", (3, 4), 2),))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((Slot("a", (4,), 0), Slot("b", (4,), 3)), "'b' at element 4 or later"),
        ((Slot("a", (9,), 8),), "'a' to end within 2 x 8"),
        ((Slot("a", (4,), 0), Slot("a", (4,), 8)), "'a' more than once"),
    ],
)
def test_slots_that_overlap_leave_the_buffer_or_repeat_are_refused(slots, message):
    with pytest.raises(ValueError, match=message):
        Layout(2, 8, "row", 1, slots)


@pytest.mark.parametrize(
    ("shapes", "num_shards", "keywords", "message"),
    [
        ({"w": (3, -1)}, 2, {}, "'w': expected dimensions >= 0"),
        ({"w": (3,)}, 0, {}, "num_shards >= 1, got 0"),
        ({"w": (3,)}, 2, {"granularity": "column"}, "granularity among .*, got 'column'"),
        ({"w": (3,)}, 2, {"granularity": "block", "rows": 0}, "rows >= 1, got 0"),
    ],
)
def test_bad_requests_are_refused_with_what_was_expected(shapes, num_shards, keywords, message):
    with pytest.raises(ValueError, match=message):
        plan_layout(shapes, num_shards, **keywords)


@pytest.mark.parametrize(
    "change",
    [
        {"num_shards": "2"},
        {"shard_size": True},
        {"slots": 7},
        {"slots": [{"name": "w", "shape": 3, "offset": 0}]},
        {"slots": [{"name": "w", "shape": [2.0], "offset": 0}]},
        {"slots": [{"name": "w", "offset": 0}]},
        {"extra": 1},
    ],
)
def test_layout_json_of_the_wrong_form_is_refused(change):
    value = json.loads(plan_layout({"w": (4,)}, 2).to_json())
    with pytest.raises(ValueError, match="layout JSON"):
        Layout.from_json(json.dumps({**value, **change}))


def test_many_tensors_over_many_shards_are_planned():
    shapes = {f"p{i}": (i % 97 + 1, (64, 128, 513)[i % 3]) for i in range(20_000)}
    layout = plan_layout(shapes, 4096)
    assert layout.overhead() < 0.01
