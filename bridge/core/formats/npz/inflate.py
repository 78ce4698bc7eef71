"""A deflated member of a zip file, readable at any place without inflating all earlier bytes each time.

A first pass over the member checks its size and CRC-32, and keeps a copy of the inflater every few megabytes. A read
begins at the last copy before its start.

    deflated   |........|......|..........|.......|
    copies     0        1      2          3              every 4 MiB inflated; the distance doubles whenever 64 are kept
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from isal import isal_zlib

from bridge.core.formats.tensors.base import COPY_AGAIN, CheckpointError

_RAW: Final = -15  # deflate without a header of its own
_PIECE: Final = 1 << 20
_INPUT: Final = 1 << 16
_STEP: Final = 4 << 20
_MAX_COPIES: Final = 64


class Inflated:
    """The inflated bytes of a member whose deflated bytes are [start, start + stored) of a file. Thread-safe.

    read: gives the bytes of the file from one place to another. size, crc: from the directory. Any method raises
    CheckpointError, beginning with `what`, if the member does not match them.
    """

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        start: int,
        stored: int,
        size: int,
        crc: int | None,
        what: str,
    ) -> None:
        self._read, self._begin, self._stored = read, start, stored
        self._size, self._crc, self._what = size, crc, what
        # All threads share the copies of the inflater, from which reads continue.
        self._lock = threading.Lock()
        self._copies: list[tuple[int, int, Any]] = []

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) as uint8."""
        out = np.empty(max(0, stop - start), np.uint8)
        for at, piece in self.pieces(start, stop):
            out[at - start : at - start + len(piece)] = np.frombuffer(piece, np.uint8)
        return out

    def head(self, stop: int) -> bytes:
        """The first bytes, before size and checksum are checked."""
        return b"".join(piece for _, piece, _ in self._run(zlib.decompressobj(_RAW), 0, 0, stop))[:stop]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Bytes [start, stop), as (place, bytes) one after the other, each of at most 1 MiB."""
        with self._lock:
            if not self._copies:
                self._copies = self._first_pass()
        at, taken, inflater = self._copies[bisect_right(self._copies, start, key=lambda copy: copy[0]) - 1]
        for begin, piece, _ in self._run(inflater.copy(), at, taken, stop):
            if begin + len(piece) > start:
                low = max(0, start - begin)
                yield begin + low, piece[low : stop - begin]

    def _first_pass(self) -> list[tuple[int, int, Any]]:
        inflater = zlib.decompressobj(_RAW)
        copies: list[tuple[int, int, Any]] = [(0, 0, inflater.copy())]
        step, crc, done = _STEP, 0, 0
        for start, piece, taken in self._run(inflater, 0, 0, self._size + 1):
            crc, done = isal_zlib.crc32(piece, crc), start + len(piece)
            if done >= copies[-1][0] + step:
                copies.append((done, taken, inflater.copy()))
            if len(copies) > _MAX_COPIES:
                copies, step = copies[::2], 2 * step
        if done != self._size or not inflater.eof:
            raise CheckpointError(
                f"{self._what}: expected {self._size} bytes after inflating, got a different number"
            )
        if self._crc is not None and crc != self._crc:
            raise CheckpointError(
                f"{self._what}: the data is damaged: expected CRC-32 {self._crc:08x} of {self._size} bytes, got "
                f"{crc:08x}; {COPY_AGAIN}"
            )
        return copies

    def _run(self, inflater: Any, at: int, taken: int, stop: int) -> Iterator[tuple[int, bytes, int]]:
        """Inflate from place `at`, after `taken` bytes have gone into the inflater, until `stop` is reached."""
        while at < stop and not inflater.eof:
            data = inflater.unconsumed_tail
            if not data:
                data = self._read(self._begin + taken, self._begin + min(taken + _INPUT, self._stored))
                taken += len(data)
            try:
                piece = inflater.decompress(data, _PIECE)
            except zlib.error as error:
                raise CheckpointError(
                    f"{self._what}: the deflated data is damaged: {error}; {COPY_AGAIN}"
                ) from None
            if not (piece or data or inflater.eof):
                raise CheckpointError(f"{self._what}: the deflated data is truncated: {COPY_AGAIN}")
            if piece:
                yield at, piece, taken
                at += len(piece)
