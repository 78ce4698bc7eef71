"""Moments in few bits through mappings: payload and scales bit for bit, and the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.tensors.base import Box, CheckpointError
from bridge.core.formats.tensors.scaled import read_decoded, run_lengths
from bridge.core.mapping import MappingError, Plan, load_mapping, make_plan, parse_mapping
from tests.support.bridge.decoder_trees import dcp_arrays, expected_orbax
from tests.support.bridge.memory_reader import MemoryReader

Arrays = dict[str, np.ndarray]
FORMATS = ("float16", "float8_e4m3fn", "float8_e5m2", "bfloat16")
SCALED = FORMATS[:3]
KINDS = {"exp_avg": "mu", "exp_avg_sq": "nu"}


def payload(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Every finite bit pattern may occur."""
    values = np.random.default_rng(seed).standard_normal(shape) * 20
    return values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def scale(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((*shape[:-1], 1), np.float32) + np.float32(0.5)


def in_few_bits(arrays: Mapping[str, np.ndarray], dtype: str) -> Arrays:
    """A checkpoint of torch with moments as its optimizer stores them: matrices in ``dtype``, vectors in float32."""
    result: Arrays = {}
    for k, (name, array) in enumerate(arrays.items()):
        result[name] = array
        if name.rpartition(".")[2] in KINDS and array.ndim > 1 and array.size:
            result[name] = payload(array.shape, dtype, k)
            if dtype in SCALED:
                result[f"{name}_scale"] = scale(array.shape, k)
    return result


def numbers(arrays: Mapping[str, np.ndarray], separator: str) -> Arrays:
    """The moments decoded by NumPy on whole arrays."""
    result = {}
    for name, array in arrays.items():
        parts = name.split(separator)
        if any(part.endswith("_scale") for part in parts if part not in ("norm/scale",)):
            continue
        own = {moment: f"{moment}_scale" for moment in (*KINDS, *KINDS.values())}
        beside = separator.join(own.get(part, part) for part in parts)
        wide = array.astype(np.float32) if array.dtype.itemsize < 4 and array.dtype != np.uint8 else array
        if beside in arrays and beside != name:
            factor = arrays[beside]
            for axis, (n, s) in enumerate(zip(array.shape, factor.shape, strict=True)):
                factor = np.repeat(factor, n // s, axis)
            wide = wide * factor
        result[name] = wide
    return result


def contents(plan: Plan, reader: MemoryReader) -> Arrays:
    return {name: tensor.read(reader, Box.whole(tensor.shape)) for name, tensor in plan.tensors.items()}


def assert_same(converted: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert converted.keys() == expected.keys()
    for name, array in expected.items():
        assert (converted[name].shape, converted[name].dtype) == (array.shape, array.dtype), name
        assert converted[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("family", ["decoder", "decoder_stacked"])
def test_scales_go_with_their_moments_and_come_back_bit_for_bit(family: str, dtype: str) -> None:
    arrays = in_few_bits(dcp_arrays(), dtype)
    dcp = MemoryReader("dcp", arrays)
    there = contents(make_plan(dcp, "orbax", load_mapping(family)), dcp)
    expected = expected_orbax(numbers(arrays, "."), stacked=family == "decoder_stacked")
    assert_same(numbers(there, "/"), expected)

    orbax = MemoryReader("orbax", there)
    assert_same(contents(make_plan(orbax, "dcp", load_mapping(family)), orbax), arrays)


def test_scales_lie_along_the_axes_that_the_sources_rows_have_in_the_target() -> None:
    reader = MemoryReader("dcp", in_few_bits(dcp_arrays(), "float8_e4m3fn"))
    tensors = make_plan(reader, "orbax", load_mapping("decoder")).tensors
    shapes = {
        name: tensors[f"opt_state/nu_scale/layers/0/{name}"].shape
        for name in ("attention/query/kernel", "attention/out/kernel", "mlp/gate/kernel", "mlp/down/kernel")
    }
    assert shapes == {
        "attention/query/kernel": (1, 4, 5),
        "attention/out/kernel": (1, 1, 6),
        "mlp/gate/kernel": (1, 7),
        "mlp/down/kernel": (1, 6),
    }


@pytest.mark.parametrize("family", ["decoder", "decoder_stacked"])
def test_scales_of_jaxs_own_rows_come_back_as_well(family: str) -> None:
    tree = expected_orbax(dcp_arrays(), stacked=family == "decoder_stacked")
    for k, (name, array) in enumerate(list(tree.items())):
        _, moment, *rest = [*name.split("/"), "", ""]
        if name.startswith("opt_state/") and moment in KINDS.values() and array.ndim > 1:
            tree[name] = payload(array.shape, "float8_e5m2", k)
            tree["/".join(("opt_state", f"{moment}_scale", *rest[:-2]))] = scale(array.shape, k)
    orbax = MemoryReader("orbax", tree)
    there = contents(make_plan(orbax, "dcp", load_mapping(family)), orbax)
    assert_same(expected_orbax(numbers(there, "."), stacked=family == "decoder_stacked"), numbers(tree, "/"))
    assert there["optimizer.state.layers.0.attention.wq.weight.exp_avg_scale"].shape == (4, 6)
    assert there["optimizer.state.layers.0.mlp.w13.weight.exp_avg_scale"].shape == (2, 6)

    dcp = MemoryReader("dcp", there)
    assert_same(contents(make_plan(dcp, "orbax", load_mapping(family)), dcp), tree)


RULES = {
    # Rows cut into three tensors have one scale in each, and one when they are whole again.
    "parts of a row": (
        "w : m (q + k + v)",
        '["w/q : m q", "w/k : m k", "w/v : m v"]',
        (6, 12),
        {"k": 4, "v": 5},
    ),
    "unequal parts": (
        "w : (g (r d + k)) m",
        '["w/q : m g r d", "w/k : m g k"]',
        (14, 3),
        {"g": 2, "r": 2, "d": 2},
    ),
    "a row in the middle": ("w : (a b) (c d)", '"w/x : c b d a"', (6, 20), {"b": 2, "d": 5}),
    "no expressions": ("w", '"w/x"', (3, 4), {}),
    "vectors of a stack": ("w.{i} : m", '"w/x : {i} m"', (5,), {}),
    "a stack of matrices": (
        "w : {e} (gate + up) m",
        '["w/{e}/g : m gate", "w/{e}/u : up m"]',
        (3, 8, 5),
        {"up": 4},
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_any_rule_carries_scales_of_either_sides_rows(case: str) -> None:
    left, right, shape, sizes = RULES[case]
    axes = "".join(f"{axis} = {size}\n" for axis, size in sizes.items())
    table = parse_mapping(f"[axes]\n{axes}[[rule]]\ntorch = '{left}'\njax = {right}\n", "test.toml")
    names = [f"w.{i}" for i in range(3)] if "{i}" in left else ["w"]
    arrays: Arrays = {}
    for k, name in enumerate(names):
        arrays[f"model.{name}"] = payload(shape, "float16", k)
        for moment in KINDS:
            arrays[f"optimizer.state.{name}.{moment}"] = np.asarray(payload(shape, "float32", k + 3))
        arrays[f"optimizer.state.{name}.step"] = np.asarray(7, np.float32)
    plain = MemoryReader("dcp", arrays)
    tree = contents(make_plan(plain, "orbax", table), plain)

    few = in_few_bits(arrays, "float8_e4m3fn")
    dcp = MemoryReader("dcp", few)
    there = contents(make_plan(dcp, "orbax", table), dcp)
    decoded = MemoryReader("dcp", numbers(few, "."))
    assert_same(
        numbers(there, "/"),
        contents(make_plan(decoded, "orbax", table), decoded)
        | {name: array.astype(np.float32) for name, array in tree.items() if name.startswith("params/")},
    )
    orbax = MemoryReader("orbax", there)
    assert_same(contents(make_plan(orbax, "dcp", table), orbax), few)

    for k, (name, array) in enumerate(list(tree.items())):
        word = name.split("/")[1]
        if word in KINDS.values() and array.ndim > 1:
            tree[name] = payload(array.shape, "float8_e4m3fn", k)
            tree[name.replace(word, f"{word}_scale", 1)] = scale(array.shape, k)
    orbax = MemoryReader("orbax", tree)
    back = contents(make_plan(orbax, "dcp", table), orbax)
    dcp = MemoryReader("dcp", back)
    again = contents(make_plan(dcp, "orbax", table), dcp)
    assert_same(numbers(again, "/"), numbers(tree, "/"))


def test_no_element_gets_a_neighbours_scale_where_unequal_parts_repeat() -> None:
    table = parse_mapping(
        '[axes]\na = 2\n[[rule]]\ntorch = ["x : k (a d)", "y : 1 (a z)"]\njax = "w/x : (a (k d + z))"\n',
        "test.toml",
    )
    arrays: Arrays = {}
    for k, (name, shape) in enumerate({"x": (2, 4), "y": (1, 6)}.items()):
        arrays[f"model.{name}"] = payload(shape, "float32", k)
        arrays[f"optimizer.state.{name}.step"] = np.asarray(7, np.float32)
        arrays |= {
            f"optimizer.state.{name}.{moment}": payload(shape, "float32", 3 * k + 1) for moment in KINDS
        }
    few = in_few_bits(arrays, "float8_e4m3fn")
    dcp = MemoryReader("dcp", few)
    there = contents(make_plan(dcp, "orbax", table), dcp)
    # 14 elements, a scale for 4 and for 3 of them by turns.
    assert there["opt_state/mu_scale/w/x"].shape == (14,)
    decoded = MemoryReader("dcp", numbers(few, "."))
    assert_same(numbers(there, "/"), contents(make_plan(decoded, "orbax", table), decoded))


def test_a_factor_changes_the_scales_and_leaves_the_payload() -> None:
    table = parse_mapping(
        '[axes]\nd = 16\n[[rule]]\ntorch = "w : (h d) m"\njax = "w/x : m h d | times(d ** -0.5)"\n',
        "test.toml",
    )
    arrays: Arrays = {
        "model.w": payload((32, 3), "float32", 0),
        "optimizer.state.w.step": np.asarray(7, np.float32),
    }
    arrays |= {f"optimizer.state.w.{moment}": payload((32, 3), "float32", 1) for moment in KINDS}
    few = in_few_bits(arrays, "float8_e4m3fn")
    dcp = MemoryReader("dcp", few)
    plan = make_plan(dcp, "orbax", table)
    there = contents(plan, dcp)
    whole = few["optimizer.state.w.exp_avg_sq"].reshape(2, 16, 3).transpose(2, 0, 1)
    assert there["opt_state/nu/w/x"].tobytes() == whole.tobytes()
    # Weights are divided by 4, so first moments grow by 4 and second ones by 16.
    scales = {moment: few[f"optimizer.state.w.{moment}_scale"].reshape(1, 2, 16) for moment in KINDS}
    np.testing.assert_array_equal(there["opt_state/mu_scale/w/x"], scales["exp_avg"] * 4)
    np.testing.assert_array_equal(there["opt_state/nu_scale/w/x"], scales["exp_avg_sq"] * 16)
    assert plan.inexact == ()
    orbax = MemoryReader("orbax", there)
    assert_same(contents(make_plan(orbax, "dcp", table), orbax), few)


def test_any_box_is_decoded_from_the_scales_that_it_needs() -> None:
    few = {
        "m": payload((4, 6, 10), "float8_e5m2", 0),
        "s": np.random.default_rng(1).random((4, 3, 1), np.float32),
    }
    reader = MemoryReader("dcp", few)
    whole = few["m"].astype(np.float32) * np.repeat(few["s"], 2, 1)
    np.testing.assert_array_equal(read_decoded(reader, "m", "s"), whole)
    for box in (
        Box((1, 1, 2), (2, 4, 3)),
        Box((3, 5, 9), (1, 1, 1)),
        Box((0, 3, 0), (4, 0, 10)),
        Box((2, 2, 4), (1, 3, 6)),
    ):
        reader.largest_read = 0
        np.testing.assert_array_equal(read_decoded(reader, "m", "s", box), whole[box.slices()])
        assert reader.largest_read <= max(box.numel, 6)


@pytest.mark.parametrize(
    ("shape", "scales"), [((4, 6), (4, 4)), ((4, 6), (4,)), ((4, 6), (8, 1)), ((4, 6), (0, 1))]
)
def test_scales_of_another_tensor_are_refused(shape: tuple[int, ...], scales: tuple[int, ...]) -> None:
    assert run_lengths(shape, scales) is None
    reader = MemoryReader("dcp", {"m": np.zeros(shape, np.float16), "s": np.zeros(scales, np.float32)})
    with pytest.raises(CheckpointError, match=r"s has shape .* expected each size to divide the size of m"):
        read_decoded(reader, "m", "s")


WQ = "optimizer.state.layers.1.attention.wq.weight.exp_avg"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {f"{WQ}_scale": np.ones((20, 4), np.float32)},
            r"expected scales for .*wq\.weight\.exp_avg with sizes that divide its shape \(20, 6\)",
        ),
        (
            {f"{WQ}_scale": np.ones((10, 1), np.float32)},
            r"each cover a whole axis, .* where each covers 2 elements of an axis of size 20",
        ),
        ({WQ: None}, r"wq\.weight\.exp_avg is missing"),
    ],
)
def test_scales_that_do_not_fit_are_refused(changes: dict[str, np.ndarray | None], message: str) -> None:
    arrays: dict[str, np.ndarray | None] = {**in_few_bits(dcp_arrays(), "float16"), **changes}
    reader = MemoryReader("dcp", {name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(MappingError, match=message):
        make_plan(reader, "orbax", load_mapping("decoder"))


def test_a_scale_that_covers_elements_of_two_parts_is_refused() -> None:
    table = parse_mapping(
        '[axes]\ny = 1\n[[rule]]\ntorch = "w : (x + y) m"\njax = ["w/x : m x", "w/y : m y"]\n', "test.toml"
    )
    momentum = "optimizer.state.w.momentum_buffer"
    arrays = {"model.w": payload((4, 3), "float32", 0), momentum: payload((4, 3), "float16", 1)}
    reader = MemoryReader("dcp", arrays | {f"{momentum}_scale": np.ones((2, 1), np.float32)})
    with pytest.raises(MappingError) as refused:
        make_plan(reader, "orbax", table)
    assert str(refused.value) == (
        f"rule w : (x + y) m <-> w/x : m x & w/y : m y: expected scales for {momentum} that each cover a whole axis, "
        f"got {momentum}_scale of shape (2, 1), where each covers 2 elements of an axis of size 4"
    )


def test_a_stack_needs_the_scales_of_all_its_layers() -> None:
    arrays = in_few_bits(dcp_arrays(), "float16")
    del arrays[f"{WQ}_scale"]
    with pytest.raises(
        MappingError,
        match=r"expected scales for optimizer\.state\.layers\.1\.attention\.wq\.weight\.exp_avg, as for",
    ):
        make_plan(MemoryReader("dcp", arrays), "orbax", load_mapping("decoder_stacked"))


def test_sgds_momentum_has_scales_as_well() -> None:
    arrays: Arrays = {"model.w": payload((4, 6), "float32", 0)}
    arrays["optimizer.state.w.momentum_buffer"] = payload((4, 6), "float16", 1)
    arrays["optimizer.state.w.momentum_buffer_scale"] = scale((4, 6), 2)
    table = parse_mapping('[[rule]]\ntorch = "w : o i"\njax = "w/x : i o"\n', "test.toml")
    dcp = MemoryReader("dcp", arrays)
    there = contents(make_plan(dcp, "orbax", table), dcp)
    assert there.keys() == {"params/w/x", "opt_state/trace/w/x", "opt_state/trace_scale/w/x"}
    assert there["opt_state/trace_scale/w/x"].shape == (1, 4)
    orbax = MemoryReader("orbax", there)
    assert_same(contents(make_plan(orbax, "dcp", table), orbax), arrays)


def saved(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    source = MemoryReader("dcp", arrays)
    with create_checkpoint(path, "dcp") as writer:
        for name, array in arrays.items():
            info = writer.add_tensor(source.tensors[name].path, array.shape, array.dtype)
            for box in info.chunks:
                writer.write(info.name, box, array[box.slices()])
    return path


def stored(path: Path) -> Arrays:
    with open_checkpoint(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_checkpoint_goes_to_orbax_and_back_byte_for_byte(tmp_path: Path, dtype: str) -> None:
    arrays = in_few_bits(dcp_arrays(), dtype)
    dcp = saved(tmp_path / "dcp", arrays)
    convert(dcp, tmp_path / "orbax", mapping="decoder_stacked")
    convert(tmp_path / "orbax", tmp_path / "back", mapping="decoder_stacked")
    assert_same(stored(tmp_path / "back"), arrays)


@pytest.mark.parametrize("mapping", [None, "decoder"])
def test_a_cast_decodes_moments_and_leaves_no_scales(tmp_path: Path, mapping: str | None) -> None:
    arrays = in_few_bits(dcp_arrays(), "float8_e4m3fn")
    dcp = saved(tmp_path / "dcp", arrays)
    pattern = "opt_state/*" if mapping else "optimizer/state/*"
    convert(dcp, tmp_path / "wide", mapping=mapping, casts=[f"{pattern}=float32"])
    tensors = stored(tmp_path / "wide")
    expected = numbers(arrays, ".")
    if mapping:
        assert_same(tensors, expected_orbax(expected))
    else:
        names = {name: info.path for name, info in MemoryReader("dcp", arrays).tensors.items()}
        assert_same(tensors, {"/".join(names[name]): array for name, array in expected.items()})


def test_a_cast_to_few_bits_would_need_other_scales(tmp_path: Path) -> None:
    dcp = saved(tmp_path / "dcp", in_few_bits(dcp_arrays(), "float8_e4m3fn"))
    with pytest.raises(
        CheckpointError, match=r"which has scales in opt_state/mu_scale/.*expected one of float32"
    ):
        convert(dcp, tmp_path / "o", mapping="decoder", casts=["opt_state/*=float16"])
    with pytest.raises(
        CheckpointError, match=r"cast opt_state/mu_scale/\*=bfloat16: .* scales of moments, which stay"
    ):
        convert(dcp, tmp_path / "o", mapping="decoder", casts=["opt_state/mu_scale/*=bfloat16"])
    assert not (tmp_path / "o").exists()
