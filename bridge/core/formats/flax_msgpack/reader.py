"""Reads what flax.serialization writes, region by region: one file, or the shards of a Hugging Face model.

Opening goes through the file from one length to the next, and looks at no element. Names are paths joined by "/".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from bridge.core.formats.files.flat import copy_flat
from bridge.core.formats.flax_msgpack.parser import parse
from bridge.core.formats.flax_msgpack.tree import Pieces, leaves
from bridge.core.formats.reading.read_memory import BLOCK
from bridge.core.formats.reading.single_chunk import SingleChunkReader
from bridge.core.formats.reading.source_files import FileArray
from bridge.core.formats.reading.weight_index import check_index
from bridge.core.formats.tensors.arrays import strides_of
from bridge.core.formats.tensors.base import COPY_AGAIN, Box, CheckpointError, TensorInfo, TreePath
from bridge.core.formats.tensors.leaves import SCALAR, STRING, empty_kind, is_tree_path, is_unicode
from bridge.core.formats.tensors.plain import plain_value
from bridge.core.formats.tensors.wrapping import ReadWhenAsked
from bridge.core.formats.whole.read_only import MSGPACK_FILES

OLD_ORBAX: Final = (
    "this is a checkpoint of Orbax or T5X before 2024: a tree in msgpack, and a folder of zarr for each array. "
    "Restore it by orbax.checkpoint.PyTreeCheckpointer (T5X's own by t5x), and save it by StandardCheckpointer"
)
_ELSEWHERE: Final = "PLACEHOLDER://"
_SPEC: Final = ("driver", "zarr")
"""A leaf of T5X is how tensorstore opens its array; this is a part of that."""
_INT64: Final = range(-(1 << 63), 1 << 63)


class MsgpackReader(SingleChunkReader):
    """A checkpoint of flax.serialization, opened for reading; see `CheckpointReader`. `path`: a file, an index or a
    directory.

    Numbers, which flax keeps as Python has them, are arrays without dimensions of the kind "scalar", as Orbax has them.
    None, empty containers and text are objects, and leaves of the tree. `unreadable`: by name, why a tensor can be
    listed only. The format has no checksums. May be used by several threads.
    """

    format = "msgpack"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, MSGPACK_FILES)
        self._stored: dict[str, tuple[str, Pieces] | np.ndarray] = {}
        self._values: dict[str, object] = {}
        self._kinds: dict[str, str] = {}
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
        if isinstance(value, str) and (value.startswith(_ELSEWHERE) or (path[-1], value) == _SPEC):
            raise CheckpointError(f"{self._fileset.directory / file}: {OLD_ORBAX}")
        self._values[name], self._object_paths[name] = value, path
        leaf_kind = STRING if isinstance(value, str) else empty_kind(value)
        if leaf_kind is not None:
            self._kinds[name] = leaf_kind
