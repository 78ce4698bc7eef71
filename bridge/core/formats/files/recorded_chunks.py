"""The common part of all formats' writers: the chunks of their tensors, with one record of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bridge.core.formats.files.atomic import CommitOrAbort, on_failure
from bridge.core.formats.files.journal import WorkingDirectory
from bridge.core.formats.files.record import ChunkRecord
from bridge.core.formats.files.sink import Sink
from bridge.core.formats.stores.folder import StoreFolder
from bridge.core.formats.tensors.base import Box, CheckpointError, Elements, Fill, TensorInfo, TreePath
from bridge.core.formats.tensors.boxes import default_chunk_shape, grid_of_chunks
from bridge.core.formats.tensors.leaves import LEAVES
from bridge.core.long_calls import collection_paused


class RecordedChunks(ABC):
    """The chunks of a writer that keeps a record of them."""

    path: Path
    _record: ChunkRecord
    _sink: Sink

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the writer was committed or aborted."""

    def position(self, name: str, box: Box | None = None) -> tuple[str, int]:
        """Where a tensor, or the elements of one of its chunks, begin; see `CheckpointWriter.position`."""
        return self._record.position(name, box, self._sink)

    def chunks(self, name: str) -> tuple[Box, ...]:
        """The boxes that `write` expects; see `CheckpointWriter.chunks`."""
        return self._record.infos[name].chunks

    def stored(self, name: str) -> frozenset[Box]:
        """The boxes of `chunks(name)` that a resumed attempt has already written."""
        return self._record.stored(name, self._sink)

    def write(self, name: str, box: Box, array: Elements, *, crc: int | None = None) -> None:
        """Store one of `chunks(name)`; see `CheckpointWriter.write`. Also KeyError, and OSError from the disk."""
        self._require_open()
        self._record.write(name, box, array, self._sink, crc=crc)

    def write_from(self, chunks: Sequence[tuple[str, Box]], fill: Fill) -> Sequence[bool]:
        """Store some small chunks of `chunks(name)`, which ``fill`` writes; see `CheckpointWriter.write_from`."""
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


class AtomicWriter(RecordedChunks, CommitOrAbort):
    """A writer whose checkpoint appears by one rename."""

    _directory: WorkingDirectory | StoreFolder

    @abstractmethod
    def _finish(self) -> None:
        """Write everything that follows the last chunk."""

    @collection_paused()
    def commit(self) -> None:
        """Check that every chunk was written, sync to disk and rename into place; on failure, leave nothing.

        CheckpointError if chunks are missing, FileExistsError if something has appeared at the path meanwhile.
        """
        with on_failure(self.abort):
            self._require_open()
            self._record.require_complete()
            self._record.flush()
            self._finish()
            self._record.close()
            self._directory.commit()

    def abort(self) -> None:
        """Remove everything written. Does nothing after commit or abort."""
        self._record.close()
        self._directory.abort()

    @property
    def ended(self) -> bool:
        return self._directory.ended


class FlatWriter(AtomicWriter):
    """An atomic writer whose names join a tree path by "."."""

    _alike: dict[tuple[tuple[int, ...], np.dtype, tuple[int, ...] | None], TensorInfo]

    @abstractmethod
    def add_object(self, path: str | Sequence[str | int], value: object) -> None:
        """Store a value that is not a tensor."""

    def add_kinds(self, kinds: Mapping[str, str]) -> None:
        """Note what leaves of a JAX tree are; see `CheckpointWriter.add_kinds`."""
        if kinds:
            self.add_object(LEAVES, dict(kinds))

    def _info(
        self,
        name: str,
        path: TreePath,
        shape: Sequence[int],
        dtype: np.dtype,
        chunk_shape: Sequence[int] | None,
        require_dtype: Callable[[np.dtype], object],
        *,
        whole: bool,
    ) -> TensorInfo:
        """A tensor with its chunks. whole: the requested chunk shape has no effect, as tensors are in one piece."""
        shape, dtype = tuple(map(int, shape)), np.dtype(dtype)
        wish = None if chunk_shape is None else tuple(chunk_shape)
        like = self._alike.get((shape, dtype, wish))
        if like is None:
            if wish is not None and (len(wish) != len(shape) or any(n < 1 for n in wish)):
                raise ValueError(
                    f"tensor {name!r}: expected a chunk shape of {len(shape)} sizes above 0, got {wish}"
                )
            block = default_chunk_shape(shape, dtype) if wish is None or whole else wish
            try:
                require_dtype(dtype)
                chunks = grid_of_chunks(shape, block)
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: tensor {name!r}: {error}") from None
            like = self._alike[shape, dtype, wish] = TensorInfo(name, path, shape, dtype, chunks)
        # Takes a third of the time, and a model has thousands of tensors that are alike.
        return like.named(name, path)
