"""Makes OCDBT stores: a manifest, one B-tree node with all keys, and one data file with the values.

    <store>/manifest.ocdbt        where the node is
    <store>/d/3f2a...             value | value | ... | node

    node    magic, length, version, compression | height | data files | entries | CRC-32C
    entry   key (without what it shares with the one before), length of the value, inline or at an offset of the file

Format: https://google.github.io/tensorstore/kvstore/ocdbt/ ("Storage format"). tensorstore itself writes values through
memory, a transaction at a time; here a value's place is known before its bytes, which go straight to the file.
"""

from __future__ import annotations

import itertools
import os
import secrets
import struct
import time
from collections.abc import Iterable
from pathlib import Path

import google_crc32c
import tensorstore as ts

from bridge.formats.files.data_file import DataFiles
from bridge.formats.files.working import ChunkRecord

MANIFEST = "manifest.ocdbt"
MAX_INLINE = 1024
_ALIGNMENT = 64
_NODE_MAGIC = 0x0CDB20DE
_CONFIG = {
    "max_inline_value_bytes": MAX_INLINE,
    "max_decoded_node_bytes": 100_000_000,
    "version_tree_arity_log2": 4,
    "compression": {"id": "zstd"},
}


class OcdbtWriter:
    """A new store in a directory, or one begun by an earlier attempt, whose data file is taken over.

    Declare every value with `reserve` or `put`, in the same order at every attempt; fill the reserved places, by any
    number of threads; then `finish`.
    """

    def __init__(self, directory: Path, record: ChunkRecord) -> None:
        self._directory = directory
        folder = directory / "d"
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(os.listdir(folder))
        self._name = earlier[0] if earlier else secrets.token_hex(16)
        self._files = DataFiles(record)
        self._file = self._files.open(folder / self._name)
        self._inline: dict[str, bytes] = {}
        self._places: dict[str, tuple[int, int]] = {}

    def put(self, key: str, value: bytes) -> None:
        """A small value, of at most MAX_INLINE bytes, kept in the node; a larger one goes to the data file."""
        if len(value) <= MAX_INLINE:
            self._inline[key] = value
        else:
            self.reserve(key, len(value))
            self.write(key, [value])

    def reserve(self, key: str, length: int) -> None:
        """Room in the data file for a value of so many bytes."""
        self._places[key] = self._file.reserve(length, _ALIGNMENT), length

    def write(self, key: str, parts: Iterable[bytes | memoryview], start: int = 0) -> None:
        """Fill a reserved place, from its byte `start` on, with parts that follow each other."""
        self._file.write_parts(self._places[key][0] + start, parts)

    def read(self, key: str) -> bytes:
        """What is in a reserved place; less where the file is shorter."""
        return self._file.read(*self._places[key])

    def wrote(self, length: int) -> None:
        """Count so many bytes as written; see `DataFiles.wrote`."""
        self._files.wrote(length)

    def finish(self) -> None:
        """Write node and manifest, and bring everything to disk: now the store can be opened."""
        end = self._file.end
        path = f"d/{self._name}"
        node = _leaf_node(path, self._inline, self._places)
        start = self._file.reserve(len(node))
        self._file.write(start, node)
        self._files.sync()
        # Another `finish` after more values writes another node.
        self._file.end = end
        root = {
            "location": f"btreenode::{path}:{start}:{len(node)}",
            "statistics": {
                "num_keys": len(self._inline) + len(self._places),
                "num_tree_bytes": len(node),
                "num_indirect_value_bytes": sum(length for _, length in self._places.values()),
            },
        }
        version = {"generation_number": 1, "root_height": 0, "commit_time": time.time_ns(), "root": root}
        config = {**_CONFIG, "uuid": secrets.token_hex(16)}
        manifest = ts.ocdbt.undump_manifest(
            {"config": config, "versions": [version], "version_tree_nodes": []}
        )
        (self._directory / MANIFEST).write_bytes(manifest)

    def close(self) -> None:
        """Let go of the file."""
        self._files.close()


def _leaf_node(path: str, inline: dict[str, bytes], places: dict[str, tuple[int, int]]) -> bytes:
    """The node with all keys, uncompressed."""
    keys = sorted([*inline, *places], key=str.encode)
    encoded = [key.encode() for key in keys]
    shared = [_common(a, b) for a, b in itertools.pairwise(encoded)]
    suffixes = [key[n:] for key, n in zip(encoded, [0, *shared], strict=True)]
    lengths = [len(inline[key]) if key in inline else places[key][1] for key in keys]
    stored = [key for key in keys if key in places]
    body = b"".join(
        (
            b"\0",  # height
            _table_of_one(path.encode()),
            _varint(len(keys)),
            _varints(shared),
            _varints(map(len, suffixes)),
            *suffixes,
            _varints(lengths),
            bytes(key in places for key in keys),
            bytes(len(stored)),  # number of the data file, of each value in it
            _varints(places[key][0] for key in stored),
            *(inline[key] for key in keys if key in inline),
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
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def _varints(values: Iterable[int]) -> bytes:
    return b"".join(map(_varint, values))


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
