"""SafetensorsWriter against the stock library, `transformers`, and its own reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize, safe_open
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from bridge.core.formats import CheckpointError, create_checkpoint, open_checkpoint
from bridge.core.formats.files.journal import Attempt
from bridge.core.formats.files.manifest import manifest_path, object_checksum, read_manifest
from bridge.core.formats.safetensors.extras import decode_value, encode_value
from bridge.core.formats.safetensors.header import DTYPE_NAMES, format_header, read_header
from bridge.core.formats.safetensors.writer import SafetensorsWriter
from bridge.core.formats.tensors.arrays import array_checksum
from bridge.core.formats.tensors.base import DTYPES, Box
from bridge.core.formats.whole.replaceable import require_replaceable
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.dcp_files import array_of
from tests.support.bridge.safetensors_files import one_of_each, tiny_llama
from tests.support.examples import examples

F32 = np.dtype("float32")
KEY = {"source": "here"}


def write_all(writer: SafetensorsWriter, arrays: Mapping[str, np.ndarray]) -> None:
    """In an order that is not the file's."""
    for name, array in arrays.items():
        writer.add_tensor(name, array.shape, array.dtype)
    for name, array in reversed(arrays.items()):
        for box in reversed(writer.chunks(name)):
            writer.write(name, box, array[box.slices()])


def save(path: Path, arrays: Mapping[str, np.ndarray], **options: Any) -> Path:
    with SafetensorsWriter(path, **options) as writer:
        write_all(writer, arrays)
    return path


def files_of(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def test_every_dtype_arrives_in_the_stock_library_with_every_bit(tmp_path: Path) -> None:
    arrays = one_of_each()
    loaded = load_file(save(tmp_path / "x.safetensors", arrays))
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert same_bits(array_of(loaded[name]), array)


def test_the_dtype_that_torch_cannot_name_yet_arrives_as_well(tmp_path: Path) -> None:
    array = random_bits((3, 5), DTYPES["float8_e8m0fnu"], 1)
    path = save(tmp_path / "x.safetensors", {"w": array})
    ((name, view),) = deserialize(path.read_bytes())
    assert (name, view["dtype"], view["shape"], bytes(view["data"])) == (
        "w",
        "F8_E8M0",
        [3, 5],
        array.tobytes(),
    )


def test_a_dtype_that_the_format_lacks_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"tensor 'a\.z': expected a dtype that safetensors has .*complex128"
    ):
        save(tmp_path / "c", {"a.z": np.zeros(3, np.complex128)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shard", [None, "1500B", "6KB"])
def test_transformers_loads_its_model_back_and_it_computes_the_same(
    tmp_path: Path, shard: str | None
) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "hf")
    with open_checkpoint(tmp_path / "hf") as reader:
        arrays = {name: reader.read(name) for name in reader.tensors}
    limit = {None: 1 << 40, "1500B": 1500, "6KB": 6000}[shard]
    save(tmp_path / "ours", arrays, shard_bytes=limit)
    (tmp_path / "ours" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(1))
    again = LlamaForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert not torch.equal(tiny_llama(tied=True).state_dict()["lm_head.weight"], again.lm_head.weight)


@pytest.mark.parametrize("limit", [1500, 6000, 1 << 40])
def test_shards_are_cut_and_named_as_hugging_face_does(tmp_path: Path, limit: int) -> None:
    state = {name: tensor.clone() for name, tensor in tiny_llama().state_dict().items()}
    save(tmp_path / "c", {name: array_of(tensor) for name, tensor in state.items()}, shard_bytes=limit)
    theirs = split_torch_state_dict_into_shards(state, max_shard_size=limit)
    files = {p.name for p in (tmp_path / "c").glob("*.safetensors")}
    assert files == set(theirs.filename_to_tensors)
    if theirs.is_sharded:
        index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
        assert {file: {n for n, f in index["weight_map"].items() if f == file} for file in files} == {
            file: set(names) for file, names in theirs.filename_to_tensors.items()
        }
        assert index["metadata"]["total_size"] == theirs.metadata["total_size"]
    for file in files:
        with safe_open(tmp_path / "c" / file, "pt") as stock:
            assert stock.metadata()["format"] == "pt"


def test_a_path_that_ends_in_safetensors_is_one_file_whatever_its_size(tmp_path: Path) -> None:
    arrays = {f"t{i}": random_bits((5, 5), F32, i) for i in range(4)}
    path = save(tmp_path / "new" / "x.safetensors", arrays, shard_bytes=1)
    assert path.is_file()
    assert {p.name for p in path.parent.iterdir()} == {"x.safetensors", "x.safetensors.manifest.json"}
    assert set(load_file(path)) == set(arrays)


def test_every_tensor_begins_where_its_dtype_can_be_mapped(tmp_path: Path) -> None:
    arrays = {
        f"{i}": random_bits((2 * i + 1,), DTYPES[name], i)
        for i, name in enumerate(reversed(DTYPE_NAMES.values()))
    }
    path = save(tmp_path / "x.safetensors", arrays)
    for array in read_header(path.read_bytes(), "x").arrays.values():
        assert array.start % array.dtype.itemsize == 0


@examples(40)
@given(st.data())
def test_any_shape_is_put_together_from_chunks_of_any_memory_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=4)))
    array = random_bits(shape, DTYPES[data.draw(st.sampled_from(["int64", "bfloat16", "bool"]))], 3)
    limit = data.draw(st.integers(8, 200))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.core.formats.tensors.boxes.CHUNK_BYTES", limit)
        path = tmp_path_factory.mktemp("any") / "x.safetensors"
        with SafetensorsWriter(path) as writer:
            chunks = writer.add_tensor("w", shape, array.dtype).chunks
            assert all(box.numel * array.itemsize <= limit for box in chunks)
            for box in data.draw(st.permutations(chunks)):
                writer.write("w", box, np.array(array[box.slices()], order="F"))
    assert same_bits(array_of(load_file(path)["w"]), array)


def test_threads_write_chunks_of_one_tensor_at_once(tmp_path: Path) -> None:
    array = random_bits((3000, 9000), F32, 1)  # 108 MB
    with SafetensorsWriter(tmp_path / "x.safetensors") as writer, ThreadPoolExecutor(4) as pool:
        boxes = writer.add_tensor("w", array.shape, array.dtype).chunks
        assert len(boxes) > 3
        list(pool.map(lambda box: writer.write("w", box, array[box.slices()]), boxes))
    with open_checkpoint(tmp_path / "x.safetensors") as reader:
        assert same_bits(reader.read("w"), array)


# What is not a tensor.

NUMBERS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats()
PLAIN = st.recursive(
    NUMBERS | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["$tuple", "$dict", "$"]), inner, max_size=3)
        | st.dictionaries(st.integers() | st.booleans() | st.none() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@examples(400)
@given(PLAIN)
def test_any_plain_value_comes_back_exactly(value: object) -> None:
    again = decode_value(json.loads(json.dumps(encode_value(value, "v"))), "v")
    # Tells types, signs of zero and bits of a NaN apart.
    assert object_checksum(again) == object_checksum(value)


def test_objects_and_tree_paths_come_back_from_shards(tmp_path: Path) -> None:
    objects = {
        ("train", "note"): "text",
        ("train", "betas"): (0.9, [1, None, {"a": True, 3: b"\0\xff"}]),
        ("flat.name",): float("-inf"),
        ("__metadata__", "note"): "free text",
        ("__metadata__", "twinshard"): "not ours",
        ("__metadata__", "count"): 3,
        ("__metadata__", "format"): "np",
    }
    paths = {("layers", 0, "w"), ("layers", "0", "v"), ("flat.name.w",), ("layers", 1)}
    with SafetensorsWriter(tmp_path / "c", shard_bytes=20) as writer:
        names = {writer.add_tensor(path, (4,), F32).name: path for path in paths}
        for path, value in objects.items():
            writer.add_object(path, value)
        for seed, name in enumerate(names):
            writer.write(name, Box((0,), (4,)), random_bits((4,), F32, seed))
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 4
    with open_checkpoint(tmp_path / "c") as reader:
        assert {name: info.path for name, info in reader.tensors.items()} == names
        by_path = {reader.object_paths[name]: value for name, value in reader.objects.items()}
        assert by_path == objects
        assert type(by_path["train", "betas"]) is tuple
        assert all(name == ".".join(reader.object_paths[name]) for name in reader.objects)
    with safe_open(tmp_path / "c" / "model-00002-of-00004.safetensors", "np") as stock:
        assert stock.metadata() | {"twinshard": ""} == {"format": "np", "note": "free text", "twinshard": ""}


@pytest.mark.parametrize("value", [np.float32(1), {1, 2}, object(), [np.zeros(2)], {(1, 2): 3}, "\udc80"])
def test_a_value_that_is_not_plain_is_refused_by_name(tmp_path: Path, value: object) -> None:
    with (
        pytest.raises(CheckpointError, match=r"object 'a\.b': expected "),
        SafetensorsWriter(tmp_path / "c") as writer,
    ):
        writer.add_object(("a", "b"), value)
    assert list(tmp_path.iterdir()) == []


# Misuse.


def test_misuse_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    array = random_bits((4, 3), F32, 1)
    writer = SafetensorsWriter(tmp_path / "c")
    writer.add_tensor(("a", "b"), (4, 3), F32)
    writer.add_object("o", 1)
    for add in (lambda: writer.add_tensor("a.b", (1,), F32), lambda: writer.add_object(("a", "b"), 1)):
        with pytest.raises(CheckpointError, match=r"two entries are named 'a\.b'"):
            add()
    with pytest.raises(CheckpointError, match="two entries are named 'o'"):
        writer.add_tensor("o", (1,), F32)
    for path in ((), "\udc80", ("a", -1)):
        with pytest.raises(CheckpointError, match="expected a name"):
            writer.add_tensor(path, (1,), F32)
    with pytest.raises(CheckpointError, match="the name '__metadata__' is reserved for the header"):
        writer.add_tensor("__metadata__", (1,), F32)
    with pytest.raises(ValueError, match="chunk shape of 1 sizes above 0"):
        writer.add_tensor("x", (1,), F32, (0,))
    with pytest.raises(KeyError):
        writer.write("ghost", Box((0,), (1,)), array)
    for box, part in ((Box((0, 0), (2, 3)), array[:2]), (Box.whole((4, 3)), array.astype("f8"))):
        with pytest.raises(CheckpointError, match=r"tensor 'a\.b': expected"):
            writer.write("a.b", box, part)
    writer.write("a.b", Box.whole((4, 3)), array)
    with pytest.raises(CheckpointError, match="written once"):
        writer.write("a.b", Box.whole((4, 3)), array)
    for late in (lambda: writer.add_tensor("late", (1,), F32), lambda: writer.add_object("late", 1)):
        with pytest.raises(CheckpointError, match="expected 'late' to be declared before the first chunk"):
            late()
    writer.commit()
    for again in (
        writer.commit,
        lambda: writer.add_tensor("x", (1,), F32),
        lambda: writer.write("a.b", Box.whole((4, 3)), array),
    ):
        with pytest.raises(CheckpointError, match="it was committed or aborted"):
            again()
    with open_checkpoint(tmp_path / "c") as reader:
        assert same_bits(reader.read("a.b"), array)
    with pytest.raises(ValueError, match="shards of 1 byte or more"):
        SafetensorsWriter(tmp_path / "d", shard_bytes=0)


@pytest.mark.parametrize("name", ["c", "x.safetensors"])
def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    writer = SafetensorsWriter(path)
    writer.add_tensor("w", (4,), F32)
    writer.add_tensor("v", (4,), F32)
    writer.write("v", Box((0,), (4,)), random_bits((4,), F32, 1))
    assert not path.exists()
    with pytest.raises(CheckpointError, match="tensor 'w': 1 of 1 chunks were not written"):
        writer.commit()
    assert list(tmp_path.iterdir()) == []
    save(path, {"w": random_bits((4,), F32, 1)})
    with pytest.raises(FileExistsError):
        SafetensorsWriter(path)
    save(path, {"w": random_bits((5,), F32, 2)}, attempt=Attempt(replace=require_replaceable))
    with open_checkpoint(path) as reader:
        assert reader.read("w").shape == (5,)
    manifest = read_manifest(path)
    assert manifest is not None
    assert manifest.tensors["w"].shape == (5,)


@pytest.mark.parametrize("name", ["c", "x.safetensors"])
def test_an_interrupted_write_is_resumed_and_ends_the_same(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.core.formats.tensors.boxes.CHUNK_BYTES", 256)
    monkeypatch.setattr("bridge.core.formats.files.record.SYNC_BYTES", 600)
    arrays = {f"t{i}": random_bits((9, 16), F32, i) for i in range(5)}
    save(tmp_path / "whole" / name, arrays, shard_bytes=1200)
    attempt = Attempt(key=KEY, resume=True)
    first = SafetensorsWriter(tmp_path / "torn" / name, attempt, shard_bytes=1200)
    chunks = [(n, box) for n, a in arrays.items() for box in first.add_tensor(n, a.shape, a.dtype).chunks]
    for tensor, box in chunks[:7]:
        first.write(tensor, box, arrays[tensor][box.slices()])
    first.abort()
    assert not (tmp_path / "torn" / name).exists()
    second = SafetensorsWriter(tmp_path / "torn" / name, attempt, shard_bytes=1200)
    for tensor, array in arrays.items():
        second.add_tensor(tensor, array.shape, array.dtype)
    stored = {(tensor, box) for tensor in arrays for box in second.stored(tensor)}
    assert stored == set(chunks[:7])
    for tensor, box in chunks:
        if (tensor, box) not in stored:
            second.write(tensor, box, arrays[tensor][box.slices()])
    second.commit()
    assert {p.name for p in (tmp_path / "torn").iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}
    torn, whole = tmp_path / "torn" / name, tmp_path / "whole" / name
    if whole.is_dir():
        assert files_of(torn) == files_of(whole)
    else:
        assert torn.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("name", ["c", "x.safetensors"])
def test_the_manifest_says_what_was_written(tmp_path: Path, name: str) -> None:
    arrays = {"w": random_bits((4, 3), F32, 1), "v": random_bits((2,), DTYPES["bfloat16"], 2)}
    with SafetensorsWriter(tmp_path / name, shard_bytes=30) as writer:
        writer.add_object(("__metadata__", "format"), "pt")
        writer.add_object("lr", 0.5)
        write_all(writer, arrays)
    manifest = read_manifest(tmp_path / name)
    assert manifest is not None
    assert manifest.format == "safetensors"
    for tensor, array in arrays.items():
        assert manifest.tensors[tensor].chunks == {Box.whole(array.shape): array_checksum(array)}
    with open_checkpoint(tmp_path / name) as reader:
        assert manifest.objects == {name: object_checksum(value) for name, value in reader.objects.items()}
    folder = manifest_path(tmp_path / name).parent
    assert {f: size.size for f, size in manifest.files.items()} == {
        p.name: p.stat().st_size for p in folder.iterdir() if p != manifest_path(tmp_path / name)
    }


def test_create_checkpoint_makes_one(tmp_path: Path) -> None:
    with create_checkpoint(tmp_path / "c", "safetensors") as writer:
        writer.add_tensor("w", (0, 4), F32)
    with open_checkpoint(tmp_path / "c") as reader:
        assert reader.read("w").shape == (0, 4)


def test_a_file_without_metadata_has_no_entry_for_it() -> None:
    header = format_header([("w", F32, (2, 3))], {})
    assert json.loads(header[8:]) == {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    assert json.loads(format_header([], {"a": "b"})[8:]) == {"__metadata__": {"a": "b"}}
