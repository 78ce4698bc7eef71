"""OCDBT stores made here, as tensorstore reads them; and where values lie in stores that tensorstore made."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import google_crc32c
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorstore as ts
import zstandard
from hypothesis import given

from bridge.core.formats.files.record import ChunkRecord
from bridge.core.formats.files.sink import Place
from bridge.core.formats.orbax.reader import OrbaxReader
from bridge.core.formats.orbax.zarr import ocdbt
from bridge.core.formats.orbax.zarr.arrays import ArrayLayout, new_context
from bridge.core.formats.orbax.zarr.ocdbt import NodeBudget, OcdbtWriter, entries_and_keys
from bridge.core.formats.orbax.zarr.values import Place as StoredPlace
from bridge.core.formats.orbax.zarr.values import StoredValues, places_in_files, values_in_ocdbt
from bridge.core.formats.tensors.base import DTYPES, CheckpointError
from tests.support.examples import examples


def stored(path: Path, context: ts.Context | None = None, **config: Any) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
    if config:
        spec |= {"config": config, "assume_config": True, "cache_pool": "cache_pool#ocdbt"}
    return ts.KvStore.open(spec, context=context).result()


def write(path: Path, values: dict[str, bytes]) -> None:
    record = ChunkRecord(path)
    writer = OcdbtWriter(path, record.open)
    for key, value in values.items():
        writer.put(key, value)
    writer.finish(record.sync)
    record.close()


def fill(reserved: Place, data: bytes) -> None:
    reserved.file.write(reserved.offset, data)


def all_of(store: ts.KvStore) -> dict[str, bytes]:
    return {key.decode(): store[key] for key in store.list().result()}


KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
VALUES = st.one_of(
    st.binary(max_size=40), st.integers(1000, 3000).map(lambda n: n.to_bytes(2, "big") * (n // 2))
)


@examples(60)
@given(values=st.dictionaries(KEYS, VALUES, min_size=1, max_size=40))
def test_tensorstore_reads_any_keys_and_values(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, bytes]
) -> None:
    path = tmp_path_factory.mktemp("store")
    write(path, values)
    assert all_of(stored(path)) == values
    locations, inline = values_in_ocdbt(path, "store")
    assert inline == {key: value for key, value in values.items() if len(value) <= 1024}
    assert set(locations) == set(values) - set(inline)
    stored_values = StoredValues(path, locations)
    for key in locations:
        assert stored_values.read(key) == values[key]


def test_tensorstore_can_go_on_with_a_store_made_here(tmp_path: Path) -> None:
    values = {f"layers/{i}": bytes([i]) * (i * 50) for i in range(60)}
    write(tmp_path / "s", values)
    store = stored(tmp_path / "s")
    store["new"] = b"x" * 5000
    del store["layers/7"]
    del values["layers/7"]
    assert all_of(stored(tmp_path / "s")) == {**values, "new": b"x" * 5000}


def test_values_written_in_parts_and_in_any_order(tmp_path: Path) -> None:
    record = ChunkRecord(tmp_path)
    writer = OcdbtWriter(tmp_path / "s", record.open)
    reserved = {key: writer.reserve(key, length) for key, length in (("b", 3000), ("a", 10), ("c", 1))}
    fill(reserved["c"], b"!")
    reserved["b"].file.write_parts(reserved["b"].offset + 1000, [b"2" * 1500, b"2" * 500])
    fill(reserved["a"], b"0123456789")
    fill(reserved["b"], b"1" * 1000)
    writer.finish(record.sync)
    record.close()
    assert all_of(stored(tmp_path / "s")) == {"a": b"0123456789", "b": b"1" * 1000 + b"2" * 2000, "c": b"!"}


def test_a_store_of_several_levels_and_stores_joined_by_reference(tmp_path: Path) -> None:
    """tensorstore's interior nodes, whose keys and files are relative to the node above."""
    small = {"max_decoded_node_bytes": 400, "max_inline_value_bytes": 3}
    expected: dict[str, bytes] = {}
    transaction = ts.Transaction(atomic=True)
    context = new_context()
    own = stored(tmp_path, context, **small)
    for process in (0, 1):
        store = stored(tmp_path / f"ocdbt.process_{process}", context, **small)
        for i in range(90):
            key = f"l{process}/{i:03d}/w{'x' * (i % 7)}"
            expected[key] = bytes([i, process]) * (1 + i % 9)
            store[key] = expected[key]
        store.experimental_copy_range_to(own.with_transaction(transaction)).result()
    transaction.commit_async().result()
    base = ts.KvStore.open(f"file://{tmp_path}/").result()
    assert ts.ocdbt.dump(base).result()["versions"][-1]["root_height"] > 1
    locations, _ = values_in_ocdbt(tmp_path, "store")
    assert set(locations) == {key for key, value in expected.items() if len(value) > 3}
    values = StoredValues(tmp_path, locations)
    for key in locations:
        assert values.read(key) == expected[key]


@pytest.mark.parametrize("dtype", DTYPES)
def test_array_metadata_is_what_tensorstore_writes(tmp_path: Path, dtype: str) -> None:
    layout = ArrayLayout("w", (5, 7), DTYPES[dtype], (2, 7), (2, 7), zarr3=True, raw="shard", checksum=True)
    base = ts.KvStore.open(f"file://{tmp_path}/").result()
    spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/w/", "metadata": layout.metadata()}
    ts.open(spec, create=True).result()
    written = json.loads(base["w/zarr.json"])
    ours = json.loads(json.dumps(layout.metadata()))
    # Defaults of codecs may be left out or not; reading by tensorstore says whether they are right.
    for metadata in (written, ours):
        del metadata["codecs"]
        metadata["chunk_key_encoding"].setdefault("configuration", {"separator": "/"})
    assert ours == written


def test_values_outside_of_the_store_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 100)
    item = tmp_path / "item"
    item.mkdir()
    (item / "link").symlink_to(tmp_path / "secret")
    (item / "short").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="expected a regular file of the checkpoint, got a link"):
        StoredValues(item, {"k": StoredPlace("link", 0, 3)})
    with pytest.raises(
        CheckpointError, match=r"short is truncated: expected at least 4 bytes \(for 'k'\), got 3"
    ):
        StoredValues(item, {"k": StoredPlace("short", 2, 2)})
    with pytest.raises(CheckpointError, match="cannot be read"):
        StoredValues(item, {"k": StoredPlace("none", 0, 1)})
    assert places_in_files(item, ["short"]) == {"short": StoredPlace("short", 0, 3)}


@pytest.mark.parametrize("folder", ["../", "a/../../", "/etc/"])
def test_references_that_lead_out_of_the_store_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    write(tmp_path / "s", {"k": b"x" * 2000})
    locations, _ = values_in_ocdbt(tmp_path / "s", "s")
    assert list(locations) == ["k"]
    dump = ts.ocdbt.dump

    class Node:
        def __init__(self, future: ts.Future) -> None:
            self.future = future

        def result(self) -> dict[str, object]:
            node = self.future.result()
            for entry in node.get("entries", []):
                entry["indirect_value"] = entry["indirect_value"].replace("value:", f"value:{folder}", 1)
            return node

    monkeypatch.setattr(ts.ocdbt, "dump", lambda *args: Node(dump(*args)))
    with pytest.raises(CheckpointError, match="expected values in files of the checkpoint"):
        values_in_ocdbt(tmp_path / "s", "s")


def hostile_tree(item: Path, levels: int, fan: int, spellings: tuple[str, ...]) -> int:
    """A store whose root leads to fan ** levels keys, as all entries of a node lead to one other; its size in bytes."""
    (item / "d").mkdir(parents=True)
    nodes = bytearray(ocdbt._leaf_node("d/x", {"": b"v"}, {}))
    child = (0, len(nodes))
    keys = [b"%03d" % k for k in range(fan)]
    table = b"".join(
        (
            ocdbt._varint(len(spellings)),
            ocdbt._varints([0] * (len(spellings) - 1)),
            ocdbt._varints(map(len, spellings)),
            ocdbt._varints([0] * len(spellings)),
            *(name.encode() for name in spellings),
        )
    )
    for height in range(1, levels + 1):
        lengths = [0] * (fan - 1), [3] * fan, [3] * fan
        files = [k % len(spellings) for k in range(fan)]
        columns = files, [child[0]] * fan, [child[1]] * fan, [1] * fan, [100] * fan, [0] * fan
        body = b"".join(
            (
                bytes([height]) + table + ocdbt._varint(fan),
                *map(ocdbt._varints, lengths),
                *keys,
                *map(ocdbt._varints, columns),
            )
        )
        node = struct.pack(">I", ocdbt._NODE_MAGIC) + struct.pack("<Q", 18 + len(body)) + b"\0\0" + body
        node += struct.pack("<I", google_crc32c.value(node))
        child = (len(nodes), len(node))
        nodes += node
    (item / "d" / "x").write_bytes(nodes)
    root = {
        "location": f"btreenode::d/x:{child[0]}:{child[1]}",
        "statistics": {"num_keys": 1, "num_tree_bytes": 100, "num_indirect_value_bytes": 0},
    }
    version = {"generation_number": 1, "root_height": levels, "commit_time": 1, "root": root}
    config = {**ocdbt._CONFIG, "uuid": "0" * 32}
    manifest = ts.ocdbt.undump_manifest({"config": config, "versions": [version], "version_tree_nodes": []})
    (item / "manifest.ocdbt").write_bytes(manifest)
    return len(nodes)


@pytest.mark.parametrize("spellings", [("d/x",), ("d/x", "d/./x", "d/y")])
def test_a_small_tree_with_any_number_of_keys_is_refused(tmp_path: Path, spellings: tuple[str, ...]) -> None:
    hostile_tree(tmp_path / "small", 3, 5, ("d/x",))
    assert len(stored(tmp_path / "small").list().result()) == 5**3
    item = tmp_path / "item"
    # tensorstore would list them for ever.
    assert hostile_tree(item, 12, 20, spellings) < 10_000
    (item / "d" / "y").hardlink_to(item / "d" / "x")
    keys = [{"key": "w", "key_type": 2}]
    leaf = {"key_metadata": keys, "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False}}
    tree = {"tree_metadata": {"('w',)": leaf}, "use_ocdbt": True, "use_zarr3": True}
    (item / "_METADATA").write_text(json.dumps(tree))
    (item / "commit_success.txt").touch()
    with pytest.raises(CheckpointError, match="expected a B-tree, found two paths to its node"):
        OrbaxReader(item)


def test_a_resumed_store_writes_to_the_same_file(tmp_path: Path) -> None:
    record = ChunkRecord(tmp_path)
    first = OcdbtWriter(tmp_path / "s", record.open)
    fill(first.reserve("a", 2000), b"a" * 2000)
    record.close()
    record = ChunkRecord(tmp_path)
    second = OcdbtWriter(tmp_path / "s", record.open)
    second.reserve("a", 2000)
    fill(second.reserve("b", 2000), b"b" * 2000)
    second.finish(record.sync)
    record.close()
    assert len(list((tmp_path / "s" / "d").iterdir())) == 1
    assert all_of(stored(tmp_path / "s")) == {"a": b"a" * 2000, "b": b"b" * 2000}


def test_a_large_store_has_one_node(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = {f"model.layers.{i}.weight/c/{j}": rng.bytes(8) for i in range(400) for j in range(20)}
    write(tmp_path / "s", values)
    store = stored(tmp_path / "s")
    assert len(store.list().result()) == len(values)
    assert store["model.layers.399.weight/c/19"] == values["model.layers.399.weight/c/19"]


def nodes_of(path: Path) -> list[tuple[bytes, Any]]:
    """The bytes of every node of a store, and what tensorstore finds in it."""
    base = ts.KvStore.open({"driver": "file", "path": f"{path}/"}).result()
    left = [ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]]
    nodes = []
    while left:
        location = left.pop()
        _, folder, file, start, size = location.split(":")
        content = (path / unquote(folder + file)).read_bytes()[int(start) : int(start) + int(size)]
        node = ts.ocdbt.dump(base, location).result()
        nodes.append((content, node))
        left += [entry["location"] for entry in node["entries"] if "location" in entry]
    return nodes


@pytest.mark.parametrize("compression", [None, {"id": "zstd"}])
def test_entries_and_keys_are_counted_as_tensorstore_finds_them(tmp_path: Path, compression: Any) -> None:
    own = {"max_decoded_node_bytes": 500, "max_inline_value_bytes": 3, "compression": compression}
    store, transaction = stored(tmp_path / "s", new_context(), **own), ts.Transaction(atomic=True)
    rng = np.random.default_rng(0)
    for k in range(400):
        name = "layers/" + "x" * int(rng.integers(0, 300)) + f"/{k}"
        store.with_transaction(transaction)[name] = rng.bytes(int(rng.integers(0, 9)))
    transaction.commit_async().result()
    nodes = nodes_of(tmp_path / "s")
    assert len(nodes) > 10
    assert {node["height"] for _, node in nodes} >= {0, 1}
    for content, node in nodes:
        assert entries_and_keys(content, 1000, "s") == (
            len(node["entries"]),
            sum(len(entry["key"]) for entry in node["entries"]),
        )
        for length in (0, 5, 13, 20):
            with pytest.raises(CheckpointError, match="s: malformed or truncated B-tree node"):
                entries_and_keys(content[:length], 1000, "s")


@pytest.mark.slow
def test_keys_that_share_all_but_a_byte_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    """100 kB of them take 200 MB of memory, and twice as many four times that."""
    write(tmp_path / "s", {"a" * length: b"" for length in range(1, 20_000)})
    assert sum(p.stat().st_size for p in (tmp_path / "s").rglob("*") if p.is_file()) < 200_000
    with pytest.raises(
        CheckpointError, match=r"expected at most \d+ bytes of keys in \d+ bytes of B-tree nodes, got"
    ):
        values_in_ocdbt(tmp_path / "s", "store")


def test_a_node_that_grows_without_end_is_refused() -> None:
    bomb = zstandard.compress(bytes(1 << 30))
    node = bytes(12) + b"\0\1" + bomb + bytes(4)
    assert len(node) < 200_000
    with pytest.raises(CheckpointError, match=r"expected at most \d+ bytes in \d+ compressed ones, got more"):
        NodeBudget("store").take(node, 0)


def test_entries_of_all_nodes_are_counted_together(tmp_path: Path) -> None:
    write(tmp_path / "s", {f"{k:05}": b"" for k in range(50_000)})
    ((content, _),) = nodes_of(tmp_path / "s")
    compressed = content[:12] + b"\0\1" + zstandard.compress(content[14:-4], 19) + content[-4:]
    budget = NodeBudget("store")
    for _ in range(5):
        budget.take(compressed, 0)
    with pytest.raises(CheckpointError, match=r"node: expected at most \d+ entries more, got 50000"):
        budget.take(compressed, 0)


def test_a_node_outside_of_the_checkpoint_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "s", {"a": b"1"})
    (data,) = (tmp_path / "s" / "d").iterdir()
    os.rename(data, tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="expected a regular file of the checkpoint"):
        values_in_ocdbt(tmp_path / "s", "store")
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(CheckpointError, match="expected a regular file of the checkpoint"):
        values_in_ocdbt(tmp_path / "s", "store")


@pytest.mark.parametrize("size", ["123456", "9" * 18])
def test_a_node_that_is_longer_than_its_file_is_refused(
    tmp_path: Path, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "s", {"a": b"1"})
    dump = ts.ocdbt.dump

    def stretched(base: Any, *location: str) -> Any:
        dumped = dump(base, *location).result()
        if not location:
            root = dumped["versions"][-1]["root"]
            root["location"] = ":".join((*root["location"].split(":")[:4], size))
        return SimpleNamespace(result=lambda: dumped)

    monkeypatch.setattr(ts.ocdbt, "dump", stretched)
    with pytest.raises(CheckpointError, match=rf"is truncated: expected at least {size} bytes \(for a node"):
        values_in_ocdbt(tmp_path / "s", "store")
