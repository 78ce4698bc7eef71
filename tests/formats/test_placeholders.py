"""Checkpoints of Orbax before 2024 and of T5X: a tree in msgpack, and a zarr folder for each array."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import flax.serialization
import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from bridge import convert, diff, inspect, verify
from bridge.core.formats import Box, CheckpointError, open_checkpoint

KERNEL = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
TABLE = np.arange(12, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(3, 4)
ZEROS = np.zeros((4, 2), np.float32)


def zarr(folder: Path, array: np.ndarray, chunks: list[int]) -> None:
    metadata = {"shape": array.shape, "chunks": chunks, "dtype": array.dtype.str}
    if array.dtype == ml_dtypes.bfloat16:
        metadata["dtype"] = "bfloat16"
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(folder)},
        "metadata": {**metadata, "compressor": {"id": "gzip", "level": 1}},
    }
    ts.open(spec, create=True).result().write(array).result()


def aggregate(folder: Path) -> Path:
    """As Orbax wrote with flax's names in 2023: placeholders for arrays, values in place."""
    tree = {
        "params": {
            "dense": {"kernel": "PLACEHOLDER://params.dense.kernel"},
            "table": "PLACEHOLDER://params.table",
        },
        "opt_state": {"0": {"count": np.asarray(7, np.int32), "mu": "PLACEHOLDER://opt_state.0.mu"}},
        "step": 7,
        "name": "run",
    }
    arrays = {"params.dense.kernel": KERNEL, "params.table": TABLE, "opt_state.0.mu": ZEROS}
    return save(folder, tree, arrays)


def t5x(folder: Path) -> Path:
    """As T5X wrote: the tensorstore spec of each array, with names that lack the tree's root."""

    def spec(name: str) -> dict[str, Any]:
        return {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{name}/"},
            "metadata": {"shape": [1], "compressor": {"id": "gzip"}},
        }

    target = {"decoder": {"kernel": spec("target.decoder.kernel"), "table": spec("target.decoder.table")}}
    state = {
        "step": 9,
        "param_states": {"decoder": {"kernel": {"v": spec("state.param_states.decoder.kernel.v")}}},
    }
    arrays = {
        "target.decoder.kernel": KERNEL,
        "target.decoder.table": TABLE,
        "state.param_states.decoder.kernel.v": ZEROS,
    }
    return save(folder, {"version": 3, "optimizer": {"target": target, "state": state}}, arrays)


def save(folder: Path, tree: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        zarr(folder / name, array, [2, 3])
    (folder / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    return folder


def test_a_checkpoint_of_old_orbax_is_what_stock_orbax_restores(tmp_path: Path) -> None:
    old = aggregate(tmp_path / "old")
    stock = ocp.PyTreeCheckpointer().restore(old)
    for path in (old, old / "checkpoint"):
        with open_checkpoint(path) as reader:
            assert {name: str(info.dtype) for name, info in reader.tensors.items()} == {
                "opt_state/0/count": "int32",
                "step": "int64",
                "params/dense/kernel": "float32",
                "params/table": "bfloat16",
                "opt_state/0/mu": "float32",
            }
            assert np.array_equal(reader.read("params/dense/kernel"), stock["params"]["dense"]["kernel"])
            assert np.array_equal(reader.read("params/table"), stock["params"]["table"])
            assert np.array_equal(reader.read("opt_state/0/mu"), ZEROS)
            assert reader.tensors["opt_state/0/mu"].path == ("opt_state", 0, "mu")
            assert (reader.read("step"), reader.objects["name"]) == (7, "run")
            box = Box((1, 2), (5, 2))
            assert np.array_equal(reader.read("params/dense/kernel", box), KERNEL[box.slices()])


def test_a_checkpoint_of_t5x_has_its_trees_names(tmp_path: Path) -> None:
    with open_checkpoint(t5x(tmp_path / "t5x")) as reader:
        assert np.array_equal(reader.read("optimizer/target/decoder/kernel"), KERNEL)
        assert np.array_equal(reader.read("optimizer/target/decoder/table"), TABLE)
        assert np.array_equal(reader.read("optimizer/state/param_states/decoder/kernel/v"), ZEROS)
        assert reader.read("optimizer/state/step") == 9


@pytest.mark.parametrize("made", [aggregate, t5x])
def test_it_is_converted_verified_and_shown(tmp_path: Path, made: Any) -> None:
    old = made(tmp_path / "old")
    convert(old, tmp_path / "new", to="orbax")
    assert diff(old, tmp_path / "new").same
    assert verify(old).good
    assert not inspect(old).left_alone
    assert not convert(old, tmp_path / "dcp", to="dcp").left_alone


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    whole = aggregate(tmp_path / "old")
    folder = shutil.copytree(whole, tmp_path / "no folder")
    shutil.rmtree(folder / "params.table")
    with pytest.raises(
        CheckpointError, match=r"'params/table': expected its metadata under 'params.table/.zarray'"
    ):
        open_checkpoint(folder)
    chunk = shutil.copytree(whole, tmp_path / "no chunk")
    (chunk / "params.dense.kernel" / "2.1").unlink()
    with pytest.raises(
        CheckpointError, match=r"'params/dense/kernel': expected 8 stored chunks.*2\.1 is missing"
    ):
        open_checkpoint(chunk)
    cut = shutil.copytree(whole, tmp_path / "cut")
    (cut / "params.dense.kernel" / "2.1").write_bytes(b"\x1f\x8b no gzip")
    with (
        pytest.raises(CheckpointError, match=r"tensor 'params/dense/kernel'"),
        open_checkpoint(cut) as reader,
    ):
        reader.read("params/dense/kernel")
    bomb = shutil.copytree(whole, tmp_path / "bomb")
    (bomb / "params.dense.kernel" / "2.1").write_bytes(gzip.compress(bytes(1 << 24)))
    with (
        pytest.raises(CheckpointError, match=r"tensor 'params/dense/kernel'"),
        open_checkpoint(bomb) as reader,
    ):
        reader.read("params/dense/kernel")


@pytest.mark.parametrize("name", ["../outside", "/etc", "params.dense.kernel/../../outside"])
def test_a_folder_elsewhere_is_not_read(tmp_path: Path, name: str) -> None:
    zarr(tmp_path / "outside", KERNEL, [2, 3])
    old = save(tmp_path / "old", {"params": f"PLACEHOLDER://{name}"}, {"params.dense.kernel": KERNEL})
    with pytest.raises(CheckpointError, match="expected its metadata"):
        open_checkpoint(old)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a/b": "PLACEHOLDER://x", "a": {"b": "PLACEHOLDER://x"}}, "found 'a/b' twice"),
        ({"a": {"b": "PLACEHOLDER://x"}, "a/b": np.ones(2, np.float32)}, "found 'a/b' twice"),
        ({"a": {"driver": "zarr3", "kvstore": {"path": "x"}}}, "expected an array of zarr in a folder"),
        ({"a": {"driver": "zarr", "kvstore": "file://x"}}, "expected an array of zarr in a folder"),
    ],
)
def test_trees_that_name_arrays_otherwise_are_refused(
    tmp_path: Path, tree: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(save(tmp_path / "old", tree, {"x": KERNEL}))


def test_lists_and_folders_that_no_leaf_names(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name, array in (("x", KERNEL), ("y", TABLE), ("z", ZEROS)):
        zarr(old / name, array, [2, 3])
    (old / "checkpoint").write_bytes(msgpack.packb({"layers": ["PLACEHOLDER://x", "PLACEHOLDER://y"]}))
    with open_checkpoint(old) as reader:
        assert np.array_equal(reader.read("layers/0"), KERNEL)
        assert np.array_equal(reader.read("layers/1"), TABLE)
    assert convert(old, tmp_path / "out").left_alone == {"z": "an array that checkpoint does not name"}
