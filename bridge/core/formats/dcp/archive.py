"""The zip archive that holds one tensor chunk or one value inside a `.distcp` file.

A `.distcp` file is a sequence of archives as `torch.save` writes them, with uncompressed records. `.metadata` gives the
offset and length of each archive. Positions inside an archive count from the start of the archive:

    |<---------------------------- length ----------------------------->|
    | data.pkl | byteorder | version |  data/0   | directory | end      |
    |          |           |         |  (bytes)  |           | records  |
    offset                            64-aligned in the file when written here

`data.pkl` says how to read the bytes: dtype, shape, strides, first element.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple, Never

import numpy as np
from isal import isal_zlib

from bridge.core.formats.dcp.pickle import read_pickle
from bridge.core.formats.dcp.pickle_records import (
    FOREIGN_VALUES,
    Call,
    Name,
    Persistent,
    Vocabulary,
    is_index,
    torch_dtype,
)
from bridge.core.formats.dcp.plain_values import plain_from_pickle
from bridge.core.formats.reading.source_files import FileView, SourceFiles
from bridge.core.formats.reading.zip_directory import (
    END,
    END64,
    END64_LOCATOR,
    ENTRY,
    LOCAL,
    MAX32,
    wide_values,
)
from bridge.core.formats.tensors.base import DTYPES, CheckpointError

_MAX_ENTRIES = 4096
_AROUND: Final = 64 << 10

STORAGES: Mapping[str, str] = {
    "torch.DoubleStorage": "float64", "torch.FloatStorage": "float32", "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16", "torch.LongStorage": "int64", "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16", "torch.CharStorage": "int8", "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool", "torch.ComplexFloatStorage": "complex64",
    "torch.ComplexDoubleStorage": "complex128",
}  # fmt: skip
UNTYPED = "torch.storage.UntypedStorage"
REBUILD = "torch._utils._rebuild_tensor_v2"
REBUILD_UNTYPED = "torch._utils._rebuild_tensor_v3"
_TENSOR = Vocabulary(
    max_bytes=4096,
    calls=frozenset({REBUILD, REBUILD_UNTYPED, "collections.OrderedDict"}),
    constants=re.compile(r"torch\.[A-Za-z0-9_]+|torch\.storage\.UntypedStorage"),
    persistent=True,
)


class Record(NamedTuple):
    """Uncompressed bytes [start, start + size) of a file; crc is their CRC-32, None if the writer computed none."""

    start: int
    size: int
    crc: int | None


class StoredTensor(NamedTuple):
    """Where a chunk's elements are in its record: element x is at `first + sum(x * strides)`, all in elements."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    record: Record


class PlacedRecord(NamedTuple):
    """A record, and the places of its header and of its directory entry in the archive."""

    record: Record
    header: int
    entry: int


def find_records(file: FileView, offset: int, length: int, what: str) -> dict[str, Record]:
    """The records of the archive in bytes [offset, offset + length) of the file, by name without their folder.

    CheckpointError, beginning with `what`, if this is not such an archive or anything points outside it.
    """
    return {name: placed.record for name, placed in records_and_places(file, offset, length, what)[0].items()}


def records_and_places(
    file: FileView, offset: int, length: int, what: str
) -> tuple[dict[str, PlacedRecord], tuple[int, int, int]]:
    """The records with their places, the start and end of the directory, and the start of the end records."""

    def need(holds: bool, why: str) -> None:
        if not holds:
            raise CheckpointError(f"{what}: expected an archive of torch.save, but {why}")

    def damaged() -> Never:
        raise CheckpointError(f"{what}: expected an archive of torch.save, but its directory is damaged")

    def at(position: int, layout: struct.Struct, magic: bytes, record_type: str) -> tuple[int, ...]:
        need(0 <= position <= length - layout.size, f"its {record_type} is outside the file")
        fields = file.unpack(layout, offset + position)
        need(fields[0] == magic, f"its {record_type} is damaged")
        return fields

    need(length >= 0 and offset >= 0 and offset + length <= len(file), "the file is too short")
    end = at(length - END.size, END, b"PK\5\6", "end record")
    need(end[-1] == 0, "it has a comment")
    locator = at(length - END.size - END64_LOCATOR.size, END64_LOCATOR, b"PK\6\7", "zip64 locator")
    *_, entries, directory_size, directory = at(locator[2], END64, b"PK\6\6", "zip64 end record")
    need(entries <= _MAX_ENTRIES, f"it has {entries} records")
    need(directory + directory_size <= length, "its directory is outside the file")

    position = directory
    records: dict[str, PlacedRecord] = {}
    for _ in range(entries):
        entry = position
        fields = at(position, ENTRY, b"PK\1\2", "directory")
        flags, method, crc, stored, size = fields[3], fields[4], *fields[7:10]
        name_length, extra_length, comment_length, local = *fields[10:13], fields[16]
        start = offset + position + ENTRY.size
        position += ENTRY.size + name_length + extra_length + comment_length
        need(position <= length, "its directory is damaged")
        raw_name = file[start : start + name_length]
        extra = file[start + name_length : start + name_length + extra_length]
        if MAX32 in (size, stored, local):
            size, stored, local = wide_values([size, stored, local], extra, damaged)
        if MAX32 in (size, stored, local):
            damaged()
        need(method == 0 and not flags & 1 and stored == size, "a record is compressed or encrypted")
        header = at(local, LOCAL, b"PK\3\4", "record header")
        data = local + LOCAL.size + header[-2] + header[-1]
        need(data + size <= length, "a record is outside the file")
        need(
            file[offset + local + 30 : offset + local + 30 + header[-2]] == raw_name,
            "its directory is damaged",
        )
        name = raw_name.decode("utf-8", "replace").partition("/")[2]
        need(name not in records, "a record occurs twice")
        records[name] = PlacedRecord(Record(offset + data, size, checked_crc(crc, size)), local, entry)
    return records, (directory, position, locator[2])


def checked_crc(crc: int, size: int) -> int | None:
    """A record's checksum, None if its writer computed none."""
    # torch.save can be told to skip checksums, and then writes 0.
    return crc if crc or not size else None


def around(offset: int, length: int) -> tuple[tuple[int, int], ...]:
    """Ranges of a file in which an archive describes its tensor: in a large archive, all but the middle."""
    stop = offset + length
    if length <= 2 * _AROUND:
        return ((offset, stop),)
    return (offset, offset + _AROUND), (stop - _AROUND, stop)


def verify_record(files: SourceFiles, name: str, record: Record, what: str) -> None:
    """Compare a record's bytes in a file with their checksum, holding no more than a small part of them in memory.

    CheckpointError, beginning with `what`, where they differ or cannot be read.
    """
    crc = 0
    for part in files.scan(name, record.start, record.start + record.size, what):
        crc = isal_zlib.crc32(part, crc)
    compare_record(crc, record, what)


def compare_record(crc: int, record: Record, what: str) -> None:
    """CheckpointError, beginning with `what`, unless this is the CRC-32 of a record, if its writer computed one."""
    if record.crc is not None and crc != record.crc:
        raise CheckpointError(
            f"{what}: the data is damaged: expected CRC-32 {record.crc:08x} of {record.size} bytes, got {crc:08x}"
        )


def _small_record(file: FileView, records: Mapping[str, Record], name: str, limit: int, what: str) -> bytes:
    record = records.get(name)
    if record is None or record.size > limit:
        raise CheckpointError(
            f"{what}: expected a record {name!r} of at most {limit} bytes, "
            f"got {'none' if record is None else f'{record.size} bytes'}"
        )
    data = file[record.start : record.start + record.size]
    compare_record(isal_zlib.crc32(data), record, f"{what}: {name}")
    return data


def read_value(file: FileView, offset: int, length: int, what: str) -> object:
    """The plain Python value in an archive. CheckpointError when it is damaged or not made of plain values."""
    records = find_records(file, offset, length, what)
    data = _small_record(file, records, "data.pkl", FOREIGN_VALUES.max_bytes, what)
    return plain_from_pickle(read_pickle(data, FOREIGN_VALUES, what), what)


def tensor_in(file: FileView, records: Mapping[str, Record], what: str) -> StoredTensor:
    """Where and how an archive with these records stores its one tensor. The data itself is not read.

    CheckpointError, beginning with `what`, for anything but one strided tensor of a known dtype inside its record.
    """
    if "byteorder" in records:
        order = _small_record(file, records, "byteorder", 16, what)
        if order != b"little":
            raise CheckpointError(f"{what}: expected little-endian data, got byte order {order!r}")
    description = _description(_small_record(file, records, "data.pkl", _TENSOR.max_bytes, what), what)
    tensor, reason = describe_tensor(description, records, what)
    if reason is not None:
        raise CheckpointError(f"{what}: expected a dtype out of {', '.join(DTYPES)}, got {reason}")
    return tensor


def describe_tensor(
    description: object, records: Mapping[str, Record], what: str
) -> tuple[StoredTensor, str | None]:
    """The tensor that a pickle describes, in one of these records, and the reason if its elements cannot be read.

    CheckpointError, beginning with `what`, for anything but one strided tensor of a PyTorch dtype inside its record.
    """
    match description:
        case Call(
            name=function, args=(Persistent(id=storage), first, shape, strides, bool(), {**hooks}, *rest)
        ) if not hooks and function in (REBUILD, REBUILD_UNTYPED):
            pass
        case _:
            raise CheckpointError(f"{what}: expected the description of one plain tensor, got something else")
    dtype_argument = rest.pop(0) if function == REBUILD_UNTYPED and rest else None
    if any(rest):
        raise CheckpointError(f"{what}: expected a plain tensor, got one marked as conjugated or negated")
    match storage:
        case ("storage", Name(dotted=storage_class), str(key), str(), int(count)):
            pass
        case _:
            raise CheckpointError(f"{what}: expected the description of one storage, got something else")
    if storage_class == UNTYPED and isinstance(dtype_argument, Name):
        known = torch_dtype(dtype_argument.dotted)
    else:
        known = torch_dtype(STORAGES.get(storage_class, "")) if dtype_argument is None else None
    if known is None:
        raise CheckpointError(
            f"{what}: expected a dtype out of {', '.join(DTYPES)}, got another ({storage_class})"
        )
    dtype, reason = known
    record = records.get(f"data/{key}")
    nbytes = count if storage_class == UNTYPED else count * dtype.itemsize
    if record is None or record.size != nbytes:
        raise CheckpointError(
            f"{what}: expected a record of {nbytes} bytes, got {'none' if record is None else record.size}"
        )
    if not (is_index(shape) and is_index(strides) and isinstance(first, int) and first >= 0):
        raise CheckpointError(f"{what}: expected sizes and strides of at least 0, got something else")
    numel = math.prod(shape)
    last = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=False))
    fits = numel == 0 or ((last + 1) * dtype.itemsize <= record.size and numel * dtype.itemsize < 1 << 63)
    if len(shape) != len(strides) or not fits:
        raise CheckpointError(
            f"{what}: expected a tensor within its {record.size} stored bytes, got one that extends beyond them"
        )
    # Strides that are never used may have any value, even one too large for NumPy.
    strides = tuple(s if n > 1 and numel else 0 for n, s in zip(shape, strides, strict=True))
    first = first if numel else 0
    return StoredTensor(dtype, shape, strides, first, record), reason


def _description(data: bytes, what: str) -> object:
    try:
        return _read_description(data)
    except CheckpointError:
        return read_pickle(data, _TENSOR, what)


@lru_cache(maxsize=256)
def _read_description(data: bytes) -> object:
    # Chunks of one shape have the same description, and reading it takes longer than small data.
    return read_pickle(data, _TENSOR, "")
