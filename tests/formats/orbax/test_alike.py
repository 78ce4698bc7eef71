"""Thousands of arrays that are alike are handled in bulk: that gives what each array, looked at alone, would give."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import example, given

from bridge.core.formats.orbax.item_files import render_tree
from bridge.core.formats.orbax.reader import OrbaxReader
from bridge.core.formats.orbax.tree import (
    Claims,
    can_claim_all,
    encode_object,
    leaf_name,
    leaves_of,
    parse_tree,
)
from bridge.core.formats.orbax.writer import OrbaxWriter
from bridge.core.formats.orbax.zarr import ocdbt
from bridge.core.formats.orbax.zarr.arrays import MANIFEST, ArrayLayout, new_context, store_spec
from bridge.core.formats.tensors.base import Box, CheckpointError, TreePath
from bridge.core.formats.tensors.leaves import EMPTY, MAX_NAME, is_tree_path, is_unicode, key_implementation
from tests.support.examples import examples

F32 = np.dtype("float32")
KEYS = st.sampled_from(["a", "b", "a.b", "a/b", 0, "0"])
ODD_KEYS = KEYS | st.sampled_from(["c/", "", ".", "é", "\ud800", 1, -1, 1 << 63])
PATHS = st.lists(KEYS, min_size=1, max_size=4).map(tuple)
ODD_PATHS = st.lists(ODD_KEYS, max_size=3).map(tuple)


def collide(a: TreePath, b: TreePath) -> bool:
    """Whether Orbax could not tell two leaves apart, or one would be inside of the other."""
    a_names, b_names = tuple(map(str, a)), tuple(map(str, b))
    shorter = min(len(a_names), len(b_names))
    same = "/".join(a_names) == "/".join(b_names) or ".".join(a_names) == ".".join(b_names)
    return same or a_names[:shorter] == b_names[:shorter]


def can_be_leaf(path: TreePath) -> bool:
    text = tuple(map(str, path))
    return (
        is_tree_path(path)
        and "" not in text
        and not text[-1].endswith("/")
        and len("/".join(text)) <= MAX_NAME
    )


@examples(400)
@given(paths=st.lists(PATHS, max_size=4) | st.lists(PATHS | ODD_PATHS, max_size=7))
@example(paths=[("a", "b"), ("a",)])
@example(paths=[("a",), ("a", "b", "c")])
@example(paths=[("a", "b", "c", "d"), ("x",), ("a", "b")])
@example(paths=[("a", "b"), ("a", "c", "d"), ("a", "c")])
@example(paths=[("a", "b"), ("a.b",)])
@example(paths=[("a", 0), ("a", "0")])
@example(paths=[("a", "b"), ("a/b",)])
@example(paths=[("a", "b/")])
@example(paths=[("a/", "b"), ("", "a")])
@example(paths=[("a", "\ud800")])
@example(paths=[("a", -1)])
def test_leaves_are_claimed_one_by_one_or_all_at_once(paths: list[TreePath]) -> None:
    claims, taken = Claims("what"), []
    for path in paths:
        free = can_be_leaf(path) and not any(collide(path, other) for other in taken)
        if free:
            claims.add(path)
            taken.append(path)
        else:
            with pytest.raises(CheckpointError, match="what: "):
                claims.add(path)
    whole = len(taken) == len(paths) and all(is_unicode(leaf_name(path)) for path in paths)
    assert can_claim_all(paths) == whole


@pytest.mark.parametrize("length", [MAX_NAME, MAX_NAME + 1])
def test_the_longest_name_is_the_same_all_at_once(length: int) -> None:
    paths = [("a", "b"), ("x" * (length - 2), "y")]
    claims = Claims("what")
    claims.add(paths[0])
    assert can_claim_all(paths) == (length == MAX_NAME)
    if length > MAX_NAME:
        with pytest.raises(CheckpointError, match="at most 4096 characters"):
            claims.add(paths[1])


@examples(200)
@given(values=st.lists(st.integers(0, (1 << 63) - 1) | st.integers(0, 300), max_size=30))
def test_numbers_are_written_at_once_as_one_by_one(values: list[int]) -> None:
    assert ocdbt._varints(values) == b"".join(map(ocdbt._varint, values))


@examples(200)
@given(start=st.binary(max_size=9), a=st.binary(max_size=5), b=st.binary(max_size=5))
def test_what_two_keys_share_is_their_common_prefix(start: bytes, a: bytes, b: bytes) -> None:
    a_key, b_key = start + a, start + b
    lengths = [n for n in range(min(len(a_key), len(b_key)) + 1) if a_key[:n] == b_key[:n]]
    assert ocdbt._common(a_key, b_key) == max(lengths)


LAYOUTS = [
    ArrayLayout("a.w", (6, 4), F32, (6, 4), (6, 4), zarr3=True, raw="shard", checksum=True),
    ArrayLayout("a.w", (5, 4), F32, (2, 4), (2, 4), zarr3=True),
    ArrayLayout("a.w", (4, 4), F32, (4, 4), (2, 2), zarr3=True),
    ArrayLayout("a.w", (), F32, (), (), zarr3=True),
    ArrayLayout("a.w", (), F32, (), (), zarr3=False, raw="plain"),
    ArrayLayout("a.w", (0, 3), F32, (1, 3), (1, 3), zarr3=True),
    ArrayLayout("a.w", (3,), F32, (3,), (3,), zarr3=False),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=range(len(LAYOUTS)))
def test_another_array_has_all_that_follows_from_the_shape_and_its_own_keys(layout: ArrayLayout) -> None:
    fresh = dataclasses.replace(layout, key="b.v")
    derived = ("chunk_bytes", "stored_bytes", "num_stored", "num_inner", "only_chunk", "boxes", "described")
    for name in derived:
        getattr(layout, name)  # kept, from here on
    named = layout.named("b.v")
    assert named == fresh
    assert named.key == "b.v"
    assert [getattr(named, name) for name in derived] == [getattr(fresh, name) for name in derived]
    assert list(named.stored_keys()) == list(fresh.stored_keys())
    assert named.boxes == tuple(box for _, box in fresh.chunks())
    grid = [range(-(-n // size)) for n, size in zip(layout.shape, layout.stored_chunk, strict=True)]
    assert set(named.stored_keys()) == {fresh.chunk_key(index) for index in np.ndindex(*map(len, grid))}
    assert json.loads(named.described) == json.loads(json.dumps(fresh.metadata()))


def plain_tree(
    arrays: list[TreePath], objects: Mapping[TreePath, object], leaf_kinds: Mapping[TreePath, str]
) -> dict[str, Any]:
    """`_METADATA` leaf by leaf, nothing kept between two of them."""
    leaves = leaves_of(arrays, objects, leaf_kinds)
    types = dict.fromkeys(arrays, "np.ndarray")
    for path in arrays:
        if key_implementation(leaf_kinds.get(path)) is not None:
            types[path] = "jax.Array"
        elif leaf_kinds.get(path) == "scalar":
            types[path] = "scalar"
    types |= leaves
    children: defaultdict[TreePath, set[str | int]] = defaultdict(set)
    for path in types:
        for depth in range(len(path)):
            children[path[:depth]].add(path[depth])

    def is_list(parent: TreePath) -> bool:
        return children[parent] == set(range(len(children[parent])))

    tree = {
        str(tuple(map(str, path))): {
            "key_metadata": [
                {"key": str(key), "key_type": 1 if is_list(path[:depth]) else 2}
                for depth, key in enumerate(path)
            ],
            "value_metadata": {"value_type": value_type, "skip_deserialize": value_type in EMPTY},
        }
        for path, value_type in types.items()
    }
    own: dict[str, Any] = {}
    others = {path: value for path, value in objects.items() if path not in leaves}
    if others:
        own["objects"] = {leaf_name(p): encode_object(v, "v") for p, v in others.items()}
        own["paths"] = {leaf_name(p): list(p) for p in others}
    positions = {
        leaf_name(path): list(path)
        for path in types
        if any(isinstance(key, int) and not is_list(path[:depth]) for depth, key in enumerate(path))
    }
    if positions:
        own["positions"] = positions
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {"twinshard": own} if own else None,
    }


LEAVES = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["a", 'b "q"', "é%{}", 0, 1, 2]), min_size=1, max_size=4).map(tuple),
        st.sampled_from([*["array"] * 4, "key<rbg>", "scalar", None, {}, (), "text", "string", 3.5]),
    ),
    max_size=9,
)


@examples(400)
@given(leaves=LEAVES)
def test_the_tree_as_text_is_the_tree_as_objects(leaves: list[tuple[TreePath, object]]) -> None:
    claims = Claims("what")
    arrays: list[TreePath] = []
    objects: dict[TreePath, object] = {}
    leaf_kinds: dict[TreePath, str] = {}
    for path, content in leaves:
        try:
            claims.add(path)
        except CheckpointError:
            continue
        if content in ("array", "key<rbg>", "scalar"):
            arrays.append(path)
            leaf_kinds |= {} if content == "array" else {path: str(content)}
        else:
            objects[path] = content
            leaf_kinds |= {path: "string"} if content == "string" else {}
    text = render_tree(arrays, objects, leaf_kinds)
    assert text == json.dumps(plain_tree(arrays, objects, leaf_kinds))
    tree = parse_tree(json.loads(text), "what")
    assert (set(tree.arrays), {*tree.objects, *tree.strings}) == (set(arrays), set(objects))


def written(path: Path, count: int) -> Path:
    shapes = [(6, 4), (3,), (), (0, 2), (5000, 500), (4000, 500)]
    with OrbaxWriter(path) as writer:
        for k in range(count):
            info = writer.add_tensor(
                ("layers", k, "w"), shapes[k % 6], F32, (2000, 500) if k % 6 > 3 else None
            )
            for box in info.chunks:
                writer.write(info.name, box, np.full(box.sizes, k, F32))
    return path


def test_every_tensor_has_its_own_name_and_the_chunks_of_its_shape(tmp_path: Path) -> None:
    slabs = (Box((0, 0), (2000, 500)), Box((2000, 0), (2000, 500)), Box((4000, 0), (1000, 500)))
    expected = [(Box((0, 0), (6, 4)),), (Box((0,), (3,)),), (Box((), ()),), (), slabs, slabs[:2]]
    with OrbaxReader(written(tmp_path / "c", 18)) as reader:
        assert list(reader.tensors) == [f"layers/{k}/w" for k in range(18)]
        for k, (name, info) in enumerate(reader.tensors.items()):
            assert (info.name, info.path, info.chunks) == (name, ("layers", k, "w"), expected[k % 6])
            assert np.array_equal(reader.read(name), np.full(info.shape, k, F32))


def results_awaited(path: Path) -> int:
    """How often tensorstore is asked for something while a checkpoint is opened."""
    count = 0

    def count_results(frame: FrameType, event: str, function: object) -> None:
        nonlocal count
        count += event == "c_call" and getattr(function, "__name__", "") == "result"

    sys.setprofile(count_results)
    try:
        OrbaxReader(path).close()
    finally:
        sys.setprofile(None)
    return count


def test_tensorstore_is_asked_no_more_often_for_more_arrays(tmp_path: Path) -> None:
    assert results_awaited(written(tmp_path / "a", 6)) == results_awaited(written(tmp_path / "b", 24)) > 0


def test_metadata_that_is_not_in_the_index_is_read_where_it_is(tmp_path: Path) -> None:
    written(tmp_path / "c", 12)
    spec = store_spec(tmp_path / "c", ocdbt=True)
    values = ts.KvStore.open(spec, context=new_context()).result()
    content = {key: values[key] for key in values.list().result()}
    (tmp_path / "c" / MANIFEST).unlink()
    # Of another store of the same content: some in the index, some not.
    spec |= {"config": {"max_inline_value_bytes": 510}, "assume_config": True}
    store = ts.KvStore.open(spec, context=new_context()).result()
    for key, value in content.items():
        store[key] = value
    lengths = [len(value) for key, value in content.items() if key.endswith(b"zarr.json")]
    assert min(lengths) <= 510 < max(lengths)
    with OrbaxReader(tmp_path / "c") as reader:
        for k, name in enumerate(reader.tensors):
            assert np.array_equal(reader.read(name), np.full(reader.tensors[name].shape, k, F32))
