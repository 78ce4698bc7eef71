"""config.json, tokenizer files and the like go along with a conversion, and survive a replacement."""

from __future__ import annotations

import json
import os
from pathlib import Path

import fsspec
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file
from typer.testing import CliRunner

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verification import verify
from bridge.commands.main import app
from bridge.core.formats import Box, create_checkpoint, open_checkpoint
from bridge.core.formats.files.atomic import temporaries_of
from bridge.core.formats.files.data_file import DataFile
from bridge.core.formats.reading.model_files import is_companion
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.whole.companions import Companions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FILES = {
    "config.json": b'{"model_type": "mine", "head_dim": 2}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "tokenizer.model": b"\x00\xff",
    "chat_template.jinja": "{{ 'ä' }}".encode(),
}
FORMATS = ("dcp", "orbax", "safetensors")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "hf"
    path.mkdir()
    save_file({"model.w": np.arange(6, dtype=np.float32).reshape(3, 2)}, path / "model.safetensors")
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    for name in ("README.md", "modeling_mine.py", "notes.txt", ".gitattributes"):
        (path / name).write_text("not the model's")
    return path


def companions(path: Path) -> dict[str, bytes]:
    return {child.name: child.read_bytes() for child in path.iterdir() if is_companion(child.name)}


@pytest.mark.fast_cases("dcp")
@pytest.mark.parametrize("format", FORMATS)
def test_companions_go_along_in_every_format_and_back(tmp_path: Path, source: Path, format: str) -> None:
    report = convert(source, tmp_path / "a", to=format)
    assert report.companions == tuple(sorted(FILES))
    assert companions(tmp_path / "a") == FILES
    assert not {"README.md", "modeling_mine.py", "notes.txt"} & set(os.listdir(tmp_path / "a"))
    assert verify(tmp_path / "a").problems == ()
    convert(tmp_path / "a", tmp_path / "b", to="safetensors")
    assert companions(tmp_path / "b") == FILES
    with open_checkpoint(tmp_path / "b") as reader:
        assert reader.read("model.w")[2, 1] == 5


def test_stock_readers_take_a_checkpoint_with_companions(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "orbax")
    assert ocp.StandardCheckpointer().restore(tmp_path / "orbax")["model.w"].sum() == 15
    convert(source, tmp_path / "dcp", to="dcp")
    state = {"model.w": torch.zeros(3, 2)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert float(state["model.w"].sum()) == 15


@pytest.mark.fast_cases("dcp")
@pytest.mark.parametrize("format", FORMATS)
def test_a_replacement_keeps_what_the_source_does_not_have(tmp_path: Path, source: Path, format: str) -> None:
    convert(source, tmp_path / "a", to=format)
    (tmp_path / "a/merges.txt").write_text("mine")
    (tmp_path / "a/config.json").write_text("old")
    (source / "tokenizer.json").unlink()
    report = convert(source, tmp_path / "a", to=format, replace=True)
    assert report.kept == ("merges.txt", "tokenizer.json")
    assert companions(tmp_path / "a") == {**FILES, "merges.txt": b"mine"}
    assert verify(tmp_path / "a").problems == ()


@pytest.mark.parametrize("name", ["notes.txt", "README.md", "modeling_mine.py"])
def test_a_replacement_still_refuses_other_files(tmp_path: Path, source: Path, name: str) -> None:
    convert(source, tmp_path / "a")
    (tmp_path / "a" / name).write_text("mine")
    with pytest.raises(CheckpointError, match=f"found also {name}"):
        convert(source, tmp_path / "a", replace=True)
    assert (tmp_path / "a" / name).read_text() == "mine"


def test_a_folder_or_link_with_the_name_of_a_companion_is_not_deleted(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "a")
    (tmp_path / "a/params.json").mkdir()
    (tmp_path / "a/params.json/mine").write_text("mine")
    with pytest.raises(CheckpointError, match=r"found also params\.json"):
        convert(source, tmp_path / "a", replace=True)


def test_a_conversion_that_fails_leaves_the_old_companions(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "a", to="dcp")
    (source / "config.json").write_text("new")

    def failing(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DataFile, "write", failing)
    with pytest.raises(OSError, match="No space"):
        convert(source, tmp_path / "a", to="dcp", replace=True)
    assert companions(tmp_path / "a") == FILES
    assert temporaries_of(tmp_path / "a") == []


def test_links_out_of_the_directory_are_named_and_not_followed(tmp_path: Path, source: Path) -> None:
    (tmp_path / "secret.json").write_text("secret")
    (source / "vocab.json").symlink_to(tmp_path / "secret.json")
    report = convert(source, tmp_path / "a")
    assert "a link to" in report.not_copied["vocab.json"]
    assert not (tmp_path / "a/vocab.json").exists()


def test_links_of_the_hub_cache_are_followed(tmp_path: Path, source: Path) -> None:
    blobs, snapshot = tmp_path / "m/blobs", tmp_path / "m/snapshots/abc"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (source / name).rename(blobs / f"of-{name}")
        (snapshot / name).symlink_to(blobs / f"of-{name}")
    convert(snapshot, tmp_path / "a")
    assert not (tmp_path / "a/config.json").is_symlink()
    assert (tmp_path / "a/config.json").read_bytes() == FILES["config.json"]


def test_one_file_has_companions_where_a_configuration_is_beside_it_and_gives_them_no_place(
    tmp_path: Path, source: Path
) -> None:
    convert(source / "model.safetensors", tmp_path / "a")
    assert companions(tmp_path / "a") == FILES
    report = convert(source, tmp_path / "one.safetensors")
    assert (report.companions, set(report.not_copied)) == ((), set(FILES))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("a", "hf", "one.safetensors", "one.safetensors.manifest.json"),
    ]
    (source / "config.json").unlink()
    assert Companions.beside(source / "model.safetensors").files == {}


def test_they_go_to_a_store_and_come_from_one(tmp_path: Path, source: Path) -> None:
    fsspec.filesystem("memory").store.clear()
    convert(source, "memory://bucket/a", to="orbax")
    assert fsspec.filesystem("memory").cat_file("/bucket/a/tokenizer.model") == FILES["tokenizer.model"]
    convert("memory://bucket/a", tmp_path / "b", to="safetensors")
    assert companions(tmp_path / "b") == FILES


def test_the_command_lists_them_and_can_leave_them(tmp_path: Path, source: Path) -> None:
    def call(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert f"files next to it: {', '.join(sorted(FILES))}\n" in call(source, tmp_path / "a", "--dry-run")
    assert json.loads(call(source, tmp_path / "a", "--dry-run", "--json"))["companions"] == sorted(FILES)
    assert f"copied along: {', '.join(sorted(FILES))}\n" in call(source, tmp_path / "a")
    (source / "tokenizer.json").unlink()
    shown = call(source, tmp_path / "a", "--replace")
    assert "kept from the checkpoint that was replaced: tokenizer.json\n" in shown
    assert "copied along" not in call(source, tmp_path / "b", "--no-companions")
    assert companions(tmp_path / "b") == {}
    # Not taking the source's does not remove those that are there.
    assert "kept" in call(source, tmp_path / "a", "--replace", "--no-companions")
    assert companions(tmp_path / "a") == FILES


def test_a_dequantized_copy_is_not_said_to_be_quantized(tmp_path: Path, source: Path) -> None:
    fields = {"d": 1, "quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps(fields))
    arrays = {
        "w.weight": np.ones((2, 2), ml_dtypes.float8_e4m3fn),
        "w.weight_scale_inv": np.ones((1, 1), np.float32),
    }
    save_file(arrays, source / "model.safetensors")
    convert(source, tmp_path / "a", to="safetensors", dequantize=True)
    convert(source, tmp_path / "b", to="safetensors")
    assert json.loads((tmp_path / "a/config.json").read_text()) == {"d": 1}
    assert json.loads((tmp_path / "b/config.json").read_text()) == fields
    # What --dequantize wrote is compared with what it was made of.
    compared = ["diff", str(source), str(tmp_path / "a")]
    assert CliRunner().invoke(app, compared).exit_code == 1
    assert CliRunner().invoke(app, [*compared, "--dequantize"]).exit_code == 0


def test_an_item_of_a_step_has_those_beside_the_items(tmp_path: Path, source: Path) -> None:
    with create_checkpoint(source / "tree", "dcp") as writer:
        name = writer.add_tensor(("model", "w"), (2,), np.dtype(np.float32)).name
        writer.write(name, Box.whole((2,)), np.ones(2, np.float32))
    for name in FILES:
        (source / name).rename(source / "tree" / name)
    convert(source / "tree", tmp_path / "step", write_items=["model"])
    assert (tmp_path / "step" / "config.json").is_file()
    fsspec.filesystem("memory").put(str(tmp_path / "step"), "/bucket/step", recursive=True)
    for number, location in enumerate(
        (tmp_path / "step", "memory://bucket/step", tmp_path / "step" / "model")
    ):
        items = ["model"] if number < 2 else []
        convert(location, tmp_path / f"copy{number}", to="dcp", items=items)
        assert companions(tmp_path / f"copy{number}") == FILES
