"""A format's storage of chunks: where each chunk goes, and which bytes go there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from bridge.core.formats.files.data_file import DataFile
from bridge.core.formats.stores.upload import UploadFile
from bridge.core.formats.tensors.base import Checksums, TensorInfo


class Place(NamedTuple):
    """Bytes [offset, offset + length) of a data file, reserved for one chunk."""

    file: DataFile | UploadFile
    offset: int
    length: int


class Sink(Protocol):
    """How a format stores a chunk: where, and which bytes surround its elements. Used by several threads.

    placed: whether the places of all chunks are known before any is written.
    """

    placed: bool

    def place(self, info: TensorInfo, number: int) -> Place:
        """The place of chunk `number` of the tensor."""

    def encode(
        self, info: TensorInfo, number: int, parts: list[np.ndarray], crc: int
    ) -> Iterable[bytes | memoryview]:
        """The bytes that fill the place, in parts. parts: the elements as uint8 arrays; crc: their CRC-32C."""

    def frame(self, info: TensorInfo, number: int) -> tuple[int, int] | None:
        """How many bytes `around` gives, before and after; None if a chunk is not stored as its plain elements."""

    def around(
        self, info: TensorInfo, number: int, elements: memoryview, sums: Checksums
    ) -> tuple[bytes, bytes]:
        """Like `encode`, but only the bytes around the elements. sums: the elements' checksums, a CRC-32C at least."""

    def decode(self, info: TensorInfo, number: int, data: bytes) -> np.ndarray | None:
        """The elements of the chunk, from bytes read at its place; None if the bytes are not a whole chunk."""

    def remembered(self, info: TensorInfo, number: int) -> int:
        """Facts that the sink learned from a chunk's elements, and needs for a chunk that is in a store already."""
        return 0

    def recall(self, info: TensorInfo, number: int, remembered: int) -> None:
        """Take over the facts that an earlier attempt's sink remembered."""
        return
