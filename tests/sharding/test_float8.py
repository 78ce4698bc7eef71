"""The bits of float8 weights, and where their bytes lie in what a rank sends."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bridge.core.sharding import Layout, PolicyError, PrecisionPolicy, ShardingPolicy, plan_layout
from bridge.core.sharding.layout.slot import Slot
from bridge.core.sharding.policy import float8
from tests.support.bridge import float8_reference

Array = Any

# An expert stack with odd rows and widths, matrices, a matrix of one column, and one without elements.
SHAPES = {
    "experts": (3, 7, 33),
    "up": (9, 96),
    "down": (10, 37),
    "column": (11, 1),
    "deep": (2, 3, 5, 64),
    "none": (0, 8),
}


def every_float32(step: int) -> Array:
    """All signs and exponents, and so many of the fractions."""
    return np.arange(0, 2**32, step, dtype=np.uint32).view(np.float32)


def test_payload_bytes_are_those_of_ml_dtypes_saturated() -> None:
    values = np.concatenate([every_float32(9973), np.float32([0.0, -0.0, 464, -464, 465, np.inf, -np.inf])])
    # All halves between e4m3 numbers, and their neighbours.
    numbers = float8_reference.decode(np.arange(0x7F, dtype=np.uint8)).astype(np.float64)
    halves = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    near = [halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(1e9))]
    values = np.concatenate([values, *near, *(-array for array in near)])
    values = values[~np.isnan(values)]
    expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(float8_reference.encode(values), expected)


def test_every_byte_is_the_number_of_ml_dtypes_and_its_own_code() -> None:
    payload = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        float8_reference.decode(payload), payload.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    )
    np.testing.assert_array_equal(float8_reference.encode(float8_reference.decode(payload)), payload)
    scales = np.arange(255, dtype=np.uint8)
    np.testing.assert_array_equal(
        float8_reference.powers_of(scales), scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    )


def test_nan_keeps_its_sign() -> None:
    nans = np.array([0x7FC00000, 0xFFC00001, 0x7F800001], np.uint32).view(np.float32)
    assert float8_reference.encode(nans).tolist() == [0x7F, 0xFF, 0x7F]


def test_scales_are_the_least_powers_with_which_nothing_saturates() -> None:
    amax = np.abs(every_float32(4999))
    amax = amax[np.isfinite(amax)]
    scales = float8_reference.scales_of(amax)
    exponents = scales.astype(np.int64) - 127
    wide = amax.astype(np.float64)
    assert (wide <= 448 * 2.0**exponents).all()
    assert (wide > 448 * 2.0 ** (exponents - 1.0))[exponents > -127].all()
    # The other words for the rule, as far as no subnormal number is in the way.
    x = amax * np.float32(1 / 448)
    fraction, power = np.frexp(x)
    other = power - 1 + (fraction != 0.5)
    normal = exponents >= -126
    np.testing.assert_array_equal(exponents[normal], other[normal])


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (0.0, 0),
        (1e-45, 0),
        (448.0, 127),
        (np.nextafter(np.float32(448), np.float32(500)), 128),
        (1.0, 119),
        (1.75, 119),
        (2.0, 120),
        (3.4028235e38, 247),
        (np.inf, 247),
    ],
)
def test_golden_scales(amax: float, scale: int) -> None:
    assert float8_reference.scales_of(np.float32(amax)) == scale


def test_golden_rows() -> None:
    row = np.zeros((1, 40), np.float32)
    row[0, :6] = 448, -224, 1, 0.3, 2**-10, -(2**-9)
    row[0, 32:36] = 1e-3, -2.5e-4, 0, np.nan
    payload, scales = float8_reference.quantize_rows(row)
    assert payload[0, :7].tolist() == [0x7E, 0xF6, 0x38, 0x2A, 0x00, 0x81, 0x00]
    assert payload[0, 32:37].tolist() == [0x78, 0xE8, 0x00, 0x7F, 0x00]
    assert scales.tolist() == [[127, 109]]
    restored = float8_reference.dequantize_rows(payload, scales)
    assert restored[0, :6].tolist() == [448, -224, 1, 0.3125, 0, -(2**-9)]
    assert restored[0, 32] == 256 * 2.0**-18
    assert np.isnan(restored[0, 35])


def test_infinity_comes_back_and_leaves_its_block_alone_with_zeros_and_numbers() -> None:
    row = np.zeros((1, 64), np.float32)
    row[0, :4] = np.inf, -np.inf, 1.0, 2.0**120
    row[0, 32] = 3.0
    restored = float8_reference.dequantize_rows(*float8_reference.quantize_rows(row))
    assert restored[0, :4].tolist() == [np.inf, -np.inf, 0, 2.0**120]
    assert restored[0, 32] == 3.0


def test_subnormal_values_count_as_zeros() -> None:
    row = np.float32([[2.0**-127, -(2.0**-127), 2.0**-126, 0]])
    payload, scales = float8_reference.quantize_rows(row)
    assert (payload.tolist(), scales.tolist()) == ([[0x00, 0x80, 0x40, 0x00]], [[0]])


def test_errors_are_those_of_three_fraction_bits() -> None:
    values = np.random.default_rng(0).normal(size=(64, 100)).astype(np.float32)
    values *= np.float32(10.0) ** np.arange(-30, 34)[:, None].astype(np.float32)
    restored = float8_reference.dequantize_rows(*float8_reference.quantize_rows(values))
    blocks = np.repeat(
        [[np.abs(row[i : i + 32]).max() for i in range(0, 100, 32)] for row in values], 32, axis=1
    )
    bound = np.maximum(np.abs(values) / 16, blocks[:, :100] * 2.0**-18)
    assert (np.abs(restored - values) <= bound).all()
    # Dequantized values are exact in bfloat16.
    np.testing.assert_array_equal(restored.astype(ml_dtypes.bfloat16).astype(np.float32), restored)


def quantized_whole(values: dict[str, Array], gather: str) -> dict[str, tuple[Array, Array]]:
    rows = {name: array.reshape(-1, array.shape[-1]) for name, array in values.items()}
    quantize = float8_reference.quantize_rows if gather == "mxfp8" else float8_reference.quantize_tensor
    return {name: quantize(array) for name, array in rows.items()}


def random_values(seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        name: (random.normal(size=shape) * 10.0 ** random.integers(-4, 3, (*shape[:-1], 1))).astype(
            np.float32
        )
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("align", [1, 128])
@pytest.mark.parametrize("granularity", ["row", "block(32)", "tensor"])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
def test_pieces_of_all_shards_hold_the_bytes_of_whole_tensors(
    shards: int, granularity: str, align: int
) -> None:
    layout = plan_layout(SHAPES, shards, granularity=granularity, align=align)
    values = random_values()
    whole = quantized_whole(values, "mxfp8")
    payload: dict[str, list[Array]] = {name: [] for name in SHAPES}
    scales: dict[str, list[Array]] = {name: [] for name in SHAPES}
    size = float8.piece_bytes(layout, "mxfp8")
    assert (size - layout.shard_size) % align == 0
    fullest = 0
    for rank in range(shards):
        taken = 0
        for part in float8.scale_parts(layout, rank):
            slot = layout.slots[part.number]
            r0, r1 = layout.row_range(slot.name, rank)
            assert (part.start, part.rows, part.blocks) == (taken, r1 - r0, -(-slot.row_size // 32))
            taken += part.rows * part.blocks
            rows = values[slot.name].reshape(-1, slot.row_size)[r0:r1]
            for kept, piece in zip((payload, scales), float8_reference.quantize_rows(rows), strict=True):
                kept[slot.name].append(piece)
        assert layout.shard_size + taken <= size
        fullest = max(fullest, taken)
    assert size == layout.shard_size + -(-fullest // align) * align
    for name in SHAPES:
        if values[name].size:
            np.testing.assert_array_equal(np.concatenate(payload[name]), whole[name][0], name)
            np.testing.assert_array_equal(np.concatenate(scales[name]), whole[name][1], name)


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_blocks_of_whole_tiles_have_their_scales_where_they_are_in_the_shard(shards: int) -> None:
    shapes = {"a": (5, 64), "b": (3, 5, 128), "c": (9, 64)}
    layout = plan_layout(shapes, shards)
    assert float8.in_blocks(layout)
    gaps = 0
    for rank in range(shards):
        parts = list(float8.scale_parts(layout, rank))
        blocks = [(part.start, part.start + part.rows * part.blocks) for part in parts]
        held = [(s, part) for b, s in enumerate(layout.shard_slices) for part in layout.parts(rank, b)]
        assert blocks == [((s.start + p.start) // 32, (s.start + p.stop) // 32) for s, p in held]
        gaps += layout.shard_size // 32 - sum(stop - start for start, stop in blocks)
    assert gaps == (layout.padded_size - layout.numel) // 32
    assert gaps or shards < 3
    assert float8.scale_bytes(layout, "mxfp8") == -(-layout.shard_size // 32 // layout.align) * layout.align


def test_one_odd_row_shard_or_offset_is_enough_for_blocks_to_differ() -> None:
    a = Slot("a", (4, 32), 1, 0, 0)
    assert float8.in_blocks(Layout(1, (256,), (a, Slot("b", (4, 32), 1, 0, 128))))
    assert not float8.in_blocks(Layout(1, (288,), (a, Slot("b", (4, 32), 1, 0, 144))))
    assert not float8.in_blocks(Layout(1, (320,), (a, Slot("b", (4, 33), 1, 0, 128))))
    assert not float8.in_blocks(Layout(1, (272,), (a, Slot("b", (4, 32), 1, 0, 128))))


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_one_scale_a_tensor_needs_the_largest_magnitude_of_all_shards(shards: int) -> None:
    layout = plan_layout(SHAPES, shards)
    values = random_values(1)
    assert float8.piece_bytes(layout, "float8_e4m3fn") == layout.shard_size
    for name, (payload, scale) in quantized_whole(values, "float8_e4m3fn").items():
        rows = values[name].reshape(-1, SHAPES[name][-1])
        ranges = [layout.row_range(name, rank) for rank in range(shards)]
        amax = max(float(float8_reference.amax_of(rows[a:b])) for a, b in ranges)
        local = [float8_reference.quantize_tensor(rows[a:b], np.float32(amax)) for a, b in ranges]
        assert {int(local_scale) for _, local_scale in local} == {int(scale)}
        np.testing.assert_array_equal(np.concatenate([local_payload for local_payload, _ in local]), payload)
        numbers, power = float8_reference.dequantize_tensor(payload, scale), 2.0 ** (float(scale) - 127)
        expected = (rows / power).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * power
        np.testing.assert_array_equal(numbers, expected)


def test_bytes_an_element() -> None:
    layout: Layout = plan_layout({"w": (4096, 1024), "v": (1024, 4096)}, 8)
    numel = 2 * 4096 * 1024
    assert 8 * float8.piece_bytes(layout, "mxfp8") == numel * 33 // 32
    assert 8 * float8.piece_bytes(layout, "float8_e4m3fn") == numel


def test_what_is_quantized() -> None:
    shapes: list[tuple[int, ...]] = [(), (5,), (5, 1), (0, 3), (2, 3, 4)]
    assert [float8.is_quantized(shape) for shape in shapes] == [False, False, True, True, True]


@pytest.mark.parametrize("gather", float8.FORMATS)
def test_a_policy_names_the_format(gather: str) -> None:
    text = f'[precision]\ncompute = "bfloat16"\ngather = "{gather}"\n[[unit]]\nmatch = ""\n'
    policy = ShardingPolicy.parse(text)
    assert policy.precision == PrecisionPolicy(compute="bfloat16", gather=gather)
    assert ShardingPolicy.parse(policy.to_toml()) == policy
    assert PrecisionPolicy().gather is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gather": "fp8"}, "gather: expected one of mxfp8, float8_e4m3fn, got 'fp8'"),
        ({"gather": "bfloat16"}, "gather: expected one of mxfp8, float8_e4m3fn, got 'bfloat16'"),
        ({"gather": ["mxfp8"]}, "gather: expected one of mxfp8"),
        ({"gather": "mxfp8", "main": "float64"}, 'main: expected "float32" with gather = "mxfp8"'),
        ({"gather": "mxfp8", "main": "bfloat16"}, 'main: expected "float32" with gather = "mxfp8"'),
        ({"gather": "mxfp8", "main": "given"}, 'main: expected "float32" with gather = "mxfp8"'),
    ],
)
def test_what_is_no_format_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        PrecisionPolicy(**fields)
    assert message in str(caught.value)
