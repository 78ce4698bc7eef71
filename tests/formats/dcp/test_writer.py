"""DcpWriter: stock PyTorch reads every bit of what it writes, and nothing half-written ever appears."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bridge.core.formats import CheckpointError, open_checkpoint
from bridge.core.formats.dcp import writer as writer_module
from bridge.core.formats.dcp.reader import DcpReader
from bridge.core.formats.dcp.writer import DcpWriter
from bridge.core.formats.files.manifest import read_manifest, rest_checksum
from bridge.core.formats.tensors.base import DTYPES, Box, CheckpointReader
from bridge.core.formats.tensors.boxes import check_coverage, default_chunk_shape
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.dcp_files import (
    array_of,
    numbered,
    stock_load,
    stock_load_all,
    stock_save,
    tensor_of,
)
from tests.support.examples import examples
from tests.support.ranks import RankGroup


def put(writer: DcpWriter, path: str | tuple[str | int, ...], array: np.ndarray, **options: Any) -> None:
    name = writer.add_tensor(path, array.shape, array.dtype, **options).name
    for box in writer.chunks(name):
        writer.write(name, box, array[box.slices()])


def copy(source: CheckpointReader, path: Path) -> None:
    with DcpWriter(path) as writer:
        for name, info in source.tensors.items():
            writer.add_tensor(info.path, info.shape, info.dtype)
            for box in writer.chunks(name):
                writer.write(name, box, source.read(name, box))
        for name, tree_path in source.object_paths.items():
            writer.add_object(tree_path, source.objects[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_stock_pytorch_loads_each_dtype_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    shapes = {
        "matrix": (5, 3),
        "scalar": (),
        "empty": (0, 3),
        "vector": (7,),
        "hollow": (2, 0, 4),
        "stack": (2, 3, 4),
    }
    arrays = {name: random_bits(shape, DTYPES[dtype], 11) for name, shape in shapes.items()}
    with DcpWriter(tmp_path / "c") as writer:
        for name, array in arrays.items():
            put(writer, ("model", name), array)
    target = {"model": {name: torch.zeros_like(tensor_of(array)) for name, array in arrays.items()}}
    stock_load(target, tmp_path / "c")
    with DcpReader(tmp_path / "c") as reader:
        for name, array in arrays.items():
            assert same_bits(array_of(target["model"][name]), array)
            assert same_bits(reader.read(f"model.{name}"), array)


OBJECTS: dict[tuple[str | int, ...], object] = {
    ("optimizer", "param_groups", 0, "lr"): 3e-4,
    ("optimizer", "param_groups", 0, "betas"): (0.9, 0.95),
    ("optimizer", "param_groups", 0, "fused"): None,
    ("optimizer", "param_groups", 0, "amsgrad"): False,
    ("optimizer", "param_groups", 0, "params"): ["a.weight", "a.bias"],
    ("optimizer", "param_groups", 1, "lr"): 1.0,
    ("train", "step"): 2**70,
    ("train", "history", 0): -1,
    ("train", "history", 1, "note"): "naïve",
    ("train", "nested"): {"a": [1, (2.5, None)], 3: {}},
}


def test_stock_pytorch_rebuilds_the_nested_state_dict(tmp_path: Path) -> None:
    array = random_bits((3,), np.dtype("float32"), 1)
    with DcpWriter(tmp_path / "c") as writer:
        put(writer, ("train", "history", 2), array)
        for path, value in OBJECTS.items():
            writer.add_object(path, value)
    state = stock_load_all(tmp_path / "c", tmp_path / "c.pt")
    assert same_bits(array_of(state["train"]["history"].pop()), array)
    assert state == {
        "optimizer": {
            "param_groups": [
                {
                    "lr": 3e-4,
                    "betas": (0.9, 0.95),
                    "fused": None,
                    "amsgrad": False,
                    "params": ["a.weight", "a.bias"],
                },
                {"lr": 1.0},
            ]
        },
        "train": {
            "step": 2**70,
            "history": [-1, {"note": "naïve"}],
            "nested": {"a": [1, (2.5, None)], 3: {}},
        },
    }
    assert type(state["optimizer"]["param_groups"][0]["betas"]) is tuple
    with DcpReader(tmp_path / "c") as reader:
        assert {reader.object_paths[name]: value for name, value in reader.objects.items()} == OBJECTS


def test_stock_metadata_holds_what_stock_pytorch_would_have_written(tmp_path: Path) -> None:
    """Same tensors, values and paths as dcp.save, but for the writer's directory and random ids."""
    state = {"model": {"w": numbered((4, 3)), "s": torch.tensor(1.5)}, "groups": [{"lr": 0.1}], "b": (1, 2)}
    stock_save(state, tmp_path / "stock")
    with DcpReader(tmp_path / "stock") as reader:
        copy(reader, tmp_path / "ours")
    stock, ours = (dcp.FileSystemReader(tmp_path / k).read_metadata() for k in ("stock", "ours"))
    for entry in stock.state_dict_metadata.values():
        if getattr(getattr(entry, "properties", None), "strides", None) is not None:
            # From torch 2.15 on; older ones cannot read metadata with strides, so the writer leaves them out.
            entry.properties.strides = None
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert ours.storage_data.keys() == stock.storage_data.keys()
    assert ours.version == stock.version
    assert str(tmp_path).encode() not in (tmp_path / "ours" / ".metadata").read_bytes()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, betas=(0.8, 0.95))
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.linspace(-1, 1, 30).reshape(5, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_a_model_copied_through_reader_and_writer_trains_on_exactly_as_before(tmp_path: Path) -> None:
    model, optimizer = trained()
    weights, state = get_state_dict(model, optimizer)
    stock_save({"model": weights, "optimizer": state}, tmp_path / "stock")
    with open_checkpoint(tmp_path / "stock") as reader:
        copy(reader, tmp_path / "ours")

    torch.manual_seed(1)
    fresh = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    weights, state = get_state_dict(fresh, fresh_optimizer)
    target = stock_load({"model": weights, "optimizer": state}, tmp_path / "ours")
    set_state_dict(
        fresh, fresh_optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
    )
    assert fresh_optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    for _ in range(2):
        assert step(fresh, fresh_optimizer) == step(model, optimizer)
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def load_shards(path: str) -> list[list[list[float]]]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state = {
        k: distribute_tensor(torch.zeros(7, 5), mesh, [Shard(a)]) for k, a in (("rows", 0), ("columns", 1))
    }
    dcp.load(state, checkpoint_id=path)
    assert isinstance(state["rows"], DTensor)
    return [state["rows"].to_local().tolist(), state["columns"].to_local().tolist()]


def test_stock_pytorch_loads_our_chunks_into_its_shards(ranks: RankGroup, tmp_path: Path) -> None:
    array = numbered((7, 5)).numpy()
    with DcpWriter(tmp_path / "c") as writer:
        put(writer, "rows", array, chunk_shape=(3, 2))
        put(writer, "columns", array, chunk_shape=(2, 5))
    first, second = ranks.run(2, load_shards, str(tmp_path / "c"))
    assert first == [array[:4].tolist(), array[:, :3].tolist()]
    assert second == [array[4:].tolist(), array[:, 3:].tolist()]


@examples(60)
@given(st.data())
def test_any_shape_in_any_chunks_in_any_order_round_trips(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("writer") / "c"
    arrays = {}
    with DcpWriter(path) as writer:
        boxes: list[tuple[str, Box]] = []
        for i in range(data.draw(st.integers(1, 3))):
            shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
            arrays[f"t{i}"] = array = random_bits(
                shape, DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))], i
            )
            info = writer.add_tensor(
                ("m", f"t{i}"), shape, array.dtype, [data.draw(st.integers(1, 6)) for _ in shape]
            )
            check_coverage(shape, info.chunks, info.name)
            boxes += [(f"t{i}", box) for box in writer.chunks(info.name)]
        for name, box in data.draw(st.permutations(boxes)):
            block = arrays[name][box.slices()]
            writer.write(f"m.{name}", box, np.asfortranarray(block) if block.ndim else block)
    target = {"m": {name: torch.zeros_like(tensor_of(array)) for name, array in arrays.items()}}
    stock_load(target, path)
    with DcpReader(path) as reader:
        for name, array in arrays.items():
            assert same_bits(array_of(target["m"][name]), array)
            assert same_bits(reader.read(f"m.{name}"), array)
            low = tuple(data.draw(st.integers(0, n)) for n in array.shape)
            part = Box(
                low, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(array.shape, low, strict=True))
            )
            assert same_bits(reader.read(f"m.{name}", part), np.array(array[part.slices()], order="C"))


@given(
    st.lists(st.integers(1, 50), max_size=4).map(tuple),
    st.sampled_from(["int8", "float32", "complex128"]),
    st.integers(16, 4096),
)
def test_default_chunks_are_as_many_whole_rows_as_fit(shape: tuple[int, ...], dtype: str, limit: int) -> None:
    itemsize = DTYPES[dtype].itemsize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.core.formats.tensors.boxes.CHUNK_BYTES", limit)
        block = default_chunk_shape(shape, DTYPES[dtype])
    nbytes = int(np.prod(block)) * itemsize
    assert nbytes <= limit
    cut = [axis for axis, (b, n) in enumerate(zip(block, shape, strict=True)) if b < n]
    if cut:
        assert all(b == 1 for b in block[: cut[-1]])
        assert nbytes // block[cut[-1]] * (block[cut[-1]] + 1) > limit


def test_large_tensors_are_stored_in_rows_of_at_most_32_mib(tmp_path: Path) -> None:
    writer = DcpWriter(tmp_path / "c")
    info = writer.add_tensor("w", (6000, 4096), DTYPES["float32"])
    assert [c.sizes for c in info.chunks] == [(2048, 4096), (2048, 4096), (1904, 4096)]
    assert default_chunk_shape((2, 20 << 20), DTYPES["float32"]) == (1, 8 << 20)
    with pytest.raises(CheckpointError, match="3 of 3 chunks were not written, the first at"):
        writer.commit()


def test_several_threads_may_write(tmp_path: Path) -> None:
    array = random_bits((64, 5), np.dtype("float32"), 3)
    with DcpWriter(tmp_path / "c") as writer:
        writer.add_tensor("w", array.shape, array.dtype, chunk_shape=(1, 5))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda box: writer.write("w", box, array[box.slices()]), writer.chunks("w")))
    with DcpReader(tmp_path / "c") as reader:
        assert same_bits(reader.read("w"), array)


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with DcpWriter(tmp_path / name) as writer:
            put(writer, ("model", "w"), numbered((4, 3)).numpy(), chunk_shape=(3, 2))
            writer.add_object(("lr",), 0.1)
    for file in (".metadata", "__0_0.distcp"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("at_once", [1, 6, 4096])
def test_the_checksum_around_the_elements_is_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(writer_module, "_AT_ONCE", at_once)
    with DcpWriter(tmp_path / "c") as writer:
        writer.add_object("first", [1, "a"])
        infos = [writer.add_tensor(f"w{k}", (5, 3), np.dtype("float32"), (2, 3)) for k in range(4)]
        writer.add_object("between", 2.5)
        writer.add_object("again", None)
        infos.append(writer.add_tensor("none", (0, 3), np.dtype("int8")))
        infos.append(writer.add_tensor("scalar", (), np.dtype("int64")))
        writer.add_object("last", "x" * 100)
        for info in reversed(infos):
            for k, box in enumerate(writer.chunks(info.name)):
                writer.write(info.name, box, np.full(box.sizes, k + 1, info.dtype))
    manifest = read_manifest(tmp_path / "c")
    assert manifest is not None
    with DcpReader(tmp_path / "c") as reader:
        ((file, ranges),) = reader.data_ranges().items()
    assert len(ranges) == 13
    assert manifest.files[file].rest == rest_checksum(tmp_path / "c" / file, ranges)


def test_a_checkpoint_of_objects_only_and_an_empty_one_are_readable(tmp_path: Path) -> None:
    with DcpWriter(tmp_path / "objects") as writer:
        writer.add_object("lr", 0.1)
    assert stock_load_all(tmp_path / "objects", tmp_path / "pt") == {"lr": 0.1}
    with DcpWriter(tmp_path / "empty"):
        pass
    with DcpReader(tmp_path / "empty") as reader:
        assert not reader.tensors
        assert not reader.objects
    assert stock_load_all(tmp_path / "empty", tmp_path / "pt") == {}


# Misuse.


def test_wrong_writes_are_refused_and_nothing_is_cast(tmp_path: Path) -> None:
    writer = DcpWriter(tmp_path / "c")
    writer.add_tensor("w", (4, 3), DTYPES["float32"], chunk_shape=(2, 3))
    first, second = writer.chunks("w")
    block = np.ones((2, 3), np.float32)
    with pytest.raises(CheckpointError, match="to be one of its 2 chunks"):
        writer.write("w", Box((1, 0), (2, 3)), block)
    with pytest.raises(
        CheckpointError, match=r"expected float32 of shape \(2, 3\) .* got float64 of shape \(2, 3\)"
    ):
        writer.write("w", first, block.astype(np.float64))
    with pytest.raises(
        CheckpointError, match=r"expected float32 of shape \(2, 3\) .* got float32 of shape \(3, 2\)"
    ):
        writer.write("w", first, block.T)
    with pytest.raises(CheckpointError, match="got int32"):
        writer.write("w", first, block.view(np.int32))
    with pytest.raises(KeyError):
        writer.write("missing", first, block)
    writer.write("w", first, block)
    with pytest.raises(CheckpointError, match="to be written once"):
        writer.write("w", first, block)
    with pytest.raises(CheckpointError, match=r"'w': 1 of 2 chunks were not written, the first at \(2, 0\)"):
        writer.commit()
    assert second.offsets == (2, 0)
    assert list(tmp_path.iterdir()) == []


def test_names_that_collide_or_are_empty_are_refused(tmp_path: Path) -> None:
    with DcpWriter(tmp_path / "c") as writer:
        writer.add_tensor(("a", "b"), (0,), DTYPES["int8"])
        writer.add_object(("x", 0), 1)
        with pytest.raises(CheckpointError, match=r"two entries are named 'a\.b'"):
            writer.add_tensor(("a.b",), (0,), DTYPES["int8"])
        with pytest.raises(CheckpointError, match=r"two entries are named 'a\.b'"):
            writer.add_object("a.b", 1)
        with pytest.raises(CheckpointError, match=r"two entries are named 'x\.0'"):
            writer.add_object(("x", "0"), 1)
        with pytest.raises(CheckpointError, match="expected a name or a path"):
            writer.add_object((), 1)
        with pytest.raises(CheckpointError, match="expected a name or a path"):
            writer.add_tensor(("a", 1.0), (1,), DTYPES["int8"])  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize(
    "value", [np.float64(1), np.ones(2), {1, 2}, bytearray(b"x"), object(), {"a": torch.ones(1)}, 1 << 5000]
)
def test_values_that_stock_pytorch_would_have_to_unpickle_freely_are_refused(
    tmp_path: Path, value: object
) -> None:
    with DcpWriter(tmp_path / "c") as writer:
        with pytest.raises(CheckpointError, match="object 'x': expected"):
            writer.add_object("x", value)
        writer.add_object("y", 1)
    with DcpReader(tmp_path / "c") as reader:
        assert dict(reader.objects) == {"y": 1}


@pytest.mark.parametrize("dtype", ["U3", ">f4", "O", "int4"])
def test_dtypes_pytorch_lacks_are_refused_by_name(tmp_path: Path, dtype: str) -> None:
    import ml_dtypes

    numpy_dtype = np.dtype(ml_dtypes.int4) if dtype == "int4" else np.dtype(dtype)
    with (
        DcpWriter(tmp_path / "c") as writer,
        pytest.raises(CheckpointError, match=r"tensor 'w': expected a .*dtype"),
    ):
        writer.add_tensor("w", (1,), numpy_dtype)


@pytest.mark.parametrize("block", [(2,), (2, 0), (2, 2, 2), (-1, 2)])
def test_impossible_chunk_shapes_are_refused(tmp_path: Path, block: tuple[int, ...]) -> None:
    with (
        DcpWriter(tmp_path / "c") as writer,
        pytest.raises(ValueError, match="chunk shape of 2 sizes above 0"),
    ):
        writer.add_tensor("w", (4, 4), DTYPES["int8"], chunk_shape=block)


# Atomicity.


class Crash(Exception):
    pass


def test_an_exception_amid_writing_leaves_nothing(tmp_path: Path) -> None:
    def crash() -> None:
        with DcpWriter(tmp_path / "deep" / "c") as writer:
            put(writer, "w", np.ones(5))
            raise Crash

    with pytest.raises(Crash):
        crash()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_destination_is_refused_at_once_and_kept(tmp_path: Path) -> None:
    with DcpWriter(tmp_path / "c") as writer:
        put(writer, "w", np.ones(5))
    before = sorted((p.name, p.read_bytes()) for p in (tmp_path / "c").iterdir())
    with pytest.raises(FileExistsError, match="choose another name"):
        DcpWriter(tmp_path / "c")
    assert sorted((p.name, p.read_bytes()) for p in (tmp_path / "c").iterdir()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full refuses each byte."""
    writer = DcpWriter(tmp_path / "c")
    info = writer.add_tensor("w", (3,), np.dtype("int8"))
    monkeypatch.setattr(writer._data, "_descriptor", os.open("/dev/full", os.O_RDWR))
    with pytest.raises(OSError, match="No space left") as caught, writer:
        writer.write("w", info.chunks[0], np.ones(3, np.int8))
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_abort_after_commit_and_a_second_abort_change_nothing(tmp_path: Path) -> None:
    writer = DcpWriter(tmp_path / "c")
    put(writer, "w", np.ones(5))
    writer.commit()
    writer.abort()
    with DcpReader(tmp_path / "c") as reader:
        assert reader.read("w").tolist() == [1] * 5
    other = DcpWriter(tmp_path / "d")
    other.abort()
    other.abort()
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_killed_writer_leaves_no_checkpoint_under_the_name(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal, numpy as np\n"
        "from bridge.core.formats.dcp.writer import DcpWriter\n"
        "w = DcpWriter(sys.argv[1]); i = w.add_tensor('w', (9,), np.dtype('int8'))\n"
        "w.write('w', i.chunks[0], np.ones(9, np.int8)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "c").exists()
    (left,) = tmp_path.iterdir()
    with pytest.raises(CheckpointError, match="never finished"):
        open_checkpoint(left)
    # The name is free: a second try succeeds.
    with DcpWriter(tmp_path / "c") as writer:
        put(writer, "w", np.ones(9, np.int8))
    assert os.path.isdir(tmp_path / "c")


# Memory.

MEASURE = """
import sys, itertools
import numpy as np
from bridge.core.formats.tensors.base import Box
from bridge.core.formats.tensors.boxes import check_coverage
from bridge.core.formats.dcp.reader import DcpReader
from bridge.core.formats.dcp.writer import DcpWriter
from tests.support.process_memory import status_bytes

path, job, shape = sys.argv[1], sys.argv[2], (int(sys.argv[3]), 16384)
row = np.arange(shape[1], dtype=np.float32)
base = status_bytes("VmRSS")
if job == "write":
    with DcpWriter(path) as writer:
        for box in writer.add_tensor("w", shape, np.dtype("float32")).chunks:
            rows = np.arange(box.offsets[0], box.offsets[0] + box.sizes[0], dtype=np.float32)
            writer.write("w", box, rows[:, None] * 3 + row)
else:
    with DcpReader(path) as reader:
        step = {"rows": (480, shape[1]), "columns": (shape[0], 800), "points": (1, 16)}[job]
        columns = [5000] if job == "points" else range(0, shape[1], step[1])
        for low in itertools.product(range(0, shape[0], step[0]), columns):
            sizes = tuple(min(s, n - o) for s, n, o in zip(step, shape, low))
            block = reader.read("w", Box(low, sizes))
            columns = row[low[1] : low[1] + sizes[1]]
            for i in (0, sizes[0] // 2, sizes[0] - 1):
                assert (block[i] == columns + 3 * (low[0] + i)).all()
print(status_bytes("VmHWM") - base)
"""


def peak_above_imports(path: Path, job: str, rows: int) -> int:
    """Peak resident bytes, file pages included, above those of the interpreter with its imports."""
    command = [sys.executable, "-c", MEASURE, str(path), job, str(rows)]
    root = Path(__file__).parents[3]
    return int(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A place for a large checkpoint, emptied again: pytest keeps the directories of three runs."""
    yield tmp_path / "large"
    shutil.rmtree(tmp_path / "large")


@pytest.mark.slow
def test_600_mb_are_written_and_read_in_less_than_150_mb(large: Path) -> None:
    for job in ("write", "rows", "columns", "points"):
        peak = peak_above_imports(large, job, 9600)
        assert peak < 150e6, f"{job} took {peak / 1e6:.0f} MB"
    assert (large / "__0_0.distcp").stat().st_size > 600e6


@pytest.mark.slow
def test_one_large_chunk_that_stock_pytorch_stored_transposed_is_read_in_less_than_150_mb(
    large: Path,
) -> None:
    state = {"w": (torch.arange(4800.0)[:, None] * 3 + torch.arange(16384.0)).t().contiguous().t()}
    assert not state["w"].is_contiguous()
    stock_save(state, large)
    for job in ("rows", "columns"):
        peak = peak_above_imports(large, job, 4800)
        assert peak < 150e6, f"{job} took {peak / 1e6:.0f} MB"


def test_boxes_of_a_grid_come_in_row_major_order(tmp_path: Path) -> None:
    with DcpWriter(tmp_path / "c") as writer:
        array = np.arange(35, dtype=np.int16).reshape(5, 7)
        put(writer, "w", array, chunk_shape=(2, 3))
        offsets = [box.offsets for box in writer.chunks("w")]
    assert offsets == list(itertools.product((0, 2, 4), (0, 3, 6)))
