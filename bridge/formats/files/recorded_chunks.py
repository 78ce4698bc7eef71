"""What the writers of all formats have in common: the chunks of their tensors, of which they keep one record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from bridge.formats.base import Box, CheckpointError, Elements, Fill
from bridge.formats.files.record import ChunkRecord
from bridge.formats.files.sink import Sink


class RecordedChunks(ABC):
    """The chunks of a writer that keeps a record of them."""

    path: Path
    _record: ChunkRecord
    _sink: Sink

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the writer was committed or aborted."""

    def position(self, name: str) -> tuple[str, int]:
        """Where a tensor begins: the data file, and the byte there; ("", 0) without elements."""
        info = self._record.infos[name]
        if not info.chunks:
            return "", 0
        place = self._sink.place(info, 0)
        return str(place.file.path), place.offset

    def chunks(self, name: str) -> tuple[Box, ...]:
        """The boxes that `write` expects, in row-major order; none for a tensor without elements.

        KeyError for an unknown name.
        """
        return self._record.infos[name].chunks

    def stored(self, name: str) -> frozenset[Box]:
        """Those of `chunks(name)` that a resumed attempt has written already."""
        return self._record.stored(name, self._sink)

    def write(self, name: str, box: Box, array: Elements, *, crc: int | None = None) -> None:
        """Store one of `chunks(name)`: `array` has its sizes and the tensor's dtype; see `CheckpointWriter.write`.

        KeyError for an undeclared tensor; CheckpointError for another box, shape or dtype, or a box written before;
        OSError when the disk fails.
        """
        self._require_open()
        self._record.write(name, box, array, self._sink, crc=crc)

    def write_from(self, chunks: Sequence[tuple[str, Box]], fill: Fill) -> Sequence[bool]:
        """Store some of `chunks(name)`, small ones, as ``fill`` makes them; see `CheckpointWriter.write_from`."""
        self._require_open()
        return self._record.write_from(chunks, fill, self._sink)

    def _require_open(self) -> None:
        failure = self._record.failure
        if self.ended or failure is not None:
            why = "it was committed or aborted" if self.ended else f"a write failed: {failure}"
            raise CheckpointError(f"{self.path}: the checkpoint cannot be written any further: {why}")

    def _refuse_repeated(self, name: str, objects: Sequence[str] | Mapping[str, object]) -> None:
        if name in self._record.infos or name in objects:
            raise CheckpointError(f"{self.path}: two entries are named {name!r} (names join the path by '.')")
