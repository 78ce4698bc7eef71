"""Reads what torch.save wrote, region by region, without PyTorch and without running anything it contains.

    model.pt, a zip file
      model/data.pkl       a pickle: the tree, with the place of each tensor's elements: storage, offset, strides
      model/byteorder      "little"
      model/data/0         the bytes of storage 0; several tensors may share them

Names are as in DCP: {"model": {"a.weight": t}, "step": 3} has the tensor "model.a.weight" and the object "step".
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from isal import isal_zlib

from bridge.core.formats.dcp.archive import (
    Record,
    StoredTensor,
    compare_record,
    describe_tensor,
    verify_record,
)
from bridge.core.formats.dcp.pickle import read_pickle
from bridge.core.formats.dcp.pickle_records import Call, Name, Vocabulary, is_index, torch_dtype
from bridge.core.formats.reading.single_chunk import SingleChunkReader
from bridge.core.formats.reading.source_files import FileArray
from bridge.core.formats.reading.weight_index import check_index
from bridge.core.formats.reading.zip_directory import Member, data_start
from bridge.core.formats.tensors.arrays import as_integers
from bridge.core.formats.tensors.base import Box, CheckpointError, TensorInfo
from bridge.core.formats.tensors.leaves import flat_name
from bridge.core.formats.tensors.wrapping import ReadWhenAsked, one_part
from bridge.core.formats.torch_save.files import TORCH_FILES, members_of
from bridge.core.formats.torch_save.tree import META, LocalPiece, is_tensor, leaves, local_piece, value_of

PIECE: Final = (
    "a piece of a DTensor, whose other pieces are in other ranks' files: give the folder with all files"
)
_ZERO_3: Final = (
    "a placeholder of DeepSpeed's ZeRO stage 3, whose elements are in the optim_states files of all ranks: give the "
    "folder with all files"
)
_NO_ELEMENTS: Final = "a tensor on PyTorch's meta device, which has a shape, but no elements"
_VOCABULARY: Final = Vocabulary(max_bytes=256 << 20, persistent=True, foreign=True)
_MAX_REPEATED: Final = 64 << 20
"""The most bytes of a tensor whose elements share memory, as after `expand`: more than its storage has."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file: its elements in a storage whose place in the file has not been looked up yet."""

    file: str
    member: Member
    tensor: StoredTensor


class TorchSaveReader(SingleChunkReader):
    """A checkpoint of torch.save, opened for reading; see `CheckpointReader`. `path`: a file, an index or a directory.

    Opening reads the directory and the pickle of each file. No class or function that a pickle names is imported or
    called. A value that needs one is an object that cannot be read, and does not affect others. Tensors may be views
    that share a storage: here each is a separate tensor. `unreadable`: by name, why a tensor can only be listed.
    `verify`: compare each storage with its CRC-32 before any part of it is used. May be used by several threads.

    CheckpointError for a file that is damaged or of another kind, and for tensors that extend beyond their storage.
    """

    format = "torch"

    def __init__(self, path: str | os.PathLike[str], verify: bool = True) -> None:
        super().__init__(path, TORCH_FILES)
        self._verify = verify
        self._starts: dict[tuple[str, str], int] = {}
        self._verified: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._stored: dict[str, _Stored | np.ndarray] = {}
        self._values: dict[str, tuple[object, str]] = {}
        self.pieces: dict[str, LocalPiece] = {}
        """The file's pieces of DTensors, by name; their shape in `tensors` is the whole tensor's."""
        owners: dict[str, str] = {}
        whole: set[str] = set()
        for file in self._fileset.names:
            with one_part(file):
                for name, reason in self._read_file(file):
                    owners[name] = file
                    if reason is not None:
                        self._unreadable[name] = reason
                whole.add(file)
        if any(path[0] == "param_shapes" for path in self._object_paths.values()):
            empty = (
                n for n, info in self._tensors.items() if info.shape == (0,) and info.path[0] == "module"
            )
            self._unreadable |= dict.fromkeys(empty, _ZERO_3)
        if self._fileset.weight_map is not None:
            damaged = {*self._fileset.names} - whole
            with one_part(self._fileset.index or ""):
                check_index(self._fileset.directory, self._fileset.weight_map, owners.items(), damaged)

    @property
    def objects(self) -> Mapping[str, object]:
        """Values that are not tensors, by name. CheckpointError from a look-up of a value that is not plain."""
        return ReadWhenAsked(self._values, self._object)

    def checksummed(self, name: str) -> bool:
        """Whether the tensor's storage has a CRC-32, which reading verifies."""
        stored = self._stored[name]
        return isinstance(stored, _Stored) and (stored.tensor.record.crc is not None)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the file's piece of a tensor."""
        stored = self._stored[name]
        return stored.tensor.shape if isinstance(stored, _Stored) else stored.shape

    def read_stored(self, name: str, box: Box, target: np.ndarray) -> None:
        """Write a block of the file's piece of a tensor into `target`."""
        info = self._tensors[name]
        (self._copy if self._in_place(info) else self._fill)(info, box, target)

    def check_stored(self, name: str) -> None:
        """CheckpointError if the file's piece of a tensor does not match its checksum."""
        if self._in_place(self._tensors[name]):
            self._part(self._tensors[name], Box.whole(self.stored_shape(name)))

    def holds_the_same(self, name: str, other: TorchSaveReader) -> bool:
        """Whether another file has the same elements of a tensor, by checksums if both have some."""
        mine, theirs = self._stored[name], other._stored[name]
        if isinstance(mine, _Stored) and isinstance(theirs, _Stored):
            alike = [
                stored.tensor._replace(record=stored.tensor.record._replace(start=0))
                for stored in (mine, theirs)
            ]
            if alike[0].record.crc is not None and alike[0] == alike[1]:
                return True
        whole = Box.whole(self.stored_shape(name))
        both = np.empty((2, *whole.sizes), self._tensors[name].dtype)
        for reader, target in zip((self, other), both, strict=True):
            if reader.stored_shape(name) != whole.sizes:
                return False
            reader.read_stored(name, whole, target)
        return np.array_equal(*as_integers(both))

    def _in_place(self, info: TensorInfo) -> bool:
        return isinstance(self._stored[info.name], _Stored)

    def _fill(self, info: TensorInfo, box: Box, target: np.ndarray) -> None:
        stored = self._stored[info.name]
        assert isinstance(stored, np.ndarray)
        target[...] = stored[box.slices()]

    def _part(self, info: TensorInfo, box: Box) -> FileArray:
        stored = self._stored[info.name]
        assert isinstance(stored, _Stored)
        tensor, member = stored.tensor, stored.member
        begin = self._start(stored.file, member)
        if self._verify and (stored.file, member.name) not in self._verified:
            what = f"{self._fileset.directory / stored.file}: tensor {info.name!r:.200}"
            verify_record(self._files, stored.file, tensor.record._replace(start=begin), what)
            self._verified.add((stored.file, member.name))
        size = tensor.dtype.itemsize
        strides = tuple(step * size for step in tensor.strides)
        first, what = begin + tensor.first * size, f"tensor {info.name!r:.200}"
        whole = FileArray(stored.file, first, tensor.shape, strides, tensor.dtype, what)
        return whole.within(box, Box.whole(info.shape))

    def _start(self, file: str, member: Member) -> int:
        key = file, member.name
        if key not in self._starts:
            self._starts[key] = data_start(self._files, file, member)
        return self._starts[key]

    def _object(self, name: str) -> object:
        node, what = self._values[name]
        return value_of(node, f"{what}: object {name!r:.200}")

    def _read_file(self, file: str) -> Iterator[tuple[str, str | None]]:
        """Register the leaves of a file: each name, and for a tensor that cannot be read the reason."""
        what = str(self._regular_file(file))
        members = members_of(self._files, file)
        if "byteorder" in members and (order := self._small(file, members["byteorder"], 16)) != b"little":
            raise CheckpointError(f"{what}: expected little-endian data, got byte order {order!r}")
        listed = list(members.values())
        # The start is the position in the list until it is looked up; a checksum of 0: torch.save was told to skip it.
        records = {
            name: Record(position, m.size, m.crc if m.crc or not m.size else None)
            for position, (name, m) in enumerate(members.items())
        }
        root = read_pickle(self._small(file, members["data.pkl"], _VOCABULARY.max_bytes), _VOCABULARY, what)
        for path_in_tree, node in leaves(root, what):
            name, tree_path = flat_name(path_in_tree)
            self._require_new(name, what)
            if (piece := local_piece(node)) is not None:
                node, self.pieces[name] = piece.local, piece
            if not (is_tensor(node) or isinstance(node, np.ndarray)):
                self._values[name], self._object_paths[name] = (node, what), tree_path
                yield name, None
                continue
            shape, dtype, reason = self._take(name, node, file, listed, records)
            if piece is not None and shape != piece.shape:
                shape, reason = piece.shape, reason or PIECE
            self._add_tensor(name, tree_path, shape, dtype)
            yield name, reason

    def _take(
        self, name: str, node: object, file: str, members: Sequence[Member], records: Mapping[str, Record]
    ) -> tuple[tuple[int, ...], np.dtype, str | None]:
        if isinstance(node, np.ndarray):
            self._stored[name] = node
            return node.shape, node.dtype, None
        where = f"{self._fileset.directory / file}: tensor {name!r:.200}"
        match node:
            case Call(name=call, args=(Name(dotted=dtype), tuple(shape), *_)) if call == META:
                if (known := torch_dtype(dtype)) is not None and is_index(shape):
                    self._stored[name] = np.zeros((0,) * len(shape), known[0])
                    return shape, known[0], known[1] or _NO_ELEMENTS
        tensor, reason = describe_tensor(node, records, where)
        self._stored[name] = _Stored(file, members[tensor.record.start], tensor)
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if nbytes > max(tensor.record.size, _MAX_REPEATED):
            reason = f"{nbytes} bytes that repeat {tensor.record.size} stored bytes"
        return tensor.shape, tensor.dtype, reason

    def _small(self, file: str, member: Member, limit: int) -> bytes:
        what = f"{self._fileset.directory / file}: {member.name!r:.200}"
        if member.size > limit:
            raise CheckpointError(f"{what}: expected at most {limit} bytes, got {member.size}")
        start = self._start(file, member)
        data = self._files.read(file, start, start + member.size, repr(member.name))
        compare_record(isal_zlib.crc32(data), Record(start, member.size, member.crc or None), what)
        return data
