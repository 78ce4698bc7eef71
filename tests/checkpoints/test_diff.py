"""Comparison of checkpoints on disk, of one format or of two through a mapping."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bridge.checkpoints.compare import diff_tensors
from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.compare.ulp import Difference, Tolerance
from bridge.checkpoints.convert.conversion import convert
from bridge.commands.main import app
from bridge.core.formats.tensors.base import Box
from bridge.core.formats.tensors.boxes import check_coverage, group_boxes, split_box
from bridge.core.mapping.language.rules import parse_mapping
from tests.checkpoints.test_convert import HYPERPARAMETERS, write
from tests.support.bridge.dcp_files import stock_save
from tests.support.bridge.decoder_trees import dcp_arrays, expected_orbax

Arrays = dict[str, np.ndarray]


@pytest.fixture
def pair(tmp_path: Path) -> Callable[[Callable[[Arrays], None]], tuple[Path, Path]]:
    """Writes the small decoder as DCP and, after an edit of its arrays, as Orbax."""

    def make(edit: Callable[[Arrays], None] = lambda arrays: None) -> tuple[Path, Path]:
        arrays = expected_orbax(dcp_arrays())
        edit(arrays)
        write(tmp_path / "a", "dcp", dcp_arrays(), HYPERPARAMETERS)
        write(tmp_path / "b", "orbax", {n: a.copy() for n, a in arrays.items()}, HYPERPARAMETERS)
        return tmp_path / "a", tmp_path / "b"

    return make


def test_a_checkpoint_and_its_conversion_have_no_difference(tmp_path: Path) -> None:
    write(tmp_path / "a", "dcp", dcp_arrays(), HYPERPARAMETERS)
    convert(tmp_path / "a", tmp_path / "b", mapping="decoder_stacked")
    for name, other in (("a", "b"), ("b", "a")):
        report = diff(tmp_path / name, tmp_path / other, mapping="decoder_stacked")
        assert report.within
        assert report.max_ulp == 0
        assert report.total == Difference(elements=report.total.elements)
    assert len(report.tensors) == len(dcp_arrays())


def test_one_changed_bit_is_found_in_its_tensor(pair: Callable[..., tuple[Path, Path]]) -> None:
    name = "opt_state/nu/layers/1/mlp/up/kernel"

    def flip(arrays: Arrays) -> None:
        arrays[name].view(np.uint32)[2, 3] ^= 4

    report = diff(*pair(flip), mapping="decoder")
    assert not report.within
    assert [t.name for t in report.tensors if t.difference.differing] == [name]
    assert report.total.differing == report.total.beyond == 1
    assert report.max_ulp == 4


def test_swapped_moments_are_found_in_every_parameter(pair: Callable[..., tuple[Path, Path]]) -> None:
    def swap(arrays: Arrays) -> None:
        for name in [name for name in arrays if name.startswith("opt_state/mu/")]:
            other = name.replace("/mu/", "/nu/", 1)
            arrays[name], arrays[other] = arrays[other], arrays[name]

    report = diff(*pair(swap), mapping="decoder")
    differing = {t.name for t in report.tensors if t.difference.differing}
    assert differing == {
        t.name for t in report.tensors if t.name.startswith(("opt_state/mu/", "opt_state/nu/"))
    }


def test_the_tolerance_decides_within_but_not_what_is_reported(tmp_path: Path) -> None:
    a = np.linspace(1, 2, 50, dtype=np.float32)
    b = a.copy()
    b[7] = np.nextafter(b[7], np.float32(3))
    b[8] *= np.float32(1.001)
    write(tmp_path / "a", "dcp", {"w": a, "n": np.arange(3)}, {})
    write(tmp_path / "b", "dcp", {"w": b, "n": np.arange(3)}, {})
    reports = {
        (ulp, rtol): diff(tmp_path / "a", tmp_path / "b", tolerance=Tolerance(ulp, rtol))
        for ulp, rtol in ((0, 0.0), (1, 0.0), (0, 0.01), (10**6, 0.0))
    }
    assert [report.within for report in reports.values()] == [False, False, True, True]
    assert [report.total.beyond for report in reports.values()] == [2, 1, 0, 0]
    assert {report.total.differing for report in reports.values()} == {2}


def test_missing_extra_and_mismatched_tensors_are_named_as_in_b(
    pair: Callable[..., tuple[Path, Path]],
) -> None:
    def edit(arrays: Arrays) -> None:
        del arrays["params/norm/scale"]
        arrays["params/other"] = np.ones(3)
        arrays["train/step"] = arrays["train/step"].astype(np.int32)
        arrays["params/embed/embedding"] = arrays["params/embed/embedding"][:-1]

    report = diff(*pair(edit), mapping="decoder")
    assert report.missing == ("params/norm/scale",)
    assert report.extra == ("params/other",)
    assert dict(report.mismatched) == {
        "train/step": "dtype int64 in a, int32 in b",
        "params/embed/embedding": "shape [11, 6] in a, [10, 6] in b",
    }
    assert report.total.differing == 0
    assert not report.within


@pytest.mark.parametrize("name", ["params/norm/scale", "params/other", "train/step"])
def test_each_kind_of_mismatch_alone_is_beyond_any_tolerance(
    pair: Callable[..., tuple[Path, Path]], name: str
) -> None:
    def edit(arrays: Arrays) -> None:
        if name == "params/other":
            arrays[name] = np.ones(3)
        elif name == "train/step":
            arrays[name] = arrays[name].astype(np.int32)
        else:
            del arrays[name]

    assert not diff(*pair(edit), mapping="decoder", tolerance=Tolerance(10**9, 1.0)).within


def test_objects_that_both_have_must_agree_and_tuples_equal_lists(tmp_path: Path) -> None:
    arrays = {"w": np.ones(2)}
    write(tmp_path / "a", "dcp", arrays, {("betas",): (0.9, 0.95), ("lr",): 0.1, ("only", "here"): 1})
    write(tmp_path / "b", "orbax", arrays, {("betas",): [0.9, 0.95], ("lr",): 0.1})
    write(tmp_path / "c", "orbax", arrays, {("betas",): [0.9, 0.99], ("lr",): 0.1})
    assert diff(tmp_path / "a", tmp_path / "b").within
    report = diff(tmp_path / "a", tmp_path / "c")
    assert report.objects == (("betas", (0.9, 0.95), [0.9, 0.99]),)
    assert not report.within


def test_formats_compare_by_paths_without_a_mapping(tmp_path: Path) -> None:
    write(tmp_path / "a", "dcp", {"x.y": np.ones(2), "z": np.zeros(1)}, {})
    write(tmp_path / "b", "orbax", {"x/y": np.ones(2), "z": np.zeros(1)}, {})
    report = diff(tmp_path / "a", tmp_path / "b")
    assert report.within
    assert [t.name for t in report.tensors] == ["x/y", "z"]


def test_two_checkpoints_of_one_convention_are_compared_through_a_mapping_too(tmp_path: Path) -> None:
    arrays = dcp_arrays()
    write(tmp_path / "a", "dcp", arrays, {})
    changed = arrays | {"model.norm.weight": arrays["model.norm.weight"] + 1}
    write(tmp_path / "b", "dcp", changed, {})
    report = diff(tmp_path / "a", tmp_path / "b", mapping="decoder")
    assert [t.name for t in report.tensors if t.difference.differing] == ["model.norm.weight"]
    assert len(report.tensors) == len(arrays)


def test_tensors_larger_than_a_region_are_compared_to_the_last_element(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_boxes, "__defaults__", (256,))
    monkeypatch.setattr(split_box, "__defaults__", (256,))
    a = np.arange(33 * 70, dtype=np.float32).reshape(33, 70)
    b = a.copy()
    b[-1, -1] += 1
    write(tmp_path / "a", "dcp", {"w": a}, {})
    write(tmp_path / "b", "orbax", {"w": b}, {})
    compared = []
    compare = diff_tensors.compare

    def recorded(left: np.ndarray, right: np.ndarray, tolerance: Tolerance, **options: bool) -> Difference:
        compared.append(left.nbytes)
        return compare(left, right, tolerance, **options)

    monkeypatch.setattr(diff_tensors, "compare", recorded)
    total = diff(tmp_path / "a", tmp_path / "b").total
    assert (total.elements, total.differing) == (33 * 70, 1)
    assert max(compared) <= 256


@given(st.data(), st.lists(st.integers(1, 6), max_size=4), st.integers(1, 64))
def test_split_and_grouped_boxes_cover_a_tensor_once_within_the_budget(
    data: st.DataObject, shape: list[int], budget: int
) -> None:
    pieces = list(split_box(Box.whole(shape), 1, budget))
    assert all(piece.numel <= budget for piece in pieces)
    check_coverage(shape, pieces, "w")

    block = [data.draw(st.integers(1, size)) for size in shape]
    starts = itertools.product(*(range(0, size, step) for size, step in zip(shape, block, strict=True)))
    grid = [
        Box(low, tuple(min(step, size - o) for o, step, size in zip(low, block, shape, strict=True)))
        for low in starts
    ]
    boxes = data.draw(st.permutations(grid)) if data.draw(st.booleans()) else grid
    groups = list(group_boxes(boxes, 1, budget))
    assert [box for _, members in groups for box in members] == boxes
    check_coverage(shape, [joint for joint, _ in groups], "w")
    for joint, members in groups:
        assert joint.numel == sum(member.numel for member in members)
        assert len(members) == 1 or joint.numel <= budget


def test_row_chunks_are_joined_up_to_the_budget() -> None:
    rows = [Box((k, 0), (1, 10)) for k in range(7)]
    joint = [box for box, _ in group_boxes(rows, 4, 120)]
    assert joint == [Box((0, 0), (3, 10)), Box((3, 0), (3, 10)), Box((6, 0), (1, 10))]


def test_only_boxes_that_fill_a_box_together_are_joined() -> None:
    left, right, below = Box((0, 0), (2, 2)), Box((0, 2), (2, 3)), Box((2, 0), (1, 4))
    assert list(group_boxes([left, right, below], 1, 100)) == [
        (Box((0, 0), (2, 5)), [left, right]),
        (below, [below]),
    ]
    assert [joint for joint, _ in group_boxes([left, below, right], 1, 100)] == [left, below, right]


def test_objects_are_compared_by_type_and_value_and_nan_equals_itself(tmp_path: Path) -> None:
    same = {("o", "nan"): math.nan, ("o", "nested"): {"x": [1, (math.nan, None)]}, ("o", "pair"): (1, 2)}
    w = {"w": np.zeros(2, np.float32)}
    write(tmp_path / "a", "dcp", w, same | {("o", "true"): True, ("o", "one"): 1, ("o", "missing"): 0})
    write(
        tmp_path / "b",
        "orbax",
        w,
        same | {("o", "pair"): [1, 2], ("o", "true"): 1.0, ("o", "one"): 1.0},
    )
    assert diff(tmp_path / "a", tmp_path / "a").within
    report = diff(tmp_path / "a", tmp_path / "b")
    assert not report.within
    assert report.objects == (("o/true", True, 1.0), ("o/one", 1, 1.0))


class Opaque:
    """Something that only pickle can store."""


def test_an_object_that_cannot_be_read_is_listed_beside_the_tensors(tmp_path: Path) -> None:
    stock_save({"w": torch.zeros(3), "extra": Opaque()}, tmp_path / "a")
    report = diff(tmp_path / "a", tmp_path / "a")
    assert [name for name, _ in report.unreadable] == ["extra"]
    assert "extra" in report.unreadable[0][1]
    assert len(report.tensors) == 1
    assert (report.total.max_ulp, report.max_ulp) == (0, math.inf)
    assert not report.within


def test_hyperparameters_that_a_mapping_renames_are_compared_under_their_new_names(tmp_path: Path) -> None:
    mapping = parse_mapping(
        """
        [convention.hf]
        format = "dcp"
        [convention.titan]
        format = "dcp"
        [[rule]]
        hf = "model.a.weight : v m"
        titan = "tok.weight : v m"
        """,
        "a test",
    )

    def trained(path: Path, name: str, rate: float, names: list[str]) -> Path:
        arrays = {f"model.{name}": np.ones((3, 4))}
        for entry in ("exp_avg", "exp_avg_sq"):
            arrays[f"optimizer.state.{name}.{entry}"] = np.ones((3, 4))
        arrays[f"optimizer.state.{name}.step"] = np.full((), 3, np.float32)
        groups = {
            ("optimizer", f"param_groups.{name}.lr"): rate,
            ("optimizer", "param_groups", 0, "params"): names,
        }
        write(path, "dcp", arrays, groups)
        return path

    a = trained(tmp_path / "a", "model.a.weight", 0.1, ["model.a.weight"])
    convert(a, tmp_path / "b", to="dcp", mapping=mapping, into="titan")
    report = diff(a, tmp_path / "b", mapping=mapping)
    assert report.within
    assert (report.objects_missing, report.objects_extra) == ((), ())
    other = trained(tmp_path / "c", "tok.weight", 999.0, ["tok.weight"])
    report = diff(a, other, mapping=mapping)
    assert report.objects == (("optimizer.param_groups.tok.weight.lr", 0.1, 999.0),)
    assert not report.within
    other = trained(tmp_path / "d", "tok.weight", 0.1, ["another"])
    assert diff(a, other, mapping=mapping).objects == (
        ("optimizer.param_groups.0.params", ["tok.weight"], ["another"]),
    )


@pytest.mark.each_value
@pytest.mark.parametrize("to", ["dcp", "orbax", "safetensors"])
@pytest.mark.parametrize("mapping", [None, "decoder", "decoder_stacked"])
def test_values_that_only_one_has_are_listed_and_conversion_loses_none(
    tmp_path: Path, to: str, mapping: str | None
) -> None:
    write(tmp_path / "a", "dcp", dcp_arrays(), HYPERPARAMETERS | {("nothing",): None, ("empty",): []})
    convert(tmp_path / "a", tmp_path / "b", to=to, mapping=mapping, into="jax" if mapping else None)
    for name, other in (("a", "b"), ("b", "a")):
        report = diff(tmp_path / name, tmp_path / other, mapping=mapping)
        assert report.within
        assert (report.objects_missing, report.objects_extra) == ((), ())
    write(tmp_path / "c", "dcp", dcp_arrays(), HYPERPARAMETERS | {("further",): 1})
    report = diff(tmp_path / "a", tmp_path / "c")
    assert report.within
    assert report.objects_missing == ("empty", "nothing")
    assert report.objects_extra == ("further",)
    shown = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "c")])
    assert shown.exit_code == 0
    assert "values that are not tensors, only in A: empty, nothing" in shown.stdout
    assert "values that are not tensors, only in B: further" in shown.stdout


def test_the_note_of_places_is_no_value_of_the_model(tmp_path: Path) -> None:
    arrays = expected_orbax(dcp_arrays())
    chained = {n.replace("opt_state/", "opt_state/1/0/"): a for n, a in arrays.items()}
    write(tmp_path / "a", "orbax", chained, HYPERPARAMETERS)
    convert(tmp_path / "a", tmp_path / "noted", mapping="decoder")
    write(tmp_path / "plain", "dcp", dcp_arrays(), HYPERPARAMETERS)
    for name, other in (("a", "noted"), ("a", "plain"), ("noted", "plain"), ("plain", "noted")):
        report = diff(tmp_path / name, tmp_path / other, mapping="decoder" if name == "a" else None)
        assert report.within
        assert (report.objects_missing, report.objects_extra) == ((), ())


def test_checkpoints_with_nothing_in_common_are_not_said_to_agree(tmp_path: Path) -> None:
    write(tmp_path / "a", "dcp", {"x": np.ones(2)}, {})
    write(tmp_path / "b", "dcp", {"y": np.ones(2)}, {})
    shown = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert shown.exit_code == 1
    assert "0 tensors, 0 elements compared: they have none in common; beyond" in shown.stdout


def test_checkpoints_without_tensors_are_not_said_to_be_beyond_the_tolerance(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, "dcp", {}, {("step",): 3})
    shown = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert shown.exit_code == 0
    assert "0 tensors, 0 elements compared: neither has any; within" in shown.stdout
    write(tmp_path / "c", "dcp", {}, {("step",): 4})
    other = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "c")])
    assert other.exit_code == 1
    assert "within the tolerance of 0 ULP; but A and B differ, as listed (other values: 1)" in other.stdout
