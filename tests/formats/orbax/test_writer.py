"""OrbaxWriter: stock Orbax reads what it writes, bit for bit; a checkpoint appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError, create_checkpoint, open_checkpoint
from bridge.core.formats.files import record
from bridge.core.formats.files.data_file import DataFile
from bridge.core.formats.orbax.reader import OrbaxReader
from bridge.core.formats.orbax.writer import OrbaxPart, OrbaxWriter
from bridge.core.formats.orbax.zarr.ocdbt import OcdbtWriter
from bridge.core.formats.tensors.base import Box
from bridge.core.formats.tensors.boxes import check_coverage
from tests.support.bridge.bits import random_bits
from tests.support.bridge.orbax_helpers import (
    STOCK_RESTORES,
    assert_reads,
    assert_same_bits,
    assert_same_tree,
    data_file,
    every_dtype,
    flip_bit,
    stock_restore_v0,
    stock_save,
    write,
)

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)


def awkward_tree() -> dict[str, object]:
    """Every dtype, ranks 0 to 4, empty and odd shapes, lists, and keys that Orbax joins ambiguously."""
    return {
        "dtypes": every_dtype(),
        "scalars": every_dtype(()),
        "empty": {
            "rows": np.zeros((0, 4), BF16),
            "columns": np.zeros((3, 0, 2), F32),
            "vector": np.zeros(0, F32),
        },
        "zeros": np.zeros((9, 9), F32),
        "vector": random_bits((1003,), F32, 50),
        "matrix": random_bits((37, 11), F32, 51),
        "stack": random_bits((5, 6, 7), BF16, 52),
        "conv": random_bits((3, 2, 5, 4), F32, 53),
        "list": [random_bits((3,), F32, 54), {"x": random_bits((2,), F32, 55)}],
        "a.key/with": {"dots.and/slashes": random_bits((4,), F32, 56)},
    }


def deep(levels: int) -> object:
    return [deep(levels - 1)] if levels else 1


WISHES = {"vector": (100,), "matrix": (10, 4), "stack": (2, 6, 3), "conv": (1, 2, 2, 4), "zeros": (4, 9)}


@pytest.mark.parametrize("layout", ["v0", "v1"])
@pytest.mark.parametrize("api", ["v0", "v1"])
def test_stock_orbax_restores_every_dtype_and_shape_bit_for_bit(
    tmp_path: Path, layout: str, api: str
) -> None:
    tree = awkward_tree()
    write(tmp_path / "c", tree, WISHES, layout=layout)
    # v0's checkpointer takes the item's own directory.
    root = tmp_path / "c" / "state" if (layout, api) == ("v1", "v0") else tmp_path / "c"
    assert_same_tree(STOCK_RESTORES[api](root), tree)


@pytest.mark.parametrize("layout", ["v0", "v1"])
def test_our_reader_reads_what_our_writer_wrote(tmp_path: Path, layout: str) -> None:
    tree = awkward_tree()
    write(tmp_path / "c", tree, WISHES, layout=layout)
    assert_reads(tmp_path / "c", tree)


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("api", ["v0", "v1"])
def test_stock_orbax_restores_onto_any_number_of_devices(tmp_path: Path, devices: int, api: str) -> None:
    tree = {"w": random_bits((24, 48), F32, 1), "b": random_bits((24,), F32, 2), "s": random_bits((), F32, 3)}
    write(tmp_path / "c", tree, {"w": (7, 48), "b": (5,)})
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    specs = {"w": PartitionSpec(None, "x"), "b": PartitionSpec("x"), "s": PartitionSpec()}
    target = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, value in tree.items()
    }
    if api == "v0":
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "c", target)
    else:
        restored = v1.load(tmp_path / "c", target)
    for name, value in restored.items():
        assert value.sharding == target[name].sharding
    assert_same_tree(restored, tree)


def test_checkpoint_manager_lists_and_restores_a_step_written_in_v1_layout(tmp_path: Path) -> None:
    tree = {"w": random_bits((5, 3), F32, 1)}
    write(tmp_path / "3", tree, layout="v1")
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [3]
        restored = manager.restore(3, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    assert_same_tree(restored["state"], tree)


def test_an_item_is_a_directory_of_its_own_for_stock_orbax_and_for_us(tmp_path: Path) -> None:
    tree = awkward_tree()
    write(tmp_path / "3", tree, WISHES, item="default")
    with ocp.CheckpointManager(tmp_path) as manager:
        assert_same_tree(manager.restore(3), tree)
        assert_same_tree(manager.restore(3, args=ocp.args.PyTreeRestore()), tree)
    assert_same_tree(stock_restore_v0(tmp_path / "3" / "default"), tree)
    assert_same_tree(v1.load(tmp_path / "3"), tree)
    assert_reads(tmp_path / "3", tree)
    assert verify(tmp_path / "3").problems == ()
    for options in (
        {"item": ""},
        {"item": "a/b"},
        {"item": ".."},
        {"item": "7"},
        {"item": "x", "layout": "v1"},
    ):
        with pytest.raises(ValueError, match="item: expected letters"):
            OrbaxWriter(tmp_path / "4", **options)
    assert not (tmp_path / "4").exists()


def test_chunks_cover_each_tensor_once_and_stay_small(tmp_path: Path) -> None:
    shapes = [(3_000_000, 5), (2, 40_000_000), (3, 5, 7_000_000), (70_000_000,), (11, 13), (), (0, 3)]
    with OrbaxWriter(tmp_path / "c") as writer:
        for index, shape in enumerate(shapes):
            info = writer.add_tensor((str(index),), shape, F32)
            check_coverage(shape, info.chunks, info.name)
            assert max((box.numel for box in info.chunks), default=0) <= 32 << 18
            assert sum(box.numel for box in info.chunks) == info.numel
            if info.nbytes > 64 << 20:
                assert min(box.numel for box in info.chunks) * 4 >= 4 << 20
        assert writer.add_tensor("wish", (100, 100), F32, (7, 200)).chunks[0] == Box((0, 0), (7, 100))
        too_large = writer.add_tensor("large", (1 << 20, 100), F32, (1 << 20, 100))
        assert max(box.numel for box in too_large.chunks) <= 32 << 18
        writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_written_array_may_be_changed_or_in_any_memory_order(tmp_path: Path) -> None:
    expected = random_bits((20, 30), F32, 1)
    with OrbaxWriter(tmp_path / "c") as writer:
        name = writer.add_tensor("w", (20, 30), F32, (10, 30)).name
        for box in writer.chunks(name):
            block = np.asfortranarray(expected[box.slices()])
            writer.write(name, box, block)
            block[:] = 0
    assert_reads(tmp_path / "c", {"w": expected})


def test_objects_come_back_with_their_types_and_paths(tmp_path: Path) -> None:
    objects = {
        ("optimizer", "param_groups", 0, "betas"): (0.9, 0.95),
        ("optimizer", "param_groups", 0, "params"): ["layers.0.w", "norm"],
        ("optimizer", "param_groups", 0, "lr"): 1e-3 / 3,
        ("flags", "nested"): {"a": [1, (2, [None, True])], "b": "text", "c": {}},
        ("flags", "big"): 2**100,
        ("raw",): b"\x00\xff bytes",
        ("flags", "inf"): float("inf"),
        ("none",): None,
        ("deep",): deep(64),
    }
    tree = {"w": random_bits((3,), F32, 1)}
    with OrbaxWriter(tmp_path / "c") as writer:
        writer.write("w", writer.add_tensor("w", (3,), F32).chunks[0], tree["w"])
        for path, value in objects.items():
            writer.add_object(path, value)
    with OrbaxReader(tmp_path / "c") as reader:
        assert {reader.object_paths[name]: value for name, value in reader.objects.items()} == objects
        betas = reader.objects["optimizer/param_groups/0/betas"]
        assert type(betas) is tuple
    for restore in STOCK_RESTORES.values():
        assert_same_tree(restore(tmp_path / "c"), tree)


@pytest.mark.parametrize(
    "value",
    [
        deep(65),
        {"__bytes__": "AA=="},
        {1: 2},
        np.float64(1),
        np.zeros(2),
        object(),
        {"__tuple__": [1]},
        [1, {2}],
    ],
    ids=lambda value: repr(value)[:20],
)
def test_an_object_that_json_would_change_is_refused(tmp_path: Path, value: object) -> None:
    with OrbaxWriter(tmp_path / "c") as writer:
        with pytest.raises(CheckpointError, match="object 'x'"):
            writer.add_object("x", value)
        writer.abort()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("a.b",), ("a", "b")),
        (("a/b",), ("a", "b")),
        (("a",), ("a",)),
        (("a",), ("a", "b")),
        (("a", "b"), ("a",)),
        (("a", 0), ("a", "0")),
    ],
)
def test_leaves_that_orbax_or_a_name_cannot_tell_apart_are_refused(
    tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    for leaf_type in ("tensor", "object"):
        with OrbaxWriter(tmp_path / "c") as writer:
            writer.add_tensor(first, (1,), F32)
            add = {
                "tensor": partial(writer.add_tensor, second, (1,), F32),
                "object": partial(writer.add_object, second, 1),
            }[leaf_type]
            with pytest.raises(CheckpointError, match="collide"):
                add()
            writer.abort()


@pytest.mark.parametrize("path", [(), ("",), ("a", ""), "", "a//b", ("a/",)])
def test_an_empty_key_is_refused(tmp_path: Path, path: tuple[str, ...] | str) -> None:
    with OrbaxWriter(tmp_path / "c") as writer:
        with pytest.raises(CheckpointError, match="non-empty keys"):
            writer.add_tensor(path, (1,), F32)
        writer.abort()


def test_lists_with_a_gap_become_dicts_that_stock_orbax_can_restore(tmp_path: Path) -> None:
    values = {("l", 0): random_bits((1,), F32, 1), ("l", 2): random_bits((2,), F32, 2)}
    with OrbaxWriter(tmp_path / "c") as writer:
        for path, value in values.items():
            info = writer.add_tensor(path, value.shape, value.dtype)
            writer.write(info.name, info.chunks[0], value)
        writer.add_object(("l", 1), "not a tensor")
    expected = {"l": {"0": values["l", 0], "2": values["l", 2]}}
    for restore in STOCK_RESTORES.values():
        assert_same_tree(restore(tmp_path / "c"), expected)


@pytest.mark.parametrize("file_type", ["directory", "file", "dangling link"])
def test_an_existing_destination_is_refused_and_left_alone(tmp_path: Path, file_type: str) -> None:
    path = tmp_path / "c"
    if file_type == "directory":
        path.mkdir()
        (path / "precious").write_text("data")
    elif file_type == "file":
        path.write_text("data")
    else:
        path.symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match="exists already"):
        OrbaxWriter(path)
    assert sorted(tmp_path.rglob("*")) == before


def _two_chunks(writer: OrbaxWriter) -> tuple[str, tuple[Box, ...]]:
    info = writer.add_tensor("w", (4, 3), F32, (2, 3))
    return info.name, info.chunks


def test_a_chunk_that_was_never_written_prevents_the_commit(tmp_path: Path) -> None:
    writer = OrbaxWriter(tmp_path / "c")
    name, boxes = _two_chunks(writer)
    writer.write(name, boxes[1], np.ones((2, 3), np.float32))
    with pytest.raises(CheckpointError, match=r"'w': 1 of 2 chunks were not written, the first at \(0, 0\)"):
        writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_a_chunk_that_is_not_in_the_store_prevents_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = OrbaxWriter(tmp_path / "c")
    name, boxes = _two_chunks(writer)
    for box in boxes:
        writer.write(name, box, np.ones((2, 3), np.float32))
    finish = OcdbtWriter.finish

    def forgetful(self: OcdbtWriter, sync: Callable[[], None]) -> None:
        del self.places["w/c/0/0"]
        finish(self, sync)

    monkeypatch.setattr(OcdbtWriter, "finish", forgetful)
    with pytest.raises(CheckpointError, match="'w/c/0/0' was written but is not stored"):
        writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_cannot_be_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = OrbaxWriter(tmp_path / "c")
    name, boxes = _two_chunks(writer)
    writer.write(name, boxes[0], np.ones((2, 3), np.float32))

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DataFile, "write_parts", full)
        patch.setattr(record, "SMALL", 0)
        with pytest.raises(OSError, match="no space left"):
            writer.write(name, boxes[1], np.ones((2, 3), np.float32))
    with pytest.raises(CheckpointError, match="a write failed"):
        writer.write(name, boxes[1], np.ones((2, 3), np.float32))
    with pytest.raises(CheckpointError, match="a write failed"):
        writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_wrong_boxes_shapes_and_dtypes_are_refused(tmp_path: Path) -> None:
    with OrbaxWriter(tmp_path / "c") as writer:
        name, boxes = _two_chunks(writer)
        good = np.ones((2, 3), np.float32)
        with pytest.raises(CheckpointError, match=r"expected float32 .* got float64"):
            writer.write(name, boxes[0], good.astype(np.float64))
        with pytest.raises(
            CheckpointError,
            match=r"float32 of shape \(2, 3\) .*, got float32 of shape \(3, 2\)",
        ):
            writer.write(name, boxes[0], good.T)
        for box in (Box((1, 0), (2, 3)), Box((4, 0), (2, 3)), Box((0, 0), (4, 3))):
            with pytest.raises(CheckpointError, match="one of its 2 chunks"):
                writer.write(name, box, np.ones(box.sizes, np.float32))
        writer.write(name, boxes[0], good)
        with pytest.raises(CheckpointError, match="written once"):
            writer.write(name, boxes[0], good)
        for dtype in (np.dtype("U3"), np.dtype(">f4"), np.dtype("O")):
            with pytest.raises(CheckpointError, match="dtype"):
                writer.add_tensor("other", (1,), dtype)
        writer.write(name, boxes[1], good)
    assert_reads(tmp_path / "c", {"w": np.ones((4, 3), np.float32)})


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    def save() -> None:
        with create_checkpoint(tmp_path / "new" / "c", "orbax") as writer:
            name = writer.add_tensor("w", (4,), F32).name
            writer.write(name, writer.chunks(name)[0], np.ones(4, np.float32))
            raise RuntimeError("the program failed")

    with pytest.raises(RuntimeError, match="the program failed"):
        save()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_tensors_is_refused(tmp_path: Path) -> None:
    writer = OrbaxWriter(tmp_path / "c")
    writer.add_object("x", 1)
    with pytest.raises(CheckpointError, match="at least one tensor"):
        writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_no_checkpoint(tmp_path: Path) -> None:
    program = """
import sys, numpy as np
from bridge.core.formats.orbax.writer import OrbaxPart, OrbaxWriter
writer = OrbaxWriter(sys.argv[1])
info = writer.add_tensor("w", (1 << 30, 4), np.dtype("float32"))
for box in info.chunks:
    writer.write("w", box, np.ones(box.sizes, np.float32))
    print("wrote", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "c")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline() == b"wrote\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("c.tmp-")
    with pytest.raises(CheckpointError, match="never finished"):
        open_checkpoint(left)
    with pytest.raises(CheckpointError, match="never finished"):
        OrbaxReader(left)


def test_any_flipped_bit_of_the_data_is_noticed_by_stock_orbax_and_by_us(tmp_path: Path) -> None:
    value = np.random.default_rng(3).standard_normal((64, 32)).astype(np.float32)
    write(tmp_path / "c", {"w": value}, {"w": (16, 32)})
    file, position = data_file(tmp_path / "c", value[16:32].tobytes())
    for offset in range(0, 16 * 32 * 4, 177):
        flip_bit(file, position + offset, offset % 8)
        with OrbaxReader(tmp_path / "c") as reader:
            assert_same_bits(reader.read("w", Box((0, 0), (16, 32))), value[:16])
            with pytest.raises(CheckpointError, match=r"'w'.*(DATA_LOSS|checksum|CRC)"):
                reader.read("w", Box((17, 3), (1, 1)))
        with pytest.raises(Exception, match=r"DATA_LOSS|CRC|checksum"):
            stock_restore_v0(tmp_path / "c")
        flip_bit(file, position + offset, offset % 8)
    assert_same_tree(stock_restore_v0(tmp_path / "c"), {"w": value})


@pytest.mark.slow
def test_many_small_tensors_take_few_files(tmp_path: Path) -> None:
    tree = {"layers": {str(i): random_bits((256,), F32, i) for i in range(3000)}}
    write(tmp_path / "c", tree)
    # One commit per tensor would be thousands of files, and a minute of syncing.
    assert sum(1 for file in (tmp_path / "c").rglob("*") if file.is_file()) < 30
    with OrbaxReader(tmp_path / "c") as reader:
        for index in (0, 1234, 2999):
            assert_same_bits(reader.read(f"layers/{index}"), tree["layers"][str(index)])
    assert_same_tree(stock_restore_v0(tmp_path / "c"), tree)


def test_a_copied_or_moved_checkpoint_stays_readable(tmp_path: Path) -> None:
    tree = {"w": random_bits((40, 30), F32, 1)}
    write(tmp_path / "c", tree)
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    os.rename(tmp_path / "c", tmp_path / "moved")
    for name in ("copy", "moved"):
        assert_reads(tmp_path / name, tree)
        assert_same_tree(stock_restore_v0(tmp_path / name), tree)


def test_a_path_can_be_written_again_after_removal(tmp_path: Path) -> None:
    for seed in range(3):
        tree = {"w": random_bits((10, 3 + seed), F32, seed)}
        write(tmp_path / "c", tree)
        assert_reads(tmp_path / "c", tree)
        assert_same_tree(stock_restore_v0(tmp_path / "c"), tree)
        shutil.rmtree(tmp_path / "c")


def test_threads_may_write_at_once(tmp_path: Path) -> None:
    tree = {str(i): random_bits((64, 16), F32, i) for i in range(12)}
    errors: list[Exception] = []
    with OrbaxWriter(tmp_path / "c") as writer:
        for name in tree:
            writer.add_tensor(name, (64, 16), F32, (8, 16))

        def work(names: list[str]) -> None:
            try:
                for name in names:
                    for box in writer.chunks(name):
                        writer.write(name, box, tree[name][box.slices()])
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(list(tree)[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert_reads(tmp_path / "c", tree)


def test_reading_and_writing_import_neither_framework(tmp_path: Path) -> None:
    program = """
import sys, numpy as np
from bridge.core.formats import create_checkpoint, open_checkpoint
with create_checkpoint(sys.argv[1], "orbax") as writer:
    info = writer.add_tensor("w", (3,), np.dtype("float32"))
    writer.write("w", info.chunks[0], np.ones(3, np.float32))
with open_checkpoint(sys.argv[1]) as reader:
    assert reader.format == "orbax" and reader.read("w").sum() == 3
assert not {"jax", "torch", "orbax", "orbax.checkpoint"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "c")], check=True, timeout=120)


MEMORY_PROGRAM = """
import sys, numpy as np
from bridge.core.formats import create_checkpoint, open_checkpoint
from tests.support.process_memory import AnonymousPeak

with AnonymousPeak() as peak:
    rng = np.random.default_rng(0)
    block = rng.integers(0, 2**32, 1 << 23, np.uint32)  # 32 MiB, of which every chunk takes a part
    shapes = [(4096, 8192), (25_000_000,), (3, 1000, 9000), (2, 11_000_000), (501, 77_777)]
    with create_checkpoint(sys.argv[1], "orbax") as writer:
        for index, shape in enumerate(shapes):
            info = writer.add_tensor(str(index), shape, np.dtype("uint32"))
            for box in info.chunks:
                writer.write(info.name, box, block[: box.numel].reshape(box.sizes))
    with open_checkpoint(sys.argv[1]) as reader:
        for index, info in reader.tensors.items():
            for box in info.chunks:
                assert np.array_equal(reader.read(index, box).reshape(-1), block[: box.numel])
        total = sum(info.nbytes for info in reader.tensors.values()) >> 20
print(total, peak.above >> 20)
"""


def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY_PROGRAM, str(tmp_path / "c")]
    result = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    total, extra = map(int, result.stdout.split())
    print(f"wrote and read {total} MiB with {extra} MiB of extra memory")
    assert total > 550
    assert extra < 250


def test_the_metadata_says_what_stock_orbax_says(tmp_path: Path) -> None:
    tree = {"w": np.ones((2, 3), np.float32)}
    stock_save(tmp_path / "stock", tree)
    write(tmp_path / "ours", tree)
    stock, ours = (json.loads((tmp_path / folder / "_METADATA").read_text()) for folder in ("stock", "ours"))
    assert ours.keys() == stock.keys()
    assert {key: ours[key] for key in ours if key != "tree_metadata"} == {
        key: value for key, value in stock.items() if key != "tree_metadata"
    } | {"use_zarr3": True}


def _two_processes(path: Path, tree: dict[str, np.ndarray]) -> tuple[OrbaxWriter, OrbaxPart]:
    """Process 0 and 1 of one save, both with all tensors declared in chunks of two rows."""
    first = OrbaxWriter(path, process=0)
    second = OrbaxPart(first.path, first.temporary, 1)
    for part in (first, second):
        for name, value in tree.items():
            part.add_tensor(name, value.shape, value.dtype, (2, *value.shape[1:]) if value.ndim else None)
    return first, second


SHARED = {
    "w": random_bits((7, 300), F32, 1),
    "small": random_bits((3,), BF16, 2),
    "scalar": random_bits((), F32, 3),
    "empty": np.zeros((0, 4), F32),
}


def _deal(parts: tuple[OrbaxPart, ...], tree: dict[str, np.ndarray]) -> None:
    for name, value in tree.items():
        for number, box in enumerate(parts[0].chunks(name)):
            parts[number % len(parts)].write(name, box, value[box.slices()])


def test_processes_write_one_checkpoint_that_stock_orbax_reads(tmp_path: Path) -> None:
    parts = _two_processes(tmp_path / "c", SHARED)
    _deal(parts, SHARED)
    for part in parts:
        part.finish()
    parts[0].commit(processes=[0, 1])
    # Moved: the item refers to the processes' files by relative paths.
    os.rename(tmp_path / "c", tmp_path / "moved")
    assert_reads(tmp_path / "moved", SHARED)
    for restore in STOCK_RESTORES.values():
        assert_same_tree(restore(tmp_path / "moved"), SHARED)
    assert len(list((tmp_path / "moved").glob("ocdbt.process_*/manifest.ocdbt"))) == 2


def test_a_process_may_have_nothing_to_write(tmp_path: Path) -> None:
    first, second = _two_processes(tmp_path / "c", SHARED)
    _deal((first,), SHARED)
    second.finish()
    first.commit(processes=[0, 1])
    assert_reads(tmp_path / "c", SHARED)


def test_a_chunk_that_two_processes_wrote_prevents_the_commit(tmp_path: Path) -> None:
    parts = _two_processes(tmp_path / "c", SHARED)
    _deal(parts, SHARED)
    box = parts[0].chunks("w")[1]
    parts[0].write("w", box, SHARED["w"][box.slices()])
    parts[1].finish()
    with pytest.raises(CheckpointError, match=r"processes 0 and 1 wrote 'w/c/1/0'"):
        parts[0].commit(processes=[0, 1])
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_did_not_finish_prevents_the_commit(tmp_path: Path) -> None:
    parts = _two_processes(tmp_path / "c", SHARED)
    _deal(parts, SHARED)
    with pytest.raises(
        CheckpointError, match=r"'w': chunk 'w/c/1/0' is stored by none of processes \[0, 1\]"
    ):
        parts[0].commit(processes=[0, 1])
    with pytest.raises(CheckpointError, match="committed or aborted"):
        parts[0].finish()
    parts[1].abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bits", ["7ff8000000000000", "fff8000000000000", "7ff80000deadbeef", "fff0000000000000"]
)
def test_numbers_that_json_lacks_keep_their_bits(tmp_path: Path, bits: str) -> None:
    value = struct.unpack(">d", bytes.fromhex(bits))[0]
    with OrbaxWriter(tmp_path / "c") as writer:
        writer.add_tensor("w", (0,), np.dtype("float32"))
        writer.add_object(("best", "loss"), [value, {"x": (value,)}])
    with open_checkpoint(tmp_path / "c") as reader:
        first, second = reader.objects["best/loss"]  # type: ignore[misc]  # a list, as written
        assert [struct.pack(">d", x).hex() for x in (first, second["x"][0])] == [bits, bits]
    assert verify(tmp_path / "c").good
    text = (tmp_path / "c" / "_METADATA").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_chunks_lie_aligned_in_the_file_and_are_lent_as_ordinary_arrays(tmp_path: Path) -> None:
    write(
        tmp_path / "ckpt", {"a": random_bits((13,), np.dtype(np.int8), 1), "b": random_bits((5, 3), F32, 2)}
    )
    with OrbaxReader(tmp_path / "ckpt") as reader:
        for name in ("a", "b"):
            whole = Box.whole(reader.tensors[name].shape)
            assert reader._raw.part(name, (0,) * len(whole.sizes), whole)[0].start % 64 == 0
            # In memory that they are read into, as NumPy aligns it: wherever the file has them.
            loan = reader.lend(name, whole)
            assert loan is not None
            assert loan.array.flags.aligned
            loan.give_back()
