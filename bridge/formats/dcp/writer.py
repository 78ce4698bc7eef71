"""Writes a DCP checkpoint chunk by chunk, without PyTorch; stock `torch.distributed.checkpoint.load` reads it.

Where each archive lies in the data file follows from the tensors declared before it, so chunks are written in any
order and by several threads, and the same tensors always make the same file.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bridge.formats.arrays import array_checksum
from bridge.formats.base import (
    Box,
    CheckpointError,
    Elements,
    TensorInfo,
    TreePath,
    dtype_name,
    flat_name,
    grid_of_chunks,
)
from bridge.formats.dcp.archive_writer import tensor_archive, tensor_archive_length, value_archive
from bridge.formats.dcp.metadata import DcpMetadata, Extent, format_metadata
from bridge.formats.dcp.reader import DcpReader
from bridge.formats.files.atomic import CommitOrAbort
from bridge.formats.files.data_file import DataFiles
from bridge.formats.files.manifest import (
    MANIFEST_FILE,
    Manifest,
    ManifestFile,
    file_checksum,
    object_checksum,
    render_manifest,
    rest_checksum,
)
from bridge.formats.files.working import Attempt, ChunkRecord, RecordedChunks, WorkingDirectory
from bridge.formats.regions import default_chunk_shape

_DATA_FILE = "__0_0.distcp"


class DcpWriter(RecordedChunks, CommitOrAbort):
    """A new DCP checkpoint at `path`; see `CheckpointWriter`. FileExistsError when `path` exists.

    Tensors above 32 MiB are cut into chunks of at most that size, along the first axis as far as rows allow. Memory:
    none beyond the caller's array, or one copy of it if it is not contiguous. May be used by several threads.
    """

    format = "dcp"

    def __init__(self, path: str | os.PathLike[str], attempt: Attempt | None = None) -> None:
        self._directory = WorkingDirectory(path, attempt or Attempt())
        self.path: Path = self._directory.path
        self._record = ChunkRecord(self.path, self._directory.journal)
        self._files = DataFiles(self._record)
        try:
            self._data = self._files.open(self._directory.temporary / _DATA_FILE)
        except BaseException:
            self.abort()
            raise
        self._lock = threading.Lock()
        self._extents: dict[str, tuple[Extent, ...]] = {}
        self._objects: dict[str, Extent] = {}
        self._object_checksums: dict[str, int] = {}
        self._object_paths: dict[str, TreePath] = {}

    def add_tensor(
        self,
        path: str | Sequence[str | int],
        shape: Sequence[int],
        dtype: np.dtype,
        chunk_shape: Sequence[int] | None = None,
    ) -> TensorInfo:
        """Declare a tensor; its name is the path joined by ".".

        chunk_shape: stored block size per axis (at least 1; clipped to the shape), default at most 32 MiB.
        CheckpointError for a repeated name, an empty path, or a dtype PyTorch lacks.
        """
        self._require_open()
        name, tree_path = flat_name(path)
        shape, dtype = tuple(int(n) for n in shape), np.dtype(dtype)
        block = default_chunk_shape(shape, dtype) if chunk_shape is None else tuple(chunk_shape)
        if len(block) != len(shape) or any(n < 1 for n in block):
            raise ValueError(
                f"tensor {name!r}: expected a chunk shape of {len(shape)} sizes above 0, got {block}"
            )
        try:
            dtype_name(dtype)
            chunks = grid_of_chunks(shape, block)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: tensor {name!r}: {error}") from None
        info = TensorInfo(name, tree_path, shape, dtype, chunks)
        with self._lock:
            self._refuse_repeated(name)
            extents = []
            for box in chunks:
                extents.append(self._next(tensor_archive_length(dtype, box.sizes, self._data.end)))
            self._extents[name] = tuple(extents)
            self._record.declare(info)
        return info

    def write(self, name: str, box: Box, array: Elements) -> None:
        """Store one of `chunks(name)`: `array` has its sizes and the tensor's dtype; see `CheckpointWriter.write`.

        KeyError for an undeclared tensor; CheckpointError for another box, shape or dtype, or a box written before.
        """
        self._require_open()
        number, parts = self._record.begin(name, box, array)
        extent, crc = self._extents[name][number], 0
        for part in parts:
            crc = zlib.crc32(part.data, crc)
        dtype = self._record.infos[name].dtype
        before, after = tensor_archive(dtype, box.sizes, extent.offset, crc)
        self._data.write_parts(extent.offset, [before, *(part.data for part in parts), after])
        self._record.end(name, number, array_checksum(*parts))
        self._files.wrote(extent.length)

    def add_object(self, path: str | Sequence[str | int], value: object) -> None:
        """Store None, bool, int, float, str, or a list, tuple or dict of these (keys str, int, bool, None).

        CheckpointError for anything else (NumPy scalars included) and for a repeated name.
        """
        self._require_open()
        name, tree_path = flat_name(path)
        with self._lock:
            self._refuse_repeated(name)
            archive = value_archive(value, self._data.end, f"{self.path}: object {name!r}")
            self._objects[name] = extent = self._next(len(archive))
            self._data.write(extent.offset, archive)
            self._object_checksums[name] = object_checksum(value)
            self._object_paths[name] = tree_path

    def commit(self) -> None:
        """Check that every chunk was written, sync to disk and rename into place; on failure, leave nothing.

        CheckpointError when chunks are missing, FileExistsError when something appeared at the path meanwhile.
        """
        self._require_open()
        try:
            self._record.require_complete()
            metadata = DcpMetadata(self._record.infos, self._extents, self._objects, self._object_paths)
            folder = self._directory.temporary
            (folder / ".metadata").write_bytes(format_metadata(metadata))
            files = {
                ".metadata": ManifestFile(
                    (folder / ".metadata").stat().st_size, file_checksum(folder / ".metadata")
                ),
                _DATA_FILE: ManifestFile(self._data.path.stat().st_size, None, self._rest(folder)),
            }
            manifest = Manifest(self.format, self._record.manifest(), self._object_checksums, files)
            (folder / MANIFEST_FILE).write_bytes(render_manifest(manifest))
            self._files.close()
            self._directory.commit()
        except BaseException:
            self.abort()
            raise

    def _rest(self, folder: Path) -> int:
        with DcpReader(folder) as written:
            return rest_checksum(folder / _DATA_FILE, written.data_ranges().get(_DATA_FILE, ()))

    def abort(self) -> None:
        """Remove everything written. Does nothing after commit or abort."""
        self._files.close()
        self._directory.abort()

    @property
    def ended(self) -> bool:
        return self._directory.ended

    def _crc_on_disk(self, name: str, number: int, box: Box) -> int | None:
        extent, dtype = self._extents[name][number], self._record.infos[name].dtype
        found = self._data.read(extent.offset, extent.length)
        start = len(tensor_archive(dtype, box.sizes, extent.offset, 0)[0])
        data = found[start : start + box.numel * dtype.itemsize]
        before, after = tensor_archive(dtype, box.sizes, extent.offset, zlib.crc32(data))
        whole = found.startswith(before) and found.endswith(after) and len(found) == extent.length
        return array_checksum(np.frombuffer(data, np.uint8)) if whole else None

    def _next(self, length: int) -> Extent:
        return Extent(_DATA_FILE, self._data.reserve(length), length)

    def _require_open(self) -> None:
        if self.ended:
            raise CheckpointError(
                f"{self.path}: expected an unfinished checkpoint, but it was committed or aborted"
            )

    def _refuse_repeated(self, name: str) -> None:
        if name in self._record.infos or name in self._objects:
            raise CheckpointError(f"{self.path}: two entries are named {name!r} (names join the path by '.')")
