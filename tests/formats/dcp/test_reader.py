"""DcpReader against checkpoints that stock PyTorch wrote, intact, damaged and hostile."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError, open_checkpoint
from bridge.core.formats.dcp import metadata as dcp_metadata
from bridge.core.formats.dcp import reader as module
from bridge.core.formats.dcp.pickle import read_pickle
from bridge.core.formats.dcp.pickle_records import PLAIN_VALUES, Instance
from bridge.core.formats.dcp.pickle_writer import write_pickle
from bridge.core.formats.dcp.plain_values import plain_from_pickle
from bridge.core.formats.dcp.reader import DcpReader
from bridge.core.formats.reading import source_files
from bridge.core.formats.tensors.base import DTYPES, Box
from bridge.core.formats.tensors.plain import plain_value
from tests.formats.dcp.test_pickle import PAIR, Evil, nest
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.dcp_files import (
    array_of,
    edit_metadata,
    find_tensor,
    numbered,
    stock_save,
    tensor_of,
)
from tests.support.examples import examples
from tests.support.ranks import RankGroup


@pytest.fixture
def genuine(tmp_path: Path) -> Path:
    """Two tensors and two values in one file."""
    state = {
        "model": {"w": numbered((6, 4)), "b": numbered((3,), torch.int64)},
        "lr": 0.1,
        "names": ["a", "b"],
    }
    stock_save(state, tmp_path / "genuine")
    return tmp_path / "genuine"


def sharded_state() -> dict[str, Any]:
    """Rows, columns, uneven and empty shards over the ranks of the current process group."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    full = sharded_full()
    placements = {"rows": Shard(0), "columns": Shard(1), "one": Shard(0), "bf16": Shard(0)}
    state: dict[str, Any] = {k: distribute_tensor(full[k], mesh, [p]) for k, p in placements.items()}
    return {**state, "replicated": full["replicated"], "lr": 0.5}


def sharded_full() -> dict[str, torch.Tensor]:
    return {
        "rows": numbered((7, 3)),
        "columns": numbered((4, 5), torch.int32),
        "one": numbered((1, 4)),
        "bf16": numbered((5, 2), torch.bfloat16),
        "replicated": numbered((2, 2), torch.float64),
    }


def save_sharded(path: str) -> None:
    dcp.save(sharded_state(), checkpoint_id=path)


def test_shards_saved_by_two_ranks_are_put_together(ranks: RankGroup, tmp_path: Path) -> None:
    ranks.run(2, save_sharded, str(tmp_path / "c"))
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 2
    with DcpReader(tmp_path / "c") as reader:
        assert len(reader.tensors["rows"].chunks) == 2
        assert len(reader.tensors["columns"].chunks) == 2
        assert len(reader.tensors["one"].chunks) == 1
        for name, tensor in sharded_full().items():
            assert same_bits(reader.read(name), array_of(tensor))
        assert same_bits(
            reader.read("columns", Box((1, 2), (2, 2))), array_of(sharded_full()["columns"][1:3, 2:4])
        )
        assert reader.objects["lr"] == 0.5


def test_a_model_and_its_adamw_saved_by_stock_pytorch_are_read_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.8, 0.95))
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    stock_save({"model": weights, "optimizer": state, "train": {"step": torch.tensor(7)}}, tmp_path / "c")
    with open_checkpoint(tmp_path / "c") as reader:
        assert reader.format == "dcp"
        for fqn, tensor in weights.items():
            assert same_bits(reader.read(f"model.{fqn}"), array_of(tensor))
            assert reader.tensors[f"model.{fqn}"].path == ("model", fqn)
            for key, moment in state["state"][fqn].items():
                assert same_bits(reader.read(f"optimizer.state.{fqn}.{key}"), array_of(moment))
        assert reader.tensors["optimizer.state.0.weight.step"].shape == ()
        group = {k.rsplit(".", 1)[1]: v for k, v in reader.objects.items()}
        assert group == state["param_groups"][0]
        assert type(group["betas"]) is tuple
        assert reader.object_paths["optimizer.param_groups.0.lr"] == ("optimizer", "param_groups", 0, "lr")
        assert reader.read("train.step").tolist() == 7
        assert len(reader.tensors) == 4 * len(weights) + 1


def test_where_the_data_is_follows_from_each_archive(ranks: RankGroup, tmp_path: Path) -> None:
    ranks.run(2, save_sharded, str(tmp_path / "sharded"))
    many = {f"w{k}": numbered((4, 3) if k % 2 else (5,)) for k in range(150)} | {"none": numbered((0, 2))}
    stock_save(many, tmp_path / "many")
    for path in (tmp_path / "sharded", tmp_path / "many"):
        with DcpReader(path) as reader:
            expected: dict[str, list[tuple[int, int]]] = {}
            for name, info in reader.tensors.items():
                for chunk, extent in zip(info.chunks, reader._metadata.extents[name], strict=True):
                    file = reader.view(extent.file)
                    assert file is not None
                    stored = find_tensor(file, extent.offset, extent.length, "w")
                    start = stored.record.start + stored.first * info.dtype.itemsize
                    span = start, start + chunk.numel * info.dtype.itemsize
                    expected.setdefault(extent.file, []).append(span)
            assert reader.data_ranges() == expected
            assert reader.data_ranges() == expected  # from what is kept
            for name in reader.tensors:
                assert reader.checksummed(name)


def test_data_that_is_not_what_metadata_says_is_refused_among_alike_tensors(tmp_path: Path) -> None:
    stock_save({f"w{k}": numbered((4, 3)) for k in range(200)}, tmp_path / "c")

    def change(metadata: Metadata) -> None:
        for entry in (metadata.state_dict_metadata["w150"], metadata.state_dict_metadata["w151"]):
            entry.size = torch.Size((3, 4))
            entry.chunks[0].sizes = torch.Size((3, 4))

    edit_metadata(tmp_path / "c", change)
    with DcpReader(tmp_path / "c") as reader:
        # The whole of both archives is looked at by reading alone, which refuses them.
        assert sum(map(len, reader.data_ranges().values())) == 198
        for name in ("w150", "w151"):
            message = rf"tensor '{name}', chunk at \(0, 0\): expected float32 \(3, 4\) as"
            with pytest.raises(CheckpointError, match=message):
                reader.read(name)
            with pytest.raises(CheckpointError, match=message):
                reader.lend(name, Box.whole((3, 4)))
    report = verify(tmp_path / "c")
    assert not report.good
    assert all(any(name in fault for fault in map(str, report.problems)) for name in ("'w150'", "'w151'"))


def test_a_checkpoint_that_python_before_3_11_4_wrote_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_name(member: Any, protocol: int) -> tuple[object, ...]:
        return getattr, (type(member), member.name)

    # As enum.Enum has it in those versions.
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    stock_save({"w": torch.arange(6.0)}, tmp_path / "a")
    assert b"getattr" in (tmp_path / "a" / ".metadata").read_bytes()
    with open_checkpoint(tmp_path / "a") as reader:
        np.testing.assert_array_equal(reader.read("w"), np.arange(6, dtype=np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_of_a_genuine_checkpoint_keeps_every_bit(tmp_path: Path, dtype: str) -> None:
    arrays = {"m": random_bits((5, 3), DTYPES[dtype], 1), "s": random_bits((), DTYPES[dtype], 2)}
    arrays["e"] = random_bits((0, 3), DTYPES[dtype], 3)
    stock_save({name: tensor_of(array) for name, array in arrays.items()}, tmp_path / "c")
    with DcpReader(tmp_path / "c") as reader:
        for name, array in arrays.items():
            assert reader.tensors[name].dtype == DTYPES[dtype]
            assert same_bits(reader.read(name), array)


def test_nan_payloads_and_negative_zeros_survive(tmp_path: Path) -> None:
    bits = np.array([0x7FA00001, 0xFFC12345, 0x80000000, 0x7F800000, 1], np.uint32)
    stock_save(
        {"w": torch.from_numpy(bits.view(np.float32)), "h": tensor_of(bits.view("u2").view("f2"))},
        tmp_path / "c",
    )
    with DcpReader(tmp_path / "c") as reader:
        assert reader.read("w").view(np.uint32).tolist() == bits.tolist()
        assert reader.read("h").view(np.uint16).tolist() == bits.view(np.uint16).tolist()


def test_tensors_stored_transposed_are_read_in_their_own_orientation(tmp_path: Path) -> None:
    """`.metadata` does not tell; only the strides in the data do."""
    square, image = numbered((4, 4)).t(), numbered((2, 3, 4, 5)).to(memory_format=torch.channels_last)
    stock_save({"t": square, "i": image}, tmp_path / "c")
    with DcpReader(tmp_path / "c") as reader:
        assert reader.read("t").tolist() == square.tolist()
        assert reader.read("t", Box((1, 0), (2, 3))).tolist() == square[1:3, :3].tolist()
        assert reader.read("i").tolist() == image.tolist()
        assert reader.read("i").flags.c_contiguous
        for name in ("t", "i"):
            memory = memoryview(bytearray(reader.tensors[name].nbytes))
            assert reader.read_into([(name, memory)]) == [None]


def test_a_tensor_that_shares_its_storage_is_not_read_as_the_storage(tmp_path: Path) -> None:
    rows = numbered((6, 4))
    stock_save({"w": rows[1:3], "v": rows}, tmp_path / "c")
    with DcpReader(tmp_path / "c") as reader:
        for name, expected in (("w", rows[1:3]), ("v", rows)):
            memory = bytearray(reader.tensors[name].nbytes)
            if reader.read_into([(name, memoryview(memory))]) != [None]:
                assert np.frombuffer(memory, np.float32).tolist() == expected.flatten().tolist()
            assert reader.read(name).tolist() == expected.tolist()


@examples(60)
@given(st.data())
def test_any_region_of_any_tensor_equals_the_slice(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=4)))
    array = random_bits(
        shape, DTYPES[data.draw(st.sampled_from(["float32", "bfloat16", "bool", "complex128"]))], 5
    )
    order = data.draw(st.permutations(range(len(shape))))
    path = tmp_path_factory.mktemp("region") / "c"
    stock_save({"w": tensor_of(array).permute(tuple(order))}, path)
    expected = array.transpose(order)
    with DcpReader(path) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_files, "BLOCK", data.draw(st.integers(16, 64)))  # at least one element
        for _ in range(4):
            low = tuple(data.draw(st.integers(0, n)) for n in expected.shape)
            sizes = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(expected.shape, low, strict=True))
            region = reader.read("w", Box(low, sizes))
            assert same_bits(region, np.array(expected[Box(low, sizes).slices()], order="C"))


def test_several_threads_may_read_while_few_files_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: RankGroup
) -> None:
    ranks.run(2, save_sharded, str(tmp_path / "c"))
    monkeypatch.setattr(source_files, "_MAX_OPEN_FILES", 1)
    names = list(sharded_full()) * 40
    with DcpReader(tmp_path / "c") as reader, ThreadPoolExecutor(4) as pool:
        for name, array in zip(names, pool.map(reader.read, names), strict=True):
            assert same_bits(array, array_of(sharded_full()[name]))
        assert len(reader._files._opened) == 1


def test_a_checkpoint_of_one_file_per_tensor_is_read_whole(tmp_path: Path) -> None:
    state = {f"w{i}": numbered((3,)) + i for i in range(source_files._MAX_OPEN_FILES + 5)}
    writer = dcp.FileSystemWriter(tmp_path / "c", single_file_per_rank=False)
    stock_save(state, tmp_path / "c", writer)
    with DcpReader(tmp_path / "c") as reader:
        assert len(list((tmp_path / "c").glob("*.distcp"))) == len(state)
        for _ in range(2):
            assert all(same_bits(reader.read(name), array_of(tensor)) for name, tensor in state.items())


def test_list_positions_and_keys_that_look_like_them_are_told_apart(tmp_path: Path) -> None:
    stock_save({"l": [numbered((2,)), {"x": 1}], "d": {0: 5, "1": numbered((1,))}}, tmp_path / "c")
    with DcpReader(tmp_path / "c") as reader:
        assert reader.tensors["l.0"].path == ("l", 0)
        assert reader.object_paths["l.1.x"] == ("l", 1, "x")
        assert reader.object_paths["d.0"] == ("d", "0")
        assert reader.tensors["d.1"].path == ("d", "1")


def test_a_value_that_is_not_plain_hides_nothing_else(tmp_path: Path) -> None:
    """A tuple of tensors is one opaque pickle in DCP."""
    stock_save(
        {"odd": (torch.ones(2), 1), "array": np.ones(1), "lr": 0.5, "w": numbered((2,))}, tmp_path / "c"
    )
    with DcpReader(tmp_path / "c") as reader:
        assert set(reader.objects) == {"odd", "array", "lr"}
        assert reader.objects["lr"] == 0.5
        assert reader.read("w").tolist() == [0, 1]
        for name in ("odd", "array"):
            with pytest.raises(CheckpointError, match=f"object '{name}'"):
                reader.objects[name]
        with pytest.raises(KeyError):
            reader.objects["missing"]


@examples(100)
@given(
    st.recursive(st.binary(max_size=9), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=6)
)
def test_bytes_anywhere_in_a_value_are_read_as_pickle_writes_them(value: object) -> None:
    for protocol in (2, 4):
        data = pickle.dumps(value, protocol)
        if protocol == 2:  # the one that torch.save uses
            assert plain_from_pickle(read_pickle(data, PLAIN_VALUES, "v"), "v") == value
        assert plain_value(value, "v", binary=True) == value
    with pytest.raises(CheckpointError, match="got bytes"):
        plain_value([b""], "v")


@pytest.mark.timeout(30)
def test_bytes_that_are_referred_to_again_and_again_are_made_once() -> None:
    """Else a file of 2 MB asks for 500 GB; more of them than can be printed or written elsewhere are refused."""
    long = b"X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20)
    call = b"c_codecs\nencode\n" + long + b"X\x06\0\0\0latin1\x86Rq\0"

    def listed(count: int) -> object:
        return plain_from_pickle(
            read_pickle(b"\x80\x02](" + call + b"h\0" * count + b"e.", PLAIN_VALUES, "v"), "v"
        )

    value = listed(100)
    assert isinstance(value, list)
    assert (len(value), len(set(map(id, value)))) == (101, 1)
    with pytest.raises(CheckpointError, match="v: expected at most 134217728 characters and bytes, got more"):
        listed(500_000)


def test_text_that_is_referred_to_again_and_again_is_counted_each_time() -> None:
    text = b"X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20) + b"q\0"
    for count, binary in ((100, True), (100, False)):
        data = b"\x80\x02](" + text + b"h\0" * count + b"e."
        assert (
            plain_value(read_pickle(data, PLAIN_VALUES, "v"), "v", binary=binary) == ["x" * (1 << 20)] * 101
        )
    with pytest.raises(CheckpointError, match="v: expected at most 134217728 characters and bytes, got more"):
        plain_from_pickle(read_pickle(b"\x80\x02](" + text + b"h\0" * 200 + b"e.", PLAIN_VALUES, "v"), "v")
    with pytest.raises(CheckpointError, match="v: expected at most 134217728 characters and bytes, got more"):
        plain_value([bytes(1 << 20)] * 200, "v", binary=True)


@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
def test_metadata_is_read_only_when_it_is_a_file_of_a_size_that_it_can_have(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    with open(path, "wb") as file:
        file.truncate(200 << 30)
    with pytest.raises(CheckpointError, match=rf"{name}: expected at most 268435456 bytes, got 214748364800"):
        DcpReader(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"not a regular file|refused|cannot"):
        DcpReader(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        DcpReader(tmp_path)


def test_wrong_questions_are_answered_with_what_was_expected(genuine: Path) -> None:
    reader = DcpReader(genuine)
    with pytest.raises(KeyError):
        reader.read("missing")
    with pytest.raises(ValueError, match=r"tensor 'model.w': expected a box inside shape \(6, 4\)"):
        reader.read("model.w", Box((5, 0), (2, 4)))
    with pytest.raises(ValueError, match="expected a box inside"):
        reader.read("model.w", Box((0,), (1,)))
    kept = reader.read("model.w")
    reader.close()
    with pytest.raises(ValueError, match="was closed"):
        reader.read("model.w")
    assert kept.sum() == 276


def test_the_checkpoint_is_not_modified_and_arrays_are_the_callers(genuine: Path) -> None:
    before = {p.name: p.read_bytes() for p in genuine.iterdir()}
    for file in genuine.iterdir():
        file.chmod(0o444)
    with DcpReader(genuine) as reader:
        reader.read("model.w")[:] = 7
        assert reader.read("model.w")[0, 1] == 1
    assert {p.name: p.read_bytes() for p in genuine.iterdir()} == before


# Damage.


def data_offset(path: Path, name: str) -> tuple[Path, int]:
    """Where the first data byte of a one-chunk tensor is."""
    reader = DcpReader(path)
    (extent,) = reader._metadata.extents[name]
    stored = find_tensor(reader._files.view(extent.file), extent.offset, extent.length, name)
    return path / extent.file, stored.record.start


def test_one_flipped_bit_in_the_data_is_found_when_it_is_read(genuine: Path) -> None:
    file, position = data_offset(genuine, "model.w")
    raw = bytearray(file.read_bytes())
    raw[position + 50] ^= 1
    file.write_bytes(raw)
    with DcpReader(genuine) as reader:
        assert reader.read("model.b").tolist() == [0, 1, 2]
        # A part that does not include the bad byte is refused as well: the checksum is of the whole chunk.
        for box in (None, Box((0, 0), (1, 1))):
            with pytest.raises(
                CheckpointError, match=r"tensor 'model.w', chunk at \(0, 0\): the data is damaged"
            ):
                reader.read("model.w", box)
    with DcpReader(genuine, verify=False) as reader:
        assert (reader.read("model.w") != numbered((6, 4)).numpy()).sum() == 1


def test_a_page_of_zeros_is_found(tmp_path: Path) -> None:
    stock_save({"w": torch.randn(100, 100)}, tmp_path / "c")
    file, position = data_offset(tmp_path / "c", "w")
    raw = bytearray(file.read_bytes())
    raw[position + 4096 : position + 8192] = bytes(4096)
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="the data is damaged"):
        DcpReader(tmp_path / "c").read("w")


def test_each_chunk_is_verified_once(genuine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(module, "verify_record", lambda *args, **_: calls.append(args))
    with DcpReader(genuine) as reader:
        for row in range(6):
            reader.read("model.w", Box((row, 0), (1, 4)))
    assert len(calls) == 1


def test_a_truncated_file_is_named_with_its_sizes_when_opening(genuine: Path) -> None:
    (file,) = genuine.glob("*.distcp")
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(
        CheckpointError, match=rf"__0_0.distcp is truncated: expected at least {size} .* got {size - 1}"
    ):
        DcpReader(genuine)


def test_a_missing_data_file_or_something_else_in_its_place_is_named_when_opening(genuine: Path) -> None:
    (file,) = genuine.glob("*.distcp")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp, which cannot be read"):
        DcpReader(genuine)
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        DcpReader(genuine)


def test_truncated_metadata_is_refused_at_every_length(genuine: Path) -> None:
    raw = (genuine / ".metadata").read_bytes()
    for size in range(0, len(raw), 7):
        (genuine / ".metadata").write_bytes(raw[:size])
        with pytest.raises(CheckpointError, match=r"\.metadata: "):
            DcpReader(genuine)


def test_two_generations_in_one_directory_are_found(tmp_path: Path) -> None:
    """What a crash while overwriting leaves: metadata of one save, data of another."""
    stock_save({"a": torch.ones(5), "w": numbered((6, 4))}, tmp_path / "old")
    stock_save({"a": torch.ones(9), "w": numbered((6, 4)) + 1}, tmp_path / "new")
    shutil.copy(tmp_path / "new" / "__0_0.distcp", tmp_path / "old")
    with DcpReader(tmp_path / "old") as reader, pytest.raises(CheckpointError):
        reader.read("a")


# Metadata that does not hold together. Each edit is made to a genuine file.


def index_of(metadata: Metadata, name: str) -> MetadataIndex:
    return next(i for i in metadata.storage_data if i.fqn == name)


def place_of(metadata: Metadata, name: str) -> _StorageInfo:
    return metadata.storage_data[index_of(metadata, name)]


def move(chunk: Any, offsets: tuple[int, ...]) -> None:
    chunk.offsets = torch.Size(offsets)


def rename_key(mapping: dict[Any, Any], new: Any) -> None:
    mapping[new] = mapping.pop(next(iter(mapping)))


def storage_entry(metadata: Metadata, name: str, offset: Any) -> None:
    metadata.storage_data[MetadataIndex(name, offset)] = place_of(metadata, "model.b")


W, B = "model.w", "model.b"
EDITS: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a hole": (lambda m: m.state_dict_metadata[W].chunks.clear(), r"element \(0, 0\) is in 0"),
    "a chunk too small": (
        lambda m: setattr(m.state_dict_metadata[W].chunks[0], "sizes", torch.Size((6, 3))),
        r"element \(0, 3\) is in 0",
    ),
    "a chunk outside": (lambda m: move(m.state_dict_metadata[W].chunks[0], (1, 0)), "inside shape"),
    "a chunk of another rank": (lambda m: move(m.state_dict_metadata[W].chunks[0], (0,)), "chunks of rank 2"),
    "a chunk twice": (
        lambda m: m.state_dict_metadata[W].chunks.append(m.state_dict_metadata[W].chunks[0]),
        "is in 2",
    ),
    "a larger tensor": (
        lambda m: setattr(m.state_dict_metadata[W], "size", torch.Size((7, 4))),
        r"element \(6, 0\) is in 0",
    ),
    "a chunk not stored": (lambda m: m.storage_data.pop(index_of(m, W)), "nothing stored for the chunk"),
    "an object not stored": (
        lambda m: m.storage_data.pop(index_of(m, "lr")),
        "'lr' to be stored in one place, got 0",
    ),
    "an object stored twice": (lambda m: storage_entry(m, "lr", torch.Size((0,))), "one place, got 2"),
    "storage for an unknown name": (lambda m: storage_entry(m, "ghost", torch.Size((0,))), "unknown 'ghost'"),
    "an unsupported dtype": (
        lambda m: setattr(m.state_dict_metadata[W].properties, "dtype", torch.dtype),
        "expected a dtype out of .* got torch.dtype",
    ),
    "another layout": (
        lambda m: setattr(m.state_dict_metadata[W].properties, "layout", torch.sparse_coo),
        "expected a strided tensor",
    ),
    "a path that is no tuple": (lambda m: m.planner_data.update({W: ["model", "w"]}), "path of 'model.w'"),
    "a path of floats": (lambda m: m.planner_data.update({W: ("model", 1.0)}), "path of 'model.w'"),
    "an empty path": (lambda m: m.planner_data.update({W: ()}), "path of 'model.w'"),
    "a nested path": (lambda m: m.planner_data.update({W: ("model", ("w",))}), "path of 'model.w'"),
    "a negative offset": (lambda m: setattr(place_of(m, W), "offset", -1), "ints of at least 0"),
    "an offset that is no int": (lambda m: setattr(place_of(m, W), "offset", 0.0), "ints of at least 0"),
    "a range past the end": (lambda m: setattr(place_of(m, W), "length", 1 << 40), "is truncated"),
    "a compressing extension": (
        lambda m: setattr(place_of(m, W), "transform_descriptors", ["zstd"]),
        "compressed or encrypted by a DCP extension",
    ),
    "names that are numbers": (lambda m: rename_key(m.state_dict_metadata, 5), "names to be text"),
    "an endless name": (lambda m: rename_key(m.state_dict_metadata, "x" * 10_000), "at most 4096 characters"),
    "no storage": (lambda m: setattr(m, "storage_data", None), "storage_data to be a dict"),
    "no entries": (lambda m: setattr(m, "state_dict_metadata", []), "state_dict_metadata to be a dict"),
    "an entry of another kind": (
        lambda m: m.state_dict_metadata.update({W: 1}),
        "expected a .*TensorStorageMetadata",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_metadata_that_does_not_hold_together_is_refused_when_opening(genuine: Path, edit: str) -> None:
    change, why = EDITS[edit]
    edit_metadata(genuine, change)
    with pytest.raises(CheckpointError, match=why):
        DcpReader(genuine)


@pytest.mark.parametrize("file", ["", ".", "..", "../x.distcp", "/etc/passwd", "a\\b", "a\0b", "x" * 300])
def test_file_names_that_lead_elsewhere_are_refused(genuine: Path, file: str) -> None:
    edit_metadata(genuine, lambda m: setattr(place_of(m, W), "relative_path", file))
    with pytest.raises(CheckpointError, match="expected the name of a file in the checkpoint's directory"):
        DcpReader(genuine)


def test_data_of_another_dtype_or_shape_than_metadata_says_is_refused_not_cast(genuine: Path) -> None:
    edit_metadata(genuine, lambda m: setattr(m.state_dict_metadata[W].properties, "dtype", torch.int32))
    with pytest.raises(
        CheckpointError, match=r"expected int32 \(6, 4\) as .metadata says, got float32 \(6, 4\)"
    ):
        DcpReader(genuine).read(W)
    edit_metadata(genuine, lambda m: setattr(m.state_dict_metadata[W].properties, "dtype", torch.float32))

    def reshape(m: Metadata) -> None:
        m.state_dict_metadata[W].size = m.state_dict_metadata[W].chunks[0].sizes = torch.Size((4, 6))

    edit_metadata(genuine, reshape)
    with pytest.raises(
        CheckpointError, match=r"expected float32 \(4, 6\) as .metadata says, got float32 \(6, 4\)"
    ):
        DcpReader(genuine).read(W)


def test_a_tensor_described_as_an_object_or_the_reverse_is_refused(genuine: Path) -> None:
    def swap(m: Metadata, name: str, other: str) -> None:
        kept = m.state_dict_metadata[name]
        m.state_dict_metadata[name] = m.state_dict_metadata[other]
        m.state_dict_metadata[other] = kept

    edit_metadata(genuine, lambda m: swap(m, W, "lr"))
    with pytest.raises(
        CheckpointError, match=r"'model\.w' to be stored in one place|nothing stored for the chunk"
    ):
        DcpReader(genuine)
    edit_metadata(
        genuine, lambda m: (swap(m, W, "lr"), m.storage_data.update({index_of(m, "lr"): place_of(m, W)}))
    )
    with pytest.raises(CheckpointError, match=r"'model.w' and 'lr' are stored in the same place, at \d+"):
        DcpReader(genuine)
    edit_metadata(genuine, lambda m: m.state_dict_metadata.pop(W) and m.storage_data.pop(index_of(m, W)))
    with (
        DcpReader(genuine) as reader,
        pytest.raises(CheckpointError, match="expected a plain value, found one tensor"),
    ):
        reader.objects["lr"]


def test_two_names_for_one_place_are_refused(genuine: Path) -> None:
    """What one flipped bit in an offset can make of two archives of the same size."""
    stock_save({"a": numbered((6, 4)), "b": numbered((6, 4)) + 1}, genuine)
    edit_metadata(genuine, lambda m: setattr(place_of(m, "b"), "offset", place_of(m, "a").offset))
    with pytest.raises(CheckpointError, match="'a' and 'b' are stored in the same place, at 0"):
        DcpReader(genuine)


def test_a_claim_of_more_bytes_than_are_stored_is_refused_when_opening(genuine: Path) -> None:
    def grow(m: Metadata) -> None:
        m.state_dict_metadata[W].size = m.state_dict_metadata[W].chunks[0].sizes = torch.Size(
            (1 << 40, 1 << 20)
        )

    edit_metadata(genuine, grow)
    with pytest.raises(
        CheckpointError, match=r"tensor 'model.w': expected \d+ bytes for a chunk, but \d+ are"
    ):
        DcpReader(genuine)


def test_a_data_file_that_is_a_link_to_elsewhere_is_refused(genuine: Path, tmp_path: Path) -> None:
    (file,) = genuine.glob("*.distcp")
    file.rename(genuine / "data")
    file.symlink_to("data")
    DcpReader(genuine).close()
    (genuine / "data").rename(tmp_path / "data")
    file.unlink()
    file.symlink_to(tmp_path / "data")
    with pytest.raises(CheckpointError, match=r"a link to .*: expected a file in the checkpoint's directory"):
        DcpReader(genuine)
    (genuine / ".metadata").rename(tmp_path / "metadata")
    (genuine / ".metadata").symlink_to(tmp_path / "metadata")
    with pytest.raises(CheckpointError, match=r"the metadata is stored in .*\.metadata, a link to"):
        DcpReader(genuine)


def test_empty_chunks_at_their_neighbours_offset_are_ignored(tmp_path: Path) -> None:
    stock_save({"w": numbered((2, 3))}, tmp_path / "c")

    def add_empty(m: Metadata) -> None:
        chunks = m.state_dict_metadata["w"].chunks
        chunks.insert(0, type(chunks[0])(torch.Size((0, 0)), torch.Size((0, 3))))

    edit_metadata(tmp_path / "c", add_empty)
    with DcpReader(tmp_path / "c") as reader:
        assert reader.tensors["w"].chunks == (Box((0, 0), (2, 3)),)
        assert same_bits(reader.read("w"), array_of(numbered((2, 3))))


def test_two_storage_entries_for_one_chunk_are_refused(genuine: Path) -> None:
    """PyTorch's own index would silently keep the last one."""
    file = genuine / ".metadata"
    metadata = read_pickle(file.read_bytes(), dcp_metadata._VOCABULARY, "genuine")
    assert isinstance(metadata, Instance)
    storage = metadata.state["storage_data"]
    index, entry = next((i, p) for i, p in storage.items() if i.state["fqn"] == W)
    storage[Instance(index.name, {**index.state, "index": 7})] = entry
    file.write_bytes(write_pickle(metadata, 4))
    with pytest.raises(
        CheckpointError, match=r"'model\.w': has two storage entries for the chunk at \(0, 0\)"
    ):
        DcpReader(genuine)


def test_planner_data_of_another_planner_leaves_names_as_paths(genuine: Path) -> None:
    edit_metadata(genuine, lambda m: setattr(m, "planner_data", None))
    with DcpReader(genuine) as reader:
        assert reader.tensors[W].path == (W,)
        assert reader.object_paths["lr"] == ("lr",)


# Attacks.


def test_metadata_that_runs_code_is_refused_without_running_it(genuine: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    edit_metadata(genuine, lambda m: m.planner_data.update({"x": Evil(marker)}))
    with pytest.raises(CheckpointError, match=r"it names 'posix\.mkdir'"):
        open_checkpoint(genuine)
    assert not marker.exists()
    dcp.FileSystemReader(genuine).read_metadata()
    assert marker.exists(), "the file above was meant to be dangerous"


def test_a_value_that_runs_code_is_refused_without_running_it(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    stock_save({"lr": Evil(marker), "w": numbered((2,))}, tmp_path / "c")
    with DcpReader(tmp_path / "c") as reader:
        assert reader.read("w").tolist() == [0, 1]
        with pytest.raises(CheckpointError, match=r"object 'lr': .* found a call of posix\.mkdir"):
            reader.objects["lr"]
    assert not marker.exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("depth", [28, 60])
def test_a_small_metadata_file_that_expands_without_end_is_refused(genuine: Path, depth: int) -> None:
    bomb = nest(b")", PAIR, depth)
    for data in (b"\x80\x02" + bomb + b".", b"\x80\x02}" + bomb + b"Ns."):
        (genuine / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            DcpReader(genuine)
        assert len(str(caught.value)) < 500


@pytest.mark.timeout(60)
@pytest.mark.parametrize("field", ["path", "size", "storage", "unused"])
def test_an_endless_tuple_inside_genuine_metadata_is_refused_or_ignored(genuine: Path, field: str) -> None:
    evil: object = ()
    for _ in range(60):
        evil = (evil, evil)

    def edit(m: Metadata) -> None:
        if field == "path":
            m.planner_data[W] = evil
        elif field == "size":
            m.state_dict_metadata[W].size = evil
        elif field == "storage":
            place_of(m, W).offset = evil
        else:
            m.storage_meta = evil

    edit_metadata(genuine, edit)
    if field == "unused":
        DcpReader(genuine).close()
    else:
        with pytest.raises(CheckpointError) as caught:
            DcpReader(genuine)
        assert len(str(caught.value)) < 500


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_10000_mutants_of_metadata_raise_nothing_but_checkpoint_errors(genuine: Path) -> None:
    rng = random.Random(3)
    file = genuine / ".metadata"
    raw = file.read_bytes()
    refused = 0
    for _ in range(10_000):
        mutant = bytearray(raw)
        for _ in range(rng.randint(1, 6)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        file.write_bytes(mutant)
        try:
            with DcpReader(genuine) as reader:
                for name in reader.tensors:
                    reader.read(name)
                for name in reader.objects:
                    reader.objects[name]
        except CheckpointError:
            refused += 1
    assert 5_000 < refused < 10_000


def test_reading_needs_no_torch() -> None:
    """A fresh interpreter in which torch and jax cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['jax'] = None\n"
        "import bridge.core.formats, bridge.core.formats.dcp.reader, bridge.core.formats.dcp.writer"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
