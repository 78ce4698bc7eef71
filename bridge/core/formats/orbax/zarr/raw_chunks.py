"""Raw chunks, whose elements are stored unchanged in the file: where the elements are, and whether they are intact.

a file of zarr      elements
a shard of zarr3    elements, CRC-32C | index: where they begin, how many bytes, CRC-32C of both
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from operator import mul
from pathlib import Path
from typing import Final

import google_crc32c
import numpy as np

from bridge.core.formats.orbax.zarr.arrays import ArrayLayout
from bridge.core.formats.orbax.zarr.values import StoredValues
from bridge.core.formats.reading.source_files import FileArray, Span
from bridge.core.formats.tensors.arrays import extend, raw_bytes, strides_of
from bridge.core.formats.tensors.base import Box, CheckpointError, Checksums

_SHARD_INDEX: Final = struct.Struct("<QQI")


class RawChunks:
    """The raw chunks of an item's arrays, by the array's name and the chunk's index. May be used by several threads.

    verify: compare a chunk with its CRC-32C when it is first touched, which reads all of it.
    """

    def __init__(
        self, item: Path, values: StoredValues, layouts: Mapping[str, ArrayLayout], verify: bool
    ) -> None:
        self._item, self._values, self._layouts, self._verify = item, values, layouts, verify
        self.files = values.files
        self._starts: dict[str, int] = {}
        self._verified: set[str] = set()

    def part(
        self, name: str, index: tuple[int, ...], part: Box, in_one_piece: bool = True
    ) -> tuple[FileArray, Callable[[np.ndarray], int | None]]:
        """Where `part` of the array, inside a raw chunk, is, and a function to call with the elements after the read.

        The function compares a whole chunk with its CRC-32C and returns the CRC-32C. For a part, the whole chunk is
        compared here, and the function returns None. in_one_piece: whether the elements will be contiguous in memory.
        """
        layout = self._layouts[name]
        key = layout.chunk_key(index)
        stored = self._values.place(key)
        start = stored.start + self._start(name, key)
        stop = start + layout.chunk_bytes
        chunk = Box(tuple(map(mul, index, layout.chunk)), layout.chunk)
        strides = strides_of(layout.chunk, layout.dtype)
        what = f"tensor {name!r}, chunk {key!r}"
        source = FileArray(stored.file, start, layout.chunk, strides, layout.dtype, what).within(part, chunk)
        if not (layout.checksum and self._verify):
            return source, lambda elements: None
        if part == chunk and in_one_piece:
            return source, lambda elements: self._compare(key, stop, extend(0, raw_bytes(elements)), what)
        if key not in self._verified:
            crc = 0
            for block in self.files.scan(stored.file, start, stop, what):
                crc = extend(crc, block)
            self._compare(key, stop, crc, what)
        return source, lambda elements: None

    def read_into(self, arrays: Sequence[tuple[ArrayLayout, memoryview]]) -> Sequence[Checksums | None]:
        """Read whole arrays that are one shard into memory of their size; None for an array that is not intact."""
        # The trailer is read together with the elements.
        pieces = [self._whole_shard(layout, target) for layout, target in arrays]
        return [
            self._compared(layout, target, piece.targets[1]) if read and piece is not None else None
            for read, piece, (layout, target) in zip(
                self.files.read_into(pieces), pieces, arrays, strict=True
            )
        ]

    def _whole_shard(self, layout: ArrayLayout, target: memoryview) -> Span | None:
        if layout.raw != "shard" or layout.shape != layout.chunk:
            return None
        stored = self._values.find(layout.chunk_key((0,) * len(layout.shape)))
        behind = 4 * layout.checksum + _SHARD_INDEX.size
        if stored is None or not target.nbytes == layout.chunk_bytes == stored.size - behind:
            return None
        return Span(stored.file, stored.start, (target, memoryview(bytearray(behind))))

    def _compared(self, layout: ArrayLayout, target: memoryview, behind: memoryview) -> Checksums | None:
        index = behind[-_SHARD_INDEX.size :]
        start, size, index_crc = _SHARD_INDEX.unpack(index)
        if (start, size) != (0, target.nbytes + 4 * layout.checksum):
            return None
        if google_crc32c.value(bytes(index[:-4])) != index_crc:
            return None
        if not (layout.checksum and self._verify):
            return Checksums()
        crc = extend(0, target)
        return Checksums(crc32c=crc) if crc == int.from_bytes(behind[:4], "little") else None

    def _start(self, name: str, key: str) -> int:
        """Where the data of a raw chunk begins in its value, after sizes and index have been checked."""
        if key not in self._starts:
            layout, value = self._layouts[name], self._values.place(key)
            what = f"{self._item / value.file}: tensor {name!r}, chunk {key!r}"
            start, size = 0, layout.chunk_bytes + 4 * layout.checksum
            expected = size + (_SHARD_INDEX.size if layout.raw == "shard" else 0)
            if layout.raw == "shard" and value.size >= _SHARD_INDEX.size:
                position = value.start + value.size - _SHARD_INDEX.size
                file = self._values.view(key, position, position + _SHARD_INDEX.size)
                start, stored, crc = file.unpack(_SHARD_INDEX, position)
                if google_crc32c.value(file[position : position + 16]) != crc:
                    raise CheckpointError(f"{what}: damaged shard index")
                if stored != size:
                    raise CheckpointError(f"{what}: expected {size} bytes of data, found {stored}")
            if value.size < expected or start + size > value.size:
                raise CheckpointError(f"{what}: expected {expected} bytes, found {value.size}")
            self._starts[key] = start
        return self._starts[key]

    def _compare(self, key: str, stop: int, crc: int, what: str) -> int:
        """A raw chunk's CRC-32C, checked against the one stored after the elements, which end at this byte."""
        file = self._values.view(key, stop, stop + 4)
        if crc.to_bytes(4, "little") != file[stop : stop + 4]:
            path = self._item / self._values.place(key).file
            raise CheckpointError(f"{path}: {what}: checksum mismatch, the data is damaged")
        self._verified.add(key)
        return crc
