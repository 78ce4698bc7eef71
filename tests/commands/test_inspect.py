"""The description of a checkpoint, from metadata alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from bridge.checkpoints.summary import inspect
from bridge.commands.inspect import inspect as inspect_command
from bridge.formats.base import Box
from tests.checkpoints.test_convert import HYPERPARAMETERS, write
from tests.support.bridge.decoder_trees import dcp_arrays

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_tensors_groups_and_objects_are_listed(tmp_path: Path) -> None:
    arrays = dcp_arrays()
    write(tmp_path / "a", "dcp", arrays, HYPERPARAMETERS)
    summary = inspect(tmp_path / "a")
    assert summary.format == "dcp"
    assert {t.name: (t.shape, t.dtype) for t in summary.tensors} == {
        n: (a.shape, a.dtype) for n, a in arrays.items()
    }
    assert summary.bytes == sum(a.nbytes for a in arrays.values())
    assert {g.name: (g.tensors, g.bytes) for g in summary.groups} == {
        group: (
            sum(name.startswith(group + ".") for name in arrays),
            sum(a.nbytes for name, a in arrays.items() if name.startswith(group + ".")),
        )
        for group in ("model", "optimizer", "train")
    }
    assert summary.objects["optimizer.param_groups.0.betas"] == (0.9, 0.95)
    assert summary.unreadable == {}


def test_stored_chunks_are_those_of_the_writer(tmp_path: Path) -> None:
    from bridge.formats import create_checkpoint

    with create_checkpoint(tmp_path / "a", "orbax") as writer:
        name = writer.add_tensor(("w",), (5, 3), np.dtype(np.float32), chunk_shape=(2, 3)).name
        for box in writer.chunks(name):
            writer.write(name, box, np.zeros(box.sizes, np.float32))
    (tensor,) = inspect(tmp_path / "a").tensors
    assert tensor.chunks == (Box((0, 0), (2, 3)), Box((2, 0), (2, 3)), Box((4, 0), (1, 3)))


class Opaque:
    """Something that only pickle can store."""


def test_an_object_that_is_not_plain_data_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3), "odd": Opaque(), "fine": 7}, checkpoint_id=tmp_path / "a", no_dist=True)
    summary = inspect(tmp_path / "a")
    assert summary.objects == {"fine": 7}
    assert list(summary.unreadable) == ["odd"]
    assert [t.name for t in summary.tensors] == ["w"]


def test_no_tensor_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.formats.orbax.reader import OrbaxReader

    write(tmp_path / "a", "orbax", {"w": np.ones(3)}, {})
    monkeypatch.setattr(OrbaxReader, "read", None)
    assert inspect(tmp_path / "a").bytes == 24


def test_the_manifest_and_the_number_of_chunks_are_told(tmp_path: Path) -> None:
    from bridge.formats import create_checkpoint

    with create_checkpoint(tmp_path / "runs/3/default", "orbax") as writer:
        writer.add_tensor(("w",), (5, 3), np.dtype(np.float32), chunk_shape=(2, 3))
        for box in writer.chunks("w"):
            writer.write("w", box, np.zeros(box.sizes, np.float32))
    summary = inspect(tmp_path / "runs")
    assert (summary.manifest, summary.chunks) == (True, 3)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert inspect(tmp_path / "a").manifest is False

    app = typer.Typer()
    app.command()(inspect_command)
    result = CliRunner().invoke(app, [str(tmp_path / "runs")])
    assert "orbax, 1 tensors in 3 chunks, 60 B, with its manifest" in result.stdout
    document = json.loads(CliRunner().invoke(app, [str(tmp_path / "runs"), "--json"]).stdout)
    assert (document["manifest"], document["num_chunks"]) == (True, 3)


def test_safetensors_are_inspected_as_a_file_and_as_a_directory(tmp_path: Path) -> None:
    arrays = {"model.w": np.ones((4, 2), np.float32), "model.v": np.zeros(3, np.int64)}
    save_file(arrays, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        summary = inspect(path)
        assert summary.format == "safetensors"
        assert {t.name: (t.shape, t.dtype) for t in summary.tensors} == {
            name: (array.shape, array.dtype) for name, array in arrays.items()
        }


def test_five_thousand_tensors_are_listed(tmp_path: Path) -> None:
    state = {"model": {f"layers.{i}.w": torch.full((4, 4), float(i)) for i in range(5000)}}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    assert len(inspect(tmp_path / "a").tensors) == 5000
