"""Whole checkpoint trees through the shipped families, and what planning refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from bridge.core.formats.tensors.base import Box, CheckpointError
from bridge.core.mapping import MappingError, MappingTable, Plan, load_mapping, make_plan, parse_mapping
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.decoder_trees import HEAD_DIM, LAYERS, dcp_arrays, expected_orbax
from tests.support.bridge.memory_reader import MemoryReader

FLOAT32 = np.dtype(np.float32)


def contents(plan: Plan, reader: MemoryReader) -> dict[str, np.ndarray]:
    return {name: tensor.read(reader, Box.whole(tensor.shape)) for name, tensor in plan.tensors.items()}


def assert_same(converted: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert converted.keys() == expected.keys()
    assert [name for name in expected if not same_bits(converted[name], expected[name])] == []


def table(text: str) -> MappingTable:
    return parse_mapping(text, "test.toml")


@pytest.mark.parametrize("family", ["decoder", "decoder_stacked"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("moments", [False, True])
def test_a_decoder_translates_to_the_tree_written_by_hand_and_back(
    family: str, tied: bool, moments: bool
) -> None:
    arrays = dcp_arrays(tied=tied, moments=moments)
    expected = expected_orbax(arrays, stacked=family == "decoder_stacked")
    mapping = load_mapping(family)

    dcp = MemoryReader("dcp", arrays)
    assert_same(contents(make_plan(dcp, "orbax", mapping), dcp), expected)
    orbax = MemoryReader("orbax", expected)
    back = make_plan(orbax, "dcp", mapping)
    assert_same(contents(back, orbax), arrays)
    assert {name: tensor.path for name, tensor in back.tensors.items()} == {
        name: info.path for name, info in dcp.tensors.items()
    }


def test_objects_keep_their_tree_paths() -> None:
    objects = {("optimizer", "param_groups", 0, "betas"): (0.9, 0.95), ("train", "note"): "x"}
    reader = MemoryReader("dcp", dcp_arrays(), objects)
    plan = make_plan(reader, "orbax", load_mapping("decoder"))
    assert plan.objects == {
        "optimizer/param_groups/0/betas": (
            ("optimizer", "param_groups", 0, "betas"),
            "optimizer.param_groups.0.betas",
        ),
        "train/note": (("train", "note"), "train.note"),
    }


def test_parameter_groups_are_a_list_in_dcp_even_when_stored_under_text_keys() -> None:
    objects = {("optimizer", "param_groups", "0", "lr"): 0.1, ("train", "0", "x"): 1}
    reader = MemoryReader("orbax", expected_orbax(dcp_arrays()), objects)
    plan = make_plan(reader, "dcp", load_mapping("decoder"))
    assert [path for path, _ in plan.objects.values()] == [
        ("optimizer", "param_groups", 0, "lr"),
        ("train", "0", "x"),
    ]


def test_objects_can_be_dropped() -> None:
    reader = MemoryReader("dcp", dcp_arrays(), {("model", "_extra_state"): "x", ("optimizer", "note"): 1})
    mapping = load_mapping("decoder")
    dropping = MappingTable(mapping.name, mapping.rules, mapping.axes, ("model._extra_state",))
    assert list(make_plan(reader, "orbax", dropping).objects) == ["optimizer/note"]


def test_without_a_mapping_names_pass_through_as_paths() -> None:
    arrays = dcp_arrays()
    plan = make_plan(MemoryReader("dcp", arrays), "orbax")
    assert plan.tensors["model/layers.0.attention.wq.weight"].path == (
        "model",
        "layers.0.attention.wq.weight",
    )
    assert len(plan.tensors) == len(arrays)


def test_two_paths_that_would_share_a_name_are_refused() -> None:
    reader = MemoryReader("orbax", {"a/b.c": np.zeros(2), "a.b/c": np.zeros(3)})
    with pytest.raises(CheckpointError, match=r"two tensors of memory would both be named a\.b\.c in dcp"):
        make_plan(reader, "dcp")


def test_another_model_is_refused_with_the_names_of_both() -> None:
    arrays = {f"model.blocks.{i}.w": random_bits((2, 2), FLOAT32, i) for i in range(12)}
    with pytest.raises(MappingError) as caught:
        make_plan(MemoryReader("dcp", arrays), "orbax", load_mapping("decoder"))
    message = str(caught.value)
    assert "is this another model?" in message
    assert "12 of 12 tensors match no rule: model.blocks.0.w, model.blocks.1.w" in message
    assert "model.blocks.4.w and 7 more" in message
    assert "10 of 11 rules found no tensor: embed.weight, layers.{i}.attention_norm.weight" in message


def test_a_required_weight_that_is_missing_is_refused() -> None:
    arrays = {name: array for name, array in dcp_arrays().items() if ".norm." not in f".{name}"}
    with pytest.raises(MappingError, match=r"1 of 11 rules found no tensor: norm\.weight\."):
        make_plan(MemoryReader("dcp", arrays), "orbax", load_mapping("decoder"))


def test_one_extra_tensor_is_refused_unless_dropped() -> None:
    arrays = dcp_arrays() | {"model.rope.inv_freq": np.ones(3, np.float32)}
    reader = MemoryReader("dcp", arrays)
    mapping = load_mapping("decoder")
    with pytest.raises(
        MappingError, match=r"1 of \d+ tensors match no rule: model\.rope\.inv_freq\. Mapping decoder"
    ):
        make_plan(reader, "orbax", mapping)
    dropping = MappingTable(mapping.name, mapping.rules, mapping.axes, ("model.rope.*",))
    plan = make_plan(reader, "orbax", dropping)
    assert plan.dropped == ("model.rope.inv_freq",)
    assert_same(contents(plan, reader), expected_orbax(dcp_arrays()))


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.state.lm_head.bias.exp_avg",
        "optimizer.state.lm_head.bias.step",
        "other",
    ],
)
def test_an_unknown_optimizer_entry_is_refused(name: str) -> None:
    # Without a shape, "other" would be a number of the program, which is copied.
    arrays = dcp_arrays() | {name: np.full((2,) if name == "other" else (), 40, np.float32)}
    with pytest.raises(MappingError, match=re.escape(f"tensors match no rule: {name}")):
        make_plan(MemoryReader("dcp", arrays), "orbax", load_mapping("decoder"))


def test_a_tensor_that_two_rules_match_is_refused() -> None:
    rules = '[[rule]]\ntorch = "a.{i}"\njax = "a/{i}"\n[[rule]]\ntorch = "a.0"\njax = "b"\n'
    with pytest.raises(
        MappingError, match=r"tensor model\.a\.0 matches two rules: a\.\{i\} <-> a/\{i\} and a\.0 <-> b"
    ):
        make_plan(MemoryReader("dcp", {"model.a.0": np.zeros(2)}), "orbax", table(rules))


def test_a_missing_layer_is_named() -> None:
    arrays = {
        name: array for name, array in dcp_arrays().items() if ".layers.1.attention.wq." not in f".{name}"
    }
    with pytest.raises(
        MappingError,
        match=r"found no tensor layers\.1\.attention\.wq\.weight, which the rule needs with",
    ):
        make_plan(MemoryReader("dcp", arrays), "orbax", load_mapping("decoder_stacked"))


def test_a_stray_layer_number_of_a_billion_is_an_error_not_a_hang() -> None:
    arrays = {"model.layers.999999999.w": np.zeros(2)}
    with pytest.raises(MappingError, match=r"found no tensor layers\.0\.w, layers\.1\.w, layers\.2\.w"):
        make_plan(
            MemoryReader("dcp", arrays),
            "orbax",
            table('[[rule]]\ntorch = "layers.{i}.w : m"\njax = "w : {i} m"'),
        )
    arrays = {"params/w": np.zeros((2**40, 0))}
    with pytest.raises(MappingError, match="expected at most 1048576 tensors in a stack"):
        make_plan(
            MemoryReader("orbax", arrays),
            "dcp",
            table('[[rule]]\ntorch = "layers.{i}.w : m"\njax = "w : {i} m"'),
        )


def test_half_of_a_fused_tensor_is_named() -> None:
    arrays = expected_orbax(dcp_arrays())
    del arrays["opt_state/mu/layers/2/mlp/up/kernel"]
    with pytest.raises(
        MappingError,
        match=r"i = 2: found no tensor layers/2/mlp/up/kernel, which the rule needs with layers/2/mlp/gate",
    ):
        make_plan(MemoryReader("orbax", arrays), "dcp", load_mapping("decoder"))


def test_an_axis_size_that_nothing_gives_names_rule_axis_and_remedy() -> None:
    arrays = {name: array for name, array in dcp_arrays().items() if not name.startswith("train.")}
    reader = MemoryReader("dcp", arrays)
    mapping = load_mapping("decoder")
    with pytest.raises(MappingError) as caught:
        make_plan(reader, "orbax", mapping)
    message = str(caught.value)
    assert "rule layers.{i}.attention.wq.weight : (h d) m <-> " in message
    assert "the mapping takes it from train.model.head_dim, which memory does not have" in message
    assert "--axis d=SIZE" in message
    converted = contents(make_plan(reader, "orbax", mapping.with_axes({"d": HEAD_DIM})), reader)
    expected = expected_orbax(dcp_arrays())
    assert_same(converted, {name: a for name, a in expected.items() if not name.startswith("train/")})


def test_a_wrong_axis_size_names_the_tensor() -> None:
    with pytest.raises(
        MappingError, match=r"tensor model\.layers\.0\.attention\.wq\.weight: .*multiple of 7 .* got 20"
    ):
        make_plan(MemoryReader("dcp", dcp_arrays()), "orbax", load_mapping("decoder").with_axes({"d": 7}))


def test_axes_that_name_each_other_are_refused() -> None:
    rules = '[axes]\na = "b"\nb = "a"\n[[rule]]\ntorch = "w : (a b)"\njax = "w : a b"\n'
    with pytest.raises(MappingError, match="the axes a = b = a of mapping test form a loop"):
        make_plan(MemoryReader("dcp", {"model.w": np.zeros(4)}), "orbax", table(rules))


def test_an_axis_tensor_that_is_no_scalar_integer_is_refused() -> None:
    arrays = dcp_arrays() | {"train.model.head_dim": np.asarray([5, 5])}
    with pytest.raises(
        MappingError, match=r"scalar integer in train\.model\.head_dim for axis d .* got int64"
    ):
        make_plan(MemoryReader("dcp", arrays), "orbax", load_mapping("decoder"))


def test_layers_of_different_shapes_or_dtypes_do_not_stack() -> None:
    rules = table('[[rule]]\ntorch = "layers.{i}.w : m"\njax = "w : {i} m"')
    with pytest.raises(
        MappingError,
        match=r"expected tensors of one shape to stack, got \(2,\) in model\.layers\.0\.w and \(3,\)",
    ):
        make_plan(
            MemoryReader("dcp", {"model.layers.0.w": np.zeros(2), "model.layers.1.w": np.zeros(3)}),
            "orbax",
            rules,
        )
    with pytest.raises(
        MappingError, match=r"expected one dtype, got float64 in model\.layers\.0\.w and float32"
    ):
        make_plan(
            MemoryReader(
                "dcp", {"model.layers.0.w": np.zeros(2), "model.layers.1.w": np.zeros(2, np.float32)}
            ),
            "orbax",
            rules,
        )


@pytest.mark.parametrize("value", [40.5, -1.0, float("nan"), float("inf"), 2.0**24 + 2])
def test_a_step_that_is_no_whole_count_is_refused(value: float) -> None:
    arrays = dcp_arrays() | {"optimizer.state.norm.weight.step": np.asarray(value, np.float32)}
    with pytest.raises(
        MappingError, match=r"whole number of steps from 0 to 16777216 .* optimizer\.state\.norm"
    ):
        make_plan(MemoryReader("dcp", arrays), "orbax", load_mapping("decoder"))


def test_parameters_with_different_steps_are_both_named() -> None:
    arrays = dcp_arrays() | {"optimizer.state.norm.weight.step": np.asarray(39, np.float32)}
    with pytest.raises(
        MappingError,
        match=r"40 in optimizer\.state\.embed\.weight\.step and 39 in optimizer\.state\.norm\.weight\.step",
    ):
        make_plan(MemoryReader("dcp", arrays), "orbax", load_mapping("decoder"))


@pytest.mark.parametrize("step", [0, 2**24])
def test_the_largest_and_smallest_steps_survive_both_ways(step: int) -> None:
    arrays = dcp_arrays(step=step)
    dcp = MemoryReader("dcp", arrays)
    there = contents(make_plan(dcp, "orbax", load_mapping("decoder")), dcp)
    assert there["opt_state/count"].dtype == np.int32
    assert int(there["opt_state/count"]) == step
    orbax = MemoryReader("orbax", there)
    assert_same(contents(make_plan(orbax, "dcp", load_mapping("decoder")), orbax), arrays)


@pytest.mark.parametrize(
    "count", [np.asarray(2**24 + 1), np.asarray(-1), np.asarray(1.0), np.zeros(2, np.int32)], ids=str
)
def test_a_count_that_float32_cannot_hold_is_refused(count: np.ndarray) -> None:
    arrays = expected_orbax(dcp_arrays()) | {"opt_state/count": count}
    with pytest.raises(MappingError, match=r"scalar integer from 0 to 16777216 .* in opt_state/count"):
        make_plan(MemoryReader("orbax", arrays), "dcp", load_mapping("decoder"))


def test_moments_without_a_count_and_a_count_without_moments_are_refused() -> None:
    arrays = expected_orbax(dcp_arrays())
    without = {name: array for name, array in arrays.items() if name != "opt_state/count"}
    with pytest.raises(MappingError, match="expected opt_state/count with the moments"):
        make_plan(MemoryReader("orbax", without), "dcp", load_mapping("decoder"))
    bare = {
        name: array for name, array in arrays.items() if not name.startswith(("opt_state/mu", "opt_state/nu"))
    }
    with pytest.raises(MappingError, match=r"expected moments .* with the opt_state/count"):
        make_plan(MemoryReader("orbax", bare), "dcp", load_mapping("decoder"))


def test_a_mapping_between_checkpoints_of_one_format_is_refused() -> None:
    with pytest.raises(MappingError, match="translates between dcp and orbax, but memory is already dcp"):
        make_plan(MemoryReader("dcp", dcp_arrays()), "dcp", load_mapping("decoder"))


def test_experts_with_two_indices_stack_into_one_array_and_come_apart_again() -> None:
    rules = table(
        '[[rule]]\ntorch = "layers.{i}.experts.{e}.w : f m"\njax = "layers/{i}/experts/w : {e} m f"\n'
        '[[rule]]\ntorch = "blocks.{i}.{j}.b : n"\njax = "b : {j} n {i}"\n'
    )
    arrays = {
        f"model.layers.{i}.experts.{e}.w": random_bits((3, 4), FLOAT32, 10 * i + e)
        for i in range(LAYERS)
        for e in range(5)
    }
    arrays |= {
        f"model.blocks.{i}.{j}.b": random_bits((6,), FLOAT32, 99 + 5 * i + j)
        for i in range(2)
        for j in range(3)
    }
    expected = {
        f"params/layers/{i}/experts/w": np.stack(
            [arrays[f"model.layers.{i}.experts.{e}.w"].T for e in range(5)]
        )
        for i in range(LAYERS)
    }
    expected["params/b"] = np.stack(
        [np.stack([arrays[f"model.blocks.{i}.{j}.b"] for i in range(2)], axis=1) for j in range(3)]
    )
    dcp, orbax = MemoryReader("dcp", arrays), MemoryReader("orbax", expected)
    assert_same(contents(make_plan(dcp, "orbax", rules), dcp), expected)
    assert_same(contents(make_plan(orbax, "dcp", rules), orbax), arrays)


def test_scalars_stack_into_a_vector_and_come_apart_again() -> None:
    rules = table('[[rule]]\ntorch = "layers.{i}.scale :"\njax = "scale : {i}"\n')
    arrays = {f"model.layers.{i}.scale": np.asarray(i + 0.5, np.float32) for i in range(4)}
    expected = {"params/scale": np.arange(4, dtype=np.float32) + 0.5}
    dcp, orbax = MemoryReader("dcp", arrays), MemoryReader("orbax", expected)
    assert_same(contents(make_plan(dcp, "orbax", rules), dcp), expected)
    assert_same(contents(make_plan(orbax, "dcp", rules), orbax), arrays)


def test_two_objects_that_would_share_a_name_are_refused() -> None:
    reader = MemoryReader("dcp", {"w": np.zeros(2)}, {("x", "y"): 1, ("x/y",): 2})
    with pytest.raises(CheckpointError, match="two objects of memory would both be named x/y in orbax"):
        make_plan(reader, "orbax")


@pytest.mark.parametrize("entry", ["step", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("every", [False, True])
def test_a_part_of_the_optimizer_state_alone_is_refused(entry: str, every: bool) -> None:
    lost = [name for name in dcp_arrays() if name.endswith("." + entry)]
    arrays = {
        name: array for name, array in dcp_arrays().items() if name not in (lost if every else lost[3:4])
    }
    with pytest.raises(MappingError) as caught:
        make_plan(MemoryReader("dcp", arrays), "orbax", load_mapping("decoder"))
    if every and entry == "exp_avg_sq":
        # A first moment alone is what Lion keeps.
        assert "has the state of Lion or another optimizer with one moment (exp_avg of embed" in str(
            caught.value
        )
    else:
        assert "expected the whole optimizer state of each weight" in str(caught.value)
        assert lost[3] in str(caught.value)


def test_one_moment_of_a_weight_alone_is_refused_from_orbax_too() -> None:
    arrays = expected_orbax(dcp_arrays())
    del arrays["opt_state/nu/norm/scale"]
    with pytest.raises(MappingError, match=r"but opt_state/nu/norm/scale is missing"):
        make_plan(MemoryReader("orbax", arrays), "dcp", load_mapping("decoder"))


def test_dropped_objects_are_reported_like_dropped_tensors() -> None:
    mapping = parse_mapping('drop = ["opt.*", "b"]\n[[rule]]\ntorch = "w"\njax = "v"', "test")
    arrays = {"model.w": np.zeros(2), "b": np.zeros(1)}
    plan = make_plan(MemoryReader("dcp", arrays, {("opt", "lr"): 1, ("kept",): 2}), "orbax", mapping)
    assert plan.dropped == ("b", "opt.lr")
    assert list(plan.objects) == ["kept"]


def test_what_a_later_tensor_settles_serves_an_earlier_one() -> None:
    mapping = parse_mapping(
        '[axes]\nk = "d"\n[[rule]]\ntorch = "w : (h d + k)"\njax = ["a : (h d)", "b : k"]', "test"
    )
    a, b = np.arange(12.0), np.arange(3.0) + 20
    plan = make_plan(MemoryReader("orbax", {"params/a": a, "params/b": b}), "dcp", mapping)
    reader = MemoryReader("orbax", {"params/a": a, "params/b": b})
    merged = plan.tensors["model.w"].read(reader, Box.whole((15,)))
    assert merged.tolist() == [*a, *b]


def test_two_rules_that_make_one_tensor_are_refused_by_name() -> None:
    rules = table(
        '[[rule]]\ntorch = "layers.{i}.gate : f m"\njax = "layers/{i}/wi : m f"\n'
        '[[rule]]\ntorch = "layers.{i}.up : f m"\njax = "layers/{i}/wi : m f"\n'
    )
    arrays = {
        f"model.layers.{i}.{n}": random_bits((3, 4), FLOAT32, i) for i in range(2) for n in ("gate", "up")
    }
    with pytest.raises(
        MappingError,
        match=r"jax layers/0/wi, layers/1/wi is made by two rules, and only one can be written: ",
    ):
        make_plan(MemoryReader("dcp", arrays), "orbax", rules)


STACK = table('[[rule]]\ntorch = "layers.{i}.w : f m"\njax = "layers/w : {i} m f"\n')


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_moments_that_some_layers_lack_do_not_make_a_lower_stack(frozen: int) -> None:
    arrays = {f"model.layers.{i}.w": random_bits((3, 4), FLOAT32, i) for i in range(3)}
    for i in {0, 1, 2} - {frozen}:
        for entry in ("exp_avg", "exp_avg_sq"):
            arrays[f"optimizer.state.layers.{i}.w.{entry}"] = random_bits((3, 4), FLOAT32, 9 + i)
        arrays[f"optimizer.state.layers.{i}.w.step"] = np.asarray(5, np.float32)
    with pytest.raises(
        MappingError, match=rf"found no tensor layers\.{frozen}\.w, which the rule needs with"
    ):
        make_plan(MemoryReader("dcp", arrays), "orbax", STACK)


@pytest.mark.parametrize("jax", ["layers/v : {i} m", "layers/{i}/v : m"])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_layer_that_lacks_a_tensor_is_named_also_when_it_is_the_last(missing: int, jax: str) -> None:
    text = '[[rule]]\ntorch = "layers.{{i}}.w : f m"\njax = "layers/w : {{i}} m f"\n'
    text += '[[rule]]\ntorch = "layers.{{i}}.v : m"\njax = "{}"\n{}'
    arrays = {f"model.layers.{i}.w": random_bits((3, 4), FLOAT32, i) for i in range(3)}
    arrays |= {f"model.layers.{i}.v": random_bits((4,), FLOAT32, i) for i in {0, 1, 2} - {missing}}
    reader = MemoryReader("dcp", arrays)
    with pytest.raises(
        MappingError, match=rf"(found none for {missing}; if the|found no tensor layers\.{missing}\.v,)"
    ):
        make_plan(reader, "orbax", table(text.format(jax, "")))
    if "{i}/v" in jax:
        plan = make_plan(reader, "orbax", table(text.format(jax, "optional = true\n")))
        assert len(plan.tensors) == 3


def test_the_example_of_the_mapping_language_is_a_mapping() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "mapping-language.md").read_text()
    (example,) = [part for part in text.split("```toml\n")[1:] if part.startswith("[axes]")]
    rules = parse_mapping(example.partition("```")[0], "the page")
    arrays = {
        **{f"model.layers.{i}.attention.wq.weight": random_bits((320, 331), FLOAT32, i) for i in range(2)},
        **{f"model.layers.{i}.mlp.w13.weight": random_bits((1766, 331), FLOAT32, i) for i in range(2)},
        **{"model.embed.weight": random_bits((7, 331), FLOAT32, 5)},
        "train.model.head_dim": np.asarray(40),
    }
    shapes = {
        name: tensor.shape
        for name, tensor in make_plan(MemoryReader("dcp", arrays), "orbax", rules).tensors.items()
    }
    assert shapes["params/layers/attention/query/kernel"] == (2, 331, 8, 40)
    assert shapes["params/layers/mlp/gate/kernel"] == (2, 331, 883)
