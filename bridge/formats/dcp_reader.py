"""Reads a DCP checkpoint region by region, without PyTorch and without running anything it contains."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from bridge.formats.base import Box, CheckpointError, TensorInfo, TreePath
from bridge.formats.dcp_archive import (
    BLOCK,
    as_integers,
    drop_pages,
    find_tensor,
    read_value,
    verify_record,
)
from bridge.formats.dcp_metadata import DcpMetadata, Extent, parse_metadata

_MAX_OPEN_FILES = 64


class DcpReader:
    """A DCP checkpoint (`.metadata` and `.distcp` files), opened for reading; see `CheckpointReader`.

    Opening reads `.metadata` and the sizes of the data files only, and raises CheckpointError unless every tensor is
    covered exactly once by chunks that lie inside existing files. `verify`: compare each chunk with its stored CRC-32
    the first time any part of it is read (the whole chunk is read for that). May be used by several threads.

    Reading needs memory for the returned array only: files are mapped and let go of block by block. They must not be
    shortened while open.
    """

    format = "dcp"

    def __init__(self, path: str | os.PathLike[str], verify: bool = True) -> None:
        self.path = Path(path)
        self._verify = verify
        self._files = _MappedFiles(self.path)
        self._metadata = self._read_metadata()
        self._check_files()
        self._verified: set[Extent] = set()
        self._bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by name, such as "model.layers.0.attention.wq.weight", in the order of the file."""
        return self._metadata.tensors

    @property
    def objects(self) -> Mapping[str, object]:
        """Values that are not tensors, by name; each is read when looked up.

        CheckpointError from a look-up when the value is damaged or not made of None, bool, int, float, str, list,
        tuple and dict.
        """
        return _Objects(self._files, self._metadata.objects)

    @property
    def object_paths(self) -> Mapping[str, TreePath]:
        """The tree path of every object, by name."""
        return self._metadata.object_paths

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block (default: all) of a tensor as a new C-contiguous array in the stored dtype.

        KeyError for an unknown name, ValueError for a box outside the tensor, CheckpointError for damaged data.
        """
        info = self.tensors[name]
        if box is None:
            box = Box.whole(info.shape)
        if not box.inside(info.shape):
            raise ValueError(f"tensor {name!r}: expected a box inside shape {info.shape}, got {box}")
        try:
            result = np.empty(box.sizes, info.dtype)
        except (MemoryError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: no memory for {box.numel} elements of tensor {name!r}, shape {info.shape}: {error}"
            ) from error
        for index in self._chunks_in(info, box):
            common = info.chunks[index].intersect(box)
            if common is not None:
                self._copy_from_chunk(info, index, common, result[common.slices(box)])
        return result

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_metadata(self) -> DcpMetadata:
        file = self.path / ".metadata"
        try:
            data = _read_regular_file(file)
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error}") from error
        return parse_metadata(data, str(file))

    def _check_files(self) -> None:
        sizes: dict[str, int] = {}
        entries = [(name, e) for name, extents in self._metadata.extents.items() for e in extents]
        for name, extent in [*entries, *self._metadata.objects.items()]:
            file = self.path / extent.file
            if extent.file not in sizes:
                try:
                    status = file.stat()
                except OSError as error:
                    raise CheckpointError(
                        f"{name!r} is stored in {file}, which cannot be read: {error}"
                    ) from error
                if not stat.S_ISREG(status.st_mode):
                    raise CheckpointError(f"{name!r} is stored in {file}, which is not a regular file")
                sizes[extent.file] = status.st_size
            if extent.offset + extent.length > sizes[extent.file]:
                raise CheckpointError(
                    f"{file} is truncated: expected at least {extent.offset + extent.length} bytes (for {name!r}), "
                    f"got {sizes[extent.file]}"
                )

    def _chunks_in(self, info: TensorInfo, box: Box) -> list[int]:
        """Indices of the chunks that share elements with the box; array arithmetic, as there may be 100,000."""
        if not box.numel or len(info.chunks) == 1:
            return list(range(len(info.chunks))) if box.numel else []
        if info.name not in self._bounds:
            starts = np.array([c.offsets for c in info.chunks], np.int64).T.copy()
            sizes = np.array([c.sizes for c in info.chunks], np.int64).T
            self._bounds[info.name] = (starts, starts + sizes)
        hits = np.ones(len(info.chunks), np.bool_)
        for start, stop, low, high in zip(*self._bounds[info.name], box.offsets, box.stops, strict=True):
            hits &= (start < high) & (stop > low)
        return [int(index) for index in np.flatnonzero(hits)]

    def _copy_from_chunk(self, info: TensorInfo, index: int, common: Box, target: np.ndarray) -> None:
        chunk, extent = info.chunks[index], self._metadata.extents[info.name][index]
        what = f"{self.path / extent.file}: tensor {info.name!r}, chunk at {chunk.offsets}"
        file = self._files.get(extent.file)
        stored = find_tensor(file, extent.offset, extent.length, what)
        if stored.dtype != info.dtype or stored.shape != chunk.sizes:
            raise CheckpointError(
                f"{what}: expected {info.dtype.name} {chunk.sizes} as .metadata says, "
                f"got {stored.dtype.name} {stored.shape}"
            )
        if self._verify and extent not in self._verified:
            verify_record(file, stored.record, what)
            self._verified.add(extent)
        source = as_integers(stored.view(file)[common.slices(chunk)])
        skipped = sum(
            (o - c) * s for o, c, s in zip(common.offsets, chunk.offsets, source.strides, strict=True)
        )
        start = stored.record.start + stored.first * source.itemsize + skipped
        _copy(as_integers(target), source, file, start)
        drop_pages(file, extent.offset, extent.offset + extent.length)


def _copy(target: np.ndarray, source: np.ndarray, file: mmap.mmap, start: int) -> None:
    """Copy an array that lies in a mapped file from byte `start` on.

    Halves it along its longest stride until a piece spans at most a block, so that little of the file is resident.
    """
    span = source.itemsize + sum((n - 1) * s for n, s in zip(source.shape, source.strides, strict=True))
    if span <= BLOCK:
        target[...] = source
        drop_pages(file, start, start + span)
        return
    axis = max(range(source.ndim), key=lambda a: source.strides[a] if source.shape[a] > 1 else -1)
    half = source.shape[axis] // 2
    before = (slice(None),) * axis
    low, high = (*before, slice(None, half)), (*before, slice(half, None))
    _copy(target[low], source[low], file, start)
    _copy(target[high], source[high], file, start + half * source.strides[axis])


class _Objects(Mapping[str, object]):
    """The values of a checkpoint by name, read when looked up: one that cannot be read must not hide the others."""

    def __init__(self, files: _MappedFiles, extents: Mapping[str, Extent]) -> None:
        self._files = files
        self._extents = extents

    def __getitem__(self, name: str) -> object:
        extent = self._extents[name]
        what = f"{self._files.directory / extent.file}: object {name!r}"
        return read_value(self._files.get(extent.file), extent.offset, extent.length, what)

    def __contains__(self, name: object) -> bool:
        return name in self._extents

    def __iter__(self) -> Iterator[str]:
        return iter(self._extents)

    def __len__(self) -> int:
        return len(self._extents)


class _MappedFiles:
    """Read-only maps of a directory's files, the most recently used ones kept open."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def get(self, name: str) -> mmap.mmap:
        with self._lock:
            if self._closed:
                raise ValueError(f"the checkpoint {self.directory} was closed")
            if name not in self._maps:
                try:
                    with open(self.directory / name, "rb") as file:
                        self._maps[name] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                except (OSError, ValueError) as error:
                    raise CheckpointError(f"cannot read {self.directory / name}: {error}") from error
                # Dropped, not closed: another thread may still copy from it.
                if len(self._maps) > _MAX_OPEN_FILES:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(name)
            return self._maps[name]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._maps.clear()


def _read_regular_file(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return path.read_bytes()
