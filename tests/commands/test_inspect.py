"""The description of a checkpoint, from metadata alone."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from rich.console import Console
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.inspect.tensor_tree import tensor_tree
from bridge.commands.inspect import inspect as inspect_command
from bridge.commands.inspect import print_tree
from bridge.commands.main import app
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import Box
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
    from bridge.core.formats import create_checkpoint

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
    from bridge.core.formats.orbax.reader import OrbaxReader

    write(tmp_path / "a", "orbax", {"w": np.ones(3)}, {})
    monkeypatch.setattr(OrbaxReader, "read", None)
    assert inspect(tmp_path / "a").bytes == 24


def test_the_manifest_and_the_number_of_chunks_are_told(tmp_path: Path) -> None:
    from bridge.core.formats import create_checkpoint

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
    assert "orbax, 1 tensor in 3 chunks, 60 B, with its manifest" in result.stdout
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


@pytest.mark.slow
def test_five_thousand_tensors_are_listed(tmp_path: Path) -> None:
    state = {"model": {f"layers.{i}.w": torch.full((4, 4), float(i)) for i in range(5000)}}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    assert len(inspect(tmp_path / "a").tensors) == 5000


def layered(path: Path) -> Path:
    arrays = {"model.embed.weight": np.zeros((5, 4), np.float32), "lm_head": np.zeros(3, np.float32)}
    for i in range(12):
        arrays[f"model.layers.{i}.mlp.w"] = np.zeros((4, 4), np.float32)
        arrays[f"model.layers.{i}.norm"] = np.zeros(7 if i % 4 == 3 else 6, np.float32)
    save_file(arrays, path)
    return path


def call(*arguments: object, **environment: str) -> Result:
    app = typer.Typer()
    app.command()(inspect_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


def test_a_tree_has_groups_with_counts_and_bytes_and_layers_that_are_alike_once(tmp_path: Path) -> None:
    shown = call(layered(tmp_path / "m.safetensors"), "--tree").stdout.splitlines()
    assert shown[0].endswith("26 tensors in 26 chunks, 1.16 kB, no manifest")
    assert [line.rstrip() for line in shown[1:]] == [
        "├── lm_head  float32 [3], 12 B",
        "└── model  25 tensors, 1.15 kB",
        "    ├── embed.weight  float32 [5, 4], 80 B",
        "    └── layers  24 tensors, 1.07 kB",
        "        ├── {0..2, 4..6, 8..10}  9 alike, 18 tensors, 792 B",
        "        │   ├── mlp.w  float32 [4, 4], 64 B",
        "        │   └── norm  float32 [6], 24 B",
        "        └── {3, 7, 11}  3 alike, 6 tensors, 276 B",
        "            ├── mlp.w  float32 [4, 4], 64 B",
        "            └── norm  float32 [7], 28 B",
    ]


def test_a_tree_ends_at_the_depth_that_is_asked_for(tmp_path: Path) -> None:
    path = layered(tmp_path / "m.safetensors")
    for depth, lines in ((0, 1), (1, 3), (2, 5), (3, 7), (9, 11)):
        assert len(call(path, "--depth", depth).stdout.splitlines()) == lines
    assert call(path, "--depth", 1, "--list").exit_code == 2
    assert call(path, "--depth", 1, "--layout").exit_code == 2
    assert call(path, "--depth", -1).exit_code == 2


def test_no_table_is_there_twice(tmp_path: Path) -> None:
    path = layered(tmp_path / "m.safetensors")
    listed = call(path).stdout
    assert listed == call(path, "--list").stdout
    assert listed.count("model.layers.3.norm") == 1
    assert "group" not in listed
    write(tmp_path / "a", "dcp", dcp_arrays(), HYPERPARAMETERS)
    assert "\ngroup " in call(tmp_path / "a").stdout


def test_names_are_whole_in_a_tree_whatever_the_width_and_never_control_the_terminal(tmp_path: Path) -> None:
    name = "model." + "a_rather_long_name" * 12
    save_file({name: np.zeros(1), "w[bold]\x1b[2J.:smile:": np.zeros(1)}, tmp_path / "m.safetensors")
    shown = call(tmp_path / "m.safetensors", "--tree", COLUMNS="20").stdout
    assert f"{name}  float64 [1], 8 B" in shown
    assert "w[bold]\\x1b[2J.:smile:" in shown
    assert "\x1b" not in shown


def test_values_of_flat_optimizer_states_are_one_line_where_they_are_equal(tmp_path: Path) -> None:
    rates = {f"layers.{layer}.w.lr": 0.1 if layer == 3 else 0.5 for layer in range(5)}
    values = {("optimizer", f"param_groups.{name}"): rate for name, rate in rates.items()}
    write(tmp_path / "a", "dcp", {"w": np.ones(2)}, values)
    shown = call(tmp_path / "a", "--tree").stdout.splitlines()[-2:]
    assert shown == [
        "optimizer.param_groups.{layers.0.w ... layers.4.w: 4 alike}.lr = 0.5",
        "optimizer.param_groups.layers.3.w.lr = 0.1",
    ]
    assert call(tmp_path / "a", "--list").stdout.count("param_groups") == 5
    assert "optimizer.param_groups: 5 values" in call(tmp_path / "a", "--depth", 3).stdout


def test_numbered_layers_of_flax_are_one_branch(tmp_path: Path) -> None:
    tensors = {f"params.layers_{k}.kernel": np.zeros(2) for k in range(12)}
    save_file({**tensors, "params.norm": np.zeros(1)}, tmp_path / "m.safetensors")
    shown = call(tmp_path / "m.safetensors", "--tree").stdout
    assert "├── layers_{0..11}.kernel  12 alike, float64 [2], 16 B of 192 B\n" in shown


def test_a_name_that_is_a_tensor_and_a_group_is_both(tmp_path: Path) -> None:
    save_file({"a": np.zeros(2), "a.b": np.zeros(1), "a.c": np.zeros(1)}, tmp_path / "m.safetensors")
    lines = [line.rstrip() for line in call(tmp_path / "m.safetensors", "--tree").stdout.splitlines()[1:]]
    assert lines == [
        "└── a  float64 [2]; 3 tensors, 32 B",
        "    ├── b  float64 [1], 8 B",
        "    └── c  float64 [1], 8 B",
    ]


def test_a_terminal_gets_a_tree(tmp_path: Path) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, color_system=None, width=20)
    with open_checkpoint(layered(tmp_path / "m.safetensors")) as reader:
        print_tree(terminal, "title", tensor_tree(reader.tensors.values()), None)
    assert "├── lm_head" in screen.getvalue()
    assert max(map(len, screen.getvalue().splitlines())) <= 20


def test_tensors_that_can_only_be_listed_are_said_to_be_so(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", odd=np.array([{}], object), even=np.ones(2))
    done = call(tmp_path / "a.npz")
    assert done.exit_code == 0
    assert "odd cannot be read: pickled objects" in done.stdout
    assert "even cannot" not in done.stdout


def test_values_below_the_depth_are_counted(tmp_path: Path) -> None:
    """A training state of PyTorch has a dozen values for each group of parameters."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(groups)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}, tmp_path / "a.pt"
    )
    lines = {}
    for depth in (0, 1, 4, None):
        options = [] if depth is None else ["--depth", str(depth)]
        result = CliRunner().invoke(app, ["inspect", str(tmp_path / "a.pt"), *options])
        assert result.exit_code == 0
        lines[depth] = [
            line for line in result.output.splitlines() if " = " in line or "in addition to the" in line
        ]
    values = len(lines[None])
    assert values > 60
    # Six groups are alike in all but their parameters; "step" and an empty "state" are two values more.
    assert len(lines[4]) - 2 == (values - 2) / 6
    assert "optimizer.param_groups.{0 ... 5: 6 alike}.lr = 0.001" in lines[4]
    assert "optimizer.param_groups.{0 ... 5: 6 alike}.params = [...]" in lines[4]
    assert lines[1] == ["step = 7", f"optimizer: {values - 1} values in addition to the tensors"]
    assert lines[0] == [f"in all: {values} values in addition to the tensors"]
