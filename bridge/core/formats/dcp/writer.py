"""Writes a DCP checkpoint chunk by chunk, without PyTorch; stock `torch.distributed.checkpoint.load` reads it.

The tensors declared before an archive determine its place in the data file. So several threads can write chunks in any
order, and the same tensors always make the same file.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Final

import numpy as np
from isal import isal_zlib

from bridge.core.formats.dcp.archive_writer import (
    tensor_archive,
    tensor_archive_frame,
    tensor_archive_length,
    value_archive,
)
from bridge.core.formats.dcp.metadata import METADATA_FILE, DcpMetadata, Extent, parse_rank_metadata
from bridge.core.formats.dcp.pickle_records import (
    BYTES,
    CHUNK,
    INDEX,
    LAYOUT,
    MEMORY_FORMAT,
    METADATA,
    PROPERTIES,
    SIZE,
    STORAGE_INFO,
    STORAGE_META,
    TENSOR,
    Call,
    Instance,
    Name,
)
from bridge.core.formats.dcp.pickle_writer import HOLE, Filled, Pattern, Repeated, write_pickle
from bridge.core.formats.files.atomic import on_failure
from bridge.core.formats.files.data_file import DataFile
from bridge.core.formats.files.journal import Attempt, working_place
from bridge.core.formats.files.manifest import (
    MANIFEST_FILE,
    Manifest,
    ManifestFile,
    file_entry,
    object_checksum,
    render_manifest,
)
from bridge.core.formats.files.part_files import Share, move_up, part_manifest, write_joint_manifest
from bridge.core.formats.files.record import ChunkRecord
from bridge.core.formats.files.recorded_chunks import FlatWriter
from bridge.core.formats.files.sink import Place
from bridge.core.formats.stores.upload import UploadFile
from bridge.core.formats.tensors.arrays import extend
from bridge.core.formats.tensors.base import DTYPES, Box, Checksums, TensorInfo, TreePath, dtype_name
from bridge.core.formats.tensors.leaves import flat_name

_AT_ONCE: Final = 4096


def data_file(rank: int) -> str:
    """The name of the data file of one writer, from 0."""
    return f"__{rank}_0.distcp"


def rank_metadata(rank: int) -> str:
    """The name of the metadata of one of several writers, from 0."""
    return f"__{rank}.metadata"


class DcpWriter(FlatWriter):
    """A new DCP checkpoint at `path`; see `CheckpointWriter`. FileExistsError when `path` exists.

    Tensors above 32 MiB are cut into chunks of at most that size, along the first axis as far as rows allow. Memory:
    none beyond the caller's array, or one copy of it if it is not contiguous. May be used by several threads.

    share: if given, only its chunks are written, and `path` becomes the directory of one part; see
    `formats/whole/in_parts.py`.
    """

    format = "dcp"
    _sink: _Archives

    def __init__(
        self, path: str | os.PathLike[str], attempt: Attempt | None = None, *, share: Share | None = None
    ) -> None:
        self._share = share
        self._directory = working_place(path, attempt or Attempt())
        self.path: Path = self._directory.path
        self._record = ChunkRecord(self.path, self._directory.journal)
        with on_failure(self.abort):
            self._data_file = data_file(share.number - 1 if share else 0)
            self._data = self._record.open(self._directory.temporary / self._data_file)
        self._sink = _Archives(self._data, self._data_file)
        # The order of declarations determines places in the data file, so declare one tensor at a time.
        self._lock = threading.Lock()
        self._alike = {}
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
        require_dtype = partial(dtype_name, known=DTYPES)
        info = self._info(name, tree_path, shape, dtype, chunk_shape, require_dtype, whole=False)
        if self._share is not None:
            info = replace(info, chunks=self._share.own(name, info.chunks))
        with self._lock:
            self._refuse_repeated(name, self._objects)
            self._sink.reserve(info)
            self._record.declare(info)
        return info

    def add_object(self, path: str | Sequence[str | int], value: object) -> None:
        """Store None, bool, int, float, str, or a list, tuple or dict of these (keys str, int, bool, None).

        CheckpointError for anything else (NumPy scalars included) and for a repeated name.
        """
        self._require_open()
        name, tree_path = flat_name(path)
        with self._lock:
            self._refuse_repeated(name, self._objects)
            archive = value_archive(value, self._data.end, f"{self.path}: object {name!r}")
            offset = self._data.reserve(len(archive))
            self._data.write(offset, archive)
            self._objects[name] = Extent(self._data_file, offset, len(archive))
            self._object_checksums[name] = object_checksum(value)
            self._object_paths[name] = tree_path

    def _finish(self) -> None:
        metadata = DcpMetadata(self._record.infos, self._sink.extents, self._objects, self._object_paths)
        folder = self._directory.temporary
        name = ".metadata" if self._share is None else rank_metadata(self._share.number - 1)
        (folder / name).write_bytes(format_metadata(metadata))
        files = {
            name: file_entry(folder / name),
            self._data_file: ManifestFile(self._data.end, None, self._rest()),
        }
        manifest = Manifest(self.format, self._record.manifest(), self._object_checksums, files)
        (folder / MANIFEST_FILE).write_bytes(render_manifest(manifest))

    def _rest(self) -> int:
        """CRC-32C of the bytes around the elements in the data file, as they should have been written."""
        objects = deque(sorted(self._objects.values(), key=itemgetter(1)))
        parts: list[bytes] = []
        crc = 0
        # Not read back: reading a few hundred bytes next to small elements would cost as much as reading all elements.
        for offset, frame in self._sink.frames(self._record.infos):
            while objects and objects[0].offset < offset:
                extent = objects.popleft()
                parts.append(self._data.read(extent.offset, extent.length))
            parts += frame
            # Many at once: one call each would take longer than processing the bytes.
            if len(parts) >= _AT_ONCE:
                crc, parts = extend(crc, b"".join(parts)), []
        parts += [self._data.read(extent.offset, extent.length) for extent in objects]
        return extend(crc, b"".join(parts))


class _Archives:
    """The archives of all chunks, one after the other in the data file; see `Sink`."""

    placed = True

    def __init__(self, data: DataFile | UploadFile, name: str) -> None:
        self._data, self._name = data, name
        self.extents: dict[str, tuple[Extent, ...]] = {}
        self._crcs: dict[int, int] = {}

    def reserve(self, info: TensorInfo) -> None:
        """Lay out the chunks of a tensor. Not for several threads at once."""
        extents = []
        for box in info.chunks:
            length = tensor_archive_length(info.dtype, box.sizes, self._data.end)
            extents.append(Extent(self._name, self._data.reserve(length), length))
        self.extents[info.name] = tuple(extents)

    def place(self, info: TensorInfo, number: int) -> Place:
        extent = self.extents[info.name][number]
        return Place(self._data, extent.offset, extent.length)

    def encode(
        self, info: TensorInfo, number: int, parts: list[np.ndarray], crc: int
    ) -> list[bytes | memoryview]:
        # torch.load compares CRC-32, not the CRC-32C of the record.
        crc32 = 0
        for part in parts:
            crc32 = isal_zlib.crc32(part.data, crc32)
        offset = self.extents[info.name][number].offset
        self._crcs[offset] = crc32
        before, after = tensor_archive(info.dtype, info.chunks[number].sizes, offset, crc32)
        return [before, *(part.data for part in parts), after]

    def frame(self, info: TensorInfo, number: int) -> tuple[int, int]:
        return tensor_archive_frame(
            info.dtype, info.chunks[number].sizes, self.extents[info.name][number].offset
        )

    def around(
        self, info: TensorInfo, number: int, elements: memoryview, sums: Checksums
    ) -> tuple[bytes, bytes]:
        crc32 = isal_zlib.crc32(elements) if sums.crc32 is None else sums.crc32
        offset = self.extents[info.name][number].offset
        self._crcs[offset] = crc32
        return tensor_archive(info.dtype, info.chunks[number].sizes, offset, crc32)

    def decode(self, info: TensorInfo, number: int, data: bytes) -> np.ndarray | None:
        extent, box = self.extents[info.name][number], info.chunks[number]
        start, _ = tensor_archive_frame(info.dtype, box.sizes, extent.offset)
        elements = data[start : start + box.numel * info.dtype.itemsize]
        crc32 = self._crcs[extent.offset] = isal_zlib.crc32(elements)
        before, after = tensor_archive(info.dtype, box.sizes, extent.offset, crc32)
        whole = data.startswith(before) and data.endswith(after) and len(data) == extent.length
        return np.frombuffer(elements, np.uint8) if whole else None

    def frames(self, infos: Mapping[str, TensorInfo]) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
        """The bytes around the elements of all chunks, once they are written, by their places in the file."""
        for name, info in infos.items():
            for box, (_, offset, _) in zip(info.chunks, self.extents[name], strict=True):
                yield offset, tensor_archive(info.dtype, box.sizes, offset, self._crcs[offset])

    def remembered(self, info: TensorInfo, number: int) -> int:
        return self._crcs[self.extents[info.name][number].offset]

    def recall(self, info: TensorInfo, number: int, remembered: int) -> None:
        self._crcs[self.extents[info.name][number].offset] = remembered


def join(folder: Path, parts: Sequence[Path], conversion: str) -> None:
    """Make `folder` a checkpoint of these parts, in their order.

    After a kill at any moment, call it again. CheckpointError if the parts do not belong to one checkpoint.
    """
    names = [rank_metadata(rank) for rank in range(len(parts))]
    pieces = {name: (part / name).read_bytes() for name, part in zip(names, parts, strict=True)}
    metadata = parse_rank_metadata(pieces, str(folder))
    manifests = [part_manifest(part) for part in parts]
    files = {}
    for rank, (part, manifest) in enumerate(zip(parts, manifests, strict=True)):
        name = data_file(rank)
        move_up(part / name, folder / name, manifest.files[name].size)
        files[name] = manifest.files[name]
    (folder / METADATA_FILE).write_bytes(format_metadata(metadata))
    files[METADATA_FILE] = file_entry(folder / METADATA_FILE)
    write_joint_manifest(folder, "dcp", manifests, files, conversion)


def format_metadata(metadata: DcpMetadata) -> bytes:
    """The `.metadata` file for this content. The same content gives the same bytes."""
    entries: dict[object, object] = {}
    paths: dict[object, object] = {}
    storage: dict[object, object] = {}
    alike: dict[tuple[np.dtype, tuple[int, ...], tuple[Box, ...]], tuple[Repeated, list[Repeated]]] = {}
    sizes: dict[tuple[int, ...], Repeated] = {}

    def size(of: tuple[int, ...]) -> Repeated:
        if of not in sizes:
            sizes[of] = Repeated(Call(SIZE, (of,)))
        return sizes[of]

    key_of = Pattern(Instance(INDEX, {"fqn": HOLE, "offset": HOLE, "index": HOLE}))
    stored_at = Pattern(Instance(STORAGE_INFO, {"relative_path": HOLE, "offset": HOLE, "length": HOLE}))
    for name, info in metadata.tensors.items():
        key = info.dtype, info.shape, info.chunks
        form = alike.get(key)
        if form is None:
            chunks = [
                Instance(CHUNK, {"offsets": size(c.offsets), "sizes": size(c.sizes)}) for c in info.chunks
            ]
            state = {"properties": _properties(info), "size": size(info.shape), "chunks": chunks}
            form = alike[key] = Repeated(Instance(TENSOR, state)), [size(c.offsets) for c in info.chunks]
        entries[name], offsets = form
        paths[name] = info.path
        for index, (offset, extent) in enumerate(zip(offsets, metadata.extents[name], strict=True)):
            storage[Filled(key_of, (name, offset, index))] = Filled(stored_at, extent)
    for name, extent in metadata.objects.items():
        entries[name] = Instance(BYTES, {})
        paths[name] = metadata.object_paths[name]
        storage[Filled(key_of, (name, None, None))] = Filled(stored_at, extent)
    # No checkpoint_id: PyTorch writes the absolute path of the directory there, which is meaningless elsewhere.
    meta: dict[str, object] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    return write_pickle(
        Instance(
            METADATA,
            {
                "state_dict_metadata": entries,
                "planner_data": paths,
                "storage_data": storage,
                "storage_meta": Instance(STORAGE_META, meta),
                "version": "1.0.0",
            },
        ),
        4,
    )


def _properties(info: TensorInfo) -> Instance:
    layout, contiguous = Call(LAYOUT, ("torch.strided",)), Call(MEMORY_FORMAT, (0,))
    return Instance(PROPERTIES, (Name(f"torch.{dtype_name(info.dtype)}"), layout, False, contiguous, False))
