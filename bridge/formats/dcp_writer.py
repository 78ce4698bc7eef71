"""Writes a DCP checkpoint chunk by chunk, without PyTorch; stock `torch.distributed.checkpoint.load` reads it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bridge.formats.atomic import AtomicDirectory, CommitOrAbort
from bridge.formats.base import Box, CheckpointError, TensorInfo, TreePath, dtype_name, grid_of_chunks
from bridge.formats.dcp_archive import write_tensor, write_value
from bridge.formats.dcp_metadata import DcpMetadata, Extent, format_metadata
from bridge.formats.dcp_pickle import is_unicode

CHUNK_BYTES = 32 << 20
_DATA_FILE = "__0_0.distcp"


class DcpWriter(CommitOrAbort):
    """A new DCP checkpoint at `path`; see `CheckpointWriter`. FileExistsError when `path` exists.

    Tensors above 32 MiB are cut into chunks of at most that size, along the first axis as far as rows allow. Memory:
    none beyond the caller's array, or one copy of it if it is not contiguous. May be used by several threads.
    """

    format = "dcp"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._directory = AtomicDirectory(path)
        self.path: Path = self._directory.path
        self._file = open(self._directory.temporary / _DATA_FILE, "wb")  # noqa: SIM115 (open until commit or abort)
        self._lock = threading.Lock()
        self._tensors: dict[str, TensorInfo] = {}
        self._extents: dict[str, dict[Box, Extent | None]] = {}
        self._objects: dict[str, Extent] = {}
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
        name, tree_path = _name(path)
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
            self._tensors[name] = info
            self._extents[name] = dict.fromkeys(info.chunks)
        return info

    def chunks(self, name: str) -> tuple[Box, ...]:
        """The boxes that `write` expects, in row-major order; none for a tensor without elements."""
        return self._tensors[name].chunks

    def write(self, name: str, box: Box, array: np.ndarray) -> None:
        """Store one of `chunks(name)`: `array` has the box's sizes and the tensor's dtype, in any memory order.

        KeyError for an undeclared tensor; CheckpointError for another box, shape or dtype, or a box written before.
        """
        self._require_open()
        info, extents = self._tensors[name], self._extents[name]
        if box not in extents:
            raise CheckpointError(f"{self.path}: tensor {name!r}: expected one of its chunks, got {box}")
        if array.shape != box.sizes or array.dtype != info.dtype:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: expected {info.dtype.name} {box.sizes} for the chunk at {box.offsets}, "
                f"got {array.dtype.name} {array.shape}"
            )
        with self._lock:
            if extents[box] is not None:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r}: the chunk at {box.offsets} was written twice"
                )
            offset = self._file.tell()
            extents[box] = Extent(_DATA_FILE, offset, write_tensor(self._file, array))

    def add_object(self, path: str | Sequence[str | int], value: object) -> None:
        """Store None, bool, int, float, str, or a list, tuple or dict of these (keys str, int, bool, None).

        CheckpointError for anything else (NumPy scalars included) and for a repeated name.
        """
        self._require_open()
        name, tree_path = _name(path)
        with self._lock:
            self._refuse_repeated(name)
            offset = self._file.tell()
            length = write_value(self._file, value, f"{self.path}: object {name!r}")
            self._objects[name] = Extent(_DATA_FILE, offset, length)
            self._object_paths[name] = tree_path

    def commit(self) -> None:
        """Check that every chunk was written, sync to disk and rename into place; on failure, leave nothing.

        CheckpointError when chunks are missing, FileExistsError when something appeared at the path meanwhile.
        """
        self._require_open()
        try:
            extents = {name: self._complete(name) for name in self._tensors}
            metadata = DcpMetadata(self._tensors, extents, self._objects, self._object_paths)
            self._file.close()
            (self._directory.temporary / ".metadata").write_bytes(format_metadata(metadata))
            self._directory.commit()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove everything written. Does nothing after commit or abort."""
        try:
            # Flushes, which fails again when the disk is full.
            self._file.close()
        finally:
            self._directory.abort()

    @property
    def ended(self) -> bool:
        return self._directory.ended

    def _require_open(self) -> None:
        if self.ended:
            raise CheckpointError(
                f"{self.path}: expected an unfinished checkpoint, but it was committed or aborted"
            )

    def _complete(self, name: str) -> tuple[Extent, ...]:
        by_box = self._extents[name]
        missing = [box for box, extent in by_box.items() if extent is None]
        if missing:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}: {len(missing)} of {len(by_box)} chunks were never written, "
                f"the first at {missing[0].offsets}"
            )
        return tuple(extent for extent in by_box.values() if extent is not None)

    def _refuse_repeated(self, name: str) -> None:
        if name in self._tensors or name in self._objects:
            raise CheckpointError(f"{self.path}: two entries are named {name!r} (names join the path by '.')")


def default_chunk_shape(shape: Sequence[int], dtype: np.dtype) -> tuple[int, ...]:
    """The largest block of whole rows within 32 MiB; a row above that is cut along the next axis in turn."""
    block = [max(n, 1) for n in shape]
    nbytes = dtype.itemsize
    for n in block:
        nbytes *= n
    for axis, n in enumerate(block):
        if nbytes <= CHUNK_BYTES:
            break
        per_index = nbytes // n
        block[axis] = max(1, CHUNK_BYTES // per_index)
        nbytes = per_index * block[axis]
    return tuple(block)


def _name(path: str | Sequence[str | int]) -> tuple[str, TreePath]:
    parts: TreePath = (path,) if isinstance(path, str) else tuple(path)
    if not parts or not all(isinstance(p, str) or (isinstance(p, int) and p >= 0) for p in parts):
        raise CheckpointError(f"expected a name or a path of str and list positions, got {parts}")
    name = ".".join(map(str, parts))
    if not is_unicode(name):
        raise CheckpointError(f"expected a name of Unicode characters, got {name!r}")
    return name, parts
