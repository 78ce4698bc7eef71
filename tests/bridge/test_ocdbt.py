"""OCDBT stores made here, as tensorstore reads them; and where values lie in stores that tensorstore made."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings

from bridge.formats.base import DTYPES, CheckpointError
from bridge.formats.ocdbt import OcdbtWriter
from bridge.formats.orbax_store import ArrayLayout, new_context
from bridge.formats.orbax_values import Place, StoredValues, places_in_files, places_in_ocdbt
from bridge.formats.working import ChunkRecord


def stored(path: Path, context: ts.Context | None = None, **config: int) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
    if config:
        spec |= {"config": config, "assume_config": True, "cache_pool": "cache_pool#ocdbt"}
    return ts.KvStore.open(spec, context=context).result()


def write(path: Path, values: dict[str, bytes]) -> None:
    writer = OcdbtWriter(path, ChunkRecord(path))
    for key, value in values.items():
        writer.put(key, value)
    writer.finish()
    writer.close()


def all_of(store: ts.KvStore) -> dict[str, bytes]:
    return {key.decode(): store[key] for key in store.list().result()}


KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
VALUES = st.one_of(
    st.binary(max_size=40), st.integers(1000, 3000).map(lambda n: n.to_bytes(2, "big") * (n // 2))
)


@settings(max_examples=60, deadline=None)
@given(values=st.dictionaries(KEYS, VALUES, min_size=1, max_size=40))
def test_tensorstore_reads_any_keys_and_values(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, bytes]
) -> None:
    path = tmp_path_factory.mktemp("store")
    write(path, values)
    assert all_of(stored(path)) == values
    places = places_in_ocdbt(path, "store")
    assert set(places) == {key for key, value in values.items() if len(value) > 1024}
    found = StoredValues(path, places)
    for key in places:
        file, place = found.open(key)
        assert file[place.start : place.start + place.size] == values[key]


def test_tensorstore_can_go_on_with_a_store_made_here(tmp_path: Path) -> None:
    values = {f"layers/{i}": bytes([i]) * (i * 50) for i in range(60)}
    write(tmp_path / "s", values)
    store = stored(tmp_path / "s")
    store["new"] = b"x" * 5000
    del store["layers/7"]
    del values["layers/7"]
    assert all_of(stored(tmp_path / "s")) == {**values, "new": b"x" * 5000}


def test_values_written_in_parts_and_in_any_order(tmp_path: Path) -> None:
    writer = OcdbtWriter(tmp_path / "s", ChunkRecord(tmp_path))
    for key, length in (("b", 3000), ("a", 10), ("c", 1)):
        writer.reserve(key, length)
    writer.write("c", [b"!"])
    writer.write("b", [b"2" * 1500, b"2" * 500], 1000)
    writer.write("a", [b"0123456789"])
    writer.write("b", [b"1" * 1000])
    writer.finish()
    writer.close()
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
    places = places_in_ocdbt(tmp_path, "store")
    assert set(places) == {key for key, value in expected.items() if len(value) > 3}
    values = StoredValues(tmp_path, places)
    for key in places:
        file, place = values.open(key)
        assert file[place.start : place.start + place.size] == expected[key]


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
        StoredValues(item, {"k": Place("link", 0, 3)})
    with pytest.raises(
        CheckpointError, match=r"short is truncated: expected at least 4 bytes \(for 'k'\), got 3"
    ):
        StoredValues(item, {"k": Place("short", 2, 2)})
    with pytest.raises(CheckpointError, match="cannot be read"):
        StoredValues(item, {"k": Place("none", 0, 1)})
    assert places_in_files(item, ["short"]) == {"short": Place("short", 0, 3)}


@pytest.mark.parametrize("folder", ["../", "a/../../", "/etc/"])
def test_references_that_lead_out_of_the_store_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    write(tmp_path / "s", {"k": b"x" * 2000})
    found = places_in_ocdbt(tmp_path / "s", "s")
    assert list(found) == ["k"]
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
        places_in_ocdbt(tmp_path / "s", "s")


def test_a_resumed_store_writes_to_the_same_file(tmp_path: Path) -> None:
    first = OcdbtWriter(tmp_path / "s", ChunkRecord(tmp_path))
    first.reserve("a", 2000)
    first.write("a", [b"a" * 2000])
    first.close()
    second = OcdbtWriter(tmp_path / "s", ChunkRecord(tmp_path))
    second.reserve("a", 2000)
    second.reserve("b", 2000)
    second.write("b", [b"b" * 2000])
    second.finish()
    second.close()
    assert len(list((tmp_path / "s" / "d").iterdir())) == 1
    assert all_of(stored(tmp_path / "s")) == {"a": b"a" * 2000, "b": b"b" * 2000}


def test_a_large_store_has_one_node(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = {f"model.layers.{i}.weight/c/{j}": rng.bytes(8) for i in range(400) for j in range(20)}
    write(tmp_path / "s", values)
    store = stored(tmp_path / "s")
    assert len(store.list().result()) == len(values)
    assert store["model.layers.399.weight/c/19"] == values["model.layers.399.weight/c/19"]
