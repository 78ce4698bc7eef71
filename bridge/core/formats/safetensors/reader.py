"""Reads safetensors checkpoints region by region: one file, Hugging Face shards, or the files of PyTorch's ranks.

Names are flat: "model.layers.0.mlp.weight" is one key, whose dots separate nothing. Its tree path is this one key, too,
unless the file says otherwise (see `extras.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from bridge.core.formats.reading.model_files import ModelFiles
from bridge.core.formats.reading.read_memory import array_for
from bridge.core.formats.reading.regular_files import regular_file
from bridge.core.formats.reading.source_files import FileArray, SourceFiles, Span
from bridge.core.formats.reading.weight_index import check_index
from bridge.core.formats.safetensors.extras import EXTRAS_KEY, Extras, parse_extras
from bridge.core.formats.safetensors.files import SAFETENSORS_FILES
from bridge.core.formats.safetensors.header import (
    LENGTH_BYTES,
    METADATA_KEY,
    SHARDING_KEY,
    Header,
    StoredArray,
    header_length,
    read_header,
    saved_offsets,
)
from bridge.core.formats.stores.listing import StorePath
from bridge.core.formats.tensors.arrays import as_integers, strides_of
from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    Checksums,
    Loan,
    TensorInfo,
    TreePath,
    Wanted,
    require_tensor,
)
from bridge.core.formats.tensors.boxes import ChunkIndex, box_of, check_coverage
from bridge.core.formats.tensors.wrapping import ClosedAtEnd, one_part

FORMAT_KEY: Final = "format"
FORMAT_VALUE: Final = "pt"
HIDDEN_KEYS: Final = frozenset({EXTRAS_KEY, SHARDING_KEY, "DCP_VERSION"})
"""Texts in a header that describe the file, and are not objects."""


@dataclass(frozen=True, slots=True)
class _Piece:
    file: str
    array: StoredArray
    box: Box


class SafetensorsReader(ClosedAtEnd):
    """A safetensors checkpoint, opened for reading; see `CheckpointReader`. `path`: a file, an index or a directory.

    Opening reads only headers, and raises CheckpointError unless its tensors fill each file exactly, every tensor is
    there once and complete, and files and index agree. Free text in a header becomes an object "__metadata__.<key>", or
    "__metadata__.<file>.<key>" if files differ; "format": "pt", which every file written here has, is left out. May be
    used by several threads.

    Tensors whose elements share bytes (F4, F6) are listed but cannot be read: `unreadable` says so by name.

    If each PyTorch rank wrote its own file, the pieces determine the global shapes: no file says whether the last
    rank's file is missing.

    Reading needs memory only for the returned array.
    """

    format = "safetensors"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path if isinstance(path, StorePath) else Path(path)
        fileset = SAFETENSORS_FILES.find(self.path)
        self._files = SourceFiles(fileset.directory)
        self._fileset = fileset
        headers: dict[str, Header] = {}
        for name in fileset.names:
            with one_part(name):
                headers[name] = self._header(name)
        extras = {
            name: parse_extras(header.metadata[EXTRAS_KEY], str(fileset.directory / name))
            for name, header in headers.items()
            if EXTRAS_KEY in header.metadata
        }
        if fileset.weight_map is not None:
            stored = ((name, file) for file, header in headers.items() for name in header.arrays)
            with one_part(fileset.index or ""):
                check_index(fileset.directory, fileset.weight_map, stored, {*fileset.names} - headers.keys())
        self._pieces = self._find_pieces(fileset, headers)
        paths = {name: path for extra in extras.values() for name, path in extra.paths.items()}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._infos(paths))
        self.unreadable: Mapping[str, str] = {
            name: f"{pieces[0].array.dtype.name}, {pieces[0].array.bits} bits per element, so that elements share bytes"
            for name, pieces in self._pieces.items()
            if pieces and pieces[0].array.bits is not None
        }
        self._chunks = ChunkIndex()
        objects, object_paths = self._find_objects(headers, extras.values())
        self.objects: Mapping[str, object] = MappingProxyType(objects)
        self.object_paths: Mapping[str, TreePath] = MappingProxyType(object_paths)

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; see `CheckpointReader.read`. CheckpointError for one of `unreadable`, too."""
        info = self.tensors[name]
        require_tensor(self, name)
        box = box_of(info, box)
        result = array_for(info, box, self.path)
        for index in self._chunks.touching(info, box):
            piece = self._pieces[name][index]
            common = piece.box.intersect(box)
            if common is not None:
                source = self._part(piece, common, name)
                self._files.copy(as_integers(result[common.slices(box)]), source)
        return result

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        """A block of one piece, without moving it; see `CheckpointReader.lend`."""
        touching = self._chunks.touching(self.tensors[name], box)
        if name in self.unreadable:
            return None
        if len(touching) != 1 or self._pieces[name][touching[0]].box.intersect(box) != box:
            return None
        return self._files.lend(self._part(self._pieces[name][touching[0]], box, name), offset)

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        """Whole tensors that are in one file; see `CheckpointReader.read_into`."""
        pieces = [self._whole_piece(name, target) for name, target in wanted]
        return [Checksums() if read else None for read in self._files.read_into(pieces)]

    def _whole_piece(self, name: str, target: memoryview) -> Span | None:
        pieces = self._pieces[name]
        if len(pieces) != 1 or name in self.unreadable:
            return None
        (piece,) = pieces
        array = piece.array
        whole = piece.box.sizes == self.tensors[name].shape and array.nbytes == target.nbytes
        return Span(piece.file, array.start, (target,)) if whole else None

    def _part(self, piece: _Piece, common: Box, name: str) -> FileArray:
        """Where elements of a piece are in the file."""
        array = piece.array
        strides = strides_of(array.shape, array.dtype)
        whole = FileArray(piece.file, array.start, array.shape, strides, array.dtype, f"tensor {name!r}")
        return whole.within(common, piece.box)

    def files(self) -> Sequence[Path]:
        """The safetensors files and their index."""
        return self._fileset.paths

    def checksummed(self, name: str) -> bool:
        """Never: the format has no checksums."""
        return False

    def data_ranges(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """For each file, the ranges of chunks' elements: the first byte, and the byte after the last."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for piece in (piece for pieces in self._pieces.values() for piece in pieces):
            array = piece.array
            ranges.setdefault(piece.file, []).append((array.start, array.start + array.nbytes))
        return ranges

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""
        self._files.close()

    def _header(self, name: str) -> Header:
        asked_for = self.path == self._files.directory / name
        regular_file(self._files.directory, name, "a part of the checkpoint", links=asked_for)
        length = header_length(self._files.view(name, (0, LENGTH_BYTES)))
        view = self._files.view(name, (0, LENGTH_BYTES + length))
        return read_header(view, str(self._files.directory / name))

    def _find_pieces(self, fileset: ModelFiles, headers: Mapping[str, Header]) -> dict[str, list[_Piece]]:
        pieces: dict[str, list[_Piece]] = {}
        whole: dict[tuple[int, ...], Box] = {}
        for file, header in headers.items():
            what = str(fileset.directory / file)
            offsets = saved_offsets(header, what)
            for name, array in header.arrays.items():
                box = Box(offsets[name], array.shape) if offsets else whole.get(array.shape)
                if box is None:
                    box = whole[array.shape] = Box.whole(array.shape)
                pieces.setdefault(name, []).append(_Piece(file, array, box))
        return pieces

    def _infos(self, paths: Mapping[str, TreePath]) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        alike: dict[tuple[tuple[int, ...], np.dtype], TensorInfo] = {}
        for name, pieces in self._pieces.items():
            path = paths.get(name, (name,))
            first = pieces[0]
            # Most tensors are one piece, and thousands may have the same shape and dtype.
            is_whole = len(pieces) == 1 and not any(first.box.offsets)
            like = alike.get((first.array.shape, first.array.dtype)) if is_whole else None
            if like is None:
                with one_part(name):
                    infos[name] = self._info(name, path)
                    if is_whole:
                        alike[first.array.shape, first.array.dtype] = infos[name]
            else:
                infos[name] = like.named(name, path)
                pieces[:] = pieces if like.chunks else []
        return infos

    def _info(self, name: str, path: TreePath) -> TensorInfo:
        pieces = self._pieces[name]
        first = pieces[0].array
        for piece in pieces:
            if piece.array.dtype != first.dtype or len(piece.box.sizes) != len(first.shape):
                raise CheckpointError(
                    f"{self._files.directory / piece.file}: tensor {name!r}: expected a piece of {first.dtype.name} "
                    f"with {len(first.shape)} axes as in {pieces[0].file}, got {piece.array.dtype.name} "
                    f"{piece.array.shape}"
                )
        shape = tuple(map(max, zip(*(piece.box.stops for piece in pieces), strict=True)))
        pieces[:] = [piece for piece in pieces if piece.box.numel]
        chunks = tuple(piece.box for piece in pieces)
        check_coverage(shape, chunks, f"{self.path}: tensor {name!r}")
        return TensorInfo(name, path, shape, first.dtype, chunks)

    def _find_objects(
        self, headers: Mapping[str, Header], extras: Iterable[Extras]
    ) -> tuple[dict[str, object], dict[str, TreePath]]:
        values: dict[str, object] = {}
        paths: dict[str, TreePath] = {}

        def add(name: str, path: TreePath, value: object) -> None:
            if name in values or name in self.tensors:
                raise CheckpointError(f"{self.path}: two entries are named {name!r:.200}")
            values[name], paths[name] = value, path

        for extra in extras:
            for name, (path, value) in extra.objects.items():
                add(name, path, value)
        texts = {
            (file, key): text
            for file, header in headers.items()
            for key, text in header.metadata.items()
            if key not in HIDDEN_KEYS and (key, text) != (FORMAT_KEY, FORMAT_VALUE)
        }
        for key in dict.fromkeys(key for _, key in texts):
            by_file = {file: texts[file, key] for file in headers if (file, key) in texts}
            if len(set(by_file.values())) == 1:
                add(f"{METADATA_KEY}.{key}", (METADATA_KEY, key), next(iter(by_file.values())))
            else:
                for file, text in by_file.items():
                    add(f"{METADATA_KEY}.{file}.{key}", (METADATA_KEY, file, key), text)
        return values, paths
