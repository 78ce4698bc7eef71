"""The members of a zip file, from its directory at the end; no member's data is read.

    | header, data | header, data | ... | directory | [zip64 end, locator] | end | comment |

Members must follow each other: a file whose members overlap claims more data than it has. The header before a member's
data says where the data begins. It is read only with the data, so listing a file in a store does not fetch all headers.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Never

from bridge.core.formats.reading.source_files import FileView, SourceFiles
from bridge.core.formats.tensors.base import COPY_AGAIN, CheckpointError

STORED: Final = 0
DEFLATED: Final = 8
END: Final = struct.Struct("<4s4H2LH")
END64_LOCATOR: Final = struct.Struct("<4sLQL")
END64: Final = struct.Struct("<4sQ2H2L4Q")
ENTRY: Final = struct.Struct("<4s6H3L5H2L")
LOCAL: Final = struct.Struct("<4s5H3L2H")
MAX32: Final = 0xFFFFFFFF
_MAX16: Final = 0xFFFF
_MAX_DIRECTORY: Final = 256 << 20
ZIP64_FIELD: Final = 1
_UTF8: Final = 1 << 11
_ENCRYPTED: Final = 1
ZIP_MAGIC: Final = b"PK\3\4"


@dataclass(frozen=True, slots=True)
class Member:
    """A file inside a zip file. stored, size: its bytes as stored, and after inflating. method: STORED or DEFLATED.

    header: where its header begins. limit: where the next header, or the directory, begins. crc: CRC-32 when inflated.
    """

    name: str
    method: int
    crc: int
    stored: int
    size: int
    header: int
    limit: int


def read_directory(files: SourceFiles, name: str, noun: str) -> dict[str, Member]:
    """All members by name, without folders. noun: the expected kind of file, for errors.

    CheckpointError if the directory is damaged, names a member twice, or has members that overlap, are encrypted, or
    are compressed by a method other than deflate.
    """
    path = files.directory / name
    size = files.size(name)

    def refuse(why: str) -> Never:
        raise CheckpointError(f"{path}: expected {noun}, but {why}")

    def damaged() -> Never:
        refuse(f"its directory is damaged: {COPY_AGAIN}")

    if size < END.size:
        refuse(f"the file has {size} bytes: {COPY_AGAIN}")
    tail = max(0, size - END.size - _MAX16 - END64_LOCATOR.size)
    end, count, length, position = _find_end(files.view(name, (tail, size)), tail, size, refuse)
    if length > _MAX_DIRECTORY or position + length > end or count * ENTRY.size > length:
        refuse(f"its directory is outside the file, or damaged: {COPY_AGAIN}")
    file = files.read(name, position, position + length)
    members: dict[str, Member] = {}
    starts: list[tuple[int, int, str]] = []
    at = 0
    for _ in range(count):
        if at + ENTRY.size > length:
            refuse(f"its directory is truncated: {COPY_AGAIN}")
        magic, _, _, flags, method, _, _, crc, stored, whole, lengths, extra, comment, _, _, _, header = (
            ENTRY.unpack_from(file, at)
        )
        if magic != b"PK\1\2":
            damaged()
        raw, at = file[at + ENTRY.size : at + ENTRY.size + lengths], at + ENTRY.size + lengths
        whole, stored, header = wide_values([whole, stored, header], file[at : at + extra], damaged)
        at += extra + comment
        try:
            member = raw.decode("utf-8" if flags & _UTF8 else "ascii")
        except UnicodeDecodeError:
            member = raw.decode("cp437")
        if at > length or header + LOCAL.size + lengths + stored > position:
            refuse(f"its member {member!r:.200} is outside the file")
        if flags & _ENCRYPTED or method not in (STORED, DEFLATED) or (method == STORED and stored != whole):
            refuse(f"its member {member!r:.200} is encrypted, or compressed by a method other than deflate")
        if member in members:
            refuse(f"its member {member!r:.200} occurs twice")
        starts.append((header, header + LOCAL.size + lengths + stored, member))
        members[member] = Member(member, method, crc, stored, whole, header, position)
    if at != length:
        # No checksum covers its count, and a count that is too small would silently drop members.
        refuse(f"its directory of {length} bytes ends after {count} members at {at}: is it damaged?")
    starts.sort()
    for (_, stop_of_first, first), (start, _, second) in itertools.pairwise(starts):
        if start < stop_of_first:
            refuse(f"its members {first!r:.200} and {second!r:.200} overlap")
        old = members[first]
        members[first] = Member(first, old.method, old.crc, old.stored, old.size, old.header, start)
    return {name: member for name, member in members.items() if not name.endswith("/")}


def data_start(files: SourceFiles, name: str, member: Member) -> int:
    """Where a member's data begins in the file, by its header. CheckpointError if header and directory disagree."""
    path = files.directory / name
    file = files.view(name, (member.header, member.header + LOCAL.size))
    magic, _, flags, method, *_, lengths, extra = file.unpack(LOCAL, member.header)
    start = member.header + LOCAL.size + lengths + extra
    if (
        magic != ZIP_MAGIC
        or method != member.method
        or flags & _ENCRYPTED
        or start + member.stored > member.limit
    ):
        raise CheckpointError(
            f"{path}: expected the header of {member.name!r:.200} at {member.header}, found another"
        )
    raw = file[member.header + LOCAL.size : member.header + LOCAL.size + lengths]
    if raw not in (member.name.encode(), member.name.encode("cp437", "replace")):
        raise CheckpointError(
            f"{path}: expected the header of {member.name!r:.200}, found that of {raw!r:.200}"
        )
    return start


def _find_end(
    file: FileView, tail: int, size: int, refuse: Callable[[str], Never]
) -> tuple[int, int, int, int]:
    """Where the end records begin, and their content: number of members, length and place of the directory."""
    data = file[tail:size]
    at = data.rfind(b"PK\5\6")
    while at >= 0 and (
        at + END.size > len(data) or at + END.size + END.unpack_from(data, at)[-1] != len(data)
    ):
        at = data.rfind(b"PK\5\6", 0, at)
    if at < 0:
        refuse(f"it has no directory at its end, so it is truncated or damaged: {COPY_AGAIN}")
    _, disk, first, _, count, length, position, _ = END.unpack_from(data, at)
    at += tail
    locator = at - END64_LOCATOR.size
    if locator >= 0 and file[locator : locator + 4] == b"PK\6\7":
        _, _, wide, _ = file.unpack(END64_LOCATOR, locator)
        if wide + END64.size > locator:
            refuse("its end record is outside the file")
        magic, *_, disk, first, _, count, length, position = file.unpack(END64, wide)
        if magic != b"PK\6\6":
            refuse(f"its end record is damaged: {COPY_AGAIN}")
        at = wide
    if disk or first:
        refuse("it is one part of an archive in several files")
    return at, count, length, position


def wide_values(values: list[int], extra: bytes, refuse: Callable[[], Never]) -> list[int]:
    """The values; values above 32 bits come from the extra field. refuse: called if that field is too short."""
    while len(extra) >= 4:
        field_id, size = struct.unpack_from("<2H", extra)
        if field_id == ZIP64_FIELD:
            places = [k for k, value in enumerate(values) if value == MAX32]
            if size < 8 * len(places) or len(extra) < 4 + 8 * len(places):
                refuse()
            for number, position in enumerate(places):
                values[position] = struct.unpack_from("<Q", extra, 4 + 8 * number)[0]
            break
        extra = extra[4 + size :]
    return values
