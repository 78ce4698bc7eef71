"""verify names every damaged part of a checkpoint and looks at the others; everyone else stops at the first."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from typer.testing import CliRunner

from bridge import convert, verify
from bridge.commands.main import app
from bridge.core.formats import CheckpointError, open_checkpoint
from bridge.core.formats.files.manifest import MANIFEST_FILE
from tests.support.bridge.orbax_helpers import stock_save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ARRAYS = {f"w{number}": np.full((40, 50), number, np.float32) for number in range(5)}


def flip(file: Path, *offsets: int) -> None:
    data = bytearray(file.read_bytes())
    for offset in offsets:
        data[offset] ^= 255
    file.write_bytes(data)


def ends_of_archives(path: Path) -> set[str]:
    save_file(ARRAYS, path.with_suffix(".safetensors"))
    convert(path.with_suffix(".safetensors"), path, to="dcp")
    (path / MANIFEST_FILE).unlink()
    file = path / "__0_0.distcp"
    data, offsets = file.read_bytes(), []
    while (offset := data.find(b"PK\5\6", offsets[-1] + 1 if offsets else 0)) >= 0:
        offsets.append(offset)
    flip(file, offsets[1], offsets[4])
    return {"w1", "w4"}


def files_of_dcp(path: Path) -> set[str]:
    tensors = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
    dcp.save(tensors, storage_writer=FileSystemWriter(path, single_file_per_rank=False))
    files = sorted(path.glob("*.distcp"))
    os.truncate(files[1], 100)
    files[3].unlink()
    return {files[1].name, files[3].name, "w1", "w3"}


def pipes_in_dcp(path: Path) -> set[str]:
    tensors = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
    dcp.save(tensors, storage_writer=FileSystemWriter(path, single_file_per_rank=False))
    files = sorted(path.glob("*.distcp"))
    for number in (1, 3):
        files[number].unlink()
        os.mkfifo(files[number])
    return {files[1].name, files[3].name, "w1", "w3"}


def shards(path: Path) -> set[str]:
    path.mkdir()
    names = {f"w{n}": f"model-{n + 1:05}-of-00005.safetensors" for n in range(5)}
    for tensor, file in names.items():
        save_file({tensor: ARRAYS[tensor]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    flip(path / names["w1"], 9)
    os.truncate(path / names["w3"], 4)
    return {"w1", names["w1"], "w3", names["w3"]}


def files_of_torch(path: Path) -> set[str]:
    path.mkdir()
    names = {f"w{n}": f"pytorch_model-{n + 1:05}-of-00005.bin" for n in range(5)}
    for tensor, file in names.items():
        torch.save({tensor: torch.from_numpy(ARRAYS[tensor])}, path / file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    for tensor in ("w1", "w3"):
        os.truncate(path / names[tensor], 500)
    return {"w1", names["w1"], "w3", names["w3"]}


def members_of_npz(path: Path) -> set[str]:
    with open(path, "wb") as out:
        np.savez(out, **ARRAYS)
    with zipfile.ZipFile(path) as archive:
        begin = {info.filename: info.header_offset for info in archive.infolist()}
    flip(path, begin["w1.npy"] + 60, begin["w3.npy"] + 60, begin["w4.npy"] + 5000)
    return {"w1.npy", "w3.npy", "w4"}


def members_of_torch(path: Path) -> set[str]:
    torch.save({name: torch.from_numpy(array) for name, array in ARRAYS.items()}, path)
    with zipfile.ZipFile(path) as archive:
        begin = {info.filename.partition("/")[2]: info.header_offset for info in archive.infolist()}
    flip(path, begin["data/1"], begin["data/3"] + 500)
    return {"w1", "w3"}


def arrays_of_orbax(path: Path) -> set[str]:
    stock_save(path, ARRAYS, use_ocdbt=False, use_zarr3=True)
    (path / "w1/zarr.json").write_text("{")
    (path / "w3/c/0/0").unlink()
    os.truncate(path / "w4/c/0/0", 50)
    return {"w1", "w3", "w4"}


def items_of_orbax(path: Path) -> set[str]:
    for item in ("params", "opt", "ema"):
        stock_save(path / item, ARRAYS)
    (path / "_CHECKPOINT_METADATA").write_text("{}")
    for item in ("params", "ema"):
        (path / item / "_METADATA").write_text("{")
    return {"params", "ema"}


DAMAGE: tuple[Callable[[Path], set[str]], ...] = (
    ends_of_archives,
    files_of_dcp,
    pipes_in_dcp,
    shards,
    files_of_torch,
    members_of_npz,
    members_of_torch,
    arrays_of_orbax,
    items_of_orbax,
)


@pytest.mark.parametrize("damage", DAMAGE, ids=[each.__name__ for each in DAMAGE])
def test_all_damaged_parts_are_named_and_the_others_are_looked_at(
    tmp_path: Path, damage: Callable[[Path], set[str]]
) -> None:
    path = tmp_path / ("c.npz" if damage is members_of_npz else "c.pt" if damage is members_of_torch else "c")
    named = damage(path)
    report = verify(path)
    assert report.opened
    assert not report.good
    assert report.error is None
    assert {problem.where for problem in report.problems} == named
    assert report.tensors - len(report.damaged) == (
        5
        if damage is items_of_orbax
        else 5 - 2 - ("w4" in named) * (damage in (members_of_npz, arrays_of_orbax))
    )
    result = CliRunner().invoke(app, ["verify", str(path), "--json"])
    assert result.exit_code == 1, result.output
    document = json.loads(result.stdout)
    assert {problem["where"] for problem in document["problems"]} == named
    assert "error" not in document
    assert "problems found" in CliRunner().invoke(app, ["verify", str(path)]).stdout


@pytest.mark.parametrize("damage", [files_of_dcp, shards, files_of_torch, arrays_of_orbax])
def test_nobody_else_reads_what_is_left(tmp_path: Path, damage: Callable[[Path], set[str]]) -> None:
    damage(tmp_path / "c")
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "c")


def test_a_checkpoint_without_a_whole_part_cannot_be_opened_and_all_parts_are_named(tmp_path: Path) -> None:
    shards(tmp_path / "c")
    for file in (tmp_path / "c").glob("*.safetensors"):
        os.truncate(file, 3)
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "c"), "--json"])
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    assert {problem["where"] for problem in document["problems"]} >= {f"w{n}" for n in range(5)}
    assert len(document["problems"]) == 10
    assert document["error"]["status"] == 2
