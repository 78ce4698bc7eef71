"""OrbaxReader: whatever stock Orbax wrote is read bit for bit; whatever is damaged or ambiguous is refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from orbax.checkpoint.experimental import v1

from bridge.core.formats import CheckpointError, open_checkpoint
from bridge.core.formats.orbax import reader as orbax_reader
from bridge.core.formats.orbax.reader import OrbaxReader
from bridge.core.formats.orbax.writer import OrbaxWriter
from bridge.core.formats.orbax.zarr.values import Place
from bridge.core.formats.tensors.base import Box
from tests.support.bridge.bits import random_bits
from tests.support.bridge.orbax_helpers import (
    assert_reads,
    assert_same_bits,
    data_file,
    every_dtype,
    flip_bit,
    ocdbt,
    sharded,
    stock_save,
    write,
)

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)


def arrays() -> dict[str, Any]:
    """The NumPy twin of `mixed_tree`: the same leaves, all arrays."""
    return {
        "dtypes": every_dtype(),
        "w": random_bits((16, 12), F32, 60),
        "split": {"rows": random_bits((24, 5), BF16, 61), "columns": random_bits((6, 8), F32, 62)},
        "replicated": np.arange(16, dtype=np.float32),
        "list": [random_bits((3, 4, 5), F32, 63), {"x": random_bits((2, 2), np.dtype(np.int8), 64)}],
        "a.key/with": {"dots.and/slashes": random_bits((5,), F32, 65)},
        "zeros": np.zeros((3, 3), np.float32),
        "scalar": random_bits((), np.dtype(np.float64), 66),
    }


def mixed_tree() -> dict[str, Any]:
    """NumPy arrays and jax arrays over eight devices, sharded in several ways."""
    tree = arrays()
    tree["w"] = sharded(tree["w"], "a", "b")
    tree["split"] = {
        "rows": sharded(tree["split"]["rows"], "b"),
        "columns": sharded(tree["split"]["columns"], None, "b"),
    }
    tree["replicated"] = sharded(tree["replicated"])
    return tree


def manager_save(path: Path, tree: Any) -> None:
    with ocp.CheckpointManager(path) as manager:
        manager.save(7, args=ocp.args.StandardSave(tree))


def composite_save(path: Path, tree: Any) -> None:
    with ocp.CheckpointManager(path) as manager:
        manager.save(
            7, args=ocp.args.Composite(params=ocp.args.StandardSave(tree), notes=ocp.args.JsonSave({"a": 1}))
        )


def standard_save(path: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


SAVES: dict[str, Callable[[Path, Any], None]] = {
    "v0": standard_save,
    "v1": lambda path, tree: v1.save(path, tree),
    "manager": manager_save,
    "composite": composite_save,
    "ocdbt zarr2 raw": lambda p, t: stock_save(p, t, use_ocdbt=True, use_zarr3=False, use_compression=False),
    "ocdbt zarr3": lambda p, t: stock_save(p, t, use_ocdbt=True, use_zarr3=True),
    "ocdbt zarr3 raw": lambda p, t: stock_save(p, t, use_ocdbt=True, use_zarr3=True, use_compression=False),
    "files zarr2": lambda p, t: stock_save(p, t, use_ocdbt=False, use_zarr3=False),
    "files zarr2 raw": lambda p, t: stock_save(p, t, use_ocdbt=False, use_zarr3=False, use_compression=False),
    "files zarr3": lambda p, t: stock_save(p, t, use_ocdbt=False, use_zarr3=True),
    "files zarr3 raw": lambda p, t: stock_save(p, t, use_ocdbt=False, use_zarr3=True, use_compression=False),
}


@pytest.fixture(params=["fast paths", "slow paths"])
def paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as it is, when everything in a test is small; once so that byte ranges and kept chunks are used."""
    if request.param == "slow paths":
        monkeypatch.setattr("bridge.core.formats.orbax.reader._IN_FLIGHT", 16)
        monkeypatch.setattr("bridge.core.formats.reading.source_files.SCAN", 40)
        monkeypatch.setattr("bridge.core.formats.reading.source_files.BLOCK", 40)


@pytest.mark.each_value
@pytest.mark.optimized  # else arrays that are cut on the device lose the bits of some bfloat16 NaNs
@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("layout", SAVES)
def test_what_stock_orbax_saved_is_read_bit_for_bit(tmp_path: Path, layout: str) -> None:
    SAVES[layout](tmp_path / "c", mixed_tree())
    assert_reads(tmp_path / "c", arrays())


def test_stored_chunks_are_those_of_the_sharding(tmp_path: Path) -> None:
    standard_save(tmp_path / "c", mixed_tree())
    with OrbaxReader(tmp_path / "c") as reader:
        assert set(reader.tensors["w"].chunks) == {Box((r, c), (8, 3)) for r in (0, 8) for c in (0, 3, 6, 9)}
        assert len(reader.tensors["list/0"].chunks) == 1


@pytest.mark.usefixtures("paths")
def test_our_own_chunks_are_read_by_any_box(tmp_path: Path) -> None:
    tree = {"m": random_bits((37, 11), F32, 1), "s": random_bits((5, 6, 7, 3), BF16, 2), "d": every_dtype()}
    write(tmp_path / "c", tree, {"m": (10, 4), "s": (2, 6, 3, 3)})
    assert_reads(tmp_path / "c", tree)


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("use_compression", [True, False])
def test_shards_of_several_inner_chunks_are_read(tmp_path: Path, use_compression: bool) -> None:
    value = random_bits((20, 12), F32, 1)
    stock_save(tmp_path / "c", {"w": value}, use_zarr3=True, use_ocdbt=True)
    inner = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if use_compression:
        inner.append({"name": "zstd", "configuration": {"level": 1}})
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    shard = {"chunk_shape": [3, 4], "codecs": inner, "index_codecs": index}
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path / 'c'}/"}}
    metadata = {
        "shape": [20, 12],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [9, 8]}},
        "codecs": [{"name": "sharding_indexed", "configuration": shard}],
    }
    ocdbt(tmp_path / "c").delete_range(ts.KvStore.KeyRange("w/", "w0")).result()
    array = ts.open(
        {"driver": "zarr3", "kvstore": {**store, "path": "w/"}, "metadata": metadata}, create=True
    ).result()
    array[:].write(value).result()
    assert_reads(tmp_path / "c", {"w": value})
    with OrbaxReader(tmp_path / "c") as reader:
        assert reader.tensors["w"].chunks[0] == Box((0, 0), (3, 4))


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize(("order", "dtype"), [("C", ">f4"), ("F", "<f4"), ("F", ">f4")])
def test_arrays_of_other_programs_in_other_byte_and_memory_orders_are_read(
    tmp_path: Path, order: str, dtype: str
) -> None:
    value = random_bits((20, 12), F32, 1)
    SAVES["files zarr2 raw"](tmp_path / "c", {"w": value})
    shutil.rmtree(tmp_path / "c" / "w")
    metadata = {"shape": [20, 12], "chunks": [9, 8], "dtype": dtype, "order": order, "compressor": None}
    store = {"driver": "file", "path": f"{tmp_path / 'c' / 'w'}/"}
    spec = {"driver": "zarr", "kvstore": store, "metadata": metadata}
    ts.open(spec, create=True).result()[:].write(value).result()
    assert_reads(tmp_path / "c", {"w": value})


def test_strings_none_and_empty_containers_are_objects(tmp_path: Path) -> None:
    tree = {"w": np.ones(3), "text": "hello", "deep": {"none": None, "dict": {}, "list": [], "s": ["x", 1]}}
    stock_save(tmp_path / "c", tree)
    with OrbaxReader(tmp_path / "c") as reader:
        assert dict(reader.objects) == {
            "text": "hello",
            "deep/none": None,
            "deep/dict": {},
            "deep/list": [],
            "deep/s/0": "x",
        }
        assert reader.object_paths["deep/s/0"] == ("deep", "s", 0)
        assert set(reader.tensors) == {"w", "deep/s/1"}
        assert reader.tensors["deep/s/1"].path == ("deep", "s", 1)
        assert (reader.read("deep/s/1").shape, reader.read("deep/s/1")[()]) == ((), 1)


def test_strings_that_are_no_text_are_refused_by_name(tmp_path: Path) -> None:
    stock_save(tmp_path / "c", {"w": np.ones(3), "text": "hello"})
    (tmp_path / "c" / "_strings.json").write_text('{"text": "\\ud800"}')
    with pytest.raises(CheckpointError, match=r"_strings\.json: expected Unicode text for 'text'"):
        OrbaxReader(tmp_path / "c")


@pytest.mark.parametrize(
    "value", [r'"\ud800"', r'["a", "\ud800"]', r'{"\ud800": 1}', r'{"__tuple__": [{"a": "\ud800"}]}']
)
def test_objects_with_half_a_character_are_refused_by_name(tmp_path: Path, value: str) -> None:
    objects = '{"twinshard": {"objects": {"note": ' + value + "}}}"
    stock_save(tmp_path / "c", {"w": np.ones(3)})
    tree = json.loads((tmp_path / "c" / "_METADATA").read_text())
    tree["custom_metadata"] = json.loads(objects)
    (tmp_path / "c" / "_METADATA").write_text(json.dumps(tree))
    with pytest.raises(
        CheckpointError, match=r"_METADATA: .*object 'note': expected Unicode text, got '\\ud800'"
    ):
        OrbaxReader(tmp_path / "c")


@pytest.mark.parametrize("leaf_type", ["array", "object"])
def test_names_with_half_a_character_are_refused(tmp_path: Path, leaf_type: str) -> None:
    stock_save(tmp_path / "c", {"w": np.ones(3)})
    tree = json.loads((tmp_path / "c" / "_METADATA").read_text())
    if leaf_type == "array":
        tree["tree_metadata"]["x"] = _entry(key_metadata=[{"key": "\ud800", "key_type": 2}])
    else:
        tree["custom_metadata"] = {"twinshard": {"objects": {"x": 1}, "paths": {"x": ["\ud800"]}}}
    (tmp_path / "c" / "_METADATA").write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=r"name of a leaf: expected Unicode text, got '\\ud800'"):
        OrbaxReader(tmp_path / "c")


def test_a_directory_of_steps_is_read_only_when_it_has_one_step(tmp_path: Path) -> None:
    tree = {"w": random_bits((4, 3), F32, 1)}
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        manager.save(9, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        (tmp_path / "c" / "10.orbax-checkpoint-tmp-123" / "default").mkdir(parents=True)
        assert_reads(tmp_path / "c", tree)
        manager.save(10, args=ocp.args.StandardSave({"w": tree["w"] * 2}))
        manager.wait_until_finished()
    with pytest.raises(
        CheckpointError, match=r"several steps: 9, 10\. Give the path of one step, e\.g\. .*/c/10$"
    ):
        OrbaxReader(tmp_path / "c")
    assert_reads(tmp_path / "c" / "9", tree)
    assert_reads(tmp_path / "c" / "9" / "default", tree)


def test_several_items_are_listed_rather_than_one_chosen(tmp_path: Path) -> None:
    tree = {"w": random_bits((4, 3), F32, 1)}
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        save = ocp.args.StandardSave(tree)
        manager.save(1, args=ocp.args.Composite(params=save, opt_state=save))
    with pytest.raises(CheckpointError, match="several items: opt_state, params"):
        OrbaxReader(tmp_path / "c")
    assert_reads(tmp_path / "c" / "1" / "params", tree)


def test_an_unfinished_checkpoint_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", {"w": np.ones(3, np.float32)})
    for name in ("c.orbax-checkpoint-tmp", "c.orbax-checkpoint-tmp-17", "c.tmp-0123abcd"):
        shutil.copytree(tmp_path / "c", tmp_path / name)
        with pytest.raises(CheckpointError, match="never finished"):
            OrbaxReader(tmp_path / name)


def test_a_missing_commit_file_gives_a_warning_only(tmp_path: Path) -> None:
    tree = {"w": random_bits((3,), F32, 1)}
    for layout in ("v0", "v1"):
        write(tmp_path / layout, tree, layout=layout)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_reads(tmp_path / layout, tree)
        (tmp_path / layout / "commit_success.txt").unlink()
        with pytest.warns(UserWarning, match=r"no commit_success\.txt"):
            assert_reads(tmp_path / layout, tree)


def test_other_directories_are_refused_with_what_they_hold(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a checkpoint directory"):
        OrbaxReader(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="found an empty directory"):
        OrbaxReader(tmp_path / "empty")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "checkpoint").write_bytes(b"\x82")
    with pytest.raises(CheckpointError, match="flax msgpack"):
        OrbaxReader(tmp_path / "old")


def test_a_checkpoint_in_which_stock_orbax_merged_two_leaves_is_refused(tmp_path: Path) -> None:
    stock_save(tmp_path / "c", {"a.b": np.ones(2), "a": {"b": np.zeros(2)}})
    with pytest.raises(CheckpointError, match="collide"):
        OrbaxReader(tmp_path / "c")


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_old_metadata_that_does_not_name_its_store_is_understood(tmp_path: Path, use_ocdbt: bool) -> None:
    tree = {"w": random_bits((4, 3), F32, 1)}
    stock_save(tmp_path / "c", tree, use_ocdbt=use_ocdbt, use_zarr3=False)
    file = tmp_path / "c" / "_METADATA"
    data = json.loads(file.read_text())
    for name in ("use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value", "custom_metadata"):
        del data[name]
    file.write_text(json.dumps(data))
    assert_reads(tmp_path / "c", tree)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("layout", ["files zarr2", "files zarr3", "ocdbt zarr3", "v0"])
def test_a_missing_chunk_is_an_error_and_never_zeros(tmp_path: Path, layout: str, zeros: bool) -> None:
    value = np.zeros((16, 12), np.float32) if zeros else random_bits((16, 12), F32, 1)
    SAVES[layout](tmp_path / "c", {"w": sharded(value, "a", "b"), "v": value})
    if layout.startswith("files"):
        (tmp_path / "c" / "w" / ("1.2" if layout == "files zarr2" else "c/1/2")).unlink()
    else:
        ocdbt(tmp_path / "c").write("w/1.2" if layout == "v0" else "w/c/1/2", None).result()
    with pytest.raises(
        CheckpointError, match=r"'w': expected 8 stored chunks, but chunk w/(1\.2|c/1/2) is missing"
    ):
        OrbaxReader(tmp_path / "c")


def test_a_chunk_that_vanishes_after_opening_is_an_error(tmp_path: Path) -> None:
    value = random_bits((16, 12), F32, 1)
    SAVES["files zarr2"](tmp_path / "c", {"w": sharded(value, "a", "b")})
    with OrbaxReader(tmp_path / "c") as reader:
        (tmp_path / "c" / "w" / "1.2").unlink()
        with pytest.raises(CheckpointError, match=r"'w'.*cannot be opened"):
            reader.read("w")


def test_missing_array_metadata_is_an_error(tmp_path: Path) -> None:
    SAVES["files zarr2"](tmp_path / "c", {"w": np.ones(3), "v": np.ones(3)})
    (tmp_path / "c" / "w" / ".zarray").unlink()
    with pytest.raises(CheckpointError, match="'w': expected its metadata under"):
        OrbaxReader(tmp_path / "c")


def test_a_copy_without_the_process_folders_is_an_error(tmp_path: Path) -> None:
    value = random_bits((64, 64), F32, 1)
    standard_save(tmp_path / "c", {"w": sharded(value, "a", "b")})
    shutil.rmtree(tmp_path / "c" / "ocdbt.process_0")
    with pytest.raises(
        CheckpointError, match=r"'w/0\.0' is stored in .*ocdbt\.process_0.*, which cannot be read"
    ):
        OrbaxReader(tmp_path / "c")


def test_a_missing_manifest_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "c", {"w": np.ones(3, np.float32)})
    (tmp_path / "c" / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match=r"expected manifest\.ocdbt"):
        OrbaxReader(tmp_path / "c")


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("layout", ["files zarr2", "files zarr2 raw", "files zarr3", "files zarr3 raw"])
def test_a_truncated_chunk_is_an_error(tmp_path: Path, layout: str) -> None:
    value = random_bits((16, 12), F32, 1)
    SAVES[layout](tmp_path / "c", {"w": value})
    file = tmp_path / "c" / "w" / ("0.0" if "zarr2" in layout else "c/0/0")
    data = file.read_bytes()
    for length in (0, 1, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with OrbaxReader(tmp_path / "c") as reader:
            with pytest.raises(CheckpointError, match="w"):
                reader.read("w", Box((15, 1), (1, 11)))
            with pytest.raises(CheckpointError, match="w"):
                reader.read("w")


def test_large_raw_chunks_are_verified_before_bytes_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.core.formats.orbax.reader._IN_FLIGHT", 16)
    monkeypatch.setattr("bridge.core.formats.reading.source_files.SCAN", 100)
    monkeypatch.setattr("bridge.core.formats.reading.source_files.BLOCK", 100)
    value = random_bits((64, 32), F32, 1)
    write(tmp_path / "c", {"w": value}, {"w": (32, 32)})
    file, position = data_file(tmp_path / "c", value[32:].tobytes())
    box = Box((33, 2), (2, 5))
    size = 32 * 32 * 4
    for offset in (0, 1000, size - 1, size, size + 3, size + 4, size + 19, size + 23):
        flip_bit(file, position + offset, offset % 8)
        with OrbaxReader(tmp_path / "c") as reader:
            assert_same_bits(reader.read("w", Box((1, 2), (2, 5))), value[1:3, 2:7])
            for asked in (box, Box((32, 0), (32, 32))):
                for look in (reader.read, reader.lend):
                    with pytest.raises(
                        CheckpointError, match=r"'w/c/1/0': (checksum mismatch|damaged shard index)"
                    ):
                        look("w", asked)
            # A whole chunk is compared in the memory that it is read into, also among others.
            with pytest.raises(CheckpointError, match="'w/c/1/0'"):
                reader.read("w")
        if offset < size:
            with OrbaxReader(tmp_path / "c", verify=False) as reader:
                assert reader.read("w", box).shape == (2, 5)
        flip_bit(file, position + offset, offset % 8)
    assert_reads(tmp_path / "c", {"w": value})


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_METADATA", "d"])
def test_damaged_index_files_are_one_clear_error_or_harmless(tmp_path: Path, name: str) -> None:
    tree = {"w": random_bits((16, 12), F32, 1), "o": {"x": random_bits((700,), F32, 2)}}
    write(tmp_path / "c", tree)
    # Of the data files, the smaller: the one without array data, a B-tree node.
    file = (
        min((tmp_path / "c" / "d").iterdir(), key=lambda f: f.stat().st_size)
        if name == "d"
        else tmp_path / "c" / name
    )
    original = file.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for trial in range(150):
        data = bytearray(original)
        if trial % 3 == 0:
            del data[int(rng.integers(0, len(data))) :]
        else:
            for _ in range(trial % 5 + 1):
                data[int(rng.integers(0, len(data)))] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(data)
        try:
            with OrbaxReader(tmp_path / "c") as reader:
                for tensor in reader.tensors:
                    reader.read(tensor)
        except CheckpointError:
            refused += 1
    assert refused > 100


HOSTILE: dict[str, dict[str, Any]] = {
    "huge shape": {"shape": [1 << 60, 1 << 60]},
    "huge chunks": {"shape": [1 << 50, 4], "chunks": [1 << 50, 4]},
    "negative": {"shape": [-4, 3]},
    "zero chunk": {"chunks": [0, 3]},
    "text": {"shape": "many"},
    "float": {"shape": [4.5, 3]},
    "true": {"shape": [True, 3]},
    "rank": {"shape": [4, 3, 1]},
    "chunk rank": {"chunks": [12]},
    "strings": {"dtype": "<U9"},
    "objects": {"dtype": "|O"},
    "records": {"dtype": [["a", "<f4"]]},
    "unknown dtype": {"dtype": "float7"},
    "format": {"zarr_format": 9},
    "compressor": {"compressor": {"id": "own"}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_array_metadata_is_one_clear_error(tmp_path: Path, case: str) -> None:
    SAVES["files zarr2"](tmp_path / "c", {"w": np.ones((4, 3), np.float32)})
    file = tmp_path / "c" / "w" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | HOSTILE[case]))

    def read() -> None:
        with OrbaxReader(tmp_path / "c") as reader:
            reader.read("w", Box((0, 0), (1, 1)))
            reader.read("w")

    with pytest.raises(CheckpointError, match="'w'"):
        read()


def _entry(**changes: Any) -> dict[str, Any]:
    key = {"key": "w", "key_type": 2}
    return {
        "key_metadata": [key],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    } | changes


TREES: dict[str, Any] = {
    "a list": [],
    "no tree": {},
    "tree of text": {"tree_metadata": "w"},
    "text entry": {"tree_metadata": {"w": "x"}},
    "no keys": {"tree_metadata": {"w": _entry(key_metadata=[])}},
    "key of another type": {"tree_metadata": {"w": _entry(key_metadata=[{"key": 3, "key_type": 2}])}},
    "key type": {"tree_metadata": {"w": _entry(key_metadata=[{"key": "w", "key_type": 3}])}},
    "list position": {"tree_metadata": {"w": _entry(key_metadata=[{"key": "w", "key_type": 1}])}},
    "parent directory": {"tree_metadata": {"w": _entry(key_metadata=[{"key": "../c/w", "key_type": 2}])}},
    "no value": {"tree_metadata": {"w": _entry(value_metadata=None)}},
    "unknown empty": {
        "tree_metadata": {"w": _entry(value_metadata={"value_type": "X", "skip_deserialize": True})}
    },
    "twice": {"tree_metadata": {"w": _entry(), "x": _entry()}},
    "our objects": {"tree_metadata": {"w": _entry()}, "custom_metadata": {"twinshard": []}},
    "our paths": {
        "tree_metadata": {"w": _entry()},
        "custom_metadata": {"twinshard": {"objects": {"x": 1}, "paths": {"x": 3}}},
    },
    "our object over a tensor": {
        "tree_metadata": {"w": _entry()},
        "custom_metadata": {"twinshard": {"objects": {"w": 1}}},
    },
    "missing string": {"tree_metadata": {"w": _entry(value_metadata={"value_type": "string"})}},
}


@pytest.mark.parametrize("case", TREES)
def test_a_hostile_tree_is_one_clear_error(tmp_path: Path, case: str) -> None:
    SAVES["files zarr2"](tmp_path / "c", {"w": np.ones((4, 3), np.float32)})
    (tmp_path / "c" / "_METADATA").write_text(
        json.dumps({"use_ocdbt": False} | TREES[case] if isinstance(TREES[case], dict) else TREES[case])
    )
    with pytest.raises(CheckpointError, match=r"(_METADATA|_strings\.json|'\.\./c/w')"):
        OrbaxReader(tmp_path / "c")


def test_deeply_nested_json_is_one_clear_error(tmp_path: Path) -> None:
    write(tmp_path / "c", {"w": np.ones(3, np.float32)})
    for depth in (66, 500, 100_000):
        nested = '{"twinshard": {"objects": {"x": ' + "[" * depth + "]" * depth + "}}}"
        (tmp_path / "c" / "_METADATA").write_text('{"tree_metadata": {}, "custom_metadata": ' + nested + "}")
        with pytest.raises(CheckpointError, match=r"levels of nesting|expected JSON"):
            OrbaxReader(tmp_path / "c")


def test_reading_refuses_unknown_names_boxes_outside_and_a_closed_reader(tmp_path: Path) -> None:
    write(tmp_path / "c", {"w": np.ones((4, 3), np.float32)})
    reader = OrbaxReader(tmp_path / "c")
    with pytest.raises(KeyError):
        reader.read("v")
    for box in (Box((0, 0), (5, 3)), Box((4, 0), (1, 3)), Box((0,), (1,))):
        with pytest.raises(ValueError, match=r"inside shape \(4, 3\)"):
            reader.read("w", box)
    kept = reader.read("w")
    reader.close()
    reader.close()
    assert kept.sum() == 12
    with pytest.raises(ValueError, match="closed"):
        reader.read("w")


def test_a_result_is_independent_of_later_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.core.formats.orbax.reader._IN_FLIGHT", 16)
    value = random_bits((8, 3), np.dtype(np.int32), 1)
    standard_save(tmp_path / "c", {"w": value})
    with OrbaxReader(tmp_path / "c") as reader:
        for box in (Box((0, 0), (8, 3)), Box((2, 0), (3, 3)), Box((2, 1), (3, 1))):
            first = reader.read("w", box)
            first[...] = 7
            assert_same_bits(reader.read("w", box), value[box.slices()])


def test_threads_may_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.core.formats.orbax.reader._IN_FLIGHT", 16)
    tree = {str(i): random_bits((40, 30), F32, i) for i in range(6)}
    write(tmp_path / "c", tree, dict.fromkeys(tree, (17, 30)))
    errors: list[BaseException] = []
    with OrbaxReader(tmp_path / "c") as reader:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(60):
                    name, row = str(rng.integers(6)), int(rng.integers(35))
                    box = Box((row, 3), (5, 20))
                    assert_same_bits(reader.read(name, box), tree[name][box.slices()])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_opening_detects_every_stock_layout_as_orbax(tmp_path: Path) -> None:
    for layout in ("v0", "v1", "manager", "composite"):
        SAVES[layout](tmp_path / layout, {"w": np.ones(2)})
        with open_checkpoint(tmp_path / layout) as reader:
            assert reader.format == "orbax"
            assert reader.read("w").sum() == 2


def test_checkpoints_merged_from_several_writers_are_read(tmp_path: Path) -> None:
    """Several processes write a B-tree each, which the first merges: data stays in ocdbt.process_N."""
    value = random_bits((40, 64), F32, 1)
    write(tmp_path / "c", {"w": value}, {"w": (10, 64)})
    context = ts.Context()

    async def split() -> None:
        parent = await ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/c/"}, context=context)
        keys = await parent.list()
        values = {key: (await parent.read(key)).value for key in keys}
        for name in ("manifest.ocdbt", "d"):
            old = tmp_path / "c" / name
            old.unlink() if old.is_file() else shutil.rmtree(old)
        fresh = ts.Context()
        merged = await ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/c/"}, context=fresh)
        transaction = ts.Transaction(atomic=True)
        for rank in range(2):
            child = await ts.KvStore.open(
                {"driver": "ocdbt", "base": f"file://{tmp_path}/c/ocdbt.process_{rank}/"}, context=fresh
            )
            for key in sorted(keys)[rank::2]:
                await child.write(key, values[key])
            await child.experimental_copy_range_to(merged.with_transaction(transaction))
        await transaction.commit_async()

    asyncio.run(split())
    assert_reads(tmp_path / "c", {"w": value})


def test_chunks_in_flight_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = random_bits((64, 6), F32, 3)
    with OrbaxWriter(tmp_path / "c") as writer:
        name = writer.add_tensor("w", array.shape, F32, (2, 6)).name
        for box in writer.chunks(name):
            writer.write(name, box, array[box.slices()])
    monkeypatch.setattr(orbax_reader, "_IN_FLIGHT", 5 * 2 * 6 * 4)
    monkeypatch.setattr(orbax_reader.StoredValues, "__contains__", lambda *_: False)  # as if compressed
    flying: list[int] = [0, 0]

    class Read:
        def __init__(self, read: Any) -> None:
            self.read = read
            flying[0] += 1
            flying[1] = max(flying)

        def result(self) -> Any:
            flying[0] -= 1
            return self.read.result()

    class Spied:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getitem__(self, index: Any) -> Spied:
            return Spied(self.store[index])

        def read(self) -> Read:
            return Read(self.store.read())

    with OrbaxReader(tmp_path / "c") as reader:
        store = reader._array
        monkeypatch.setattr(reader, "_array", lambda name, boxes: Spied(store(name, boxes)))
        assert_same_bits(reader.read("w"), array)
    assert flying == [0, 5]


@pytest.mark.parametrize("name", ["_METADATA", "_strings.json"])
@pytest.mark.parametrize("file_type", ["fifo", "device", "huge", "elsewhere"])
def test_json_is_read_only_from_a_file_of_a_size_that_it_can_have(
    tmp_path: Path, name: str, file_type: str
) -> None:
    stock_save(tmp_path / "c", {"w": np.ones(3), "text": "hello"})
    path = tmp_path / "c" / name
    os.rename(path, tmp_path / "elsewhere")
    if file_type == "fifo":
        os.mkfifo(path)
    elif file_type == "device":
        path.symlink_to("/dev/zero")
    elif file_type == "huge":
        with open(path, "wb") as file:
            file.truncate(200 << 30)
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=name if name != "_METADATA" else "_METADATA|holds"):
        OrbaxReader(tmp_path / "c")


@pytest.mark.each_value
@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
def test_what_tensorstore_reads_whole_has_a_size_that_it_can_have(
    tmp_path: Path, ocdbt: bool, zarr3: bool
) -> None:
    """It ends the process when it gets no memory: run apart from the tests."""
    arrays = {"w": np.zeros((4, 3), np.float32), "v": np.zeros(3, np.float32)}
    stock_save(tmp_path / "c", arrays, use_ocdbt=ocdbt, use_zarr3=zarr3)
    names = (
        ["manifest.ocdbt"]
        if ocdbt
        else [f"w/{'zarr.json' if zarr3 else '.zarray'}", "w/c/0/0" if zarr3 else "w/0.0"]
    )
    program = (
        "import resource, sys; from bridge.core.formats import CheckpointError\n"
        "from bridge.core.formats.orbax.reader import OrbaxReader\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "try: OrbaxReader(sys.argv[1]).read('w')\n"
        "except CheckpointError as error: print(error)"
    )
    for name in names:
        shutil.copytree(tmp_path / "c", tmp_path / "d")
        os.truncate(tmp_path / "d" / name, 200 << 30)
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "d")], capture_output=True, text=True, check=False
        )
        assert re.search(r"expected at most \d+ bytes.*, got 2147483\d+\n", done.stdout), (name, done.stderr)
        shutil.rmtree(tmp_path / "d")


@pytest.mark.parametrize("key", ["w/.zarray", "w/0.0"])
def test_values_in_the_index_have_a_size_that_they_can_have(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    locations = {key: Place("d/x", 0, 1 << 40)}
    stock_save(tmp_path / "c", {"w": np.ones((4, 3), np.float32)}, use_ocdbt=True, use_zarr3=False)
    monkeypatch.setattr("bridge.core.formats.orbax.reader.values_in_ocdbt", lambda *_: (locations, {}))
    with pytest.raises(CheckpointError, match=r"expected at most \d+ bytes .*, got 1099511627776"):
        OrbaxReader(tmp_path / "c")


def test_chunks_inside_of_shards_are_counted_over_all_arrays(tmp_path: Path) -> None:
    """Each is a box in memory, and a file of 600 bytes may claim a million."""
    write(tmp_path / "a", {f"w{k}": np.zeros(4, np.int8) for k in range(4)})
    tree = json.loads((tmp_path / "a" / "_METADATA").read_text())
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "_METADATA").write_text(json.dumps(tree | {"use_ocdbt": False}))
    (tmp_path / "c" / "commit_success.txt").write_text("")
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    size = 1 << 17
    for k in range(4):
        shard = {"chunk_shape": [1], "codecs": [little], "index_codecs": [little]}
        metadata = {
            **{"zarr_format": 3, "node_type": "array", "shape": [size], "data_type": "int8", "fill_value": 0},
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [size]}},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "sharding_indexed", "configuration": shard}],
        }
        (tmp_path / "c" / f"w{k}" / "c").mkdir(parents=True)
        (tmp_path / "c" / f"w{k}" / "c" / "0").write_bytes(b"x")
        (tmp_path / "c" / f"w{k}" / "zarr.json").write_text(json.dumps(metadata))
    with OrbaxReader(tmp_path / "c") as reader:
        assert [len(info.chunks) for info in reader.tensors.values()] == [size, size, 1, 1]


@pytest.mark.parametrize("name", ["w/0", "w/.zarray", "v/0"])
@pytest.mark.parametrize("file_type", ["link", "fifo"])
def test_files_of_arrays_lie_in_the_checkpoint_compressed_or_not(
    tmp_path: Path, name: str, file_type: str
) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "c", {"w": np.arange(6.0), "v": np.ones(3)})
    assert json.loads((tmp_path / "c" / "w" / ".zarray").read_text())["compressor"] is not None
    path = tmp_path / "c" / name
    os.rename(path, tmp_path / "elsewhere")
    if file_type == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        CheckpointError, match=rf"{name}.*: expected (a regular file|its metadata|\d+ stored chunks)"
    ):
        OrbaxReader(tmp_path / "c")


def test_other_items_of_a_step_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        args = ocp.args.Composite(
            state=ocp.args.StandardSave({"w": np.ones(2)}), data=ocp.args.JsonSave({"position": 70})
        )
        manager.save(7, args=args)
    with pytest.warns(UserWarning, match=r"7 also contains data, which is not read") as caught:
        open_checkpoint(tmp_path / "c").close()
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match=r"7 also contains data, which is not read"):
        OrbaxReader(tmp_path / "c" / "7").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OrbaxReader(tmp_path / "c" / "7" / "state").close()


def test_a_dtype_that_is_not_known_is_named(tmp_path: Path) -> None:
    stock_save(tmp_path / "c", {"w": np.ones(3, ml_dtypes.int4)}, use_ocdbt=False, use_zarr3=False)
    file = tmp_path / "c" / "w" / ".zarray"
    file.write_text(file.read_text().replace('"int4"', '"uint4"'))
    with pytest.raises(CheckpointError, match=r"tensor 'w': .*got 'uint4'"):
        OrbaxReader(tmp_path / "c")
