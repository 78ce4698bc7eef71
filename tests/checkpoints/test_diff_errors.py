"""Tolerances on whole tensors: the norm-relative error, the noise of a third run; and how differences are spread."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import Tolerance
from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.compare.diff_report import DiffReport
from bridge.checkpoints.compare.spread import Spread
from bridge.checkpoints.compare.ulp import compare
from bridge.checkpoints.ground.selection import Selection
from bridge.core.formats.tensors.base import DTYPES, CheckpointError
from bridge.core.formats.tensors.boxes import group_boxes, split_box
from tests.checkpoints.test_convert import write
from tests.support.bridge.decoder_trees import dcp_arrays, expected_orbax

Arrays = dict[str, np.ndarray]
Compare = Callable[..., DiffReport]


@pytest.fixture
def compared(tmp_path: Path) -> Compare:
    """Compares two arrays, or two trees of arrays, optionally beside a third as noise."""

    calls = itertools.count()

    def make(a: Any, b: Any, noise: Any = None, **options: Any) -> DiffReport:
        folder = tmp_path / str(next(calls))
        folder.mkdir()
        for name, weights, format in (("a", a, "dcp"), ("b", b, "orbax"), ("noise", noise, "dcp")):
            if weights is not None:
                write(folder / name, format, weights if isinstance(weights, dict) else {"w": weights}, {})
        tolerance = {field.name for field in dataclasses.fields(Tolerance)} & options.keys()
        return diff(
            folder / "a",
            folder / "b",
            noise=None if noise is None else folder / "noise",
            tolerance=Tolerance(**{name: options.pop(name) for name in tolerance}),
            **options,
        )

    return make


def summed(seed: int, dtype: str = "float32") -> np.ndarray:
    """Gradients as sums that cancel, in an order that the seed chooses: relative errors of elements have no bound."""
    terms = np.random.default_rng(9).standard_normal((512, 4096)).astype(np.float32)
    terms[256:] = -terms[:256] + np.float32(1e-2) * terms[256:]
    order = np.random.default_rng(seed).permutation(512)
    total = np.zeros(4096, dtype)
    for row in terms[order]:
        total += row
    return total


def test_gradients_that_differ_by_rounding_pass_by_their_error_and_not_element_by_element(
    compared: Compare,
) -> None:
    a, b = summed(1), summed(2)
    exact = compared(a, b, max_ulp=1000)
    assert exact.total.max_ulp > 10_000
    assert not exact.within
    assert compared(a, b, max_error=1e-4).within
    assert not compared(a, b, max_error=1e-9).within


def test_one_shifted_element_fails_element_by_element_and_passes_by_the_norm(compared: Compare) -> None:
    a = np.ones(1_000_000, np.float32)
    b = a.copy()
    b[7] += np.float32(1e-3)
    elementwise, whole = compared(a, b, rtol=1e-5), compared(a, b, rtol=1e-5, max_error=1e-5)
    assert (elementwise.within, whole.within) == (False, True)
    # What is reported of the elements stays.
    assert elementwise.total == whole.total
    assert whole.total.beyond == 1
    assert whole.tensors[0].relative == pytest.approx(1e-6, rel=1e-3)


def test_the_error_is_the_norm_of_the_difference_over_that_of_a_at_the_edge(compared: Compare) -> None:
    a, b = np.asarray([3.0, 4.0]), np.asarray([3.0, 4.5])
    assert compared(a, b, max_error=0.1).within
    assert not compared(a, b, max_error=0.0999).within
    assert not compared(b, a, max_error=0.05 / 0.6).within


@pytest.mark.parametrize("tolerance", [{"max_error": 1e-3}, {}])
def test_zeros_on_both_sides_pass(compared: Compare, tolerance: dict[str, float]) -> None:
    assert compared(np.zeros(5), np.zeros(5), **tolerance).within


def test_zeros_against_numbers_have_an_infinite_error(compared: Compare) -> None:
    assert not compared(np.zeros(5), np.full(5, 1e-30), max_error=0.5).within
    assert compared(np.zeros(5), np.full(5, -0.0), max_error=0.0).within


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_a_nan_against_a_number_fails_whatever_the_tolerance(compared: Compare, dtype: str) -> None:
    a = np.arange(1, 9).astype(DTYPES[dtype])
    b = a.copy()
    b[3] = math.nan
    widest = {"max_ulp": 2**64 - 1, "rtol": math.inf, "atol": math.inf, "max_error": math.inf}
    for array, other in ((a, b), (b, a)):
        assert not compared(array, other, **widest).within
        assert not compared(array, other, a + 1, **widest).within
    assert compared(b, b, **widest).within


def test_one_common_infinity_does_not_hide_the_other_elements(compared: Compare) -> None:
    a = np.asarray([np.inf, 1.0, 2.0])
    b = np.asarray([np.inf, 1.0, -2.0])
    assert not compared(a, b, max_error=1e-3).within
    assert not compared(a, b, np.asarray([0.0, 1.0, 2.0])).within


def test_integers_are_equal_or_not(compared: Compare) -> None:
    a = {"n": np.arange(1000), "w": np.ones(3)}
    b = {"n": a["n"] + (a["n"] == 999), "w": np.ones(3)}
    assert not compared(a, b, max_error=1.0, atol=5.0).within
    report = compared(a, b, {"w": np.ones(3)}, noise_factor=math.inf)
    assert not report.within
    assert [(tensor.name, tensor.noise) for tensor in report.tensors] == [("n", None), ("w", 0.0)]


def test_an_element_passes_within_atol_too() -> None:
    a = np.asarray([1e-12, 1.0, 1e3])
    b = np.asarray([-1e-12, 1.001, 1e3 + 1.0])
    assert compare(a, b, Tolerance()).beyond == 3
    assert compare(a, b, Tolerance(atol=1e-10)).beyond == 2
    assert compare(a, b, Tolerance(atol=1e-10, rtol=0.002)).beyond == 0
    assert compare(a, b, Tolerance(atol=2.0)).beyond == 0


@pytest.mark.parametrize("name", ["max_ulp", "rtol", "atol", "max_error", "noise_factor"])
@pytest.mark.parametrize("bad", [-1, math.nan])
def test_tolerances_are_validated(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=rf"expected tolerances of 0 or more, .*{name}={bad}"):
        Tolerance(**{name: bad})  # type: ignore[arg-type]  # also NaN ULP


def test_noise_is_another_run_or_a_twin_in_float64(compared: Compare) -> None:
    a, b, other, exact = summed(1), summed(2), summed(3), summed(4, "float64")
    for noise in (other, exact):
        report = compared(a, b, noise)
        (tensor,) = report.tensors
        wide = [x.astype(np.float64) for x in (a, b, noise)]
        expected = np.linalg.norm(wide[0] - wide[1]) / np.linalg.norm(wide[1] - wide[2])
        assert tensor.noise == pytest.approx(expected, rel=1e-12)
        assert 0.5 < expected < 2
        assert report.within
        assert not compared(a, b, noise, noise_factor=0.4).within
    wrong = a * np.float32(1.01)
    report = compared(wrong, b, other)
    assert not report.within
    assert report.tensors[0].noise > 100  # type: ignore[operator]  # with a noise checkpoint noise is a number


def test_noise_that_is_the_same_passes_nothing_that_differs(compared: Compare) -> None:
    a, b = np.ones(4), np.full(4, 1 + 1e-15)
    report = compared(a, b, b)
    assert (report.within, report.tensors[0].noise) == (False, math.inf)
    assert compared(b, b, b).within


def test_noise_is_read_region_by_region(compared: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_boxes, "__defaults__", (512,))
    monkeypatch.setattr(split_box, "__defaults__", (512,))
    rng = np.random.default_rng(3)
    a, b, noise = (rng.standard_normal((60, 21)).astype(np.float32) for _ in range(3))
    for workers in (1, 3):
        (tensor,) = compared(a, b, noise.astype(np.float64), workers=workers).tensors
        expected = np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64) - noise)
        assert tensor.noise == pytest.approx(expected, rel=1e-6)
        assert sum(tensor.histogram.values()) == 60 * 21


@pytest.mark.fast_cases("a")
@pytest.mark.parametrize("names", ["a", "b"])
def test_noise_has_the_names_of_b_or_of_a_through_the_mapping(tmp_path: Path, names: str) -> None:
    def run(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        return {
            name: (1 + rng.normal(0, 1e-3, array.shape)).astype(array.dtype)
            if array.dtype.kind not in "iu" and array.ndim
            else array
            for name, array in dcp_arrays().items()
        }

    write(tmp_path / "a", "dcp", run(1), {})
    write(tmp_path / "b", "orbax", expected_orbax(run(2)), {})
    third = run(3) if names == "a" else expected_orbax(run(3))
    write(tmp_path / "noise", "dcp" if names == "a" else "orbax", third, {})
    report = diff(tmp_path / "a", tmp_path / "b", mapping="decoder", noise=tmp_path / "noise")
    assert report.within
    assert report.noise == tmp_path / "noise"
    differing = [tensor for tensor in report.tensors if tensor.difference.differing]
    assert len(differing) > 10
    assert all(0.2 < tensor.noise < 4 for tensor in differing)  # type: ignore[operator]  # noise is a number here, too
    part = Selection(drop=("model.norm.*",))
    assert diff(
        tmp_path / "a", tmp_path / "b", mapping="decoder", noise=tmp_path / "noise", selection=part
    ).within
    # Without a selection all of it is needed; of a part, only the part.
    gone = "model.norm.weight" if names == "a" else "params/norm/scale"
    del third[gone]
    write(tmp_path / "less", "dcp" if names == "a" else "orbax", third, {})
    with pytest.raises(CheckpointError, match=r"noise checkpoint .*missing: params/norm/scale"):
        diff(tmp_path / "a", tmp_path / "b", mapping="decoder", noise=tmp_path / "less")


def test_missing_and_unlike_tensors_of_the_noise_are_named(compared: Compare) -> None:
    a = {"x": np.ones(3), "y": np.ones((2, 2)), "n": np.arange(2)}
    b = {name: array + 1 if name != "n" else array for name, array in a.items()}
    with pytest.raises(
        CheckpointError, match=r"under its name in B or, with a mapping, in A; missing: x, y$"
    ):
        compared(a, b, {"n": np.arange(2)})
    with pytest.raises(
        CheckpointError, match=r"x of shape \[4\] where B has \[3\], y of dtype int64 where B has float64"
    ):
        compared(a, b, {"x": np.ones(4), "y": np.ones((2, 2), np.int64)})


def test_percentiles_are_within_a_bin_above_those_of_all_elements(compared: Compare) -> None:
    rng = np.random.default_rng(5)
    a = rng.standard_normal(20_000)
    b = a * (1 + 10.0 ** rng.uniform(-14, -1, a.size))
    b[:2000] = a[:2000]
    (tensor,) = compared(a, b).tensors
    relative = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    for percent, value in tensor.percentiles.items():
        exact = np.percentile(relative, float(percent), method="inverted_cdf")
        assert exact <= value <= exact * 1.16
    assert [*tensor.percentiles] == ["50", "90", "99", "99.9"]
    assert tensor.histogram["0"] == np.count_nonzero(a == b)
    for power in range(-14, -1):
        inside = (relative >= 10.0**power) & (relative < 10.0 ** (power + 1))
        assert tensor.histogram[f"1e{power:+03d}"] == pytest.approx(np.count_nonzero(inside), abs=1)


def test_the_histogram_leaves_nans_out_and_counts_infinities_apart(compared: Compare) -> None:
    a = np.asarray([1.0, 1.0, 2.0, np.nan, 5.0, 0.0])
    b = np.asarray([1.0, -1.0, np.inf, 1.0, 5.0001, -0.0])
    (tensor,) = compared(a, b).tensors
    powers = {"1e-05": 0, "1e-04": 0, "1e-03": 0, "1e-02": 0, "1e-01": 0}
    assert tensor.histogram == {"0": 2, **powers, "1e-05": 1, "1e+00": 1, "inf": 1}
    assert tensor.percentiles["99.9"] == math.inf
    (same,) = compared(a, a).tensors
    assert (same.histogram, same.percentiles["99.9"]) == ({"0": 6}, 0.0)


def test_a_spread_of_nothing_has_no_counts() -> None:
    spread = Spread()
    spread.add(np.zeros(0))
    assert (spread.histogram(0), set(spread.percentiles(0).values())) == ({}, {0.0})


def test_the_smallest_and_largest_differences_have_bins() -> None:
    spread = Spread()
    spread.add(np.asarray([2.0**-53, 2.0, 1.0, 1e-3]))
    assert spread.histogram(4)["1e-16"] == 1
    assert spread.histogram(4)["1e+00"] == 2
    assert spread.histogram(4)["1e-03"] == 1
