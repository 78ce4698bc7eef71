"""How much the nodes of an OCDBT B-tree claim to hold, counted before tensorstore decodes them.

    node    magic, length, version, compression | body, perhaps zstd | CRC-32C
    body    height | data files | number of entries | shared lengths | other lengths | ...
    key     what it shares with the key before it, and the rest: "layers/0/w", (9) "v", (7) "1/w", ...

A key that shares all but a byte with the one before takes a byte of the node and all of its length in memory: a node of
263 kB held keys of 4 GB. Format: https://google.github.io/tensorstore/kvstore/ocdbt/ ("Storage format").
"""

from __future__ import annotations

from typing import Final

import numpy as np
import zstandard

from bridge.formats.base import CheckpointError

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


class NodeBudget:
    """What all nodes of a store may hold, by their bytes on disk; some of it is free, for small stores."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._stored = self._entries = self._keys = 0

    def take(self, node: bytes, prefix: int) -> None:
        """Count a node whose keys continue `prefix` bytes of the nodes above.

        CheckpointError when it cannot be counted, or there is more than belongs into that many bytes.
        """
        self._stored += len(node)
        # Before the keys are looked at: so many numbers take memory, too.
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
    """The number of entries of an encoded node, and the bytes of all their keys together.

    CheckpointError, beginning with `what`, for a malformed node, and for one of more than `most` entries.
    """
    try:
        numbers = _Numbers(np.frombuffer(node, np.uint8)[_HEADER:-_CRC])
        numbers.next(1)  # version
        compressed = numbers.next(1)
        body = numbers.left.tobytes()
        if compressed:
            body = _decompressed(body)
        numbers = _Numbers(np.frombuffer(body, np.uint8)[1:])
        files = _counted(numbers, most, "files")
        numbers.next(files - 1)  # what each name shares with the one before
        names = numbers.next(files)
        numbers.next(files)  # of these bytes, the folder's
        numbers.skip(names)
        entries = _counted(numbers, most, "entries")
        return entries, numbers.next(entries - 1) + numbers.next(entries)
    except (IndexError, ValueError, zstandard.ZstdError) as error:
        raise CheckpointError(f"{what}: malformed or truncated B-tree node: {error}") from error


def _counted(numbers: _Numbers, most: int, kind: str) -> int:
    count = numbers.next(1)
    if count > most:
        raise ValueError(f"expected at most {most} {kind} more, got {count}")
    return count


def _decompressed(data: bytes) -> bytes:
    most = _FREE_BODY + _BODY_PER_BYTE * len(data)
    body = bytearray()
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        while part := reader.read(_PART):
            body += part
            if len(body) > most:
                raise ValueError(f"expected at most {most} bytes in {len(data)} compressed ones, got more")
    return bytes(body)


class _Numbers:
    """Numbers of seven bits a byte, the lowest first, of which only sums are of interest."""

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
        """Leave out so many bytes."""
        if count > len(self.left):
            raise ValueError("names of files that are longer than the node")
        self.left = self.left[count:]
