"""The dtype of each copy of a parameter: every rule once, by hand."""

from __future__ import annotations

import pytest

from bridge.core.sharding.policy.group_dtypes import AskedDtypes, GroupDtypes

F32, F64, BF16, F16, F8 = "float32", "float64", "bfloat16", "float16", "float8_e4m3fn"
DEFAULTS = AskedDtypes(F32, None, None, None)
TORCH = AskedDtypes(F32, None, None, None, narrowest=True)
ASKED = AskedDtypes(F32, BF16, F16, F64)


@pytest.mark.parametrize(
    ("asked", "stored", "trainable", "expected"),
    [
        (DEFAULTS, F32, True, GroupDtypes(F32, F32, F32, F32, F32)),
        (DEFAULTS, BF16, True, GroupDtypes(F32, F32, F32, F32, F32)),
        (TORCH, BF16, True, GroupDtypes(F32, BF16, BF16, F32, F32)),
        (TORCH, F32, True, GroupDtypes(F32, F32, F32, F32, F32)),
        # float32 leaves float64 as it is; another dtype does not.
        (DEFAULTS, F64, True, GroupDtypes(F64, F64, F64, F64, F64)),
        (AskedDtypes(BF16, None, None, None), F64, True, GroupDtypes(BF16, BF16, BF16, BF16, BF16)),
        (AskedDtypes(BF16, None, None, None, narrowest=True), F32, True, GroupDtypes(*[BF16] * 5)),
        # Frozen parameters keep the dtype in which they were given.
        (DEFAULTS, BF16, False, GroupDtypes(BF16, BF16, BF16, BF16, F32)),
        (AskedDtypes(None, None, None, None), F16, True, GroupDtypes(F16, F16, F16, F16, F16)),
        # Gradients travel as forward computes, and are kept as main weights, unless asked otherwise.
        (AskedDtypes(F32, BF16, None, None), F32, True, GroupDtypes(F32, BF16, BF16, F32, F32)),
        (ASKED, F32, True, GroupDtypes(F32, BF16, F16, F64, F32)),
        # What is no floating-point number, or float8 by itself, stays as it is throughout.
        (ASKED, "int32", False, GroupDtypes(*["int32"] * 5)),
        (ASKED, F8, True, GroupDtypes(*[F8] * 5)),
    ],
)
def test_each_copy_has_its_dtype(
    asked: AskedDtypes, stored: str, trainable: bool, expected: GroupDtypes[str]
) -> None:
    assert asked.of_group(stored, trainable=trainable) == expected


def test_matrices_alone_cross_the_network_in_the_format_that_was_asked_for() -> None:
    asked = AskedDtypes(F32, BF16, None, None, F8)
    assert asked.of_group(F32, trainable=True, quantized=True).gather == F8
    assert asked.of_group(F32, trainable=True, quantized=False).gather is None
    assert DEFAULTS.of_group(F32, trainable=True, quantized=True).gather is None


def test_main_weights_that_keep_fewer_bits_have_no_remainders() -> None:
    asked = AskedDtypes(F32, BF16, None, None, remainders=True)
    assert asked.of_group(F32, trainable=True).remainders
    assert not asked.of_group(BF16, trainable=False).remainders
    assert not ASKED.of_group(F32, trainable=True).remainders


def test_a_framework_gets_its_own_dtypes() -> None:
    dtypes = GroupDtypes(F32, BF16, F16, F64, F32, gather=F8, remainders=True)
    upper = GroupDtypes("FLOAT32", "BFLOAT16", "FLOAT16", "FLOAT64", "FLOAT32", gather=F8, remainders=True)
    assert dtypes.translate(str.upper) == upper
