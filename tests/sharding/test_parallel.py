"""Model axes of a policy: what ``[mesh]`` and ``[[parallel]]`` may say, and what is cut by which entry."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.sharding import (
    Cut,
    ParallelPolicy,
    PolicyError,
    ShardingPolicy,
    UnitPolicy,
    check_cuts,
    local_ranges,
    local_shape,
)
from bridge.core.sharding.policy.mesh_axes import MODEL_AXES, REFUSED_AXES
from tests.support.examples import examples

ROOT = UnitPolicy("")
MESH = {"dp": "all", "tp": 2, "ep": 2}
UP = ParallelPolicy("layers.*.up", "tp", "colwise")
PATHS = ["", "layers", "layers.0", "layers.0.up", "layers.0.up.weight", "layers.1", "layers.1.up", "head"]


def policy(*parallel: ParallelPolicy, **mesh: Any) -> ShardingPolicy:
    return ShardingPolicy((ROOT,), mesh or MESH, parallel=parallel)


def parse(mesh: str, parallel: str) -> ShardingPolicy:
    return ShardingPolicy.parse(f'[mesh]\n{mesh}\n[[unit]]\nmatch = ""\n{parallel}', "m.toml")


@pytest.mark.parametrize("name", [*MODEL_AXES, "TP", "Expert"])
def test_axes_of_models_are_told_from_data_parallel_ones_by_name(name: str) -> None:
    sharding = policy(**{"outer": 2, "dp": "all", name: 4})
    assert sharding.data_axes == ("outer", "dp")
    assert sharding.model_axes == (name,)
    assert sharding.mesh_sizes(16) == {"outer": 2, "dp": 2, name: 4}
    assert sharding.data_ranks(16) == 4
    with pytest.raises(
        PolicyError, match=r"expected axes of 12 devices in all, got outer = 2 x dp = \"all\""
    ):
        sharding.mesh_sizes(12)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tp": 2, "dp": 4}, "[mesh]: expected data-parallel axes before model axes, got tp, dp"),
        ({"a": 2, "tp": 4, "b": 2}, "[mesh]: expected data-parallel axes before model axes, got a, tp, b"),
        ({"tp": 2}, "expected one or two data-parallel axes, then at most two model axes, got tp"),
        ({"dp": 2, "tp": 2, "ep": 2, "mp": 2}, "then at most two model axes, got dp, tp, ep, mp"),
        ({"a": 2, "b": 2, "c": 2, "tp": 2}, "expected one or two data-parallel axes"),
        ({"dp": "all", "tp": "all"}, 'expected "all" for one axis at most, got it for dp, tp'),
        *(({"dp": 2, name: 2}, f"axis {name!r} is named for context or pipeline") for name in REFUSED_AXES),
    ],
)
def test_meshes_that_cannot_be(mesh: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        policy(**mesh)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('axis = "tp"\nstyle = "colwise"', "[[parallel]] 1: match: expected dotted paths, got none"),
        (
            'match = "a"\nstyle = "colwise"',
            "[[parallel]] 1: axis: expected the name of a model axis, got none",
        ),
        ('match = "a"\naxis = "tp"', "[[parallel]] 1: expected style or dimension, got none of them"),
        ('match = "a"\naxis = "tp"\nstyle = "expert"\ndimension = 0', "got both, style 'expert'"),
        ('match = ""\naxis = "tp"\nstyle = "expert"', "match: expected dotted paths as in"),
        ('match = []\naxis = "tp"\nstyle = "expert"', "match: expected dotted paths as in"),
        ('match = ["a", "b..c"]\naxis = "tp"\nstyle = "expert"', "match: expected dotted paths as in"),
        ('match = ["a", 3]\naxis = "tp"\nstyle = "expert"', "match: expected dotted paths as in"),
        ('match = 3\naxis = "tp"\nstyle = "expert"', "match: expected dotted paths as in"),
        ('match = "a"\naxis = 3\nstyle = "expert"', "axis: expected the name of a model axis, got 3"),
        (
            'match = "a"\naxis = "tp"\nstyle = "columns"',
            "style: expected one of colwise, rowwise, expert, got",
        ),
        ('match = "a"\naxis = "tp"\ndimension = -1', "dimension: expected a number >= 0, got -1"),
        ('match = "a"\naxis = "tp"\ndimension = true', "dimension: expected a number >= 0, got True"),
        ('match = "a"\naxis = "tp"\nstyle = "colwise"\nfused = 1', "fused: expected a number >= 2 of equal"),
        ('match = "a"\naxis = "tp"\nstyle = "colwise"\nfused = [4]', "fused: expected a number >= 2"),
        ('match = "a"\naxis = "tp"\nstyle = "colwise"\nfused = [4, 0]', "fused: expected a number >= 2"),
        ('match = "a"\naxis = "tp"\nstyle = "colwise"\nfused = true', "fused: expected a number >= 2"),
        (
            'match = "a"\naxis = "tp"\nstile = "colwise"',
            "stile: expected no other keys than match, axis, style",
        ),
        (
            'match = "a"\naxis = "mp"\nstyle = "colwise"',
            "[[parallel]] 1: axis: expected a model axis of [mesh] (tp), got 'mp', no axis of [mesh]",
        ),
        (
            'match = "a"\naxis = "dp"\nstyle = "colwise"',
            "[[parallel]] 1: axis: expected a model axis of [mesh] (tp), got 'dp', a data-parallel axis",
        ),
    ],
)
def test_entries_that_cannot_be(entry: str, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse("dp = 2\ntp = 2", f"[[parallel]]\n{entry}\n")
    assert str(caught.value).startswith("m.toml: [[parallel]] 1: ")
    assert message in str(caught.value)


def test_entries_need_a_model_axis_and_are_a_list_of_entries() -> None:
    with pytest.raises(PolicyError, match=r"expected a model axis of \[mesh\] \(none\), got 'tp'"):
        parse("dp = 2", '[[parallel]]\nmatch = "a"\naxis = "tp"\nstyle = "colwise"')
    with pytest.raises(PolicyError, match=r"m.toml: \[\[parallel\]\]: expected a list of tables"):
        parse("dp = 2\ntp = 2", '[parallel]\nmatch = "a"')
    with pytest.raises(PolicyError, match="policy: parallel: expected ParallelPolicy items, got"):
        policy("layers.*.up")


def test_strategies_and_placements_speak_of_data_parallel_axes_only() -> None:
    with pytest.raises(
        PolicyError, match="expected \\[mesh\\] with two data-parallel axes for 'hsdp', got dp"
    ):
        ShardingPolicy((UnitPolicy("", "hsdp"),), MESH)
    text = '[[unit]]\nmatch = "a"\nparameters = ["shard"]\ngradients = ["shard"]\noptimizer = ["shard"]\n'
    assert len(parse("dp = 2\ntp = 2", text).units) == 2
    both = text.replace('["shard"]', '["shard", "shard"]')
    with pytest.raises(PolicyError, match=r"expected one word for each data-parallel axis \(dp\), got 2"):
        parse("dp = 2\ntp = 2", both)


def test_an_axis_over_which_nothing_is_cut_is_an_error() -> None:
    policy(UP, dp=2, tp=2).check_model_axes()
    policy(dp=2, tp=2).check_model_axes({"tp"})
    for sharding in (policy(dp=2, tp=2), policy(UP, **MESH)):
        axis = sharding.model_axes[-1]
        with pytest.raises(PolicyError) as caught:
            sharding.check_model_axes({"other"})
        message = str(caught.value)
        assert message.startswith(f"policy: [mesh] {axis}: nothing is cut over {axis!r}")
        assert f'expected a [[parallel]] entry with match, axis = "{axis}" and style' in message


def test_entries_find_modules_and_parameters() -> None:
    weight = ParallelPolicy(("layers.1.*", "layers.*.up.weight"), "ep", dimension=1)
    entries = policy(UP, weight).parallel_of(PATHS)
    assert entries == {
        "layers.0.up": (UP,),
        "layers.0.up.weight": (weight,),
        "layers.1.up": (UP, weight),
    }
    assert list(entries) == ["layers.0.up", "layers.0.up.weight", "layers.1.up"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [UP, ParallelPolicy(("layers.*.down", "blocks.*"), "tp", "rowwise")],
            "policy: [[parallel]] 2: match: expected modules or parameters that 'layers.*.down' or 'blocks.*' matches, "
            "got none; near: layers.",
        ),
        (
            [UP, ParallelPolicy("layers.1.up", "tp", "rowwise")],
            "[[parallel]] 2: match: expected parameters that no other entry cuts over 'tp', got 'layers.1.up', which "
            "[[parallel]] 1 cuts",
        ),
    ],
)
def test_entries_that_do_not_fit_a_model(entries: list[ParallelPolicy], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        policy(*entries).parallel_of(PATHS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "cuts", "message"),
    [
        (
            (6, 4),
            [Cut("tp", 2)],
            "w (6, 4): expected a parameter with dimension 2, to cut it over 'tp', got 2",
        ),
        ((), [Cut("tp", 0)], "w (): expected a parameter with dimension 0, to cut it over 'tp', got 0"),
        ((6, 4), [Cut("tp", 0), Cut("tp", 1)], "w (6, 4): expected one cut over 'tp', got several"),
        ((6, 4), [Cut("tp", 0), Cut("ep", 0)], "expected one axis that cuts dimension 0, got 'tp' and 'ep'"),
        ((7, 4), [Cut("tp", 0)], "dimension 0 to be cut over tp = 2 in equal parts, got 7, which 2 does not"),
        ((6, 4), [Cut("tp", 0, (1, 1))], "got 6, 3 of a fused tensor, which 2 does not divide"),
        ((7, 4), [Cut("tp", 0, (1, 1))], "tensors of relative sizes [1, 1], got 7, which 2 does not divide"),
    ],
)
def test_parameters_that_cannot_be_cut(shape: tuple[int, ...], cuts: list[Cut], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        check_cuts("w", shape, cuts, {"tp": 2, "ep": 3})
    assert message in str(caught.value)


@examples(100)
@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 4), st.integers(1, 3))
def test_ranks_have_equal_parts_of_each_fused_tensor(fused: list[int], ranks: int, unit: int) -> None:
    fused = fused if len(fused) > 1 else []
    cut = Cut("tp", 1, tuple(fused))
    size = ranks * unit * (sum(fused) or 1)
    check_cuts("w", (3, size), [cut], {"tp": ranks})
    held = [
        [index for start, stop in local_ranges(size, cut, ranks, rank) for index in range(start, stop)]
        for rank in range(ranks)
    ]
    assert {len(indices) for indices in held} == {local_shape((3, size), [cut], {"tp": ranks})[1]}
    assert sorted(itertools.chain(*held)) == list(range(size))
    start = 0
    for part in fused or [1]:
        stop = start + part * ranks * unit
        per_rank = [[index for index in indices if start <= index < stop] for indices in held]
        assert list(itertools.chain(*per_rank)) == list(range(start, stop))
        assert {len(indices) for indices in per_rank} == {part * unit}
        start = stop


def test_equal_fused_tensors_may_be_a_number() -> None:
    assert ParallelPolicy("a", "tp", "colwise", fused=2) == ParallelPolicy(
        ("a",), "tp", "colwise", fused=(1, 1)
    )
