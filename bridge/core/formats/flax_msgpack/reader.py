"""Reads files of flax.serialization, region by region: one file, or the shards of a Hugging Face model.

Opening walks through the file from one length to the next, and reads no element. Names are paths joined by "/".

flax writes lists and tuples as maps with the keys "0", "1", ..., and a dict with such keys looks the same. In optimizer
state these keys are positions, as in optax's tuples, except in the part of a path that belongs to a weight:

    opt_state/0/mu/blocks/0/kernel         ("opt_state", 0, "mu", "blocks", "0", "kernel")    params/blocks/0/kernel
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from bridge.core.formats.flax_msgpack.parser import CHUNKED, MSGPACK_FILES, StoredArray, parse
from bridge.core.formats.reading.read_memory import BLOCK
from bridge.core.formats.reading.single_chunk import SingleChunkReader
from bridge.core.formats.reading.source_files import FileArray
from bridge.core.formats.reading.weight_index import check_index
from bridge.core.formats.tensors.arrays import copy_flat, strides_of
from bridge.core.formats.tensors.base import (
    COPY_AGAIN,
    ORBAX_DTYPES,
    Box,
    CheckpointError,
    TensorInfo,
    TreePath,
)
from bridge.core.formats.tensors.leaves import SCALAR, STRING, empty_kind, is_tree_path, is_unicode
from bridge.core.formats.tensors.plain import plain_value
from bridge.core.formats.tensors.wrapping import ReadWhenAsked

OPTIMIZER: Final = frozenset({"opt_state", "optimizer"})
_UNREADABLE: Final = np.dtype(np.uint8)


@dataclass(frozen=True)
class Pieces:
    """An array whose elements are in one or several pieces of the file, in row-major order.

    places: first byte and number of bytes of each piece. unreadable: the dtype, if it is not in ORBAX_DTYPES.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    places: tuple[tuple[int, int], ...]
    unreadable: str | None = None


@dataclass(frozen=True)
class Elsewhere:
    """An array in the zarr folder of this name next to the file: a placeholder of Orbax, or T5X's tensorstore spec."""

    folder: str


def leaves(root: object, what: str) -> Iterator[tuple[TreePath, object]]:
    """Each leaf with its path: Pieces of an array, Elsewhere, or another value.

    CheckpointError if the root is not a map.
    """
    if not isinstance(root, dict):
        raise CheckpointError(f"{what}: expected a tree with keys, found {type(root).__name__}")
    walked = list(_walk(root, (), what))
    weights = {path[1:] for path, _ in walked if path[0] in ("params", "target", "model") and len(path) > 1}
    paths = {path for path, _ in walked}
    for path, value in walked:
        yield (_with_positions(path, weights, paths) if path[0] in OPTIMIZER else path), value


def _walk(node: object, path: TreePath, what: str) -> Iterator[tuple[TreePath, object]]:
    where = f"{what}: {'/'.join(map(str, path))!r:.200}"
    if isinstance(node, StoredArray):
        yield path, _pieces([node], node.shape, where)
    elif isinstance(node, str) and node.startswith(_ELSEWHERE):
        yield path, Elsewhere(node.removeprefix(_ELSEWHERE))
    elif isinstance(node, dict) and {"driver", "kvstore"} <= node.keys():
        kvstore = node["kvstore"]
        if node["driver"] != "zarr" or not isinstance(kvstore, dict):
            raise CheckpointError(f"{where}: expected an array of zarr in a folder, found {node!r:.200}")
        yield path, Elsewhere(str(kvstore.get("path")).rstrip("/").rpartition("/")[2])
    elif isinstance(node, dict) and CHUNKED in node:
        yield path, _chunked(node, where)
    elif isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _walk(value, (*path, key), what)
    elif isinstance(node, list) and any(
        isinstance(value, dict | list | StoredArray | complex) or str(value).startswith(_ELSEWHERE)
        for value in node
    ):
        for number, value in enumerate(node):
            yield from _walk(value, (*path, number), what)
    elif path:
        yield path, node


def _chunked(node: dict[str, object], where: str) -> Pieces:
    shape, chunks = (_in_order(node.get(key)) for key in ("shape", "chunks"))
    sizes = tuple(n for n in shape or () if type(n) is int and n >= 0)
    arrays = [chunk for chunk in chunks or () if isinstance(chunk, StoredArray) and len(chunk.shape) == 1]
    if (
        shape is None
        or chunks is None
        or len(sizes) != len(shape)
        or not arrays
        or len(arrays) != len(chunks)
    ):
        raise CheckpointError(
            f"{where}: expected the shape and the chunks of one array, found something else"
        )
    if len({array.dtype for array in arrays}) > 1:
        raise CheckpointError(f"{where}: expected chunks of one dtype, found several")
    return _pieces(arrays, sizes, where)


def _in_order(node: object) -> list[object] | None:
    if not isinstance(node, dict) or set(node) != {str(k) for k in range(len(node))}:
        return None
    return [node[str(k)] for k in range(len(node))]


def _pieces(arrays: list[StoredArray], shape: tuple[int, ...], where: str) -> Pieces:
    name = arrays[0].dtype
    dtype = ORBAX_DTYPES.get("bfloat16" if name == "V2" else name)
    nbytes = sum(array.nbytes for array in arrays)
    if any(size >= 1 << 63 for size in shape):
        raise CheckpointError(f"{where}: expected sizes below 2**63, got {shape!r:.200}")
    expected = math.prod(shape) * (dtype or _UNREADABLE).itemsize
    if dtype is not None and nbytes != expected:
        raise CheckpointError(f"{where}: expected {expected} bytes for {name} {shape}, got {nbytes}")
    places = tuple((array.start, array.nbytes) for array in arrays if array.nbytes)
    if dtype is None:
        return Pieces(shape, _UNREADABLE, places, f"{name!r:.80}, which is an unknown dtype")
    return Pieces(shape, dtype, places)


def _with_positions(path: TreePath, weights: Collection[TreePath], paths: Collection[TreePath]) -> TreePath:
    start = next((k for k in range(1, len(path)) if path[k:] in weights), len(path))
    return tuple(
        int(key) if 0 < depth < start and isinstance(key, str) and _is_position(key) else key
        for depth, key in enumerate(path)
    )


def _is_position(key: str) -> bool:
    return key.isascii() and key.isdecimal() and (key == "0" or key[0] != "0") and len(key) < 19


_ELSEWHERE: Final = "PLACEHOLDER://"
_INT64: Final = range(-(1 << 63), 1 << 63)


class MsgpackReader(SingleChunkReader):
    """A checkpoint of flax.serialization, opened for reading; see `CheckpointReader`. `path`: a file, an index or a
    directory.

    Python numbers become arrays without dimensions of the kind "scalar", as in Orbax. None, empty containers and text
    are objects, and leaves of the tree. `unreadable`: by name, why a tensor can only be listed. The format has no
    checksums. May be used by several threads.
    """

    format = "msgpack"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, MSGPACK_FILES)
        self._stored: dict[str, tuple[str, Pieces] | np.ndarray] = {}
        self._values: dict[str, object] = {}
        self._kinds: dict[str, str] = {}
        self.elsewhere: dict[str, tuple[TreePath, str]] = {}
        """Path and folder of the arrays that are not in the file, by name; `whole/placeholders.py` reads them."""
        owners = [(name, file) for file in self._fileset.names for name in self._read_file(file)]
        if self._fileset.weight_map is not None:
            check_index(self._fileset.directory, self._fileset.weight_map, owners)
        self.kinds: Mapping[str, str] = MappingProxyType(self._kinds)

    @property
    def objects(self) -> Mapping[str, object]:
        """Values that are not tensors, by name."""
        return ReadWhenAsked(
            self._values, lambda name: plain_value(self._values[name], f"{self.path}: {name!r}", binary=True)
        )

    def checksummed(self, name: str) -> bool:
        """Never: the format has no checksums."""
        return False

    def _in_place(self, info: TensorInfo) -> bool:
        stored = self._stored[info.name]
        return not isinstance(stored, np.ndarray) and len(stored[1].places) == 1

    def _part(self, info: TensorInfo, box: Box) -> FileArray:
        stored = self._stored[info.name]
        assert not isinstance(stored, np.ndarray)
        name, pieces = stored
        begin, _ = pieces.places[0]
        strides = strides_of(pieces.shape, pieces.dtype)
        whole = FileArray(name, begin, pieces.shape, strides, pieces.dtype, f"tensor {info.name!r:.200}")
        return whole.within(box, Box.whole(info.shape))

    def _fill(self, info: TensorInfo, box: Box, target: np.ndarray) -> None:
        stored = self._stored[info.name]
        if isinstance(stored, np.ndarray):
            target[...] = stored[box.slices()]
        else:
            copy_flat(info.shape, box, target, lambda start, stop: self._bytes(*stored, start, stop))

    def _bytes(self, file: str, pieces: Pieces, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop) of an array in several pieces, in parts."""
        at = 0
        for begin, nbytes in pieces.places:
            low, high = max(start, at), min(stop, at + nbytes)
            while low < high:
                end = min(high, low + BLOCK)
                yield self._files.read(file, begin + low - at, begin + end - at)
                low = end
            at += nbytes

    def _read_file(self, file: str) -> Iterator[str]:
        path = self._regular_file(file)
        what, size = str(path), path.stat().st_size
        if not size:
            raise CheckpointError(
                f"{what}: expected msgpack as flax.serialization writes it, but the file is empty: "
                f"{COPY_AGAIN}"
            )
        view = self._files.view(file)
        tree = parse(lambda start, stop: view[start:stop], size, what)
        for tree_path, value in leaves(tree, what):
            name = "/".join(map(str, tree_path))
            if not is_tree_path(tree_path) or not all(is_unicode(str(key)) for key in tree_path):
                raise CheckpointError(f"{what}: expected a path of text, got {tree_path!r:.200}")
            self._require_new(name, what)
            self._take(name, tree_path, file, value)
            yield name

    def _take(self, name: str, path: TreePath, file: str, value: object) -> None:
        if name in self.elsewhere:
            raise CheckpointError(f"{self.path}: expected names that differ, found {name!r:.200} twice")
        if isinstance(value, Elsewhere):
            self.elsewhere[name] = path, value.folder
            return
        if isinstance(value, Pieces):
            self._stored[name] = file, value
            self._add_tensor(name, path, value.shape, value.dtype)
            if value.unreadable is not None:
                self._unreadable[name] = value.unreadable
            return
        if isinstance(value, bool | float | complex) or (isinstance(value, int) and value in _INT64):
            array = np.asarray(value)
            self._stored[name] = array
            self._add_tensor(name, path, (), array.dtype)
            if not isinstance(value, complex):
                self._kinds[name] = SCALAR
            return
        self._values[name], self._object_paths[name] = value, path
        leaf_kind = STRING if isinstance(value, str) else empty_kind(value)
        if leaf_kind is not None:
            self._kinds[name] = leaf_kind
