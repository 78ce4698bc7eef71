"""What a comparison says about one tensor: its worst elements, its error, and whether it is another one, cast."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.outputs import common_dtype
from bridge.commands.diff import diff as diff_command
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.tensors.base import DTYPES
from bridge.core.formats.tensors.boxes import group_boxes, split_box
from tests.checkpoints.test_convert import write
from tests.support.bridge.bits import random_bits


def one_tensor(path: Path, format: str, array: np.ndarray, name: str = "w") -> Path:
    write(path, format, {name: array}, {})
    return path


def test_the_worst_element_is_shown_with_its_place_and_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((50, 40, 3)).astype(np.float32)
    b = a.copy()
    b[31, 7, 2] = -b[31, 7, 2]  # most ULP
    b[48, 39, 0] += 1e4  # largest
    b[0, 0, 0] = np.nextafter(b[0, 0, 0], np.float32(9))
    for rows in (50, 7):
        with create_checkpoint(tmp_path / f"b{rows}", "orbax") as writer:
            writer.add_tensor(("w",), b.shape, b.dtype, (rows, 40, 3))
            for box in writer.chunks("w"):
                writer.write("w", box, b[box.slices()])
        (tensor,) = diff(one_tensor(tmp_path / f"a{rows}", "dcp", a), tmp_path / f"b{rows}").tensors
        difference = tensor.difference
        assert difference.at_ulp is not None
        assert difference.at_abs is not None
        assert (difference.at_ulp.index, difference.at_abs.index) == ((31, 7, 2), (48, 39, 0))
        assert (float(difference.at_ulp.a), float(difference.at_ulp.b)) == (
            pytest.approx(a[31, 7, 2]),
            pytest.approx(b[31, 7, 2]),
        )
        assert difference.differing == 3


def test_places_are_found_in_scalars_and_regions_and_complex_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_boxes, "__defaults__", (256,))
    monkeypatch.setattr(split_box, "__defaults__", (256,))
    a = np.zeros((9, 30), np.complex64)
    b = a.copy()
    b[8, 29] = 3j
    (tensor,) = diff(one_tensor(tmp_path / "a", "dcp", a), one_tensor(tmp_path / "b", "orbax", b)).tensors
    assert tensor.difference.at_abs is not None
    assert tensor.difference.at_abs.index == (8, 29)
    (scalar,) = diff(
        one_tensor(tmp_path / "c", "dcp", np.asarray(1, np.float32)),
        one_tensor(tmp_path / "d", "dcp", np.asarray(2, np.float32)),
    ).tensors
    assert scalar.difference.at_ulp is not None
    assert scalar.difference.at_ulp.index == ()


def test_values_that_print_alike_are_told_apart_by_their_bits(tmp_path: Path) -> None:
    a = np.asarray([0x7FC00000, 0x3F800000], np.uint32).view(np.float32)
    b = np.asarray([0x7FC00001, 0x3F800000], np.uint32).view(np.float32)
    (tensor,) = diff(one_tensor(tmp_path / "a", "dcp", a), one_tensor(tmp_path / "b", "dcp", b)).tensors
    worst = tensor.difference.at_ulp
    assert worst is not None
    assert (worst.a, worst.b) == ("nan (0x7fc00000)", "nan (0x7fc00001)")
    assert tensor.difference.at_abs is None


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "complex64", "int16"])
def test_the_relative_error_is_that_of_the_whole_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, workers: int
) -> None:
    monkeypatch.setattr(group_boxes, "__defaults__", (512,))
    monkeypatch.setattr(split_box, "__defaults__", (512,))
    rng = np.random.default_rng(1)
    a = (8 * rng.standard_normal((60, 21))).astype(DTYPES[dtype])
    b = a.copy()
    # One region differs, and the norm is that of all.
    b[40:42] = (8 * rng.standard_normal((2, 21))).astype(DTYPES[dtype])
    report = diff(
        one_tensor(tmp_path / "a", "dcp", a), one_tensor(tmp_path / "b", "orbax", b), workers=workers
    )
    wide = "complex128" if dtype == "complex64" else "float64"
    x, y = a.astype(wide), b.astype(wide)
    assert report.tensors[0].relative == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-12)


def test_the_relative_error_leaves_nans_out_and_is_infinite_against_zeros(tmp_path: Path) -> None:
    a = np.asarray([3.0, 4.0, np.nan, 0.0])
    b = np.asarray([3.0, 4.5, 1.0, np.nan])
    (tensor,) = diff(one_tensor(tmp_path / "a", "dcp", a), one_tensor(tmp_path / "b", "dcp", b)).tensors
    assert (tensor.relative, tensor.difference.nan) == (0.1, 2)
    zero = one_tensor(tmp_path / "z", "dcp", np.zeros(4))
    assert diff(zero, tmp_path / "a").tensors[0].relative == math.inf
    assert diff(tmp_path / "a", tmp_path / "a").tensors[0].relative == 0


def test_the_worst_tensors_come_first(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    a = {name: rng.standard_normal(40).astype(np.float32) for name in ("same", "small", "large", "nan")}
    b = {name: array.copy() for name, array in a.items()}
    b["small"][3] *= np.float32(1.001)
    b["large"] *= np.float32(1.5)
    b["nan"][7] = np.nan
    write(tmp_path / "a", "dcp", a, {})
    write(tmp_path / "b", "orbax", b, {})
    assert [t.name for t in diff(tmp_path / "a", tmp_path / "b").offenders] == ["nan", "large", "small"]


CASTS = [("float32", "bfloat16"), ("float64", "float32"), ("float32", "float16"), ("bfloat16", "float8_e5m2")]


@pytest.mark.parametrize(("wide", "narrow"), CASTS)
def test_a_cast_checkpoint_is_exactly_the_original_rounded(tmp_path: Path, wide: str, narrow: str) -> None:
    a = random_bits((31, 17), DTYPES[wide], 4)
    with np.errstate(all="ignore"):
        b = a.astype(DTYPES[narrow])
    paths = one_tensor(tmp_path / "a", "dcp", a), one_tensor(tmp_path / "b", "orbax", b)
    assert diff(*paths).mismatched == (("w", f"dtype {wide} in a, {narrow} in b"),)
    for pair in (paths, paths[::-1]):
        report = diff(*pair, rounded=True)
        assert report.within
        assert {report.tensors[0].dtype_a, report.tensors[0].dtype_b} == {wide, narrow}
        assert report.tensors[0].dtype == narrow
    b.view(f"u{b.itemsize}")[5, 5] ^= 1
    report = diff(paths[0], one_tensor(tmp_path / "c", "orbax", b), rounded=True)
    assert (report.within, report.total.differing) == (False, 1)


def test_float64_is_rounded_as_a_conversion_rounds_it(tmp_path: Path) -> None:
    # The middle of two numbers of bfloat16 in float32, but above it in float64.
    a = np.asarray([1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, -3.0])
    source = one_tensor(tmp_path / "a", "dcp", a)
    convert(source, tmp_path / "b", casts=["w=bfloat16"])
    with open_checkpoint(tmp_path / "b") as reader:
        np.testing.assert_array_equal(reader.read("w").astype(np.float64), [1 + 2**-7, 1, -3])
    assert diff(source, tmp_path / "b", rounded=True).within
    assert diff(tmp_path / "b", source, rounded=True).within


def test_a_nan_stays_a_nan_whatever_the_cast_makes_of_its_payload(tmp_path: Path) -> None:
    a = np.asarray([1.5, np.nan, 2.5], np.float32)
    b = np.asarray([0x3FC0, 0xFFC3, 0x4020], np.uint16).view(DTYPES["bfloat16"])
    paths = one_tensor(tmp_path / "a", "dcp", a), one_tensor(tmp_path / "b", "dcp", b)
    assert diff(*paths, rounded=True).within
    b = np.asarray([0xFFC3, 0xFFC3, 0x4020], np.uint16).view(DTYPES["bfloat16"])
    report = diff(paths[0], one_tensor(tmp_path / "c", "dcp", b), rounded=True)
    assert (report.total.differing, report.total.nan, report.within) == (1, 1, False)


def test_truncation_is_not_taken_for_rounding(tmp_path: Path) -> None:
    a = np.random.default_rng(3).standard_normal(500).astype(np.float32)
    cut = (a.view(np.uint32) >> 16).astype(np.uint16).view(DTYPES["bfloat16"])
    report = diff(one_tensor(tmp_path / "a", "dcp", a), one_tensor(tmp_path / "b", "dcp", cut), rounded=True)
    assert report.max_ulp == 1
    assert not report.within


@pytest.mark.parametrize(
    ("a", "b", "joint"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("float16", "bfloat16", None),
        ("float64", "float8_e4m3fn", "float8_e4m3fn"),
        ("complex128", "complex64", "complex64"),
        ("complex64", "float32", None),
        ("int32", "int64", "int64"),
        ("uint8", "int16", "int16"),
        ("int64", "uint64", None),
        ("bool", "int8", "int8"),
        ("int32", "float32", None),
    ],
)
def test_dtypes_are_compared_in_one_that_decides(a: str, b: str, joint: str | None) -> None:
    for dtype, other in ((a, b), (b, a)):
        common = common_dtype(DTYPES[dtype], DTYPES[other])
        assert (common and common.name) == joint


def test_integers_of_other_widths_must_have_the_same_values(tmp_path: Path) -> None:
    a = np.asarray([1, 2**31 + 5], np.int64)
    wrapped = a.astype(np.int32)
    report = diff(
        one_tensor(tmp_path / "a", "dcp", a), one_tensor(tmp_path / "b", "dcp", wrapped), rounded=True
    )
    assert (report.total.differing, report.within) == (1, False)


def command(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(diff_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_shows_the_worst_elements_and_compares_casts(tmp_path: Path) -> None:
    a = np.random.default_rng(3).standard_normal((5, 6)).astype(np.float32)
    b = a.copy()
    b[3, 4] = 100
    paths = one_tensor(tmp_path / "a", "dcp", a), one_tensor(tmp_path / "b", "orbax", b)
    result = command(*paths)
    assert result.exit_code == 1
    assert f"w[3, 4]: {a[3, 4]!s} in A, 100.0 in B (most ULP)" in result.stdout
    document = json.loads(command(*paths, "--json").stdout)
    assert document["offenders"] == ["w"]
    assert document["tensors"][0]["difference"]["at_ulp"]["index"] == [3, 4]
    cast = one_tensor(tmp_path / "c", "orbax", a.astype(DTYPES["bfloat16"]))
    assert command(paths[0], cast).exit_code == 1
    rounded = command(paths[0], cast, "--rounded", "--workers", 2)
    assert rounded.exit_code == 0
    assert "all bits agree (of 1 after rounding)" in rounded.stdout
