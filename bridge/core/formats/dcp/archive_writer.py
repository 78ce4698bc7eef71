"""Makes the zip archives of a `.distcp` file: everything around the data. The data's place is known before the data.

    |  before                            |  data/0   |  after                      |
    |  data.pkl, byteorder, version, ... |  (bytes)  |  directory, end records     |
    offset                               64-aligned in the file

Lengths depend only on dtype, sizes and offset. So all archives of a checkpoint can be laid out first, and their data
written in any order. The checksum goes into `before` and `after`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import numpy as np
from isal import isal_zlib

from bridge.core.formats.dcp.archive import REBUILD, REBUILD_UNTYPED, STORAGES, UNTYPED
from bridge.core.formats.dcp.pickle_records import PLAIN_VALUES, Call, Name, Persistent
from bridge.core.formats.dcp.pickle_writer import write_pickle
from bridge.core.formats.reading.zip_directory import (
    END,
    END64,
    END64_LOCATOR,
    ENTRY,
    LOCAL,
    MAX32,
    ZIP64_FIELD,
)
from bridge.core.formats.tensors.base import CheckpointError, dtype_from_name, dtype_name
from bridge.core.formats.tensors.plain import plain_value

ALIGNMENT: Final = 64
WIDE: Final = MAX32  # record sizes from here on are written with 64 bits
_CRC: Final = struct.Struct("<L")
_PADDING_FIELD = 0x4246  # "FB", what torch.save uses for its padding


def value_archive(value: object, offset: int, what: str) -> bytes:
    """An archive with a plain value, readable by torch.load(weights_only=True), for this offset of its file."""
    pickled = write_pickle(plain_value(value, what, binary=True), 2)
    if len(pickled) > PLAIN_VALUES.max_bytes:
        raise CheckpointError(f"{what}: expected at most {PLAIN_VALUES.max_bytes} bytes, got {len(pickled)}")
    before, after = _around({"data.pkl": pickled}, None, 0, offset)
    return before + after


def tensor_archive(dtype: np.dtype, sizes: tuple[int, ...], offset: int, crc: int) -> tuple[bytes, bytes]:
    """The bytes before and after the data of a chunk in row-major order; crc: the CRC-32 of the data."""
    before, in_before, after, in_after = _template(dtype_name(dtype), sizes, offset % ALIGNMENT)
    check = _CRC.pack(crc)
    return (
        before[:in_before] + check + before[in_before + _CRC.size :],
        after[:in_after] + check + after[in_after + _CRC.size :],
    )


def tensor_archive_length(dtype: np.dtype, sizes: tuple[int, ...], offset: int) -> int:
    """Bytes of the whole archive."""
    before, _, after, _ = _template(dtype_name(dtype), sizes, offset % ALIGNMENT)
    return len(before) + math.prod(sizes) * dtype.itemsize + len(after)


def tensor_archive_frame(dtype: np.dtype, sizes: tuple[int, ...], offset: int) -> tuple[int, int]:
    """How many bytes there are before and after the data."""
    before, _, after, _ = _template(dtype_name(dtype), sizes, offset % ALIGNMENT)
    return len(before), len(after)


@lru_cache(maxsize=4096)
def _template(name: str, sizes: tuple[int, ...], padding_phase: int) -> tuple[bytes, int, bytes, int]:
    """The bytes around the data, without its checksum, and the checksum's position in each half.

    Chunks of one shape differ in nothing else, and a model has thousands of them.
    """
    dtype = dtype_from_name(name)
    head = {"data.pkl": _description(name, sizes)}
    nbytes = math.prod(sizes) * dtype.itemsize
    (before, after), others = (_around(head, nbytes, crc, padding_phase) for crc in (0, MAX32))
    # The positions where the two differ, four bytes each.
    in_before, in_after = (
        next(i for i, (a, b) in enumerate(zip(part, other, strict=True)) if a != b)
        for part, other in zip((before, after), others, strict=True)
    )
    return before, in_before, after, in_after


@lru_cache(maxsize=4096)
def _description(name: str, sizes: tuple[int, ...]) -> bytes:
    dtype = dtype_from_name(name)
    storage = next((s for s, d in STORAGES.items() if d == name), None)
    count = math.prod(sizes) * (1 if storage else dtype.itemsize)
    strides = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    reference = Persistent(("storage", Name(storage or UNTYPED), "0", "cpu", count))
    hooks = Call("collections.OrderedDict", ())
    args = (reference, 0, sizes, strides, False, hooks)
    call = Call(REBUILD, args) if storage else Call(REBUILD_UNTYPED, (*args, Name(f"torch.{name}")))
    return write_pickle(call, 2)


def _around(head: Mapping[str, bytes], nbytes: int | None, crc: int, offset: int) -> tuple[bytes, bytes]:
    """Data comes last, so that all record headers are below 4 GiB and only sizes need 64 bits."""
    before = b""
    directory = []
    contents: dict[str, bytes | None] = {**head, "byteorder": b"little", "version": b"3\n"}
    if nbytes is not None:
        contents["data/0"] = None
    for short_name, content in contents.items():
        name = b"archive/" + short_name.encode()
        size = len(content) if content is not None else nbytes or 0
        check = isal_zlib.crc32(content) if content is not None else crc
        local = len(before)
        wide = size >= WIDE
        size32 = MAX32 if wide else size
        extra = struct.pack("<2H2Q", ZIP64_FIELD, 16, size, size) if wide else b""
        padding = -(offset + local + LOCAL.size + len(name) + len(extra) + 4) % ALIGNMENT
        padded = extra + struct.pack("<2H", _PADDING_FIELD, padding) + bytes(padding)
        version = 45 if wide else 20
        sizes = (0x21, check, size32, size32, len(name))
        before += (
            LOCAL.pack(b"PK\3\4", version, 0, 0, 0, *sizes, len(padded)) + name + padded + (content or b"")
        )
        fixed = (b"PK\1\2", version, version, 0, 0, 0, *sizes, len(extra), 0, 0, 0, 0)
        directory.append(ENTRY.pack(*fixed, local) + name + extra)
    position = len(before) + (nbytes or 0)
    entries = b"".join(directory)
    counts = (len(directory), len(directory))
    end = (
        END64.pack(b"PK\6\6", END64.size - 12, 45, 45, 0, 0, *counts, len(entries), position),
        END64_LOCATOR.pack(b"PK\6\7", 0, position + len(entries), 1),
        END.pack(b"PK\5\6", 0, 0, *counts, len(entries), min(position, MAX32), 0),
    )
    return before, entries + b"".join(end)
