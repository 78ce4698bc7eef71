"""Archives of many chunks: those that are alike are parsed once.

Two archives of chunks of one shape differ in the elements, in their checksum, and in records that nobody looks at:

    |  data.pkl, byteorder, ...  | crc |  data/0   |  directory ... | crc |  end records |
    |          the same          |     |           |     the same   |     |   the same   |
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bridge.formats.dcp.archive import (
    END,
    END64,
    END64_LOCATOR,
    PlacedRecord,
    Record,
    StoredTensor,
    checked_crc,
    records_and_places,
    tensor_in,
)
from bridge.formats.files.source_files import FileView
from bridge.formats.safetensors.header import LENGTH_BYTES

_CRC: Final = struct.Struct("<L")
_LOCAL_CRC: Final = 14
_ENTRY_CRC: Final = 16
"""Where a record's checksum is in its own header, and in its entry of the directory."""

_SAFETENSORS: Final = b"{"
_PADDED_TO: Final = 64
_MAX_FORMS: Final = 4096
_MAX_FIXED: Final = 16 << 10
_LOOKED_AT: Final = ("data.pkl", "byteorder")


class Archives:
    """Finds the tensors of archives; those that are alike, as chunks of one shape are, are parsed once."""

    def __init__(self) -> None:
        self._forms: dict[tuple[int, int, bytes], _Form] = {}

    def known(self, file: FileView, offset: int, length: int) -> StoredTensor | None:
        """The tensor of an archive that is like one found before; None if it may be another, or no archive."""
        form = self._forms.get(
            (length, offset % _PADDED_TO, file[offset + _LOCAL_CRC : offset + _LOCAL_CRC + 4])
        )
        return None if form is None or form.begins_as_safetensors else form.found(file, offset)

    def find(self, file: FileView, offset: int, length: int, what: str) -> StoredTensor:
        """See `find_tensor`."""
        # Where the padding depends on the place, as here, and by the checksum of the first record: the description.
        key = length, offset % _PADDED_TO, file[offset + _LOCAL_CRC : offset + _LOCAL_CRC + 4]
        form = self._forms.get(key)
        if form is not None and (found := form.found(file, offset)) is not None:
            return found
        records, end = records_and_places(file, offset, length, what)
        found = tensor_in(file, {name: one.record for name, one in records.items()}, what)
        keep = length - found.record.size <= _MAX_FIXED and (
            len(self._forms) < _MAX_FORMS or form is not None
        )
        if keep and _apart(records, offset, length, end):
            self._forms[key] = _Form.of(file, offset, length, records, found)
        return found


def _apart(records: Mapping[str, PlacedRecord], offset: int, length: int, end: tuple[int, int, int]) -> bool:
    """Whether records, directory and end records follow each other, as all writers but hostile ones have it.

    Else the content of a record, which may vary, could be what says how the archive is parsed.
    """
    directory, after_directory, last = end
    spans = sorted((one.header, one.record.start - offset + one.record.size) for one in records.values())
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


@dataclass(frozen=True, slots=True)
class _Form:
    """All of an archive that decides how it is parsed: bytes by their place in it, and what was found.

    What varies between archives that are alike is left out: elements, their checksum, and records not looked at.
    begins_as_safetensors: whether its first bytes could also be those of a safetensors file, in a file long enough.
    start, crc: where the elements and their checksum are. tensor: the result for the archive at offset 0.
    before, after: all bytes before and after the elements, cut where the checksum of these is.
    """

    fixed: tuple[tuple[int, int, bytes], ...]
    start: int
    crc: int
    tensor: StoredTensor
    begins_as_safetensors: bool
    before: tuple[bytes, bytes]
    after: tuple[bytes, bytes]
    length: int

    @classmethod
    def of(
        cls,
        file: FileView,
        offset: int,
        length: int,
        records: Mapping[str, PlacedRecord],
        tensor: StoredTensor,
    ) -> _Form:
        free: list[tuple[int, int]] = []
        local = at = 0
        for name, (record, header, entry) in records.items():
            if name not in _LOOKED_AT:
                start = record.start - offset
                free += [
                    (header + _LOCAL_CRC, header + _LOCAL_CRC + 4),
                    (start, start + record.size),
                    (entry + _ENTRY_CRC, entry + _ENTRY_CRC + 4),
                ]
            if record is tensor.record:
                local, at = header + _LOCAL_CRC, entry + _ENTRY_CRC
        fixed = []
        position = 0
        for low, high in (*sorted(free), (length, length)):
            if position < low:
                fixed.append((position, low, file[offset + position : offset + low]))
            position = max(position, high)
        start = tensor.record.start
        stop = start + tensor.record.size
        return cls(
            tuple(fixed),
            start - offset,
            at,
            tensor,
            begins_as_safetensors=file[offset + LENGTH_BYTES : offset + LENGTH_BYTES + 1] == _SAFETENSORS,
            before=(file[offset : offset + local], file[offset + local + 4 : start]),
            after=(file[stop : offset + at], file[offset + at + 4 : offset + length]),
            length=length,
        )

    def found(self, file: FileView, offset: int) -> StoredTensor | None:
        """The tensor of the archive at this offset, None if the archive is another."""
        like = self.tensor
        written = file[offset + self.crc : offset + self.crc + 4]
        stop = offset + self.start + like.record.size
        # Two looks instead of seven where also the records not looked at are the same, as one writer has them: half
        # of the time.
        if file[offset : offset + self.start] != written.join(self.before) or file[
            stop : offset + self.length
        ] != written.join(self.after):
            for low, high, content in self.fixed:
                if file[offset + low : offset + high] != content:
                    return None
        (crc,) = _CRC.unpack(written)
        record = Record(offset + self.start, like.record.size, checked_crc(crc, like.record.size))
        return StoredTensor(like.dtype, like.shape, like.strides, like.first, record)
