"""How a chunk of an Orbax checkpoint is stored, and how the stores of several processes become one.

A chunk's value, zarr3's `sharding_indexed` with one inner chunk, which is Orbax's own form with a checksum added:

    data, padded to the full chunk | CRC-32C of data | 0, length with CRC | CRC-32C of these two numbers

Each process that writes a checkpoint has its own store, since an OCDBT manifest has one writer. Joining copies no data:
the item's own B-tree refers to the files of the stores by relative paths.

    <item>/manifest.ocdbt, d/*           keys of all arrays, written by join_stores
    <item>/ocdbt.process_0/d/*           chunks that process 0 wrote
    <item>/ocdbt.process_1/d/*           chunks that process 1 wrote
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import google_crc32c
import numpy as np
import tensorstore as ts

from bridge.core.formats.files.data_file import DataFile
from bridge.core.formats.files.sink import Place, Sink
from bridge.core.formats.orbax.tree import leaf_name, storage_key
from bridge.core.formats.orbax.zarr.arrays import (
    MANIFEST,
    ArrayLayout,
    explain,
    metadata_key,
    new_context,
    store_spec,
)
from bridge.core.formats.orbax.zarr.ocdbt import ALIGNMENT, OcdbtWriter
from bridge.core.formats.stores.upload import UploadFile, UploadPath
from bridge.core.formats.tensors.arrays import array_checksum, as_integers, raw_bytes
from bridge.core.formats.tensors.base import Box, CheckpointError, Checksums, TensorInfo, TreePath

_NUMBERS = struct.Struct("<QQ")
_CRC = struct.Struct("<I")
_TRAILER = _CRC.size + _NUMBERS.size + _CRC.size


def process_store(item: Path, process: int) -> Path:
    """The directory of a process's own store, named as Orbax names it."""
    return item / f"ocdbt.process_{process}"


class ChunkStore(Sink):
    """The chunks of all arrays in one OCDBT store; see `Sink`.

    open_file: opens the store's data file; the caller syncs and closes it. complete: all chunks of the arrays will be
    written here, so the arrays alone determine their places; otherwise each chunk gets a place when it is written.
    """

    def __init__(
        self, directory: Path, open_file: Callable[[Path], DataFile | UploadFile], *, complete: bool
    ) -> None:
        self._store = OcdbtWriter(directory, open_file)
        self.placed, self._sent = complete, isinstance(directory, UploadPath)
        self._layouts: dict[str, ArrayLayout] = {}
        # If places are not known beforehand, two threads may reserve theirs at once.
        self._lock = threading.Lock()

    def declare(self, name: str, layout: ArrayLayout, own: Sequence[Box] | None = None) -> None:
        """Declare the array of a tensor, whose chunks will follow. Not for several threads at once.

        own: the chunks that this store will contain, by default all.
        """
        self._layouts[name] = layout
        self._store.put(metadata_key(layout.key, zarr3=True), layout.described)
        if self.placed:
            for key in layout.stored_keys() if own is None else (self._key(layout, box) for box in own):
                self._store.reserve(key, layout.chunk_bytes + _TRAILER)

    def place(self, info: TensorInfo, number: int) -> Place:
        layout = self._layouts[info.name]
        key = self._key(layout, info.chunks[number])
        if not self.placed:
            # Reserved only now, when this process writes the chunk: a place that stays empty would be in the index.
            with self._lock:
                self._store.reserve(key, layout.chunk_bytes + _TRAILER)
        return self._store.places[key]

    def _key(self, layout: ArrayLayout, box: Box) -> str:
        return layout.chunk_key(tuple(o // n for o, n in zip(box.offsets, layout.chunk, strict=True)))

    def encode(
        self, info: TensorInfo, number: int, parts: list[np.ndarray], crc: int
    ) -> list[bytes | memoryview]:
        layout, box = self._layouts[info.name], info.chunks[number]
        # zarr stores full chunks, also at the upper ends of an array; the trailer's checksum covers the padded bytes.
        if box.sizes != layout.chunk:
            parts = [_padded(parts, box, layout)]
            crc = array_checksum(*parts)
        return [*(part.data for part in parts), self._behind(layout, crc)]

    def _behind(self, layout: ArrayLayout, crc: int) -> bytes:
        # With padding after a value, the next value follows immediately, and both are written together. Uploads to an
        # object store are counted, and their padding is added automatically.
        padding = b"" if self._sent else bytes(-(layout.chunk_bytes + _TRAILER) % ALIGNMENT)
        return _trailer(layout, crc) + padding

    def frame(self, info: TensorInfo, number: int) -> tuple[int, int] | None:
        layout = self._layouts[info.name]
        if info.chunks[number].sizes != layout.chunk:
            return None
        return 0, _TRAILER + -(layout.chunk_bytes + _TRAILER) % ALIGNMENT

    def around(
        self, info: TensorInfo, number: int, elements: memoryview, sums: Checksums
    ) -> tuple[bytes, bytes]:
        assert sums.crc32c is not None
        return b"", self._behind(self._layouts[info.name], sums.crc32c)

    def decode(self, info: TensorInfo, number: int, data: bytes) -> np.ndarray | None:
        layout, box = self._layouts[info.name], info.chunks[number]
        stored = np.frombuffer(data[: layout.chunk_bytes], np.uint8)
        if data[layout.chunk_bytes :] != _trailer(layout, array_checksum(stored)):
            return None
        return stored.view(layout.dtype).reshape(layout.chunk)[tuple(map(slice, box.sizes))]

    def finish(self, sync: Callable[[], None]) -> None:
        """Write the index, so that everything written until now can be read. sync: brings the data file to disk."""
        self._store.finish(sync)


def join_stores(item: Path, processes: Iterable[int]) -> None:
    """Refer to the chunks of the processes' stores from the item's own; a process that wrote nothing has no store.

    CheckpointError if two processes wrote the same chunk: one version would be lost.
    """
    with explain(f"{item}: cannot join the stores of the processes"):
        context, transaction = new_context(), ts.Transaction(atomic=True)
        own = ts.KvStore.open(store_spec(item, ocdbt=True, create=True), context=context).result()
        writers: dict[bytes, int] = {}
        for process in processes:
            directory = process_store(item, process)
            if not (directory / MANIFEST).exists():
                continue
            store = ts.KvStore.open(store_spec(directory, ocdbt=True), context=context).result()
            for key in store.list().result():
                # Each writer of an array stores the same metadata for the array.
                if writers.setdefault(key, process) != process and not key.endswith(b"/zarr.json"):
                    raise CheckpointError(
                        f"{item}: expected one writer for each chunk, but processes {writers[key]} and {process} wrote "
                        f"{key.decode()!r}"
                    )
            store.experimental_copy_range_to(own.with_transaction(transaction)).result()
        transaction.commit_async().result()


def _trailer(layout: ArrayLayout, crc: int) -> bytes:
    return _CRC.pack(crc) + _index(layout.chunk_bytes + _CRC.size)


@lru_cache(maxsize=4096)
def _index(size: int) -> bytes:
    """The index of a shard whose only inner chunk, with its checksum, has so many bytes."""
    numbers = _NUMBERS.pack(0, size)
    return numbers + _CRC.pack(google_crc32c.value(numbers))


def _padded(parts: list[np.ndarray], box: Box, layout: ArrayLayout) -> np.ndarray:
    """The bytes of a chunk at an upper end of the array, padded with zeros: full chunks are stored."""
    whole = np.zeros(layout.chunk, layout.dtype)
    values = np.concatenate(parts).view(layout.dtype).reshape(box.sizes)
    as_integers(whole)[tuple(map(slice, box.sizes))] = as_integers(values)
    return raw_bytes(whole)


_CHUNK = 8 << 20
_MAX_CHUNK = 32 << 20


# 8 MiB, since readers decode whole chunks; a row above 32 MiB is cut along the next axis.
def array_layout(
    leaf: TreePath, shape: tuple[int, ...], dtype: np.dtype, chunk_shape: Sequence[int] | None
) -> ArrayLayout:
    """How a new array of an item is stored. CheckpointError for an invalid requested chunk shape."""
    if any(n < 0 for n in shape):
        raise CheckpointError(
            f"tensor {leaf_name(leaf)!r}: expected no negative dimension, got shape {shape}"
        )
    if chunk_shape is None:
        chunk = default_chunk(shape, dtype)
    else:
        if len(chunk_shape) != len(shape) or any(n < 1 for n in chunk_shape):
            raise CheckpointError(
                f"tensor {leaf_name(leaf)!r}: expected a chunk shape of {len(shape)} positive sizes, got "
                f"{tuple(chunk_shape)}"
            )
        chunk = _row_slab(tuple(map(min, chunk_shape, shape)), dtype.itemsize, _MAX_CHUNK)
    return ArrayLayout(storage_key(leaf), shape, dtype, chunk, chunk, zarr3=True, raw="shard", checksum=True)


def default_chunk(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """The default chunk shape of a tensor."""
    return _row_slab(shape, dtype.itemsize, _CHUNK)


@lru_cache(maxsize=4096)
def _row_slab(shape: tuple[int, ...], itemsize: int, target: int) -> tuple[int, ...]:
    """A chunk shape of about `target` bytes or less: leading axes cut to one index, the next cut, the others whole."""
    for axis, size in enumerate(shape):
        row = itemsize * math.prod(max(1, n) for n in shape[axis + 1 :])
        if row <= _MAX_CHUNK:
            # Equal slabs, rather than full ones and a small rest.
            slabs = max(1, -(-size * row // max(target, row)))
            return (1,) * axis + (max(1, -(-size // slabs)), *(max(1, n) for n in shape[axis + 1 :]))
    return ()
