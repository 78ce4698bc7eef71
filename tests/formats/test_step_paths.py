"""A step chosen in directories of steps of every format, here and in a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.inspect.summary import inspect
from bridge.commands.main import app
from bridge.core.formats import CheckpointError, create_checkpoint, open_checkpoint
from bridge.core.formats.whole.step_paths import at_step


def small(path: Path, format: str) -> None:
    with create_checkpoint(path, format) as writer:
        name = writer.add_tensor(("w",), (2,), np.dtype(np.float32)).name
        for box in writer.chunks(name):
            writer.write(name, box, np.zeros(2, np.float32))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for format, names in {
        "dcp": ("step-9", "step-10", "step-100"),
        "orbax": ("9", "10", "100"),
        "safetensors": ("checkpoint-9", "checkpoint-10", "checkpoint-100"),
    }.items():
        for name in names:
            small(tmp_path / format / name, format)
    (tmp_path / "torch").mkdir()
    (tmp_path / "npz").mkdir()
    for number in (9, 10, 100):
        torch.save({"w": torch.zeros(2)}, tmp_path / "torch" / f"epoch=3-step={number}.ckpt")
        np.savez(tmp_path / "npz" / f"model_{number}.npz", w=np.zeros(2))
    return tmp_path


@pytest.mark.parametrize("format", ["dcp", "orbax", "safetensors", "torch", "npz"])
def test_the_latest_and_any_other_step(runs: Path, format: str) -> None:
    # What does not count: an attempt, notes, files of other kinds, and a save that did not finish.
    (runs / format / "101.orbax-checkpoint-tmp-1").mkdir()
    (runs / format / "step-102.tmp-01234567").mkdir()
    (runs / format / "log_103.txt").write_text("x")
    (runs / format / "104").mkdir()
    (runs / format / "104" / "__0_0.distcp").write_bytes(b"x")
    assert Path(at_step(runs / format, "latest")).stem.endswith("100")
    assert Path(at_step(runs / format, 9)).stem.endswith("9")
    with open_checkpoint(runs / format, step=10) as reader:
        assert list(reader.tensors) == ["w"]
    with pytest.raises(
        CheckpointError, match=r"expected one step 11 \(--step\), found none: complete are 9, 10, 100"
    ):
        at_step(runs / format, 11)
    with pytest.raises(CheckpointError, match="found one that is not complete"):
        at_step(runs / format, 104)


def test_the_number_behind_the_word_step_is_the_step(tmp_path: Path) -> None:
    # The last number is of the loss: 0.91 is older, and worse, than 0.35.
    names = ("epoch=0-step=100-val_loss=0.91.ckpt", "epoch=1-step=200-val_loss=0.35.ckpt")
    for name in names:
        torch.save({"w": torch.zeros(2)}, tmp_path / name)
    assert Path(at_step(tmp_path, "latest")).name == names[1]
    assert Path(at_step(tmp_path, 100)).name == names[0]
    torch.save({"w": torch.zeros(2)}, tmp_path / "epoch=1-step=200-val_loss=0.35-v1.ckpt")
    with pytest.raises(CheckpointError, match=r"expected one step 200 .*0\.35-v1\.ckpt and .*0\.35\.ckpt"):
        at_step(tmp_path, "latest")


def test_names_with_several_numbers_are_refused_unless_only_the_last_one_differs(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for loss in ("0-val_loss=0.91", "1-val_loss=0.35"):
        torch.save({"w": torch.zeros(2)}, tmp_path / "a" / f"epoch={loss}.ckpt")
    for number in (9, 10):
        torch.save({"w": torch.zeros(2)}, tmp_path / "b" / f"llama-7b-{number}.pt")
    with pytest.raises(
        CheckpointError, match=r"epoch=0-val_loss=0\.91\.ckpt and epoch=1.*give the path of one"
    ):
        at_step(tmp_path / "a", "latest")
    assert Path(at_step(tmp_path / "b", "latest")).name == "llama-7b-10.pt"


def test_what_is_no_directory_of_steps_is_named(runs: Path, tmp_path: Path) -> None:
    for path, message in (
        (runs / "dcp" / "step-9", "found one checkpoint: leave the step out"),
        (runs / "torch" / "epoch=3-step=9.ckpt", "found a file"),
        (runs / "nowhere", "found nothing there"),
        (runs, "found no step among dcp, npz"),
    ):
        with pytest.raises(CheckpointError, match=message):
            at_step(path, "latest")
    small(runs / "dcp" / "step_9", "dcp")
    with pytest.raises(CheckpointError, match=r"expected one step 9 \(--step\), found step-9 and step_9"):
        at_step(runs / "dcp", 9)
    for wrong in (-1, True, "last", 1.5):
        with pytest.raises(ValueError, match="expected a number of at least 0, or latest"):
            at_step(runs / "dcp", wrong)  # type: ignore[arg-type]


def test_commands_and_functions_take_a_step(runs: Path, tmp_path: Path) -> None:
    convert(runs / "dcp", tmp_path / "out", step="latest")
    assert diff(runs / "dcp", tmp_path / "out", step=100).within
    with pytest.raises(CheckpointError, match="expected one step 5"):
        diff(runs / "dcp", tmp_path / "out", step=5)
    with pytest.raises(CheckpointError, match="found one checkpoint"):
        diff(tmp_path / "out", tmp_path / "out", step=5)
    assert inspect(runs / "orbax", step=9).path == runs / "orbax" / "9"
    for command in ("inspect", "verify"):
        assert CliRunner().invoke(app, [command, str(runs / "dcp"), "--step", "latest"]).exit_code == 0
        assert CliRunner().invoke(app, [command, str(runs / "dcp"), "--step", "11"]).exit_code == 2
        assert CliRunner().invoke(app, [command, str(runs / "dcp"), "--step", "x"]).exit_code == 2
    same = ["map", str(runs / "dcp"), str(runs / "orbax"), "--step", "10"]
    assert "w" in CliRunner().invoke(app, same).stdout


def test_a_step_in_a_store(runs: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.put(str(runs / "dcp"), "/steps/dcp", recursive=True)
    store.put(str(runs / "torch"), "/steps/torch", recursive=True)
    assert at_step("memory://steps/dcp", "latest") == "memory://steps/dcp/step-100"
    assert inspect("memory://steps/dcp", step=9).path == "memory://steps/dcp/step-9"
    assert at_step("memory://steps/torch/", 10) == "memory://steps/torch/epoch=3-step=10.ckpt"
    with pytest.raises(CheckpointError, match="complete are 9, 10, 100"):
        at_step("memory://steps/dcp", 5)


def test_shards_of_one_model_are_no_steps(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({f"w{number}": np.zeros(2)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="found no step among"):
        at_step(tmp_path, "latest")


def test_a_directory_of_steps_without_a_step_says_how_to_choose_one(tmp_path: Path) -> None:
    (tmp_path / "run" / "step_10").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match=r"found step_10; if the directory contains several steps, choose one \(--step"
    ):
        open_checkpoint(tmp_path / "run")
    (tmp_path / "other" / "weights").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"found weights$"):
        open_checkpoint(tmp_path / "other")
