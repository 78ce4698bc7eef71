"""`convert --salvage`: everything that is whole arrives with every bit, and everything else is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

from bridge import convert, verify
from bridge.checkpoints.ground.selection import Selection
from bridge.commands.main import app
from bridge.core.formats import CheckpointError, Format, create_checkpoint, open_checkpoint
from bridge.core.formats.tensors.base import TreePath
from bridge.core.mapping import parse_mapping

ARRAYS = {f"model.w{n}[0]": np.random.default_rng(n).standard_normal((40, 30)) for n in range(6)}


def written(path: Path, to: Format) -> Path:
    with create_checkpoint(path, to) as target:
        infos = []
        for name, array in ARRAYS.items():
            own: TreePath = ("model", name.removeprefix("model.")) if to != "safetensors" else (name,)
            infos.append(target.add_tensor(own, array.shape, array.dtype))
        target.add_object(("step",), 7)
        for info, array in zip(infos, ARRAYS.values(), strict=True):
            for box in target.chunks(info.name):
                target.write(info.name, box, array[box.slices()])
    return path


def flip(folder: Path, array: np.ndarray) -> None:
    """Change a bit in the stored bytes of an array."""
    stored = array[3:9].tobytes()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = bytearray(file.read_bytes())
        if (at := data.find(stored)) >= 0:
            data[at + 5] ^= 4
            file.write_bytes(data)
            return
    raise AssertionError("the array is stored as it is")


def arrived(path: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


@pytest.mark.parametrize("source_format", ["dcp", "orbax", "safetensors"])
def test_a_damaged_tensor_is_left_out_and_named(tmp_path: Path, source_format: Format) -> None:
    source = written(tmp_path / "source", source_format)
    names = [*open_checkpoint(source).tensors]
    flip(source, ARRAYS["model.w2[0]"])
    with pytest.raises(CheckpointError):
        convert(source, tmp_path / "strict", to="safetensors")
    report = convert(source, tmp_path / "out", to="safetensors", salvage=True)
    damaged = next(name for name in names if "w2" in name)
    assert {*report.faults} >= {damaged}
    assert not report.complete
    assert verify(tmp_path / "out").good
    assert {name: array.tobytes() for name, array in arrived(tmp_path / "out").items()} == {
        name: array.tobytes() for name, array in ARRAYS.items() if "w2" not in name
    }


def test_what_has_no_fault_is_converted_as_without(tmp_path: Path) -> None:
    source = written(tmp_path / "source", "dcp")
    report = convert(source, tmp_path / "out", to="safetensors", salvage=True)
    assert (report.faults, report.dropped, report.complete) == ({}, (), True)
    assert len(arrived(tmp_path / "out")) == len(ARRAYS)


SECOND = "model-00002-of-00002"


@pytest.fixture(params=["safetensors", "torch"])
def sharded(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model in two files with an index: two tensors in the first, four in the second."""
    folder = tmp_path / "source"
    folder.mkdir()
    start, end, index = {
        "safetensors": ("model", ".safetensors", "model.safetensors.index.json"),
        "torch": ("pytorch_model", ".bin", "pytorch_model.bin.index.json"),
    }[request.param]
    names = [*ARRAYS]
    weight_map = {}
    for number, own in ((1, names[:2]), (2, names[2:])):
        file = folder / f"{start}-0000{number}-of-00002{end}"
        if request.param == "torch":
            torch.save({name: torch.from_numpy(ARRAYS[name]) for name in own}, file)
        else:
            save_file({name: ARRAYS[name] for name in own}, file)
        weight_map |= dict.fromkeys(own, file.name)
    (folder / index).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def missing(file: Path) -> None:
    file.unlink()


def cut_in_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


@pytest.mark.parametrize("damage", [missing, cut_in_the_header])
def test_a_shard_that_cannot_be_opened_takes_its_tensors_along(
    sharded: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    (file,) = sharded.glob(f"*{SECOND}*")
    damage(file)
    names = [*ARRAYS]
    report = convert(sharded, tmp_path / "out", to="dcp", salvage=True)
    assert {*report.faults} == {file.name, *names[2:]}
    assert all(report.faults[name] == f"in {file.name}, which cannot be opened" for name in names[2:])
    assert {*arrived(tmp_path / "out")} == {*names[:2]}
    with pytest.raises((CheckpointError, OSError), match=SECOND):
        convert(sharded, tmp_path / "strict", to="dcp")


@pytest.mark.parametrize("cut", [1, 8, 9600, 9601, 30000])
def test_tensors_before_the_end_of_a_truncated_file_are_whole(tmp_path: Path, cut: int) -> None:
    """As after a download that broke off. Each tensor has 9600 bytes."""
    source = tmp_path / "source.safetensors"
    save_file(ARRAYS, source)
    source.write_bytes(source.read_bytes()[:-cut])
    by_place = sorted(ARRAYS)
    lost = by_place[-cut // 9600 :]
    whole = [name for name in by_place if name not in lost]
    report = convert(source, tmp_path / "out", to="dcp", salvage=True)
    assert {*report.faults} == {*lost}
    assert all("truncated" in text for text in report.faults.values())
    there = arrived(tmp_path / "out")
    assert {name: array.tobytes() for name, array in there.items()} == {
        name: ARRAYS[name].tobytes() for name in whole
    }
    problems = verify(source).problems
    assert [problem.where for problem in problems] == lost
    assert all("truncated" in problem.text for problem in problems)
    with pytest.raises(CheckpointError, match="truncated"):
        convert(source, tmp_path / "strict", to="dcp")
    with source.open("ab") as file:
        file.write(bytes(cut + 1))
    # Surplus bytes say that no offset can be trusted.
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        convert(source, tmp_path / "surplus", to="dcp", salvage=True)


def test_an_object_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "when": np.datetime64("2026-01-01")}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError):
        convert(tmp_path / "a.pt", tmp_path / "strict", to="dcp")
    report = convert(tmp_path / "a.pt", tmp_path / "out", to="dcp", salvage=True)
    assert {*report.faults} == {"when"}
    assert {*arrived(tmp_path / "out")} == {"w"}


def test_nothing_whole_is_an_error(tmp_path: Path) -> None:
    source = written(tmp_path / "source", "orbax")
    for array in ARRAYS.values():
        flip(source, array)
    shutil.rmtree(tmp_path / "strict", ignore_errors=True)
    with pytest.raises(CheckpointError, match=r"nothing is whole|none of 6 tensors is selected"):
        convert(source, tmp_path / "out", to="dcp", salvage=True)
    assert not (tmp_path / "out").exists()
    (tmp_path / "no").mkdir()
    with pytest.raises(CheckpointError):
        convert(tmp_path / "no", tmp_path / "out", salvage=True)


def test_the_command_names_the_damage_and_ends_with_1(tmp_path: Path) -> None:
    source = written(tmp_path / "source", "dcp")
    arguments = ["convert", str(source), str(tmp_path / "out"), "--to", "safetensors", "--salvage"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    flip(source, ARRAYS["model.w0[0]"])
    arguments[2] = str(tmp_path / "damaged")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "damaged in the source: model.w0[0]: " in result.stdout
    assert len(arrived(tmp_path / "damaged")) == len(ARRAYS) - 1
    document = json.loads(
        CliRunner().invoke(app, [*arguments[:2], str(tmp_path / "c"), *arguments[3:], "--json"]).stdout
    )
    assert [*document["faults"]] == ["model.w0[0]"]


@pytest.mark.parametrize("numbered", [False, True])
def test_names_that_a_mapping_reads_otherwise_are_left_out(tmp_path: Path, numbered: bool) -> None:
    """Wrapped names, and numbered states of the optimizer, have other names when a mapping translates them."""
    weights = {f"{n}._orig_mod.weight": torch.full((4, n + 2), float(n)) for n in range(3)}
    state = {
        n if numbered else name: {
            "exp_avg": torch.full_like(w, 5.0 + n),
            "exp_avg_sq": torch.full_like(w, 9.0),
            "step": torch.tensor(3.0),
        }
        for n, (name, w) in enumerate(weights.items())
    }
    group = {"lr": 0.1, "params": [0, 1, 2] if numbered else [*weights]}
    file = tmp_path / "a.pt"
    torch.save({"model": weights, "optimizer": {"state": state, "param_groups": [group]}}, file)
    data = bytearray(file.read_bytes())
    at = data.find(weights["1._orig_mod.weight"].numpy().tobytes())
    data[at + 1] ^= 2
    file.write_bytes(data)
    rules = "".join(f'[[rule]]\ntorch = "{n}.weight : o m"\njax = "l{n}/kernel : m o"\n' for n in range(3))
    table = parse_mapping(rules, "rules.toml")
    report = convert(
        file, tmp_path / "out", mapping=table, salvage=True, selection=Selection(weights_only=True)
    )
    assert {*report.faults} == {"model.1._orig_mod.weight"}
    assert {*arrived(tmp_path / "out")} == {"params/l0/kernel", "params/l2/kernel"}


def test_parts_and_dry_runs_are_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "source", "dcp")
    for more in (["--part", "1/2"], ["--dry-run"]):
        result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), "--salvage", *more])
        assert result.exit_code == 2
        assert "--salvage needs the whole result" in result.output.replace("\n", " ").replace("│", "")
