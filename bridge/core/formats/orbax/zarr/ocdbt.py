"""OCDBT stores: writing, and checks before reading. A store is a manifest, B-tree nodes with all keys, and data files.

    <store>/manifest.ocdbt        where the root node is
    <store>/d/3f2a...             value | value | ... | node

    node    magic, length, version, compression | body, perhaps zstd | CRC-32C
    body    height | data files | number of entries | shared lengths | other lengths | ...
    key     the length of the prefix shared with the previous key, and the rest: "layers/0/w", (9) "v", (7) "1/w", ...
    entry   key, length of the value, and the value itself or its offset in a data file

Format: https://google.github.io/tensorstore/kvstore/ocdbt/ ("Storage format"). tensorstore itself writes values through
memory, one transaction at a time; `OcdbtWriter` knows a value's place first, so bytes go straight to the file.

When reading, tensorstore decodes the nodes. `NodeBudget` first counts how much they claim to contain: a key that shares
all but one byte with the previous key takes one byte in the node but its full length in memory, so a node of 263 kB
could contain 4 GB of keys.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import google_crc32c
import numpy as np
import tensorstore as ts
import zstandard

from bridge.core.formats.files.data_file import DataFile
from bridge.core.formats.files.sink import Place
from bridge.core.formats.stores.upload import UploadFile
from bridge.core.formats.tensors.base import CheckpointError

MANIFEST = "manifest.ocdbt"
MAX_INLINE = 1024
ALIGNMENT = 64
"""Values begin at multiples of this number; the bytes before the next one are padding."""
_NODE_MAGIC = 0x0CDB20DE
_CONFIG = {
    "max_inline_value_bytes": MAX_INLINE,
    "max_decoded_node_bytes": 100_000_000,
    "version_tree_arity_log2": 4,
    "compression": {"id": "zstd"},
}

_HEADER: Final = 4 + 8  # magic and length
_CRC: Final = 4
_LONGEST: Final = 5  # bytes of a number below 2**35

_FREE_ENTRIES: Final = 1 << 18
_ENTRIES_PER_BYTE: Final = 4
_FREE_KEYS: Final = 64 << 20
_KEYS_PER_BYTE: Final = 256
_FREE_BODY: Final = 64 << 20
_BODY_PER_BYTE: Final = 64
_PART: Final = 1 << 20


class OcdbtWriter:
    """A new store in a directory, or one begun by an earlier attempt, whose data file is taken over.

    open_file: opens the data file; the caller syncs and closes it. Declare every value with `reserve` or `put`, in the
    same order at every attempt; fill the reserved `places`, by any number of threads; then `finish`.
    """

    def __init__(self, directory: Path, open_file: Callable[[Path], DataFile | UploadFile]) -> None:
        self._directory = directory
        folder = directory / "d"
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(path.name for path in folder.iterdir())
        self._name = earlier[0] if earlier else secrets.token_hex(16)
        self._file = open_file(folder / self._name)
        self._inline: dict[str, bytes] = {}
        self.places: dict[str, Place] = {}

    def put(self, key: str, value: bytes) -> None:
        """Add a small value. Up to MAX_INLINE bytes are stored in the node; a larger value goes to the data file."""
        if len(value) <= MAX_INLINE:
            self._inline[key] = value
        else:
            self._file.write(self.reserve(key, len(value)).offset, value)

    def reserve(self, key: str, length: int) -> Place:
        """Reserve room in the data file for a value of so many bytes."""
        place = self.places[key] = Place(self._file, self._file.reserve(length, ALIGNMENT), length)
        return place

    def finish(self, sync: Callable[[], None]) -> None:
        """Write node and manifest: then the store can be opened. sync: syncs the data file to disk.

        A store without values has neither, as in stock Orbax.
        """
        if not (self._inline or self.places):
            return
        end = self._file.end
        path = f"d/{self._name}"
        node = _leaf_node(path, self._inline, self.places)
        # After the last value's padding, which may be written later. Uploads to an object store have no padding.
        sent = isinstance(self._file, UploadFile)
        start = self._file.reserve(len(node), 1 if sent else ALIGNMENT)
        self._file.write(start, node)
        # Before the manifest: it must not refer to a node or to values that the disk does not have.
        sync()
        # Another `finish` after more values writes another node.
        self._file.end = end
        root = {
            "location": f"btreenode::{path}:{start}:{len(node)}",
            "statistics": {
                "num_keys": len(self._inline) + len(self.places),
                "num_tree_bytes": len(node),
                "num_indirect_value_bytes": sum(place.length for place in self.places.values()),
            },
        }
        version = {"generation_number": 1, "root_height": 0, "commit_time": time.time_ns(), "root": root}
        config = {**_CONFIG, "uuid": secrets.token_hex(16)}
        manifest = ts.ocdbt.undump_manifest(
            {"config": config, "versions": [version], "version_tree_nodes": []}
        )
        (self._directory / MANIFEST).write_bytes(manifest)


def _leaf_node(path: str, inline: dict[str, bytes], places: dict[str, Place]) -> bytes:
    """The node with all keys, uncompressed."""
    # Code points sort in the same order as their UTF-8 bytes.
    keys = sorted([*inline, *places])
    encoded = [key.encode() for key in keys]
    shared = list(itertools.starmap(_common, itertools.pairwise(encoded)))
    suffixes = [key[n:] for key, n in zip(encoded, [0, *shared], strict=True)]
    values = [inline.get(key) for key in keys]
    stored = [places[key] for key, value in zip(keys, values, strict=True) if value is None]
    there = iter(stored)
    lengths = [next(there).length if value is None else len(value) for value in values]
    body = b"".join(
        (
            b"\0",  # height
            _table_of_one(path.encode()),
            _varint(len(keys)),
            _varints(shared),
            _varints(map(len, suffixes)),
            *suffixes,
            _varints(lengths),
            bytes([value is None for value in values]),
            bytes(len(stored)),  # number of the data file, of each value in it
            _varints(place.offset for place in stored),
            *filter(None, values),
        )
    )
    version_and_compression = b"\0\0"
    length = 4 + 8 + len(version_and_compression) + len(body) + 4
    node = struct.pack(">I", _NODE_MAGIC) + struct.pack("<Q", length) + version_and_compression + body
    return node + struct.pack("<I", google_crc32c.value(node))


def _table_of_one(path: bytes) -> bytes:
    """The table of data files with one entry, relative to the store."""
    return _varint(1) + _varint(len(path)) + _varint(0) + path


def _common(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(a), len(b))
    # The position where two numbers differ, found in C: comparing byte by byte takes ten times as long.
    differ = int.from_bytes(a[:shorter], "big") ^ int.from_bytes(b[:shorter], "big")
    return shorter - -(-differ.bit_length() // 8)


def _varints(values: Iterable[int]) -> bytes:
    """`_varint` of each number, all at once, which takes a tenth of the time."""
    numbers = np.fromiter(values, np.uint64)
    if not len(numbers):
        return b""
    bits = 7 * np.arange(-(-max(1, int(numbers.max()).bit_length()) // 7), dtype=np.uint64)
    shifted = numbers[:, None] >> bits
    # One column for each byte, the lowest first: a number has all bytes up to its last nonzero byte, at least one.
    more = shifted[:, 1:] != 0
    wanted = np.concatenate((np.ones((len(numbers), 1), bool), more), axis=1)
    data = (shifted & np.uint64(0x7F)).astype(np.uint8)
    data[:, :-1] |= more.astype(np.uint8) << 7
    return data[wanted].tobytes()


def _varint(value: int) -> bytes:
    """Seven bits per byte, the lowest first; the highest bit says that more bytes follow."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class NodeBudget:
    """The most that a store's nodes may contain, relative to their bytes on disk; small stores get a free allowance."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._stored = self._entries = self._keys = 0

    def take(self, node: bytes, prefix: int) -> None:
        """Count a node whose keys continue `prefix` bytes of the nodes above.

        CheckpointError if it cannot be counted, or claims more than so many bytes can justify.
        """
        self._stored += len(node)
        # Before the keys are read: so many numbers take memory, too.
        most = _FREE_ENTRIES + _ENTRIES_PER_BYTE * self._stored - self._entries
        entries, keys = entries_and_keys(node, most, self._what)
        self._entries += entries
        self._keys += keys + entries * prefix
        limit = _FREE_KEYS + _KEYS_PER_BYTE * self._stored
        if self._keys > limit:
            raise CheckpointError(
                f"{self._what}: expected at most {limit} bytes of keys in {self._stored} bytes of B-tree nodes, got "
                f"{self._keys}"
            )


def entries_and_keys(node: bytes, most: int, what: str) -> tuple[int, int]:
    """The number of entries in an encoded node, and the total bytes of their keys.

    CheckpointError, beginning with `what`, for a malformed node, and for a node with more than `most` entries.
    """
    try:
        numbers = _Numbers(np.frombuffer(node, np.uint8)[_HEADER:-_CRC])
        numbers.next(1)  # version
        compressed = numbers.next(1)
        body = numbers.left.tobytes()
        if compressed:
            body = _decompressed(body, _FREE_BODY + _BODY_PER_BYTE * len(body))
        numbers = _Numbers(np.frombuffer(body, np.uint8)[1:])
        files = _counted(numbers, most, "files")
        numbers.next(files - 1)  # the length that each name shares with the previous name
        names = numbers.next(files)
        numbers.next(files)  # how many of these bytes are the folder's
        numbers.skip(names)
        entries = _counted(numbers, most, "entries")
        return entries, numbers.next(entries - 1) + numbers.next(entries)
    except (IndexError, ValueError, zstandard.ZstdError) as error:
        raise CheckpointError(f"{what}: malformed or truncated B-tree node: {error}") from error


def _counted(numbers: _Numbers, most: int, noun: str) -> int:
    count = numbers.next(1)
    if count > most:
        raise ValueError(f"expected at most {most} {noun} more, got {count}")
    return count


def require_bounded_manifest(manifest: bytes, most: int, what: str) -> None:
    """CheckpointError, beginning with `what`, for a compressed manifest of more than `most` bytes.

    tensorstore decompresses a manifest of any size.
    """
    with suppress(IndexError, ValueError, zstandard.ZstdError):  # tensorstore reports the error
        numbers = _Numbers(np.frombuffer(manifest, np.uint8)[_HEADER:-_CRC])
        numbers.next(1)  # version
        if numbers.next(1):
            try:
                _decompressed(numbers.left.tobytes(), most)
            except _TooLargeError as error:
                raise CheckpointError(f"{what}: the index {MANIFEST}: {error}") from error


class _TooLargeError(ValueError):
    """Compressed data yields more bytes than expected."""


def _decompressed(data: bytes, most: int) -> bytes:
    body = bytearray()
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        while part := reader.read(_PART):
            body += part
            if len(body) > most:
                raise _TooLargeError(
                    f"expected at most {most} bytes in {len(data)} compressed ones, got more"
                )
    return bytes(body)


class _Numbers:
    """Numbers with seven bits per byte, the lowest first; only their sums are needed."""

    def __init__(self, data: np.ndarray) -> None:
        self.left = data

    def next(self, count: int) -> int:
        """The sum of the next numbers; none for a `count` below one."""
        if count < 1:
            return 0
        window = self.left[: _LONGEST * min(count, len(self.left))]
        ends = np.flatnonzero(window < 0x80)[:count] + 1
        if len(ends) < count:
            raise ValueError(f"expected {count} numbers, found {len(ends)}")
        starts = np.concatenate(([0], ends[:-1]))
        places = np.arange(ends[-1]) - np.repeat(starts, ends - starts)
        if places.max() >= _LONGEST:
            raise ValueError("a number that is too large")
        total = int(((window[: ends[-1]] & 0x7F) * np.exp2(7 * places)).sum())
        self.left = self.left[ends[-1] :]
        return total

    def skip(self, count: int) -> None:
        """Skip so many bytes."""
        if count > len(self.left):
            raise ValueError("names of files that are longer than the node")
        self.left = self.left[count:]
