"""Where a chunk of a DCP checkpoint lies in a file."""

from __future__ import annotations

from typing import NamedTuple

from bridge.core.formats.dcp.archive import Record, StoredTensor
from bridge.core.formats.reading.source_files import FileArray
from bridge.core.formats.safetensors.header import StoredArray


class StoredChunk(NamedTuple):
    """A chunk in a file: how its elements lie, the byte they begin at, and their checksum if there is one."""

    layout: StoredArray | StoredTensor
    start: int
    record: Record | None

    @classmethod
    def of(cls, tensor: StoredTensor) -> StoredChunk:
        return cls(tensor, tensor.record.start + tensor.first * tensor.dtype.itemsize, tensor.record)

    def array(self, file: str, what: str) -> FileArray:
        """All of its elements. what: whose they are, for errors."""
        dtype, shape = self.layout.dtype, self.layout.shape
        steps = tuple([step * dtype.itemsize for step in self.layout.strides])
        return FileArray(file, self.start, shape, steps, dtype, what)

    def fill(self) -> tuple[int, int]:
        """How a chunk lies in its record: only records that are filled alike can be compared by checksum."""
        assert self.record is not None
        return self.start - self.record.start, self.record.size
