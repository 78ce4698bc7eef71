"""Reads what torch.save wrote, region by region, without PyTorch and without running anything it contains.

    model.pt, a zip file
      model/data.pkl       a pickle: the tree, in which a tensor says where its elements are: storage, offset, strides
      model/byteorder      "little"
      model/data/0         the bytes of storage 0; several tensors may share them

Names are those of DCP: {"model": {"a.weight": t}, "step": 3} has the tensor "model.a.weight" and the object "step".
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from bridge.formats.arrays import as_integers
from bridge.formats.base import (
    Box,
    CheckpointError,
    Loan,
    TensorInfo,
    TreePath,
    flat_name,
    require_tensor,
)
from bridge.formats.dcp.archive import Record, StoredTensor, describe_tensor, verify_record
from bridge.formats.dcp.pickle import Vocabulary, read_pickle
from bridge.formats.files.mapped import (
    MappedFiles,
    array_for,
    box_of,
    copy_mapped,
    lend_mapped,
    regular_file,
)
from bridge.formats.files.weight_index import check_index
from bridge.formats.files.zip_directory import Member, data_start
from bridge.formats.stores.listing import StorePath
from bridge.formats.torch_save.files import TORCH_FILES, members_of
from bridge.formats.torch_save.tree import is_tensor, leaves, value_of
from bridge.formats.wrapping import ClosedAtEnd, ReadWhenAsked

_ADVICE: Final = "a conversion can leave it out (--drop, --weights-only)"
_VOCABULARY: Final = Vocabulary(max_bytes=256 << 20, persistent=True, foreign=True)
_MAX_REPEATED: Final = 64 << 20
"""Bytes of a tensor whose elements share memory, as those of `expand` do: more than its storage has."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file: its elements in a storage whose place there is not yet looked up."""

    file: str
    member: Member
    tensor: StoredTensor


class TorchSaveReader(ClosedAtEnd):
    """A checkpoint of torch.save, opened for reading; see `CheckpointReader`. `path`: a file, an index or a directory.

    Opening reads the directory and the pickle of each file. No class and no function that a pickle names is imported
    or called. A value that needs one is an object that cannot be read, and hides no other. Tensors may be views that
    share a storage: each is a tensor of its own here. `unreadable`: by name, why a tensor can be listed only. `verify`:
    compare each storage with its CRC-32 before a part of it is first used. May be used by several threads.

    CheckpointError for a file that is damaged or of another kind, and for tensors that reach outside of their storage.
    """

    format = "torch"

    def __init__(self, path: str | os.PathLike[str], verify: bool = True) -> None:
        self.path = path if isinstance(path, StorePath) else Path(path)
        self._verify = verify
        self._fileset = TORCH_FILES.find(self.path)
        self._files = MappedFiles(self._fileset.directory)
        self._starts: dict[tuple[str, str], int] = {}
        self._verified: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._stored: dict[str, _Stored | np.ndarray] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._values: dict[str, tuple[object, str]] = {}
        self._object_paths: dict[str, TreePath] = {}
        unreadable: dict[str, str] = {}
        owners: dict[str, str] = {}
        for file in self._fileset.names:
            for name, reason in self._read_file(file):
                owners[name] = file
                if reason is not None:
                    unreadable[name] = reason
        self.unreadable: Mapping[str, str] = MappingProxyType(unreadable)
        if self._fileset.weight_map is not None:
            check_index(self._fileset.directory, self._fileset.weight_map, owners.items())

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, in the order of the files."""
        return MappingProxyType(self._tensors)

    @property
    def objects(self) -> Mapping[str, object]:
        """Values that are not tensors, by name. CheckpointError from a look-up for one that is no plain value."""
        return ReadWhenAsked(self._values, self._object)

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
        elif box.numel:
            source, file, start = self._part(name, stored, box)
            copy_mapped(as_integers(result), as_integers(source), file, start)
        return result

    def lend(self, name: str, box: Box) -> Loan | None:
        """A block where it is in the file; see `CheckpointReader.lend`."""
        stored = self._stored[name]
        if isinstance(stored, np.ndarray) or name in self.unreadable or not box.numel:
            return None
        return lend_mapped(*self._part(name, stored, box))

    def files(self) -> Sequence[Path]:
        """The files and their index."""
        return self._fileset.paths

    def checksummed(self, name: str) -> bool:
        """Whether the tensor's storage has a CRC-32, which reading verifies."""
        stored = self._stored[name]
        return isinstance(stored, _Stored) and (stored.tensor.record.crc is not None)

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""
        self._files.close()

    def _part(self, name: str, stored: _Stored, box: Box) -> tuple[np.ndarray, mmap.mmap, int]:
        """Elements of a tensor where they are in the file, once their storage is verified, and the first byte there."""
        tensor, member = stored.tensor, stored.member
        begin = self._start(stored.file, member)
        tensor = tensor._replace(record=tensor.record._replace(start=begin))
        if self._verify and (stored.file, member.name) not in self._verified:
            what = f"{self._fileset.directory / stored.file}: tensor {name!r:.200}"
            verify_record(partial(self._files.get, stored.file), tensor.record, what)
            self._verified.add((stored.file, member.name))
        size = tensor.dtype.itemsize
        first = begin + size * (
            tensor.first + sum(o * s for o, s in zip(box.offsets, tensor.strides, strict=True))
        )
        span = size * (1 + sum((n - 1) * s for n, s in zip(box.sizes, tensor.strides, strict=True)))
        file = self._files.get(stored.file, first, first + span)
        return tensor.view(file)[box.slices()], file, first

    def _start(self, file: str, member: Member) -> int:
        key = file, member.name
        if key not in self._starts:
            self._starts[key] = data_start(self._files, file, member)
        return self._starts[key]

    def _object(self, name: str) -> object:
        node, what = self._values[name]
        try:
            return value_of(node, f"{what}: object {name!r:.200}")
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_ADVICE}") from None

    def _read_file(self, file: str) -> Iterator[tuple[str, str | None]]:
        """Take up the leaves of a file: each name, and for a tensor that cannot be read the reason."""
        path = self._fileset.directory / file
        what = str(path)
        regular_file(self._fileset.directory, file, "a part of the checkpoint", links=self.path == path)
        members = members_of(self._files, file)
        if "byteorder" in members and (order := self._small(file, members["byteorder"], 16)) != b"little":
            raise CheckpointError(f"{what}: expected little-endian data, got byte order {order!r}")
        listed = list(members.values())
        # The start is the place in the list until it is looked up; torch.save can be told to skip checksums: 0.
        records = {
            name: Record(place, m.size, m.crc if m.crc or not m.size else None)
            for place, (name, m) in enumerate(members.items())
        }
        root = read_pickle(self._small(file, members["data.pkl"], _VOCABULARY.max_bytes), _VOCABULARY, what)
        for path_in_tree, node in leaves(root, what):
            name, tree_path = flat_name(path_in_tree)
            if name in self._tensors or name in self._object_paths:
                raise CheckpointError(f"{what}: expected names that differ, found {name!r:.200} twice")
            if not (is_tensor(node) or isinstance(node, np.ndarray)):
                self._values[name], self._object_paths[name] = (node, what), tree_path
                yield name, None
                continue
            shape, dtype, reason = self._take(name, node, file, listed, records)
            whole = Box.whole(shape)
            self._tensors[name] = TensorInfo(name, tree_path, shape, dtype, (whole,) if whole.numel else ())
            yield name, reason

    def _take(
        self, name: str, node: object, file: str, members: Sequence[Member], records: Mapping[str, Record]
    ) -> tuple[tuple[int, ...], np.dtype, str | None]:
        if isinstance(node, np.ndarray):
            self._stored[name] = node
            return node.shape, node.dtype, None
        where = f"{self._fileset.directory / file}: tensor {name!r:.200}"
        tensor, reason = describe_tensor(node, records, where)
        self._stored[name] = _Stored(file, members[tensor.record.start], tensor)
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if nbytes > max(tensor.record.size, _MAX_REPEATED):
            reason = f"{nbytes} bytes made of {tensor.record.size} by repeating them"
        return tensor.shape, tensor.dtype, reason

    def _small(self, file: str, member: Member, limit: int) -> bytes:
        what = f"{self._fileset.directory / file}: {member.name!r:.200}"
        if member.size > limit:
            raise CheckpointError(f"{what}: expected at most {limit} bytes, got {member.size}")
        start = self._start(file, member)
        verify_record(partial(self._files.get, file), Record(start, member.size, member.crc or None), what)
        stop = start + member.size
        return self._files.get(file, start, stop)[start:stop]
