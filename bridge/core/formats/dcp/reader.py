"""Reads a DCP checkpoint region by region, without PyTorch and without running anything it contains."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from isal import isal_zlib

from bridge.core.formats.dcp.archive import (
    Record,
    StoredTensor,
    around,
    compare_record,
    read_value,
    verify_record,
)
from bridge.core.formats.dcp.archives import (
    Archives,
    StoredChunk,
    data_files_of,
    looks_like_header,
    read_header_at,
    stored_chunk,
)
from bridge.core.formats.dcp.metadata import (
    METADATA_FILE,
    DcpMetadata,
    Extent,
    metadata_files,
    parse_metadata,
    parse_rank_metadata,
    require_metadata_of_all,
)
from bridge.core.formats.files.manifest import object_checksum
from bridge.core.formats.reading.read_memory import BLOCK, array_for
from bridge.core.formats.reading.regular_files import small_file
from bridge.core.formats.reading.source_files import FileArray, FileView, SourceFiles, Span
from bridge.core.formats.safetensors.header import LENGTH_BYTES, Header
from bridge.core.formats.stores.listing import StorePath
from bridge.core.formats.tensors.arrays import as_integers, raw_bytes, row_major
from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    Checksums,
    Loan,
    TensorInfo,
    TreePath,
    UnreadableValue,
    Wanted,
    drop_options,
    require_tensor,
)
from bridge.core.formats.tensors.boxes import ChunkIndex, box_of, split_box
from bridge.core.formats.tensors.wrapping import ClosedAtEnd, ReadWhenAsked

_FILES_AT_ONCE: Final = 16
_MAX_KEPT: Final = 1 << 16
"""Archives whose parsed headers are kept in memory, some 500 bytes each; other headers are parsed at each read."""


class DcpReader(ClosedAtEnd):
    """A DCP checkpoint (`.metadata` and `.distcp` files), opened for reading; see `CheckpointReader`.

    Opening reads only `.metadata`, or every rank's metadata file, and the sizes of the data files. It raises
    CheckpointError unless chunks inside existing files cover every tensor exactly once, without overlap in the files.
    `verify`: compare each chunk with its stored CRC-32, and with the copies other ranks stored, the first time any part
    of it is read (the whole chunk is read for that). May be used by several threads.

    Reading needs memory only for the returned array and for one block of the files.
    """

    format = "dcp"

    def __init__(self, path: str | os.PathLike[str], verify: bool = True) -> None:
        self.path = path if isinstance(path, StorePath) else Path(path)
        self._verify = verify
        self._files = SourceFiles(self.path)
        self._metadata = self._read_metadata()
        self.tensors: Mapping[str, TensorInfo] = self._metadata.tensors
        self.object_paths: Mapping[str, TreePath] = self._metadata.object_paths
        self.unreadable: Mapping[str, str] = self._metadata.unreadable
        self._data_files = data_files_of(self.path, self._metadata, self._is_safetensors)
        self._verified: set[Extent] = set()
        self._chunks = ChunkIndex()
        self._headers: dict[tuple[str, int], Header] = {}
        self._archives: dict[Extent, StoredTensor] = {}
        self._forms = Archives()
        self._names = {name: str(self.path / name) for name in self._data_files}
        # Only for headers of safetensors files. All other tables hold values that any thread would compute alike.
        self._lock = threading.Lock()

    @property
    def objects(self) -> Mapping[str, object]:
        """Values that are not tensors, by name, each read when looked up; see `CheckpointReader.objects`."""
        return ReadWhenAsked(self._metadata.objects, self._object)

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; see `CheckpointReader.read`."""
        info = self.tensors[name]
        require_tensor(self, name)
        box = box_of(info, box)
        result = array_for(info, box, self.path)
        for index in self._chunks.touching(info, box):
            common = info.chunks[index].intersect(box)
            if common is not None:
                target = result[common.slices(box)]
                source, compare = self._part(info, index, common, target.flags.c_contiguous)
                self._files.copy(as_integers(target), source)
                compare(target)
        return result

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        """A block of one chunk, without moving it; see `CheckpointReader.lend`."""
        info = self.tensors[name]
        if name in self.unreadable:
            return None
        touching = self._chunks.touching(info, box)
        if len(touching) != 1 or info.chunks[touching[0]].intersect(box) != box:
            return None
        source, compare = self._part(info, touching[0], box)
        loan = self._files.lend(source, offset)
        if loan is not None:
            compare(loan.array)
        return loan

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        """Whole tensors that are one chunk, alone in its record; see `CheckpointReader.read_into`."""
        records = [self._whole_record(name, target.nbytes) for name, target in wanted]
        pieces = [
            None if record is None else Span(record[0].file, record[1].start, (target,))
            for record, (_, target) in zip(records, wanted, strict=True)
        ]
        return [
            self._compared(*record, target) if read and record is not None else None
            for read, record, (_, target) in zip(self._files.read_into(pieces), records, wanted, strict=True)
        ]

    def _compared(self, extent: Extent, record: Record, target: memoryview) -> Checksums | None:
        if not self._verify or record.crc is None:
            return Checksums()
        crc = isal_zlib.crc32(target)
        if crc != record.crc:
            return None
        self._verified.add(extent)
        return Checksums(crc32=crc)

    def _whole_record(self, name: str, nbytes: int) -> tuple[Extent, Record] | None:
        """The place of a tensor that fills a record of so many bytes, in row-major order."""
        info, extents = self._metadata.tensors[name], self._metadata.extents[name]
        if len(extents) != 1 or (name, 0) in self._metadata.copies or name in self.unreadable:
            return None
        (chunk,), (extent,) = info.chunks, extents
        stored = self._archives.get(extent)
        if stored is None:
            located = self._find(info, chunk, extent)
            if not isinstance(located.layout, StoredTensor):
                return None
            stored = located.layout
        record = stored.record
        plain = (stored.dtype, stored.shape, stored.first, record.size) == (info.dtype, info.shape, 0, nbytes)
        return (extent, record) if plain and row_major(stored.shape, stored.strides) else None

    def files(self) -> Sequence[Path]:
        """The metadata and every file that a chunk, its copies or an object is stored in."""
        return (*metadata_files(self.path), *(self.path / name for name in self._data_files))

    def checksummed(self, name: str) -> bool:
        """Whether every chunk of a tensor has a CRC-32, which reading verifies."""
        if name in self.unreadable:
            return False
        info = self.tensors[name]
        for chunk, extent in zip(info.chunks, self._metadata.extents[name], strict=True):
            known = self._archives.get(extent)
            record = self._find(info, chunk, extent).record if known is None else known.record
            if record is None or record.crc is None:
                return False
        return True

    def data_ranges(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """For each file, the ranges of whole chunks' elements: the first byte, and the byte after the last."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        extents, unreadable, archives = self._metadata.extents, self.unreadable, self._archives
        # Requesting a file takes longer than reading in it. In a store, each archive is fetched separately.
        files: dict[str, FileView] = {}
        for name, info in self.tensors.items():
            if name in unreadable:
                continue
            dtype = info.dtype
            for chunk, extent in zip(info.chunks, extents[name], strict=True):
                file = extent.file
                if file not in ranges:
                    ranges[file] = []
                try:
                    if file not in files and not isinstance(self.path, StorePath):
                        if len(files) >= _FILES_AT_ONCE:
                            files.clear()
                        files[file] = self._files.view(file)
                    tensor = archives.get(extent)
                    if tensor is None and file in files:
                        tensor = self._like(files[file], extent)
                    # Same as `_find`, without the call and without a record for its result.
                    if tensor is not None and tensor.dtype is dtype and tensor.shape == chunk.sizes:
                        start = tensor.record.start + tensor.first * dtype.itemsize
                    else:
                        start = self._find(info, chunk, extent).start
                except CheckpointError:
                    continue
                ranges[file].append((start, start + prod(chunk.sizes) * dtype.itemsize))
        return ranges

    def damaged_copies(self) -> Iterator[tuple[str, CheckpointError]]:
        """Tensors with a chunk whose copy by another rank is damaged, and what is wrong with the copy."""
        for (name, index), copies in self._metadata.copies.items():
            info, chunk = self.tensors[name], self.tensors[name].chunks[index]
            for copy in copies:
                try:
                    if (record := self._find(info, chunk, copy).record) is not None:
                        verify_record(self._files, copy.file, record, self._what(info, chunk, copy))
                except CheckpointError as error:
                    yield name, error

    def view(self, file: str) -> FileView | None:
        """A data file, for reading between its chunks; None if it is fetched from a store."""
        return None if isinstance(self.path, StorePath) else self._files.view(file)

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""
        self._files.close()

    def _object(self, name: str) -> object:
        extent = self._metadata.objects[name]
        value = self._stored_object(name, extent)
        for copy in self._metadata.object_copies.get(name, ()):
            if object_checksum(self._stored_object(name, copy)) != object_checksum(value):
                reason = f"a different value from {extent.file}: each rank stored its own value"
                text = f"{self.path / copy.file}: object {name!r}: expected one value, got {reason}"
                raise UnreadableValue(text, reason, holds_tensors=False)
        return value

    def _stored_object(self, name: str, extent: Extent) -> object:
        what = f"{self.path / extent.file}: object {name!r}"
        file = self._files.view(extent.file, (extent.offset, extent.offset + extent.length))
        return read_value(file, extent.offset, extent.length, what)

    def _read_metadata(self) -> DcpMetadata:
        try:
            names = [file.name for file in metadata_files(self.path)] or [METADATA_FILE]
            data = {name: small_file(self.path, name, "the metadata") for name in names}
        except OSError as error:
            raise CheckpointError(f"cannot read the metadata of {self.path}: {error}") from error
        if METADATA_FILE in data:
            return parse_metadata(data[METADATA_FILE], str(self.path / METADATA_FILE))
        metadata = parse_rank_metadata(data, str(self.path))
        require_metadata_of_all(self.path, len(data))
        return metadata

    def _is_safetensors(self, extent: Extent) -> bool:
        """Whether SerializationFormat.SAFETENSORS wrote it: a safetensors file begins at this place."""
        file = self._files.view(extent.file, (extent.offset, extent.offset + LENGTH_BYTES + 1))
        return looks_like_header(file, extent.offset)

    def _part(
        self, info: TensorInfo, index: int, common: Box, in_one_piece: bool = True
    ) -> tuple[FileArray, Callable[[np.ndarray], None]]:
        """Where elements of a chunk are, and a function to call with them once they are read.

        The chunk is verified first, unless its record contains only these elements: then they are verified after the
        read. in_one_piece: whether they will be contiguous in memory.
        """
        chunk, extent = info.chunks[index], self._metadata.extents[info.name][index]
        stored = self._find(info, chunk, extent)
        source = stored.array(extent.file, self._of_chunk(info, chunk)).within(common, chunk)
        if not self._verify or extent in self._verified:
            return source, lambda elements: None
        record = stored.record

        def verified() -> None:
            for copy in self._metadata.copies.get((info.name, index), ()):
                self._require_same(info, chunk, extent, stored, copy)
            self._verified.add(extent)

        if record is not None and record.crc is not None:
            what = self._what(info, chunk, extent)
            if in_one_piece and source.row_major and (source.start, source.nbytes) == record[:2]:

                def compare(elements: np.ndarray) -> None:
                    compare_record(isal_zlib.crc32(raw_bytes(elements)), record, what)
                    verified()

                return source, compare
            verify_record(self._files, extent.file, record, what)
        verified()
        return source, lambda elements: None

    def _of_chunk(self, info: TensorInfo, chunk: Box) -> str:
        return f"tensor {info.name!r}, chunk at {chunk.offsets}"

    def _what(self, info: TensorInfo, chunk: Box, extent: Extent) -> str:
        return f"{self._names[extent.file]}: {self._of_chunk(info, chunk)}"

    def _find(self, info: TensorInfo, chunk: Box, extent: Extent) -> StoredChunk:
        tensor = self._archives.get(extent)
        stored = self._parsed(info, chunk, extent) if tensor is None else StoredChunk.of(tensor)
        dtype, shape = stored.layout.dtype, stored.layout.shape
        if (dtype is not info.dtype and dtype != info.dtype) or shape != chunk.sizes:
            raise CheckpointError(
                f"{self._what(info, chunk, extent)}: expected {info.dtype.name} {chunk.sizes} as .metadata says, got "
                f"{dtype.name} {shape}"
            )
        return stored

    def _like(self, file: FileView, extent: Extent) -> StoredTensor | None:
        """The tensor of an archive that is like an earlier one."""
        tensor = self._forms.known(file, extent.offset, extent.length)
        if tensor is not None and len(self._archives) < _MAX_KEPT:
            self._archives[extent] = tensor
        return tensor

    def _parsed(self, info: TensorInfo, chunk: Box, extent: Extent) -> StoredChunk:
        what = self._what(info, chunk, extent)
        if self._is_safetensors(extent):
            return self._in_safetensors(info, chunk, extent, what)
        file = self._files.view(extent.file, *around(extent.offset, extent.length))
        tensor = self._forms.find(file, extent.offset, extent.length, what)
        if len(self._archives) < _MAX_KEPT:
            self._archives[extent] = tensor
        return StoredChunk.of(tensor)

    def _in_safetensors(self, info: TensorInfo, chunk: Box, extent: Extent, what: str) -> StoredChunk:
        key = (extent.file, extent.offset)
        # Threads that need chunks of one file wait until one of them has parsed its header.
        with self._lock:
            if key not in self._headers:
                self._headers[key] = read_header_at(self._files, *key, what)
        return stored_chunk(self._headers[key], info.name, chunk, what)

    def _require_same(
        self, info: TensorInfo, chunk: Box, extent: Extent, stored: StoredChunk, copy: Extent
    ) -> None:
        other = self._find(info, chunk, copy)
        checksums = [s.record.crc if s.record is not None else None for s in (stored, other)]
        alike = stored.layout.strides == other.layout.strides and stored.layout.shape == chunk.sizes
        if alike and None not in checksums and stored.fill() == other.fill():
            same = checksums[0] == checksums[1]
        else:
            what, whole = self._of_chunk(info, chunk), Box.whole(chunk.sizes)
            ours, theirs = stored.array(extent.file, what), other.array(copy.file, what)
            same = all(
                np.array_equal(self._elements(ours, part, whole), self._elements(theirs, part, whole))
                for part in split_box(whole, info.dtype.itemsize, BLOCK)
            )
        if not same:
            raise CheckpointError(
                f"{self._what(info, chunk, copy)}: expected the same values as in {extent.file}, got different ones: "
                f"each rank stored its own values; a conversion can leave the tensor out ({drop_options([info.name])})"
            )

    def _elements(self, chunk: FileArray, part: Box, whole: Box) -> np.ndarray:
        """A part of a chunk as unsigned integers, in newly allocated memory."""
        elements = as_integers(np.empty(part.sizes, chunk.dtype))
        self._files.copy(elements, chunk.within(part, whole))
        return elements
