"""Trees to save, stock Orbax calls, and damage, for the tests of the Orbax reader and writer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

from bridge.core.formats.orbax.reader import OrbaxReader
from bridge.core.formats.orbax.writer import OrbaxWriter
from bridge.core.formats.tensors.base import DTYPES, Box
from tests.support.bridge.bits import random_bits


def every_dtype(shape: tuple[int, ...] = (7, 5)) -> dict[str, np.ndarray]:
    return {name: random_bits(shape, dtype, seed) for seed, (name, dtype) in enumerate(DTYPES.items())}


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, leaf) of nested dicts and lists; list positions are ints."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list | tuple) and tree:
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def write(
    path: Path, tree: Any, chunk_shape: Mapping[str, tuple[int, ...]] | None = None, **options: Any
) -> None:
    """Save a tree of arrays with OrbaxWriter, chunk by chunk."""
    with OrbaxWriter(path, **options) as writer:
        for leaf_path, array in leaves(tree):
            wish = (chunk_shape or {}).get("/".join(map(str, leaf_path)))
            info = writer.add_tensor(leaf_path, array.shape, array.dtype, wish)
            for box in writer.chunks(info.name):
                writer.write(info.name, box, array[box.slices()])


def stock_save(path: Path, tree: Any, **handler: Any) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**handler)) as checkpointer:
        checkpointer.save(path, tree)


def stock_restore_v0(path: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


STOCK_RESTORES = {"v0": stock_restore_v0, "v1": v1.load}


def sharded(array: np.ndarray, *spec: str | None, shape: tuple[int, ...] = (2, 4)) -> jax.Array:
    """An array over a device mesh with axes a, b."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.device_put(array, NamedSharding(Mesh(devices, ("a", "b")), PartitionSpec(*spec)))


def assert_same_bits(actual: Any, expected: Any) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


def assert_same_tree(tree: Any, expected: Any) -> None:
    tree, expected = dict(leaves(tree)), dict(leaves(expected))
    assert tree.keys() == expected.keys()
    for path, value in expected.items():
        assert_same_bits(tree[path], value)


def assert_reads(path: Path, tree: Any) -> None:
    """Assert that OrbaxReader returns exactly this tree of arrays, whole and by random boxes."""
    rng = np.random.default_rng(0)
    with OrbaxReader(path) as reader:
        expected = {"/".join(map(str, p)): (p, np.asarray(v)) for p, v in leaves(tree)}
        assert set(reader.tensors) == set(expected)
        for name, (leaf_path, array) in expected.items():
            info = reader.tensors[name]
            assert (info.path, info.shape, info.dtype) == (leaf_path, array.shape, array.dtype)
            assert_same_bits(reader.read(name), array)
            for _ in range(6):
                box = random_box(rng, array.shape)
                part = reader.read(name, box)
                assert part.flags.c_contiguous
                assert part.flags.writeable
                assert_same_bits(part, array[box.slices()])


def random_box(rng: np.random.Generator, shape: tuple[int, ...]) -> Box:
    ends = [sorted(int(x) for x in rng.integers(0, n + 1, 2)) for n in shape]
    return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def ocdbt(item: Path) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}}
    return ts.KvStore.open(spec, context=ts.Context()).result()


def flip_bit(file: Path, position: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def data_file(item: Path, holding: bytes) -> tuple[Path, int]:
    """The file of an item that holds these bytes, and their position."""
    for file in sorted(item.rglob("*")):
        if file.is_file() and (position := file.read_bytes().find(holding)) >= 0:
            return file, position
    raise AssertionError("no file holds these bytes")
