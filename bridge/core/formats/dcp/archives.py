"""Where the chunks of a DCP checkpoint are. Chunks do not overlap, and archives that are alike are parsed once.

Two archives with chunks of one shape differ in the elements, in their checksum, and in records that are never read:

    |  data.pkl, byteorder, ...  | crc |  data/0   | crc |  directory ... | crc |  end records |
    |          the same          |     |           |     |     the same   |     |   the same   |

PyTorch writes 0 as the first checksum, and the second one after the elements. Archives written here lack the second.

SerializationFormat.SAFETENSORS writes safetensors files instead: one begins where `.metadata` says that a tensor is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from bridge.core.formats.dcp.archive import (
    PlacedRecord,
    Record,
    StoredTensor,
    checked_crc,
    records_and_places,
    tensor_in,
)
from bridge.core.formats.dcp.metadata import DcpMetadata, Extent
from bridge.core.formats.files.manifest import ManifestFile, rest_checksum
from bridge.core.formats.reading.regular_files import regular_file
from bridge.core.formats.reading.source_files import FileArray, FileView, SourceFiles
from bridge.core.formats.reading.zip_directory import END, END64, END64_LOCATOR
from bridge.core.formats.safetensors.header import (
    LENGTH_BYTES,
    MAX_HEADER,
    Header,
    StoredArray,
    header_length,
    read_header,
    saved_offsets,
)
from bridge.core.formats.tensors.base import Box, CheckpointError
from bridge.core.formats.tensors.wrapping import one_part

_CRC: Final = struct.Struct("<L")
_LOCAL_CRC: Final = 14
_ENTRY_CRC: Final = 16
"""Where a record's checksum is in its own header, and in its entry of the directory."""

_DESCRIPTOR: Final = b"PK\7\x08"
_DESCRIPTOR_CRC: Final = 4

_SAFETENSORS: Final = b"{"
_PADDED_TO: Final = 64
_MAX_FORMS: Final = 4096
_MAX_ALIKE: Final = 8
"""Different forms of archives with the same length, such as the archives of a matrix and of its transpose."""

_MAX_FIXED: Final = 16 << 10
_LOOKED_AT: Final = ("data.pkl", "byteorder")


class Archives:
    """Finds the tensors of archives. Archives that are alike, such as chunks of one shape, are parsed once."""

    def __init__(self) -> None:
        # By length, and by alignment if the padding depends on the place, as in archives written here.
        self._forms: dict[tuple[int, int], tuple[_Form, ...]] = {}

    def known(self, file: FileView, offset: int, length: int) -> StoredTensor | None:
        """The tensor of an archive that is like an earlier one; None if it may differ, or is not an archive."""
        for form in self._forms.get((length, offset % _PADDED_TO), ()):
            if (tensor := form.tensor_at(file, offset)) is not None:
                return None if form.begins_as_safetensors else tensor
        return None

    def find(self, file: FileView, offset: int, length: int, what: str) -> StoredTensor:
        """See `tensor_in`."""
        key = length, offset % _PADDED_TO
        forms = self._forms.get(key, ())
        for form in forms:
            if (like := form.tensor_at(file, offset)) is not None:
                return like
        records, end = records_and_places(file, offset, length, what)
        tensor = tensor_in(file, {name: placed.record for name, placed in records.items()}, what)
        keep = length - tensor.record.size <= _MAX_FIXED and (forms or len(self._forms) < _MAX_FORMS)
        if keep and _apart(records, offset, length, end):
            form = _Form.of(file, offset, length, records, tensor, end[0])
            # A new tuple: other threads may be iterating over the old one.
            self._forms[key] = (*forms, form)[-_MAX_ALIKE:]
        return tensor


def _apart(records: Mapping[str, PlacedRecord], offset: int, length: int, end: tuple[int, int, int]) -> bool:
    """Whether records, directory and end records follow each other, as all but hostile writers arrange them.

    Otherwise the content of a record, which may vary, could decide how the archive is parsed.
    """
    directory, after_directory, last = end
    spans = sorted(
        (placed.header, placed.record.start - offset + placed.record.size) for placed in records.values()
    )
    position = 0
    for header, stop in (
        *spans,
        (directory, after_directory),
        (last, length - END.size - END64_LOCATOR.size),
    ):
        if header < position:
            return False
        position = stop
    return last + END64.size <= length - END.size - END64_LOCATOR.size


class _Fixed(NamedTuple):
    """Bytes of a part of an archive that decide how the archive is parsed: a layout that skips all others."""

    layout: struct.Struct
    content: tuple[bytes, ...]

    @classmethod
    def of(cls, part: bytes, skipped: Sequence[tuple[int, int]]) -> _Fixed:
        """For all bytes of ``part`` except some ranges, which may overlap."""
        layout, position = "", 0
        for low, high in sorted(skipped):
            layout += f"{max(0, low - position)}s{max(0, high - max(low, position))}x"
            position = max(position, high)
        fixed = struct.Struct(f"{layout}{len(part) - position}s")
        return cls(fixed, fixed.unpack(part))

    def like(self, part: bytes) -> bool:
        """Whether another part has these bytes."""
        return len(part) == self.layout.size and self.layout.unpack(part) == self.content


@dataclass(frozen=True, slots=True)
class _Form:
    """All parts of an archive that decide how it is parsed: bytes by their place in it, and the tensor that was found.

    Elements, checksums and records that are never read vary between archives that are alike, and are left out.
    begins_as_safetensors: whether its first bytes could also begin a safetensors file, if the file is long enough.
    head, tail: the bytes before and after the elements. crc: where their checksum is in the tail.
    tensor: the result for the archive at offset 0.
    """

    head: _Fixed
    tail: _Fixed
    crc: int
    tensor: StoredTensor
    length: int
    begins_as_safetensors: bool

    @classmethod
    def of(
        cls,
        file: FileView,
        offset: int,
        length: int,
        records: Mapping[str, PlacedRecord],
        tensor: StoredTensor,
        directory: int,
    ) -> _Form:
        start, stop = tensor.record.start - offset, tensor.record.start - offset + tensor.record.size
        head, tail = file[offset : offset + start], file[offset + stop : offset + length]
        varies: list[tuple[int, int]] = []
        crc = 0
        begins = (*(placed.header for placed in records.values()), directory)
        for name, (record, header, entry) in records.items():
            if name in _LOOKED_AT:
                continue
            low = record.start - offset
            high = low + record.size
            varies += [
                (header + _LOCAL_CRC, header + _LOCAL_CRC + 4),
                (low, high),
                (entry + _ENTRY_CRC, entry + _ENTRY_CRC + 4),
            ]
            # PyTorch's checksums follow the records, and are 0 in the headers.
            described = file[offset + high : offset + high + 4] == _DESCRIPTOR
            if described and min(begin for begin in begins if begin >= high) >= high + _DESCRIPTOR_CRC + 4:
                varies.append((high + _DESCRIPTOR_CRC, high + _DESCRIPTOR_CRC + 4))
            if record is tensor.record:
                crc = entry + _ENTRY_CRC - stop
        return cls(
            _Fixed.of(head, [span for span in varies if span[1] <= start]),
            _Fixed.of(
                tail, [(low - stop, high - stop) for low, high in varies if low >= stop and high > low]
            ),
            crc,
            tensor._replace(record=tensor.record._replace(start=start)),
            length,
            begins_as_safetensors=head[LENGTH_BYTES : LENGTH_BYTES + 1] == _SAFETENSORS,
        )

    def tensor_at(self, file: FileView, offset: int) -> StoredTensor | None:
        """The tensor of the archive at this offset, None if the archive is another."""
        like = self.tensor
        start = offset + like.record.start
        tail = file[start + like.record.size : offset + self.length]
        if not (self.head.like(file[offset:start]) and self.tail.like(tail)):
            return None
        (crc,) = _CRC.unpack_from(tail, self.crc)
        record = Record(start, like.record.size, checked_crc(crc, like.record.size))
        return StoredTensor(like.dtype, like.shape, like.strides, like.first, record)


class StoredChunk(NamedTuple):
    """A chunk in a file: its layout, the byte at which its elements begin, and their checksum if there is one."""

    layout: StoredArray | StoredTensor
    start: int
    record: Record | None

    @classmethod
    def of(cls, tensor: StoredTensor) -> StoredChunk:
        return cls(tensor, tensor.record.start + tensor.first * tensor.dtype.itemsize, tensor.record)

    def array(self, file: str, what: str) -> FileArray:
        """All of its elements. what: the owner, for errors."""
        dtype, shape = self.layout.dtype, self.layout.shape
        steps = tuple([step * dtype.itemsize for step in self.layout.strides])
        return FileArray(file, self.start, shape, steps, dtype, what)

    def fill(self) -> tuple[int, int]:
        """How a chunk fills its record: only records that are filled alike can be compared by checksum."""
        assert self.record is not None
        return self.start - self.record.start, self.record.size


_Place: TypeAlias = tuple[str, int, int, int, str]
"""An extent (file, offset, length), the number of element bytes that it should contain, and their owner."""

_NOWHERE: Final[_Place] = ("", 0, 0, 0, "")


def data_files_of(
    directory: Path, metadata: DcpMetadata, is_safetensors: Callable[[Extent], bool]
) -> tuple[str, ...]:
    """The names of the files with chunks and objects. is_safetensors: whether a place is in a file of that format.

    CheckpointError unless all chunks and objects are inside regular files of sufficient length and do not overlap.
    """
    places: list[_Place] = []
    for name, info in metadata.tensors.items():
        for index, (chunk, extent) in enumerate(zip(info.chunks, metadata.extents[name], strict=True)):
            nbytes = chunk.numel * info.dtype.itemsize
            places.append((*extent, nbytes, name))
            if metadata.copies:
                copies = metadata.copies.get((name, index), ())
                places += [(*copy, nbytes, name) for copy in copies]
    for name, extent in metadata.objects.items():
        places += [(*e, 0, name) for e in (extent, *metadata.object_copies.get(name, ()))]
    sizes: dict[str, int] = {}
    for file, offset, length, nbytes, name in places:
        size = sizes.get(file)
        if size is None:
            # If damage is being noted, reading the chunks reports what a missing file lacks.
            size = 1 << 62
            with one_part(file):
                _, size = regular_file(directory, file, repr(name))
            sizes[file] = size
        if offset + length > size:
            with one_part(file):
                raise CheckpointError(
                    f"{directory / file} is truncated: expected at least {offset + length} bytes (for {name!r}), got "
                    f"{size}"
                )
        if length < nbytes:
            raise CheckpointError(
                f"{directory / file}: tensor {name!r}: expected {nbytes} bytes for a chunk, but {length} are stored"
            )
    places.sort(key=itemgetter(0, 1, 2))
    last, end = _NOWHERE, 0
    for span in places:
        file, offset, length, _, name = span
        # All tensors in one safetensors file share its place.
        if offset < end and file == last[0] and not (offset == last[1] and is_safetensors(Extent(*last[:3]))):
            raise CheckpointError(
                f"{directory / file}: {last[4]!r} and {name!r} are stored in the same place, at {offset}"
            )
        last, end = span, offset + length
    return tuple(sizes)


def looks_like_header(file: FileView | bytes, start: int) -> bool:
    """Whether a safetensors file may begin at this byte of a file."""
    length = int.from_bytes(file[start : start + LENGTH_BYTES], "little")
    begin = start + LENGTH_BYTES
    return length <= min(MAX_HEADER, len(file) - begin) and file[begin : begin + 1] == _SAFETENSORS


class SavedChunk(NamedTuple):
    """The archive of one chunk: where it is in the file, and the bytes of its elements."""

    offset: int
    length: int
    nbytes: int


def data_file_entry(path: Path, chunks: Sequence[SavedChunk]) -> ManifestFile:
    """The manifest's entry of a data file with archives of these chunks: its size, and the checksum of the other bytes.

    Reads all bytes but elements. CheckpointError if damaged.
    """
    size = path.stat().st_size
    ranges = []
    archives = Archives()
    if chunks:
        files = SourceFiles(path.parent)
        view = files.view(path.name)
        for chunk in chunks:
            stored = archives.find(view, chunk.offset, chunk.length, str(path))
            start = stored.record.start + stored.first * stored.dtype.itemsize
            ranges.append((start, start + chunk.nbytes))
        files.close()
    return ManifestFile(size, None, rest_checksum(path, ranges))


def read_header_at(files: SourceFiles, name: str, start: int, what: str) -> Header:
    """The header of the safetensors file that begins at this byte of a file. CheckpointError if damaged."""
    # From a store, only these bytes are fetched: first the length, then the header.
    length = header_length(files.view(name, (start, start + LENGTH_BYTES)), start)
    return read_header(files.view(name, (start, start + LENGTH_BYTES + length)), what, start)


def stored_chunk(header: Header, name: str, chunk: Box, what: str) -> StoredChunk:
    """Where the chunk of a tensor is in a safetensors file. CheckpointError if the file has a different chunk."""
    array = header.arrays.get(name)
    if array is None:
        raise CheckpointError(f"{what}: expected the safetensors file to contain the tensor, found none")
    offsets = saved_offsets(header, what).get(name)
    if offsets != chunk.offsets:
        raise CheckpointError(
            f"{what}: expected the chunk that .metadata names, got the chunk at {offsets}: this way of saving keeps "
            "only one chunk of a tensor per file, and the other chunks are lost"
        )
    return StoredChunk(array, array.start, None)
