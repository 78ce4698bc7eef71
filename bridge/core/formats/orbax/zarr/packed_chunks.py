"""Compares the memory that a compressed chunk requests for decoding with the size that the chunk should have.

tensorstore stops zstd, gzip, zlib and bz2 when the chunk is full. Two compressors allocate what their first bytes say:

    blosc    bytes 4 to 7: the decoded size, up to 2 GiB
    zstd     the window of the frame, up to 2 GiB (RFC 8878, 3.1.1.1)

A shard's index says where the inner chunks are: offset and length of each, at the shard's end or start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import zstandard

from bridge.core.formats.tensors.base import CheckpointError

PACKERS: Final = ("blosc", "zstd")
HEAD: Final = 18
"""Bytes at the start of a compressed chunk that say how much memory it requests: zstd's longest frame header."""

_ZSTD_WINDOW: Final = 128 << 20  # the largest window of any zstd level
_FREE: Final = 1 << 20  # room for checksums and a second compressor


@dataclass(frozen=True)
class Packing:
    """How the chunks of an array are compressed.

    compressor: the one whose first bytes request memory. nbytes: decoded size of a chunk, in a shard of an inner chunk.
    inner: inner chunks of a shard, None if chunks are not shards. index: type of the numbers in the shard's index.
    index_size: bytes of the index, with its checksum. index_first: whether the index is at the shard's start.
    """

    compressor: str
    nbytes: int
    inner: int | None = None
    index: str = "<u8"
    index_size: int = 0
    index_first: bool = False

    def require_bounded(self, read: Callable[[int, int], bytes], size: int, what: str) -> None:
        """CheckpointError, beginning with `what`, if decoding a stored chunk takes more memory than its size justifies.

        read: gives bytes from one place of the stored chunk to another. size: bytes of the stored chunk.
        """
        for start in self._starts(read, size):
            asked, most = self._asked(read(start, min(size, start + HEAD)))
            if asked > most:
                raise CheckpointError(
                    f"{what}: expected a chunk of {self.nbytes} bytes, but its {self.compressor} header asks for "
                    f"{asked} bytes of memory, more than {most}: the chunk is damaged or of another array"
                )

    def _starts(self, read: Callable[[int, int], bytes], size: int) -> Iterator[int]:
        if self.inner is None:
            yield 0
            return
        first = 0 if self.index_first else size - self.index_size
        if first < 0:
            return  # tensorstore says that the shard is too short
        numbers = np.frombuffer(read(first, first + 16 * self.inner), self.index)
        # An inner chunk that is not stored has the offset 2**64 - 1.
        yield from (start for start in numbers[::2].tolist() if start < size)

    def _asked(self, head: bytes) -> tuple[int, int]:
        """The bytes that a chunk requests, and the most that it may request."""
        if self.compressor == "blosc":
            return int.from_bytes(head[4:8], "little"), 2 * self.nbytes + _FREE
        try:
            return zstandard.get_frame_parameters(head).window_size, max(_ZSTD_WINDOW, self.nbytes)
        except zstandard.ZstdError:
            return 0, 0  # tensorstore says what is wrong


def packing(codecs: Sequence[Mapping[str, Any]], chunk: Sequence[int], itemsize: int) -> Packing | None:
    """How zarr3's codecs compress chunks of this shape; None if no compressor requests memory by its first bytes.

    ValueError if another codec encodes blosc's output, so that blosc's first bytes are not in the file unchanged.
    """
    serializer, *packers = [c for c in codecs if c["name"] not in ("crc32c", "transpose")]
    packed = None
    inside: tuple[Any, ...] = ()
    if packers:
        name = packers[-1]["name"]
        packed = Packing(name, math.prod(chunk) * itemsize) if name in PACKERS else None
        inside = packers[:-1], serializer
    elif serializer["name"] == "sharding_indexed":
        shard = serializer["configuration"]
        inner = packing(shard["codecs"], shard["chunk_shape"], itemsize)
        inside = () if inner is None or inner.inner is None else (shard,)
        if inner is not None and inner.inner is None:
            count = math.prod(n // size for n, size in zip(chunk, shard["chunk_shape"], strict=True))
            bytes_codec, *checks = shard["index_codecs"]
            big = bytes_codec.get("configuration", {}).get("endian", "little") == "big"
            packed = Packing(
                inner.compressor,
                inner.nbytes,
                count,
                ">u8" if big else "<u8",
                16 * count + 4 * len(checks),
                shard.get("index_location", "end") == "start",
            )
    if '"blosc"' in json.dumps(inside):
        raise ValueError("expected blosc as the last compression of a chunk, got another one around it")
    return packed
