"""TensorBoard event files: records with checksums (TFRecord), each a protobuf message ``Event``, without libraries.

A record is its length (uint64), the masked CRC-32C of these 8 bytes, the message, and the message's masked CRC-32C, all
little-endian. Only these fields of the messages matter::

    Event    2 step (int64)   5 summary
    Summary  1 value, repeated:  1 tag   2 simple_value (float)   8 tensor
    Tensor   1 dtype (1 float, 2 double)   2 shape (2 dimensions)   4 content   5 float values   6 double values
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from bridge.parity.curves.series import Collected, MetricsError

_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MASK = 0xA282EAD8
_TENSOR_DTYPES = {1: ("<f", 5), 2: ("<d", 6)}
"""By the number of a dtype: the layout of one value, and the field of values outside ``content``."""


def masked_crc(data: bytes) -> int:
    """The CRC-32C of ``data``, rotated and shifted as TFRecord files store it."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def is_event_file(path: Path) -> bool:
    """Whether the file begins with the header of a record."""
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
    return len(start) == _HEADER.size and _HEADER.unpack(start)[1] == masked_crc(start[:8])


def read_events(path: Path, points: Collected) -> None:
    """Add all scalars of one event file to ``points``.

    An incomplete last record is skipped with a warning. Raises ``MetricsError`` for a wrong checksum or message.
    """
    with path.open("rb") as file:
        for offset, record in _records(file, path):
            try:
                _add_event(record, points)
            except (_MalformedError, UnicodeDecodeError, struct.error) as error:
                raise MetricsError(
                    f"{path}, record at byte {offset}: expected a TensorBoard Event message, found one that does not "
                    f"parse ({error}), although its checksum is right; is this another kind of TFRecord file?"
                ) from None


def _records(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    size = file.seek(0, 2)
    offset = 0
    while offset < size:
        file.seek(offset)
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return _incomplete(path, offset)
        length, crc = _HEADER.unpack(header)
        _check(path, offset, "length", header[:8], crc)
        end = offset + _HEADER.size + length + _CRC.size
        if end > size:
            return _incomplete(path, offset)
        data = file.read(length)
        _check(path, offset, "data", data, _CRC.unpack(file.read(_CRC.size))[0])
        yield offset, data
        offset = end


def _incomplete(path: Path, offset: int) -> None:
    warnings.warn(f"{path}: the last record, at byte {offset}, is incomplete and was skipped", stacklevel=5)


def _check(path: Path, offset: int, part: str, data: bytes, stored: int) -> None:
    computed = masked_crc(data)
    if computed != stored:
        raise MetricsError(
            f"{path}, record at byte {offset}: expected checksum {stored:#010x} for the record's {part}, found "
            f"{computed:#010x}; the file is damaged from there on, or it is not a TensorBoard event file"
        )


class _MalformedError(ValueError):
    pass


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at ``at``, and the place after it."""
    value = 0
    # Ten bytes hold 64 bits; a longer number is damage.
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise _MalformedError(f"no number at byte {at}")


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Number, value and bytes of every field; for fields of bytes the value is 0, for others the bytes are raw."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value, start = 0, at
        if wire == 0:
            value, end = _varint(data, at)
        elif wire in (1, 5):
            end = at + (8 if wire == 1 else 4)
        elif wire == 2:
            length, start = _varint(data, at)
            end = start + length
        else:
            raise _MalformedError(f"wire type {wire} of field {number}")
        if end > len(data):
            raise _MalformedError(f"field {number} goes beyond the message's end")
        yield number, value, data[start:end]
        at = end


def _add_event(data: bytes, points: Collected) -> None:
    step, summaries = 0, []
    for number, value, content in _fields(data):
        if number == 2:
            step = value - 2**64 if value >= 2**63 else value
        elif number == 5:
            summaries.append(content)
    for summary in summaries:
        for number, _, content in _fields(summary):
            if number == 1:
                _add_value(content, step, points)


def _add_value(data: bytes, step: int, points: Collected) -> None:
    tag, scalar = "", None
    for number, _, content in _fields(data):
        if number == 1:
            tag = content.decode()
        elif number == 2:
            scalar = struct.unpack("<f", content)[0]
        elif number == 8:
            scalar = _scalar(content)
    if scalar is not None:
        points.add(tag, step, scalar)


def _scalar(tensor: bytes) -> float | None:
    """The one number of a tensor without dimensions; None for other tensors, such as texts and histograms."""
    fields = list(_fields(tensor))
    dtype = next((value for number, value, _ in fields if number == 1), 0)
    shapes = [content for number, _, content in fields if number == 2]
    has_dimensions = any(number == 2 for shape in shapes for number, _, _ in _fields(shape))
    if dtype not in _TENSOR_DTYPES or has_dimensions:
        return None
    layout, values = _TENSOR_DTYPES[dtype]
    stored = b"".join(content for number, _, content in fields if number in (4, values))
    # Protobuf leaves out what is zero.
    number: float = struct.unpack(layout, stored)[0] if stored else 0.0
    return number
