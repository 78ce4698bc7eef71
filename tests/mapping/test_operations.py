"""Operations of entries: factors and shifts, their inverses, what becomes of moments, and rounding."""

from __future__ import annotations

import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.formats.tensors.base import Box, CheckpointError
from bridge.core.mapping import MappingError, MappingTable, Plan, make_plan, parse_mapping
from bridge.core.mapping.language.operations import Operation, rounded
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.memory_reader import MemoryReader
from tests.support.examples import examples

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS, D, M, LAYERS = 3, 6, 5, 2

QUERY = """
[axes]
d = 6
[[rule]]
torch = "layers.{i}.q.weight : (h d) m"
jax = "layers/q : m {i} h d | times(d ** -0.5)"
[[rule]]
torch = "norm.weight"
jax = "norm/scale | plus(1)"
optional = true
"""


def table(text: str = QUERY) -> MappingTable:
    return parse_mapping(text, "operations")


def normal(shape: tuple[int, ...], seed: int, dtype: np.dtype = F32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def checkpoint(dtype: np.dtype = F32) -> dict[str, np.ndarray]:
    arrays = {f"layers.{i}.q.weight": normal((HEADS * D, M), i, dtype) for i in range(LAYERS)}
    arrays["norm.weight"] = normal((M,), 9, dtype)
    result = {f"model.{name}": array for name, array in arrays.items()}
    for seed, (name, array) in enumerate(arrays.items()):
        state = f"optimizer.state.{name}."
        result[state + "exp_avg"] = normal(array.shape, 20 + seed, dtype)
        result[state + "exp_avg_sq"] = np.abs(normal(array.shape, 40 + seed, dtype))
        result[state + "step"] = np.asarray(3, np.float32)
    return result


def contents(plan: Plan, reader: MemoryReader) -> dict[str, np.ndarray]:
    return {name: t.read(reader, Box.whole(t.shape)) for name, t in plan.tensors.items()}


def stacked(arrays: dict[str, np.ndarray], before: str, after: str, factor: float) -> np.ndarray:
    """By NumPy on whole arrays: one multiplication in float64, one rounding."""
    layers = [arrays[f"{before}layers.{i}.q.weight{after}"] for i in range(LAYERS)]
    heads = [layer.T.reshape(M, HEADS, D).astype(np.float64) * factor for layer in layers]
    return np.stack(heads, axis=1).astype(F32)


def test_a_factor_is_on_weights_its_inverse_on_first_and_the_inverse_square_on_second_moments() -> None:
    arrays = checkpoint()
    reader = MemoryReader("dcp", arrays)
    plan = make_plan(reader, "orbax", table())
    converted = contents(plan, reader)
    root = D**-0.5
    assert same_bits(converted["params/layers/q"], stacked(arrays, "model.", "", root))
    expected = stacked(arrays, "optimizer.state.", ".exp_avg", 1 / root)
    np.testing.assert_array_max_ulp(converted["opt_state/mu/layers/q"], expected, 1)
    expected = stacked(arrays, "optimizer.state.", ".exp_avg_sq", float(D))
    np.testing.assert_array_max_ulp(converted["opt_state/nu/layers/q"], expected, 1)
    shifted = arrays["model.norm.weight"].astype(np.float64) + 1
    assert same_bits(converted["params/norm/scale"], shifted.astype(np.float32))
    for moment, entry in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
        assert same_bits(
            converted[f"opt_state/{moment}/norm/scale"], arrays[f"optimizer.state.norm.weight.{entry}"]
        )
    inexact = {"params/layers/q", "opt_state/mu/layers/q", "opt_state/nu/layers/q", "params/norm/scale"}
    assert set(plan.inexact) == inexact


def test_the_way_back_undoes_it_to_a_unit_in_the_last_place() -> None:
    arrays = checkpoint()
    reader = MemoryReader("dcp", arrays)
    jax = MemoryReader("orbax", contents(make_plan(reader, "orbax", table()), reader))
    back = contents(make_plan(jax, "dcp", table()), jax)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        if name == "model.norm.weight":
            np.testing.assert_allclose(back[name], array, atol=2**-23)
        else:
            np.testing.assert_array_max_ulp(back[name], array, 1)


@pytest.mark.parametrize("d", [1, 4, 16])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_power_of_two_is_exact_both_ways(d: int, dtype: np.dtype) -> None:
    mapping = table(QUERY.replace("d = 6", f"d = {d}").replace("(h d) m", "(h d) m", 1))
    arrays = {f"model.layers.{i}.q.weight": normal((2 * d, M), i, dtype) for i in range(LAYERS)}
    reader = MemoryReader("dcp", arrays)
    plan = make_plan(reader, "orbax", mapping)
    assert plan.inexact == ()
    there = contents(plan, reader)
    assert same_bits(
        there["params/layers/q"][:, 0, 0, 0], (arrays["model.layers.0.q.weight"][0] * d**-0.5).astype(dtype)
    )
    jax = MemoryReader("orbax", there)
    back = contents(make_plan(jax, "dcp", mapping), jax)
    assert all(same_bits(back[name], array) for name, array in arrays.items())


def test_equal_operations_leave_every_bit_alone() -> None:
    text = '[[rule]]\ntorch = "w.x | times(3)"\njax = "w/x | times(3)"\n'
    weight = random_bits((7, 5), F32, 1)
    reader = MemoryReader("dcp", {"model.w.x": weight})
    plan = make_plan(reader, "orbax", table(text))
    assert plan.inexact == ()
    assert same_bits(contents(plan, reader)["params/w/x"], weight)


def test_operations_on_both_sides_are_composed() -> None:
    text = '[[rule]]\ntorch = "w.x | times(3)"\njax = "w/x | plus(1)"\n'
    reader = MemoryReader("dcp", {"model.w.x": np.float64([3.0, -6.0, 0.0])})
    assert contents(make_plan(reader, "orbax", table(text)), reader)["params/w/x"].tolist() == [
        2.0,
        -1.0,
        1.0,
    ]
    back = MemoryReader("orbax", {"params/w/x": np.float64([2.0, -1.0, 1.0])})
    assert contents(make_plan(back, "dcp", table(text)), back)["model.w.x"].tolist() == [3.0, -6.0, 0.0]


def test_parts_of_one_tensor_have_their_own_operations() -> None:
    text = '[[rule]]\ntorch = "qk.x : (q + k) m"\njax = ["q/x : m q | times(0.5)", "k/x : m k"]\n[axes]\nk = "q"\n'
    weight = normal((8, 3), 1)
    reader = MemoryReader("dcp", {"model.qk.x": weight})
    converted = contents(make_plan(reader, "orbax", table(text)), reader)
    assert same_bits(converted["params/q/x"], np.array(weight[:4].T / 2, order="C"))
    assert same_bits(converted["params/k/x"], np.array(weight[4:].T, order="C"))
    jax = MemoryReader("orbax", converted)
    assert same_bits(contents(make_plan(jax, "dcp", table(text)), jax)["model.qk.x"], weight)


@examples(60)
@given(st.data())
def test_any_region_equals_that_of_the_whole(data: st.DataObject) -> None:
    reader = MemoryReader("dcp", checkpoint())
    tensor = make_plan(reader, "orbax", table()).tensors["params/layers/q"]
    whole = tensor.read(reader, Box.whole(tensor.shape))
    low = tuple(data.draw(st.integers(0, n)) for n in tensor.shape)
    sizes = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(tensor.shape, low, strict=True))
    box = Box(low, sizes)
    assert same_bits(tensor.read(reader, box), np.array(whole[box.slices()], order="C"))


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float16, np.float32]
)
def test_float64_is_rounded_once_to_nearest_even(dtype: type) -> None:
    narrow = np.dtype(dtype)
    info = ml_dtypes.finfo(narrow)
    with np.errstate(invalid="ignore"):  # signalling NaNs, which are left out below
        values = np.unique(random_bits((4000,), narrow, 1).astype(np.float64))
    values = values[np.isfinite(values)]
    values = values[np.abs(values) < float(info.max) / 2]
    middles = (values[1:] + values[:-1]) / 2
    neighbours = np.concatenate([np.nextafter(middles, -np.inf), middles, np.nextafter(middles, np.inf)])
    wide = np.concatenate([neighbours, values])
    narrowed = rounded(wide, narrow)
    for x, y in zip(wide.tolist(), narrowed, strict=True):
        bits = y.view(np.uint16 if narrow.itemsize == 2 else np.uint32 if narrow.itemsize == 4 else np.uint8)
        error = abs(Fraction(float(y)) - Fraction(x))
        for step in (-1, 1):
            other = (bits.astype(np.int64) + step).astype(bits.dtype).view(narrow)
            if np.isfinite(other):
                distance = abs(Fraction(float(other)) - Fraction(x))
                assert (
                    error < distance or (error == distance and bits % 2 == 0) or float(other) == float(y)
                ), (x, y)


def test_an_element_that_becomes_infinite_is_an_error_and_an_infinite_one_stays() -> None:
    text = '[[rule]]\ntorch = "w.x"\njax = "w/x | times(1000)"\n'
    reader = MemoryReader("dcp", {"model.w.x": np.float16([1.0, np.inf, np.nan])})
    converted = contents(make_plan(reader, "orbax", table(text)), reader)["params/w/x"]
    assert converted[:2].tolist() == [1000.0, np.inf]
    assert np.isnan(converted[2])
    reader = MemoryReader("dcp", {"model.w.x": np.float16([1.0, 66.0])})
    with pytest.raises(
        CheckpointError, match=r"tensor model\.w\.x of memory: .* float16 .* x \* 1000 \+ 0, got one"
    ):
        contents(make_plan(reader, "orbax", table(text)), reader)


def test_integers_are_refused_when_planning() -> None:
    text = '[[rule]]\ntorch = "w.x"\njax = "w/x | plus(1)"\n'
    with pytest.raises(
        MappingError, match=r"a floating-point tensor to calculate with, got int32 in model\.w\.x"
    ):
        make_plan(MemoryReader("dcp", {"model.w.x": np.arange(3, dtype=np.int32)}), "orbax", table(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("times(d ** -0.5)", 0.25),
        ("times(2 * d)", 32.0),
        ("times(4 ** 0.5 * d ** -1)", 0.125),
        ("plus(-1)", -1.0),
        (" plus( 0.5 ) ", 0.5),
        # Square roots as Gemma 3 has them: 50.596... and 73.321... in bfloat16.
        ("times(bfloat16(2560 ** 0.5))", 50.5),
        ("times(bfloat16(336 ** 0.5 * d ** 0.5))", 73.5),
    ],
)
def test_constants(text: str, value: float) -> None:
    assert Operation.parse(text).constant({"d": 16}) == value


@pytest.mark.parametrize(
    "text",
    [
        "times",
        "times()",
        "times(d **)",
        "divide(2)",
        "times(d d)",
        "plus(1) plus(1)",
        "times((d))",
        "times(bfloat16())",
        "x",
    ],
)
def test_malformed_operations_are_quoted(text: str) -> None:
    with pytest.raises(MappingError, match=re.escape(f"got {text!r}")):
        Operation.parse(text)


def test_what_cannot_be_undone_or_computed_is_refused() -> None:
    for text, sizes in (
        ("times(0)", {}),
        ("times(-2 ** 0.5)", {}),
        ("times(d ** -1)", {"d": 0}),
        ("times(d ** 999)", {"d": 9}),
    ):
        with pytest.raises(MappingError, match="to be a finite number that can be undone, got"):
            Operation.parse(text).constant(sizes)
    rule = '[[rule]]\ntorch = "w.x : a"\njax = "w/x : a | times(scale)"\n'
    reader = MemoryReader("dcp", {"model.w.x": np.ones(2)})
    with pytest.raises(
        MappingError, match=r"expected the size of axis scale for times\(scale\), got none: .* --axis scale"
    ):
        make_plan(reader, "orbax", table(rule))
    plan = make_plan(reader, "orbax", table(rule).with_axes({"scale": 2}))
    assert contents(plan, reader)["params/w/x"].tolist() == [2.0, 2.0]
