"""Comparison of a part of a checkpoint: what is left out of one side is not missed, or found too much, on the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.compare.diff_report import DiffReport
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.commands.main import app
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.mapping.language.rules import parse_mapping
from tests.checkpoints.test_convert import HYPERPARAMETERS, write
from tests.support.bridge.decoder_trees import dcp_arrays, expected_orbax

WEIGHTS = Selection(weights_only=True)


@pytest.fixture
def ends(tmp_path: Path) -> tuple[Path, Path]:
    """The small decoder as DCP and as Orbax."""
    write(tmp_path / "a", "dcp", dcp_arrays(), HYPERPARAMETERS)
    write(tmp_path / "b", "orbax", expected_orbax(dcp_arrays()), HYPERPARAMETERS)
    return tmp_path / "a", tmp_path / "b"


def assert_same_names(report: DiffReport) -> None:
    assert report.within
    unmatched = (report.missing, report.extra, report.objects_missing, report.objects_extra)
    assert unmatched == ((), (), (), ())


@pytest.mark.parametrize(
    "selection", [WEIGHTS, Selection(drop=("optimizer.*",)), Selection(select=("model.*",))]
)
def test_what_was_converted_in_part_is_compared_in_that_part(
    tmp_path: Path, ends: tuple[Path, Path], selection: Selection
) -> None:
    whole = len(dcp_arrays())
    convert(ends[0], tmp_path / "part", mapping="decoder", selection=selection)
    report = diff(ends[0], tmp_path / "part", mapping="decoder", selection=selection)
    assert_same_names(report)
    assert 0 < len(report.tensors) < whole
    # So it is with a checkpoint that holds all: the part has the same counterparts there.
    complete = diff(ends[0], ends[1], mapping="decoder", selection=selection)
    assert_same_names(complete)
    assert {t.name for t in complete.tensors} == {t.name for t in report.tensors}
    assert not diff(ends[0], tmp_path / "part", mapping="decoder").within


def test_a_tensor_that_neither_side_leaves_out_is_still_missed(
    tmp_path: Path, ends: tuple[Path, Path]
) -> None:
    arrays = expected_orbax(dcp_arrays())
    del arrays["params/embed/embedding"]
    write(tmp_path / "c", "orbax", arrays | {"params/other": np.ones(2)}, {})
    report = diff(ends[0], tmp_path / "c", mapping="decoder", selection=WEIGHTS)
    assert report.missing == ("params/embed/embedding",)
    assert report.extra == ("params/other",)
    assert not report.within


def test_differences_are_found_in_the_part_and_not_beside_it(tmp_path: Path, ends: tuple[Path, Path]) -> None:
    arrays = expected_orbax(dcp_arrays())
    name = "opt_state/nu/embed/embedding"
    arrays[name] = arrays[name] + 1
    write(tmp_path / "c", "orbax", arrays, HYPERPARAMETERS)
    assert_same_names(diff(ends[0], tmp_path / "c", mapping="decoder", selection=WEIGHTS))
    drop = Selection(drop=("model.*",))
    report = diff(ends[0], tmp_path / "c", mapping="decoder", selection=drop)
    assert [tensor.name for tensor in report.offenders] == [name]


def test_weights_of_a_training_checkpoint_with_a_model_file(tmp_path: Path, ends: tuple[Path, Path]) -> None:
    convert(ends[0], tmp_path / "w.safetensors", selection=WEIGHTS)
    for a, b in ((ends[0], tmp_path / "w.safetensors"), (tmp_path / "w.safetensors", ends[0])):
        assert not diff(a, b).within
        assert_same_names(diff(a, b, selection=WEIGHTS))


def test_names_without_a_mapping_are_dropped_on_either_side(tmp_path: Path) -> None:
    x: dict[str, Any] = {"model.x": np.ones(3)}
    write(tmp_path / "a", "dcp", x | {"model.mine": np.ones(1)}, {("note",): 1})
    write(tmp_path / "b", "orbax", {"model/x": np.ones(3), "model/yours": np.ones(1)}, {("text",): "b"})
    drop = Selection(drop=("*mine", "*yours", "note", "text"))
    assert_same_names(diff(tmp_path / "a", tmp_path / "b", selection=drop))
    with pytest.raises(CheckpointError, match=r"--drop nothing\*: .* matches none of 6, such as"):
        diff(tmp_path / "a", tmp_path / "b", selection=Selection(drop=("nothing*",)))


def test_what_a_mapping_does_not_know_can_be_left_out(tmp_path: Path, ends: tuple[Path, Path]) -> None:
    write(tmp_path / "c", "dcp", {**dcp_arrays(), "ema.x": np.ones(3)}, HYPERPARAMETERS)
    with pytest.raises(CheckpointError, match=r"ema\.x"):
        diff(tmp_path / "c", ends[1], mapping="decoder")
    assert_same_names(diff(tmp_path / "c", ends[1], mapping="decoder", selection=Selection(drop=("ema.*",))))


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["diff", *map(str, arguments)])
    return result.exit_code, result.stdout + result.stderr


def test_the_command_takes_what_convert_takes(tmp_path: Path, ends: tuple[Path, Path]) -> None:
    a, b = ends
    convert(a, tmp_path / "part", mapping="decoder", selection=Selection(drop=("optimizer.*",)))
    common = (a, tmp_path / "part", "--mapping", "decoder", "--into", "jax", "--from", "torch")
    assert run(*common)[0] == 1
    assert run(*common, "--drop", "optimizer.*")[0] == 0
    assert run(a, b, "--mapping", "decoder", "--weights-only")[0] == 0
    assert run(a, b, "--mapping", "decoder", "--select", "model.*")[0] == 0
    status, text = run(*common, "--from", "klingon")
    assert status == 2
    assert "expected a convention of mapping decoder" in " ".join(text.split())
    for option in ("--into", "--from"):
        status, text = run(a, b, option, "jax")
        assert status == 2
        assert "--mapping" in text


def test_a_tied_weight_is_compared_as_it_is_asked_for(tmp_path: Path) -> None:
    arrays = {name: array for name, array in dcp_arrays().items() if "lm_head" not in name}
    write(tmp_path / "a", "dcp", arrays, {})
    convert(tmp_path / "a", tmp_path / "b", mapping="decoder", tied="both")
    report = diff(tmp_path / "a", tmp_path / "b", mapping="decoder")
    assert "params/lm_head/kernel" in report.extra
    assert_same_names(diff(tmp_path / "a", tmp_path / "b", mapping="decoder", tied="both"))
    assert run(tmp_path / "a", tmp_path / "b", "--mapping", "decoder", "--tied", "both")[0] == 0
    with pytest.raises(ValueError, match="expected a mapping, which says which weights are tied"):
        diff(tmp_path / "a", tmp_path / "b", tied="both")
    with pytest.raises(ValueError, match="expected a mapping, which says which weights are tied"):
        convert(tmp_path / "a", tmp_path / "c", tied="both")
    assert not (tmp_path / "c").exists()


def test_where_two_conventions_fit_the_other_side_the_named_one_is_taken(tmp_path: Path) -> None:
    mapping = parse_mapping(
        """
        [convention.torch]
        [convention.rows]
        [convention.columns]
        [[rule]]
        torch = "layer.w : a b"
        rows = "layer/kernel : a b"
        columns = "layer/kernel : b a"
        """,
        "a test",
    )
    w, moment = np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3) / 7
    write(tmp_path / "a", "dcp", {"model.layer.w": w, "optimizer.state.layer.w.momentum_buffer": moment}, {})
    tree = {"params/layer/kernel": w.T, "opt_state/5/trace/layer/kernel": moment.T}
    write(tmp_path / "b", "orbax", tree, {})
    with pytest.raises(CheckpointError, match=r"--into"):
        diff(tmp_path / "a", tmp_path / "b", mapping=mapping)
    assert_same_names(diff(tmp_path / "a", tmp_path / "b", mapping=mapping, into="columns"))
    assert diff(tmp_path / "a", tmp_path / "b", mapping=mapping, into="rows").mismatched
