"""The common part of readers for read-only formats: each tensor is one chunk, stored in a file or made from its data.

read    stored unchanged: copied from the file        else: `_fill`, which inflates, joins or converts
lend    stored unchanged: lent from the file          else: None
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from bridge.core.formats.reading.model_files import FileKind
from bridge.core.formats.reading.read_memory import array_for
from bridge.core.formats.reading.regular_files import regular_file
from bridge.core.formats.reading.source_files import FileArray, SourceFiles
from bridge.core.formats.stores.listing import StorePath
from bridge.core.formats.tensors.arrays import as_integers
from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    Loan,
    TensorInfo,
    TreePath,
    Wanted,
    require_tensor,
)
from bridge.core.formats.tensors.boxes import box_of
from bridge.core.formats.tensors.wrapping import ClosedAtEnd


class SingleChunkReader(ClosedAtEnd):
    """A checkpoint whose tensors are one chunk each, opened for reading; see `CheckpointReader`.

    kind: which files the format has. A subclass registers their contents with `_add_tensor`, `_object_paths` and
    `_unreadable`, and says where a tensor is. `unreadable`: by name, why a tensor can only be listed.
    """

    format: str

    def __init__(self, path: str | os.PathLike[str], file_kind: FileKind) -> None:
        self.path = path if isinstance(path, StorePath) else Path(path)
        self._fileset = file_kind.find(self.path)
        self._files = SourceFiles(self._fileset.directory)
        self._tensors: dict[str, TensorInfo] = {}
        self._object_paths: dict[str, TreePath] = {}
        self._unreadable: dict[str, str] = {}
        self.unreadable: Mapping[str, str] = MappingProxyType(self._unreadable)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, in the order of the files."""
        return MappingProxyType(self._tensors)

    @property
    def objects(self) -> Mapping[str, object]:
        """Values that are not tensors, by name: none if a format has only tensors."""
        return MappingProxyType({})

    @property
    def object_paths(self) -> Mapping[str, TreePath]:
        """The tree path of every object, by name."""
        return MappingProxyType(self._object_paths)

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor, in the dtype of `tensors`; see `CheckpointReader.read`."""
        info = self._tensors[name]
        require_tensor(self, name)
        box = box_of(info, box)
        result = array_for(info, box, self.path)
        if box.numel and self._in_place(info):
            self._copy(info, box, result)
        elif box.numel:
            self._fill(info, box, result)
        return result

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        """A block lent from the file, if the file stores it unchanged; see `CheckpointReader.lend`."""
        info = self._tensors[name]
        if name in self.unreadable or not box.numel or not self._in_place(info):
            return None
        return self._files.lend(self._part(info, box), offset)

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[None]:
        """Reads none of them: these formats are read once, for a conversion, and seldom have many small tensors."""
        return [None] * len(wanted)

    def files(self) -> Sequence[Path]:
        """The files and their index."""
        return self._fileset.paths

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""
        self._files.close()

    @abstractmethod
    def _in_place(self, info: TensorInfo) -> bool:
        """Whether one file stores all elements of a tensor unchanged, each once."""

    @abstractmethod
    def _part(self, info: TensorInfo, box: Box) -> FileArray:
        """Where a tensor's elements are in the file, after they have been verified."""

    @abstractmethod
    def _fill(self, info: TensorInfo, box: Box, target: np.ndarray) -> None:
        """Write a box, which has elements, of a tensor that is not in place into `target`."""

    def _copy(self, info: TensorInfo, box: Box, target: np.ndarray) -> None:
        self._files.copy(as_integers(target), self._part(info, box))

    def _add_tensor(self, name: str, path: TreePath, shape: tuple[int, ...], dtype: np.dtype) -> None:
        box = Box.whole(shape)
        self._tensors[name] = TensorInfo(name, path, shape, dtype, (box,) if box.numel else ())

    def _require_new(self, name: str, what: str) -> None:
        if name in self._tensors or name in self._object_paths:
            raise CheckpointError(f"{what}: expected names that differ, found {name!r:.200} twice")

    def _regular_file(self, name: str) -> Path:
        """One of the files, after a check that it is a regular file."""
        path = self._fileset.directory / name
        regular_file(self._fileset.directory, name, "a part of the checkpoint", links=self.path == path)
        return path
