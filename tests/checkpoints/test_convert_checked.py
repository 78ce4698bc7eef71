"""Conversion holds a source to its manifest: what is not as it was written is never carried on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
from typer.testing import CliRunner

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.checked import checked
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.verify.verification import verify
from bridge.commands.main import app
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.files.manifest import MANIFEST_FILE
from bridge.core.formats.tensors.arrays import array_checksum
from bridge.core.formats.tensors.base import Box, CheckpointError
from tests.checkpoints.test_small_tensors import FEW, MANY, make, per_tensor
from tests.support.bridge.verify_files import FORMATS, arrays, contents, converted, copy, flipped, places

__all__ = ["converted", "copy"]  # fixtures


@pytest.fixture
def any_copy(copy: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint in a format, or in one safetensors file, its manifest beside it."""

    def make(form: str) -> Path:
        if form != "file":
            return copy(form)
        convert(copy("dcp"), tmp_path / "file" / "x.safetensors")
        return tmp_path / "file" / "x.safetensors"

    return make


def flip_anywhere(path: Path, out: Path, count: int) -> int:
    """How many of ``count`` flipped bytes, spread over all files, `verify` finds; none of these may pass."""
    rng, detected = random.Random(4), 0
    target = "dcp" if path.name == "orbax" else "orbax"
    convert(path, out / "whole", to=target)
    expected = contents(out / "whole")
    files = [file for file in sorted((path if path.is_dir() else path.parent).rglob("*")) if file.is_file()]
    for number in range(count):
        file = files[number % len(files)]
        restore = flipped(file, rng.randrange(file.stat().st_size), rng)
        good = verify(path, workers=1).good
        try:
            convert(path, out / str(number), to=target, workers=1)
        except (CheckpointError, FileNotFoundError):
            detected += 1
        else:
            assert good, f"a byte of {file.name} was changed, and convert passed it"
            assert contents(out / str(number)) == expected, f"a byte of {file.name} was changed unnoticed"
        restore()
    return detected


@pytest.mark.parametrize("form", [*FORMATS, "file"])
def test_conversion_passes_no_flipped_byte_that_verify_finds(
    any_copy: Callable[[str], Path], tmp_path: Path, form: str
) -> None:
    assert flip_anywhere(any_copy(form), tmp_path, 60) > 50


@pytest.mark.parametrize("form", [*FORMATS, "file"])
def test_without_verifying_damage_is_carried_on_and_said(
    any_copy: Callable[[str], Path], tmp_path: Path, form: str
) -> None:
    path = any_copy(form)
    values = arrays()["w.large"]
    file, position = next(places(path if path.is_dir() else path.parent, {"w.large": values}))
    flipped(file, position, random.Random(1))
    target = "dcp" if form == "orbax" else "orbax"
    with pytest.raises(CheckpointError):
        convert(path, tmp_path / "out", to=target)
    report = convert(path, tmp_path / "out", to=target, verify=False)
    assert not report.verified
    # The copy is whole, and differs from what was written in this byte.
    assert verify(tmp_path / "out").good
    with open_checkpoint(tmp_path / "out") as reader:
        (name,) = (name for name in reader.tensors if name.replace("/", ".") == "w.large")
        damaged = reader.read(name)
    different = np.flatnonzero(damaged.view(np.uint8) != values.view(np.uint8))
    assert different.size == 1
    result = CliRunner().invoke(
        app, ["convert", str(path), str(tmp_path / "again"), "--to", target, "--no-verify"]
    )
    assert result.exit_code == 0
    assert "not verified: damage in the source was copied into the new checkpoint" in " ".join(
        result.stdout.split()
    )
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_damage_is_named_with_the_way_out(copy: Callable[[str], Path], tmp_path: Path) -> None:
    path = copy("safetensors")
    file, position = next(places(path, {"w.large": arrays()["w.large"]}))
    flipped(file, position, random.Random(1))
    with pytest.raises(
        CheckpointError,
        match=r"w\.large: the chunk at \(0, 0\), sizes .* is damaged: expected CRC-32C .* \(--no-verify\)",
    ):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # What is not read need not be right.
    convert(path, tmp_path / "rest", selection=Selection(drop=("w.large",)))
    assert verify(tmp_path / "rest").good
    (path / MANIFEST_FILE).unlink()
    convert(path, tmp_path / "out")


def test_names_dtypes_and_objects_are_compared(copy: Callable[[str], Path], tmp_path: Path) -> None:
    path = copy("safetensors")
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    del manifest["certificate"]
    for change, problem in (
        (
            lambda m: m["tensors"].update(other=m["tensors"].pop("w.bool")),
            "other: the manifest lists this tensor",
        ),
        (lambda m: m["tensors"]["w.int64"].update(dtype="float64"), r"w\.int64: expected float64 \[3, 2\]"),
        (lambda m: m["objects"].update({"run.note": "00000000"}), r"run\.note: the value is damaged"),
        (lambda m: m.update(format="dcp"), "expected format dcp"),
        (
            lambda m: m["files"]["model.safetensors"].__setitem__(0, 7),
            r"model\.safetensors: expected 7 bytes",
        ),
    ):
        changed = json.loads(json.dumps(manifest))
        change(changed)
        (path / MANIFEST_FILE).write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=f"{problem}.*does not match its manifest"):
            convert(path, tmp_path / "out")


def test_a_part_of_a_chunk_is_read_only_if_the_whole_is_right(tmp_path: Path) -> None:
    values = np.arange(600, dtype=np.float32).reshape(30, 20)
    with create_checkpoint(tmp_path / "ck", "safetensors") as writer:
        writer.add_tensor("w", values.shape, values.dtype)
        writer.write("w", Box((0, 0), (30, 20)), values)
    manifest = json.loads((tmp_path / "ck" / MANIFEST_FILE).read_text())
    manifest["tensors"]["w"]["chunks"] = [
        [[low, 0], [10, 20], f"{array_checksum(values[low : low + 10]):08x}"] for low in (0, 10, 20)
    ]
    (tmp_path / "ck" / MANIFEST_FILE).write_text(json.dumps(manifest))
    file = tmp_path / "ck" / "model.safetensors"
    position = file.read_bytes().find(values[12:13].tobytes())
    flipped(file, position, random.Random(2))
    with checked(open_checkpoint(tmp_path / "ck")) as reader:
        assert np.array_equal(reader.read("w", Box((0, 3), (10, 2))), values[:10, 3:5])
        assert np.array_equal(reader.read("w", Box((20, 0), (10, 20))), values[20:])
        for box in (Box((19, 19), (1, 1)), Box((0, 0), (30, 20)), Box((5, 0), (20, 1))):
            with pytest.raises(
                CheckpointError, match=r"the chunk at \(10, 0\), sizes \(10, 20\), is damaged"
            ):
                reader.read("w", box)
        with pytest.raises(CheckpointError, match=r"the chunk at \(10, 0\)"):
            reader.lend("w", Box((11, 0), (1, 20)))


def test_a_source_at_a_url_is_held_to_its_manifest(copy: Callable[[str], Path], tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for format in FORMATS:
        path = copy(format)
        store.put(str(path), f"/checked/{format}", recursive=True)
        convert(f"memory://checked/{format}", tmp_path / f"whole_{format}")
    # Still a copy of the last of these.
    assert path.name == "safetensors"
    for number, position in enumerate((12, (path / "model.safetensors").stat().st_size - 3)):
        restore = flipped(path / "model.safetensors", position, random.Random(3))
        store.put(str(path / "model.safetensors"), f"/checked/flipped{number}/model.safetensors")
        store.put(str(path / MANIFEST_FILE), f"/checked/flipped{number}/{MANIFEST_FILE}")
        restore()
        with pytest.raises(CheckpointError):
            convert(f"memory://checked/flipped{number}", tmp_path / "out")
    store.rm("/checked", recursive=True)


def test_one_file_may_be_renamed_with_its_manifest(copy: Callable[[str], Path], tmp_path: Path) -> None:
    convert(copy("dcp"), tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").rename(tmp_path / "y.safetensors")
    (tmp_path / "x.safetensors.manifest.json").rename(tmp_path / "y.safetensors.manifest.json")
    assert verify(tmp_path / "y.safetensors").good
    convert(tmp_path / "y.safetensors", tmp_path / "back")
    flipped(tmp_path / "y.safetensors", 12, random.Random(5))
    assert not verify(tmp_path / "y.safetensors").good


@pytest.mark.parametrize("location", ["here", "store"])
def test_the_manifest_of_the_only_file_counts_for_its_directory(tmp_path: Path, location: str) -> None:
    with create_checkpoint(tmp_path / "a" / "weights.safetensors", "safetensors") as writer:
        name = writer.add_tensor(("w",), (4,), np.dtype(np.float32)).name
        writer.write(name, Box.whole((4,)), np.arange(4, dtype=np.float32))
    file = tmp_path / "a" / "weights.safetensors"
    assert verify(tmp_path / "a").manifest
    file.write_bytes(file.read_bytes()[:-1] + b"\x41")
    path: Path | str = tmp_path / "a"
    if location == "store":
        fsspec.filesystem("memory").put(str(path), "/checked/only_file", recursive=True)
        path = "memory://checked/only_file"
    assert not verify(path).good
    with pytest.raises(CheckpointError, match="does not match its manifest"):
        convert(path, tmp_path / "b")


@pytest.mark.parametrize(("format", "limit"), [("dcp", 41), ("safetensors", 65)])
def test_a_tensor_more_is_few_calls_more_when_a_source_is_opened_and_checked(
    format: str, limit: int, tmp_path: Path
) -> None:
    """Some 15 % above what was counted; see `test_small_tensors.py`."""
    for count in (FEW, MANY):
        convert(make(tmp_path / f"made-{count}", count), tmp_path / f"{format}-{count}", to=format)
    assert per_tensor(lambda count: checked(open_checkpoint(tmp_path / f"{format}-{count}")).close()) < limit
