"""What a destination may take the place of: one checkpoint that is asked to give way, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import Attempt, create_checkpoint, open_checkpoint
from bridge.core.formats.files import atomic
from bridge.core.formats.files.atomic import AtomicDirectory, sidecar_of, temporaries_of
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.whole.replaceable import require_replaceable
from tests.support.bridge.bits import random_bits, same_bits

F32 = np.dtype(np.float32)
ARRAY = random_bits((6, 4), F32, 1)
OTHER = random_bits((3,), F32, 2)
FORMATS = ("dcp", "orbax", "safetensors")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make(tmp_path / "source", "dcp", ARRAY)


def make(path: Path, format: str, array: np.ndarray) -> Path:
    with create_checkpoint(path, format) as writer:
        name = writer.add_tensor("w", array.shape, array.dtype).name
        for box in writer.chunks(name):
            writer.write(name, box, array[box.slices()])
    return path


def read(path: Path) -> np.ndarray:
    with open_checkpoint(path) as reader:
        return reader.read("w")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def stock_dcp(path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path)


def stock_orbax(path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"w": np.ones(2), "b": {"c": np.ones(3)}})


def stock_orbax_files(path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, {"w": np.ones(2), "b": {"c": np.ones(3)}})


def stock_v1(path: Path) -> None:
    ocp.v1.save(path, {"w": np.ones(2)})


def a_step_with_items(path: Path) -> None:
    with ocp.CheckpointManager(path.parent / "run") as manager:
        args = ocp.args.Composite(
            state=ocp.args.StandardSave({"w": np.ones(2)}), note=ocp.args.JsonSave({"seed": 1})
        )
        manager.save(3, metrics={"loss": 1.0}, args=args)
    os.rename(path.parent / "run" / "3", path)


def hugging_face_shards(path: Path) -> None:
    path.mkdir()
    save_file({"a": ARRAY}, path / "model-00001-of-00002.safetensors")
    save_file({"b": ARRAY}, path / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(f'{{"weight_map": {names}}}'.replace("'", '"'))


STOCK = (stock_dcp, stock_orbax, stock_orbax_files, stock_v1, a_step_with_items, hugging_face_shards)


@pytest.mark.parametrize("write", STOCK)
def test_what_stock_programs_write_may_be_replaced_and_nothing_beside_it(
    tmp_path: Path, source: Path, write: Callable[[Path], None]
) -> None:
    destination = tmp_path / "c"
    write(destination)
    for name in ("notes.txt", "plots/loss.png"):
        (destination / name).parent.mkdir(exist_ok=True)
        (destination / name).write_text("precious")
        before = tree(destination)
        with pytest.raises(CheckpointError, match=rf"found also {name.split('/')[0]}; move that elsewhere"):
            convert(source, destination, to="dcp", replace=True)
        assert tree(destination) == before
        (destination / name).unlink()
    (destination / "plots").rmdir()
    convert(source, destination, to="dcp", replace=True)
    assert same_bits(read(destination), ARRAY)


def test_nothing_inside_an_item_is_lost(tmp_path: Path, source: Path) -> None:
    stock_v1(tmp_path / "c")
    (item,) = (path.parent for path in (tmp_path / "c").rglob("_METADATA"))
    assert item != tmp_path / "c"
    (item / "notes.txt").write_text("precious")
    with pytest.raises(CheckpointError, match=rf"found also {item.name}/notes\.txt; move that elsewhere"):
        convert(source, tmp_path / "c", to="dcp", replace=True)
    assert (item / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize("old", FORMATS)
@pytest.mark.parametrize("new", FORMATS)
def test_every_format_replaces_every_other(tmp_path: Path, source: Path, old: str, new: str) -> None:
    make(tmp_path / "c", old, OTHER)
    convert(source, tmp_path / "c", to=new, replace=True)
    assert same_bits(read(tmp_path / "c"), ARRAY)
    assert verify(tmp_path / "c").good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "source"]


@pytest.mark.parametrize("format", ["dcp", "orbax"])
def test_a_directory_of_steps_is_not_a_checkpoint_to_replace(
    tmp_path: Path, source: Path, format: str
) -> None:
    for step in ("step_1", "step_2"):
        make(tmp_path / "runs" / step, "orbax", OTHER)
    before = tree(tmp_path / "runs")
    with pytest.raises(
        CheckpointError, match=r"with its files directly in the directory, found step_1, step_2; give"
    ):
        convert(source, tmp_path / "runs", to=format, replace=True)
    assert tree(tmp_path / "runs") == before


def test_a_directory_of_several_weights_is_not_a_checkpoint_to_replace(tmp_path: Path, source: Path) -> None:
    for name in ("a", "b"):
        make(tmp_path / "home" / f"{name}.safetensors", "safetensors", OTHER)
    before = tree(tmp_path / "home")
    with pytest.raises(CheckpointError, match=r"found a\.safetensors, b\.safetensors"):
        convert(source, tmp_path / "home", to="dcp", replace=True)
    assert tree(tmp_path / "home") == before


def test_files_that_come_to_the_old_checkpoint_meanwhile_are_kept(tmp_path: Path) -> None:
    make(tmp_path / "c", "dcp", OTHER)
    writer = create_checkpoint(tmp_path / "c", "dcp", attempt=Attempt(replace=require_replaceable))
    (tmp_path / "c" / "notes.txt").write_text("precious")
    with pytest.raises(CheckpointError, match=r"found also notes\.txt"):
        writer.commit()
    assert (tmp_path / "c" / "notes.txt").read_text() == "precious"
    assert same_bits(read(tmp_path / "c"), OTHER)
    assert temporaries_of(tmp_path / "c") == []


def test_a_file_that_is_no_checkpoint_is_not_replaced(tmp_path: Path, source: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match=r"is a file that does not end in \.safetensors"):
        convert(source, tmp_path / "letter.txt", to="dcp", replace=True)
    assert (tmp_path / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("format", ["dcp", "orbax"])
def test_a_directory_replaces_a_file_with_its_manifest(
    tmp_path: Path, source: Path, format: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    destination = tmp_path / "c.safetensors"
    make(destination, "safetensors", OTHER)
    convert(source, destination, to=format, replace=True)
    assert same_bits(read(destination), ARRAY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.safetensors", "source"]


def test_a_file_does_not_replace_a_directory_and_says_so_at_once(tmp_path: Path, source: Path) -> None:
    make(tmp_path / "c.safetensors", "dcp", OTHER)
    with pytest.raises(IsADirectoryError, match="is a directory, and one file cannot replace it"):
        create_checkpoint(
            tmp_path / "c.safetensors", "safetensors", attempt=Attempt(replace=require_replaceable)
        )
    assert same_bits(read(tmp_path / "c.safetensors"), OTHER)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.safetensors", "source"]


def test_a_file_left_by_a_killed_replacement_is_removed_by_a_later_one(tmp_path: Path, source: Path) -> None:
    left = tmp_path / "c.safetensors.tmp-0123abcd"
    left.write_text("an old checkpoint")
    os.utime(left, (0, 0))
    convert(source, tmp_path / "c.safetensors", to="dcp")
    assert not left.exists()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("name", ["c", "c.safetensors"])
def test_a_checkpoint_of_another_process_that_appears_meanwhile_is_kept(
    tmp_path: Path, source: Path, name: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    appear = AtomicDirectory._appear

    def after_the_other(self: AtomicDirectory) -> None:
        monkeypatch.setattr(AtomicDirectory, "_appear", appear)
        make(tmp_path / name, "safetensors", OTHER)
        appear(self)

    monkeypatch.setattr(AtomicDirectory, "_appear", after_the_other)
    with pytest.raises(FileExistsError, match=r"exists already: remove it first"):
        convert(source, tmp_path / name, to="safetensors")
    assert same_bits(read(tmp_path / name), OTHER)
    report = verify(tmp_path / name)
    assert report.good
    assert report.manifest
    beside = [sidecar_of(Path(name)).name] if name.endswith("s") else []
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, *beside, "source"]


def test_a_failed_replacement_of_a_file_keeps_its_manifest(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = tmp_path / "c.safetensors"
    make(destination, "safetensors", OTHER)
    before = tree(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        convert(source, destination, to="safetensors", replace=True)
    monkeypatch.undo()
    assert tree(tmp_path) == before


def test_a_file_of_the_user_at_the_place_of_the_manifest_is_kept(tmp_path: Path, source: Path) -> None:
    mine = tmp_path / "k.safetensors.manifest.json"
    mine.write_text('{"mine": true}')
    with pytest.raises(CheckpointError, match=r"manifest\.json has the name of the checkpoint's manifest"):
        convert(source, tmp_path / "k.safetensors", to="safetensors")
    assert mine.read_text() == '{"mine": true}'
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine.name, "source"]
    # A manifest whose checkpoint was removed is none's.
    make(tmp_path / "old.safetensors", "safetensors", OTHER)
    os.rename(tmp_path / "old.safetensors.manifest.json", mine)
    convert(source, tmp_path / "k.safetensors", to="safetensors")
    assert verify(tmp_path / "k.safetensors").good


def test_a_file_of_the_source_is_never_the_destination(tmp_path: Path) -> None:
    folder = tmp_path / "l"
    hugging_face_shards(folder)
    before = tree(folder)
    shard = folder / "model-00001-of-00002.safetensors"
    with pytest.raises(
        CheckpointError, match="a file of the source: expected a destination outside the source"
    ):
        convert(folder / "model.safetensors.index.json", shard, to="safetensors", replace=True)
    assert tree(folder) == before


def test_a_checkpoint_that_an_item_links_to_is_not_replaced(tmp_path: Path) -> None:
    make(tmp_path / "real", "orbax", ARRAY)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "default").symlink_to(tmp_path / "real")
    with pytest.raises(
        CheckpointError, match="a file of the source: expected a destination outside the source"
    ):
        convert(tmp_path / "root", tmp_path / "real", to="dcp", replace=True)
    assert same_bits(read(tmp_path / "real"), ARRAY)


def test_what_others_left_is_theirs(tmp_path: Path, source: Path) -> None:
    others = make(tmp_path / "ck.tmp-foo", "dcp", OTHER)
    os.rename(others, tmp_path / "ck.tmp-foo.tmp-12345678")
    os.utime(tmp_path / "ck.tmp-foo.tmp-12345678", (0, 0))
    convert(source, tmp_path / "ck", to="orbax")
    assert (tmp_path / "ck.tmp-foo.tmp-12345678").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_a_name_that_means_unfinished_is_refused(tmp_path: Path, source: Path, format: str) -> None:
    with pytest.raises(CheckpointError, match="choose another"):
        convert(source, tmp_path / "foo.tmp-12345678", to=format)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_may_be_replaced_is_found_by_names_so_damage_does_not_matter(tmp_path: Path) -> None:
    make(tmp_path / "c", "dcp", ARRAY)
    (tmp_path / "c" / ".metadata").write_bytes(b"damaged")
    require_replaceable(tmp_path / "c")
