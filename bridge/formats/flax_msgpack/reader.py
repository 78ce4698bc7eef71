"""Reads what flax.serialization writes, region by region: one file, or the shards of a Hugging Face model.

Opening goes through the file from one length to the next, and looks at no element. Names are paths joined by "/".
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from bridge.formats.arrays import as_integers, strides_of
from bridge.formats.base import (
    Box,
    CheckpointError,
    Loan,
    TensorInfo,
    TreePath,
    is_tree_path,
    is_unicode,
    require_tensor,
)
from bridge.formats.files.flat import copy_flat
from bridge.formats.files.mapped import (
    BLOCK,
    MappedFiles,
    array_for,
    box_of,
    copy_mapped,
    drop_pages,
    lend_mapped,
    regular_file,
)
from bridge.formats.files.weight_index import check_index
from bridge.formats.flax_msgpack.parser import parse
from bridge.formats.flax_msgpack.tree import Pieces, leaves
from bridge.formats.leaf_kinds import SCALAR, STRING, empty_kind
from bridge.formats.plain import plain_value
from bridge.formats.read_only import MSGPACK_FILES
from bridge.formats.stores.listing import StorePath
from bridge.formats.wrapping import ClosedAtEnd, ReadWhenAsked

_INT64: Final = range(-(1 << 63), 1 << 63)


class MsgpackReader(ClosedAtEnd):
    """A checkpoint of flax.serialization, opened for reading; see `CheckpointReader`. `path`: a file, an index or a
    directory.

    Numbers, which flax keeps as Python has them, are arrays without dimensions of the kind "scalar", as Orbax has them.
    None, empty containers and text are objects, and leaves of the tree. `unreadable`: by name, why a tensor can be
    listed only. The format has no checksums. May be used by several threads.
    """

    format = "msgpack"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path if isinstance(path, StorePath) else Path(path)
        self._fileset = MSGPACK_FILES.find(self.path)
        self._files = MappedFiles(self._fileset.directory)
        self._stored: dict[str, tuple[str, Pieces] | np.ndarray] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._values: dict[str, object] = {}
        self._object_paths: dict[str, TreePath] = {}
        self._kinds: dict[str, str] = {}
        self._unreadable: dict[str, str] = {}
        owners = [(name, file) for file in self._fileset.names for name in self._read_file(file)]
        if self._fileset.weight_map is not None:
            check_index(self._fileset.directory, self._fileset.weight_map, owners)
        self.kinds: Mapping[str, str] = MappingProxyType(self._kinds)
        self.unreadable: Mapping[str, str] = MappingProxyType(self._unreadable)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every array and number by name, in the order of the files."""
        return MappingProxyType(self._tensors)

    @property
    def objects(self) -> Mapping[str, object]:
        """Values that are not tensors, by name."""
        return ReadWhenAsked(
            self._values, lambda name: plain_value(self._values[name], f"{self.path}: {name!r}", binary=True)
        )

    @property
    def object_paths(self) -> Mapping[str, TreePath]:
        """The tree path of every object, by name."""
        return MappingProxyType(self._object_paths)

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block (default: all) of a tensor as a new C-contiguous array in the stored dtype.

        KeyError for an unknown name, ValueError for a box outside the tensor, CheckpointError for damaged data.
        """
        info = self._tensors[name]
        require_tensor(self, name)
        box = box_of(info, box)
        result = array_for(info, box, self.path)
        stored = self._stored[name]
        if isinstance(stored, np.ndarray):
            result[...] = stored[box.slices()]
        elif box.numel and len(stored[1].places) == 1:
            source, file, start = self._part(*stored, box)
            copy_mapped(as_integers(result), as_integers(source), file, start)
        elif box.numel:
            copy_flat(info.shape, box, result, lambda start, stop: self._bytes(*stored, start, stop))
        return result

    def lend(self, name: str, box: Box) -> Loan | None:
        """A block where it is in the file, if it is there in one piece; see `CheckpointReader.lend`."""
        stored = self._stored[name]
        if (
            name in self.unreadable
            or not box.numel
            or isinstance(stored, np.ndarray)
            or len(stored[1].places) > 1
        ):
            return None
        return lend_mapped(*self._part(*stored, box))

    def files(self) -> Sequence[Path]:
        """The files and their index."""
        return self._fileset.paths

    def checksummed(self, name: str) -> bool:
        """Never: the format has no checksums."""
        return False

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""
        self._files.close()

    def _part(self, name: str, pieces: Pieces, box: Box) -> tuple[np.ndarray, mmap.mmap, int]:
        """A box of an array in one piece, where it is in the file, and the first byte there."""
        begin, _ = pieces.places[0]
        strides = strides_of(pieces.shape, pieces.dtype)
        start = begin + sum(o * s for o, s in zip(box.offsets, strides, strict=True))
        span = sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True)) + pieces.dtype.itemsize
        file = self._files.get(name, start, start + span)
        return np.ndarray(pieces.shape, pieces.dtype, file, begin)[box.slices()], file, start

    def _bytes(self, file: str, pieces: Pieces, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop) of an array in several pieces, in parts."""
        at = 0
        for begin, nbytes in pieces.places:
            low, high = max(start, at), min(stop, at + nbytes)
            while low < high:
                end = min(high, low + BLOCK)
                first, last = begin + low - at, begin + end - at
                mapped = self._files.get(file, first, last)
                yield mapped[first:last]
                drop_pages(mapped, first, last)
                low = end
            at += nbytes

    def _read_file(self, file: str) -> Iterator[str]:
        path = self._fileset.directory / file
        what = str(path)
        _, size = regular_file(
            self._fileset.directory, file, "a part of the checkpoint", links=self.path == path
        )
        if not size:
            raise CheckpointError(
                f"{what}: expected msgpack as flax.serialization writes it, but the file is empty"
            )
        tree = parse(lambda start, stop: self._files.get(file, start, stop)[start:stop], size, what)
        for tree_path, value in leaves(tree, what):
            name = "/".join(map(str, tree_path))
            if not is_tree_path(tree_path) or not all(is_unicode(str(key)) for key in tree_path):
                raise CheckpointError(f"{what}: expected a path of text, got {tree_path!r:.200}")
            if name in self._tensors or name in self._object_paths:
                raise CheckpointError(f"{what}: expected names that differ, found {name!r:.200} twice")
            self._take(name, tree_path, file, value)
            yield name

    def _take(self, name: str, path: TreePath, file: str, value: object) -> None:
        if isinstance(value, Pieces):
            self._stored[name] = file, value
            box = Box.whole(value.shape)
            self._tensors[name] = TensorInfo(
                name, path, value.shape, value.dtype, (box,) if box.numel else ()
            )
            if value.unreadable is not None:
                self._unreadable[name] = value.unreadable
            return
        if isinstance(value, bool | float | complex) or (isinstance(value, int) and value in _INT64):
            array = np.asarray(value)
            self._stored[name] = array
            self._tensors[name] = TensorInfo(name, path, (), array.dtype, (Box((), ()),))
            if not isinstance(value, complex):
                self._kinds[name] = SCALAR
            return
        self._values[name], self._object_paths[name] = value, path
        kind = STRING if isinstance(value, str) else empty_kind(value)
        if kind is not None:
            self._kinds[name] = kind
