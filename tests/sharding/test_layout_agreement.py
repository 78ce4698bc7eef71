"""Two independent implementations of the layout rules must cut alike, and refuse alike what is no layout."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bridge.core.sharding
import tests.sharding.second_planner.layout as second_planner
from tests.bench.layout_groups import reference_groups
from tests.bench.layout_rules import lcm_rule
from tests.sharding.golden import layouts as golden_layouts
from tests.support.examples import examples

GOLDEN = json.loads(golden_layouts.PATH.read_text())
DIMENSION = st.one_of(st.integers(0, 8), st.sampled_from([11, 13, 16, 24, 31, 64, 97, 331, 883]))
SHAPE = st.lists(DIMENSION, max_size=4).map(tuple)
GROUP = st.lists(SHAPE, max_size=14).map(lambda shapes: {f"p{i}": shape for i, shape in enumerate(shapes)})
SHARDS = st.one_of(st.integers(1, 9), st.integers(1, 1000))
ALIGN = st.one_of(st.just(1), st.just("auto"), st.sampled_from([2, 3, 6, 8, 128]), st.integers(1, 400))
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
        "align": draw(ALIGN),
    }


def unit_of(shape: tuple[int, ...], granularity: str, rows: int) -> int:
    """Elements that stay together, from the words of the contract."""
    row = shape[-1] if len(shape) > 1 else 1
    if granularity == "row":
        return row
    if granularity == "tensor":
        return math.prod(shape)
    block = row * (rows if granularity == "block" else int(granularity.removeprefix("block(")[:-1]))
    matrix = math.prod(shape[-2:])
    # One matrix may end in a short block; of several, all are cut alike.
    is_matrix = matrix == math.prod(shape)
    return min(block, matrix) if is_matrix or matrix % block == 0 else matrix


def assert_guarantees(layout: bridge.core.sharding.Layout, arguments: dict[str, Any]) -> None:
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
    align = layout.align
    assert align == arguments.get("align", 1) or (arguments["align"] == "auto" and 128 % align == 0)
    assert not any(size % align for size in layout.shard_sizes)
    # Starts on tiles may cost one part in 2000.
    assert total <= layout.padded_size
    assert layout.shard_size * 2000 <= -(-total // align) * align * 2001


def assert_same(arguments: dict[str, Any]) -> None:
    ours = bridge.core.sharding.plan_layout(**arguments)
    theirs = second_planner.plan_layout(**arguments)
    assert_guarantees(ours, arguments)
    assert bridge.core.sharding.Layout.from_json(theirs.to_json()) == ours
    assert second_planner.Layout.from_json(ours.to_json()) == theirs
    assert theirs.to_json() == ours.to_json()
    assert theirs.fingerprint == ours.fingerprint
    assert theirs.overhead() == ours.overhead()
    assert theirs.shard_size == ours.shard_size
    assert theirs.padded_size == ours.padded_size
    assert tuple(map(theirs.columns, range(len(theirs.shard_sizes)))) == ours.shard_slices
    for rank in {0, ours.num_shards // 2, ours.num_shards - 1}:
        assert theirs.row_ranges(rank) == ours.row_ranges(rank)
        for slot in theirs.slots:
            r0, r1 = ours.row_range(slot.name, rank)
            if r0 < r1:
                assert theirs.start_in_shard(slot, rank, r0) == ours.shard_start(slot.name, rank)
    for name in arguments["shapes"]:
        assert tuple(theirs.row_bounds(name)) == ours.row_bounds(name)


@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_the_second_planner_plans_the_golden_layouts(case):
    golden = GOLDEN[case]
    shapes = {name: tuple(dims) for name, dims in golden["shapes"]}
    keywords = {key: golden[key] for key in ("granularity", "rows", "max_buffers")}
    keywords["align"] = golden.get("align", 1)
    layout = second_planner.plan_layout(shapes, golden["num_shards"], **keywords)
    assert json.loads(layout.to_json()) == golden["layout"]
    assert layout.fingerprint == golden["fingerprint"]


@examples(2500)
@given(requests(GROUP))
def test_both_planners_plan_the_same_layout(arguments):
    assert_same(arguments)


@examples(250)
@given(requests(MANY))
def test_both_planners_plan_the_same_layout_of_many_kinds(arguments):
    assert_same(arguments)


@pytest.mark.fast_cases(
    "DeepSeek-V3 layer, 2-D",
    "Qwen2.5-VL ViT whole",
    "GPT-2 XL whole",
    "Mixtral whole, 2-D",
    "Llama3-405B whole",
)
@pytest.mark.parametrize("name", reference_groups())
def test_both_planners_plan_the_same_layout_of_real_groups(name):
    shapes = reference_groups()[name]
    if len(shapes) > 2000:
        shapes = dict(itertools.islice(shapes.items(), 2000))
    for num_shards in (8, 64, 256, 1024, 4096, 16384):
        for align in (1, 128, "auto"):
            ours = bridge.core.sharding.plan_layout(shapes, num_shards, align=align)
            assert second_planner.plan_layout(shapes, num_shards, align=align).to_json() == ours.to_json()


@examples(800)
@given(GROUP, SHARDS, ALIGN)
def test_padding_is_never_above_that_of_one_common_multiple(shapes, num_shards, align):
    """Against an independent implementation of Megatron-FSDP's rule, with chunks of whole tiles."""
    layout = bridge.core.sharding.plan_layout(shapes, num_shards, align=align)
    assert layout.padded_size <= lcm_rule(tuple(shapes.values()), num_shards, layout.align)


@pytest.mark.fast_cases("matrices0-7")
@pytest.mark.parametrize(
    ("matrices", "num_shards"),
    [
        ([(2, 8400), (8, 16800), (9, 12600), (3, 25200)], 7),
        ([(11, 12600), (11, 18900), (10, 21000)], 3),
    ],
)
def test_padding_is_not_above_it_in_groups_of_thousands_of_tensors_either(matrices, num_shards):
    shapes = {f"p{i}": shape for i, shape in enumerate([*matrices, *[(1,)] * 4200])}
    arguments = {
        "shapes": shapes,
        "num_shards": num_shards,
        "granularity": "row",
        "rows": 1,
        "max_buffers": 3,
    }
    for align in (1, 128):
        assert_same({**arguments, "align": align})
        layout = bridge.core.sharding.plan_layout(shapes, num_shards, align=align)
        assert layout.padded_size <= lcm_rule(tuple(shapes.values()), num_shards, align)


HUGE: list[dict[str, tuple[int, ...]]] = [
    {"a": (2**40, 2**40, 2), "b": (3,)},
    {"a": (2**64,), "b": (3,)},
    {"p": (1070083222954,), "q": (775769427930, 749704489572, 916858853095)},
    {"a": (2**40, 3), "b": (7, 2**40), "c": (2**40 - 1,), "d": ()},
]


@pytest.mark.parametrize("shapes", HUGE)
@pytest.mark.parametrize("granularity", ["row", "tensor", "block(128)"])
def test_both_planners_plan_the_same_layout_of_huge_tensors(shapes, granularity):
    for num_shards, align in itertools.product((3, 7, 10**6), (1, 128)):
        arguments = {"shapes": shapes, "num_shards": num_shards, "granularity": granularity, "align": align}
        ours = bridge.core.sharding.plan_layout(**arguments)
        assert second_planner.plan_layout(**arguments).to_json() == ours.to_json()
        if granularity == "tensor":
            assert all(slot.block == max(1, slot.num_rows) for slot in ours.slots)


@pytest.mark.parametrize("module", [bridge.core.sharding, second_planner])
@pytest.mark.parametrize(
    "arguments",
    [
        {"shapes": None},
        {"shapes": [1]},
        {"shapes": [("w", (2,), 3)]},
        {"shapes": [(["w"], (2,))], "granularity": {"w": "row"}},
        {"shapes": {"w": {3: 0}}},
        {"shapes": {"w": {5, 3}}},
        {"shapes": {"w": b"\x03"}},
        {"shapes": {"w": ([1], 2)}},
        {"shapes": {"w": np.ones(2, int)}},
        {"shapes": {"w": (np.int64(3),)}},
        {"shapes": {"w": (-1, 2)}},
        {"shapes": {"w": (True,)}},
        {"shapes": {"w": (2.0,)}},
        {"shapes": {3: (2,)}},
        {"shapes": [("w", (2,)), ("w", (3,))]},
        {"granularity": {1: "row", "z": "row"}},
        {"granularity": {"w": 32}},
        {"granularity": ["row"]},
        {"granularity": "block( 3)"},
        {"granularity": "block(03)"},
        {"rows": 0},
        {"rows": 1.5},
        {"max_buffers": 0},
        {"max_buffers": True},
        {"num_shards": 0},
        {"num_shards": "2"},
        {"align": 0},
        {"align": True},
        {"align": 128.0},
        {"align": "most"},
    ],
    ids=str,
)
def test_both_planners_refuse_bad_input(module, arguments):
    with pytest.raises(ValueError, match="expected"):
        module.plan_layout(**{"shapes": {"w": (4, 3)}, "num_shards": 2, **arguments})


SLOT = {"block": 1, "buffer": 0, "name": "w", "offset": 0, "shape": [4]}


@pytest.mark.parametrize("module", [bridge.core.sharding, second_planner])
@pytest.mark.parametrize(
    "change",
    [
        {"num_shards": "2"},
        {"num_shards": True},
        {"align": 1},
        {"align": 3},
        {"align": "2"},
        {"align": 2.0},
        {"shard_sizes": 2},
        {"num_shards": 4, "shard_sizes": [True]},
        {"shard_sizes": [2.0]},
        {"shard_sizes": [0]},
        {"slots": 7},
        {"slots": [7]},
        {"slots": [{**SLOT, "shape": 4}]},
        {"slots": [{**SLOT, "shape": [4.0]}]},
        {"slots": [{**SLOT, "block": 1.0}]},
        {"slots": [{**SLOT, "offset": "0"}]},
        {"slots": [{key: value for key, value in SLOT.items() if key != "shape"}]},
        {"slots": [{**SLOT, "extra": 1}]},
        {"extra": 1},
    ],
    ids=str,
)
def test_both_planners_refuse_json_of_the_wrong_form(module, change):
    value = json.loads(module.plan_layout({"w": (4,)}, 2).to_json())
    assert module.Layout.from_json(json.dumps(value)).num_shards == 2
    with pytest.raises(ValueError, match=r"expected .*got"):
        module.Layout.from_json(json.dumps({**value, **change}))


@pytest.mark.parametrize("module", [bridge.core.sharding, second_planner])
def test_both_planners_refuse_what_is_no_layout(module):
    for text in (None, 5, "[" * 100_000, "{", "{}", '{"num_shards":1,"shard_sizes":[2],"slots":[3]}'):
        with pytest.raises(ValueError, match="expected"):
            module.Layout.from_json(text)
    slot = module.Slot("w", (2,), 1, 0, 0)
    for shard_sizes, slots in (([2], (slot,)), ((2,), [slot]), (2, (slot,))):
        with pytest.raises(ValueError, match="expected"):
            module.Layout(1, shard_sizes, slots)


@examples(1000)
@given(requests(GROUP).filter(lambda arguments: arguments["shapes"]), st.data())
def test_both_planners_accept_the_same_edited_layouts(arguments, data):
    value = json.loads(bridge.core.sharding.plan_layout(**arguments).to_json())
    for _ in range(data.draw(st.integers(1, 2))):
        slot = data.draw(st.sampled_from(value["slots"]))
        field = data.draw(st.sampled_from(["block", "buffer", "offset", "name", "shard", "num_shards"]))
        if field == "name":
            slot["name"] = data.draw(st.sampled_from(["p0", "p1", "another"]))
        elif field == "shard" and value["shard_sizes"]:
            buffer = data.draw(st.integers(0, len(value["shard_sizes"]) - 1))
            value["shard_sizes"][buffer] += data.draw(st.integers(-3, 3))
        elif field == "num_shards":
            value["num_shards"] = max(1, value["num_shards"] + data.draw(st.integers(-1, 1)))
        elif field != "shard":
            slot[field] += data.draw(st.integers(-3, 3))
    read_back = []
    for module in (bridge.core.sharding, second_planner):
        try:
            read_back.append(json.loads(module.Layout.from_json(json.dumps(value)).to_json()))
        except ValueError:
            read_back.append(None)
    assert read_back[0] == read_back[1]
    assert read_back[0] in (None, value)


@pytest.mark.parametrize("module", [bridge.core.sharding, second_planner])
def test_more_buffers_than_units_are_not_searched_for(module):
    shapes = {"a": (7, 5), "b": (5, 7)}
    assert module.plan_layout(shapes, 3, max_buffers=10**9) == module.plan_layout(shapes, 3)


@examples(500)
@given(SHAPE, st.data())
def test_both_planners_cut_row_ranges_into_the_same_boxes(shape, data):
    _, num_rows = bridge.core.sharding.rows_of(shape)
    r0 = data.draw(st.integers(0, num_rows))
    r1 = data.draw(st.integers(r0, num_rows))
    ours = [(tuple(b.offsets), tuple(b.sizes)) for b in bridge.core.sharding.row_boxes(shape, r0, r1)]
    theirs = [(tuple(b.offsets), tuple(b.sizes)) for b in second_planner.row_boxes(shape, r0, r1)]
    assert theirs == ours
