"""A checkpoint as its manifest describes it: what is read is compared with the checksums, and a difference is an error.

Chunks of the manifest that a block holds whole are compared as they are read. Of others the whole chunk is read for the
comparison, when a part of it is first asked for. Tensors whose format has checksums are left to the format's reader.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bridge.checkpoints.ground.manifest_problems import (
    Problem,
    SaysWhatIsChecked,
    crc_problems,
    entry_problems,
    file_problems,
    object_problems,
    rest_problems,
    structure_problems,
)
from bridge.checkpoints.inspect.summary import manifest_home
from bridge.core.formats.files.manifest import Manifest, manifest_path, read_manifest
from bridge.core.formats.reading.boxes import ChunkIndex
from bridge.core.formats.stores.listing import StorePath
from bridge.core.formats.stores.reader import StoredReader, home_of
from bridge.core.formats.tensors.arrays import array_checksum
from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    CheckpointReader,
    Checksums,
    Loan,
    TensorInfo,
    Wanted,
)
from bridge.core.formats.tensors.crc32c import extend
from bridge.core.formats.tensors.regions import split_box
from bridge.core.formats.tensors.wrapping import ReadWhenAsked, WrappingReader
from bridge.core.formats.whole.joined import JoinedReader


def checked(reader: CheckpointReader) -> CheckpointReader:
    """``reader``, held to the manifest of its checkpoint; ``reader`` itself if there is none.

    Metadata files, names, dtypes and shapes are compared at once, values when they are read.

    Raises CheckpointError, naming file, tensor or chunk, where the checkpoint is not what the manifest says.
    """
    if isinstance(reader, StoredReader):
        # Closed by whoever opened it, with what it reads.
        reader = reader.opened
    if isinstance(reader, JoinedReader):
        return reader.replaced(checked)
    home = manifest_home(home_of(reader))
    manifest = read_manifest(home)
    if manifest is None:
        return reader
    held = CheckedReader(reader, manifest, str(manifest_path(home)))
    held.require(_problems(reader, home, manifest))
    return held


def _problems(reader: CheckpointReader, home: Path, manifest: Manifest) -> Iterator[Problem]:
    yield from file_problems(home, manifest)
    yield from structure_problems(reader, manifest)
    # Where DCP's chunks are is said between them: a store would be asked for all of its data at once.
    if reader.format == "safetensors" or not isinstance(home, StorePath):
        yield from rest_problems(reader, home, manifest)
    for name, entry in manifest.tensors.items():
        yield from entry_problems(reader.tensors[name], entry)


class CheckedReader(WrappingReader):
    """``reader``, whose values are compared with ``manifest``, the content of the file ``source``; see above."""

    def __init__(self, reader: CheckpointReader, manifest: Manifest, source: str) -> None:
        super().__init__(reader)
        self._manifest, self._source = manifest, source
        self._own = reader.checksummed if isinstance(reader, SaysWhatIsChecked) else _never
        self._owned: dict[str, bool] = {}
        self._listed: dict[str, TensorInfo] = {}
        self._chunks = ChunkIndex()
        self._compared: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self.objects = ReadWhenAsked(reader.object_paths, self._checked_object)

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; CheckpointError also for one that is not as in the manifest."""
        array = self._reader.read(name, box)
        self._compare(name, Box.whole(self.tensors[name].shape) if box is None else box, array)
        return array

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        """One block where it is in the file; CheckpointError also for one that is not as in the manifest."""
        loan = self._reader.lend(name, box, offset)
        if loan is not None:
            crc = self._compare(name, box, loan.array)
            loan = loan if crc is None else dataclasses.replace(loan, crc=crc)
        return loan

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        """Small tensors into memory, compared with the manifest; None also for one that is not as in there."""
        found = self._reader.read_into(wanted)
        return [self._held(*one, sums) for one, sums in zip(wanted, found, strict=True)]

    def _held(self, name: str, target: memoryview, sums: Checksums | None) -> Checksums | None:
        if sums is None or self._is_own(name):
            return sums
        chunks = self._manifest.tensors[name].chunks
        if len(chunks) != 1:
            return None
        ((chunk, crc),) = chunks.items()
        found = extend(0, target) if sums.crc32c is None else sums.crc32c
        return (
            Checksums(sums.crc32, found) if found == crc and chunk.sizes == self.tensors[name].shape else None
        )

    def require(self, problems: Iterable[Problem]) -> None:
        """Raise CheckpointError for the first of these."""
        for problem in problems:
            raise CheckpointError(
                f"{self.path}: {problem.where}: {problem.text}. The checkpoint is not what its manifest says: use an "
                "undamaged copy (twinshard verify lists all that is wrong), or convert it as it is (--no-verify): the "
                f"manifest of the new checkpoint will be of what is read. The manifest is {self._source}"
            )

    def _compare(self, name: str, box: Box, array: np.ndarray) -> int | None:
        """Compare the manifest's chunks in a box; the CRC-32C of the box, if it is one of them and was looked at."""
        if self._is_own(name):
            return None
        if name not in self._listed:
            # With the manifest's chunks, which need not be those of the file.
            chunks = tuple(self._manifest.tensors[name].chunks)
            info = self.tensors[name]
            self._listed[name] = info if info.chunks == chunks else dataclasses.replace(info, chunks=chunks)
        info = self._listed[name]
        found = None
        for index in self._chunks.touching(info, box):
            if (name, index) in self._compared:
                continue
            chunk = info.chunks[index]
            whole = chunk.intersect(box) == chunk
            crc = array_checksum(array[chunk.slices(box)]) if whole else self._checksum(info, chunk)
            self.require(crc_problems(info, chunk, self._manifest.tensors[name].chunks[chunk], crc))
            found = crc if chunk == box else None
            with self._lock:
                self._compared.add((name, index))
        return found

    def _is_own(self, name: str) -> bool:
        """Whether the format has checksums of the tensor, which its reader compares."""
        own = self._owned.get(name)
        if own is None:
            own = self._owned[name] = self._own(name)
        return own

    def _checksum(self, info: TensorInfo, chunk: Box) -> int:
        crc = 0
        for piece in split_box(chunk, info.dtype.itemsize):
            loan = self._reader.lend(info.name, piece)
            if loan is None:
                crc = array_checksum(self._reader.read(info.name, piece), crc=crc)
            else:
                crc = array_checksum(loan.array, crc=crc)
                loan.give_back()
        return crc

    def _checked_object(self, name: str) -> object:
        value = self._reader.objects[name]
        self.require(object_problems(name, value, self._manifest))
        return value


def _never(name: str) -> bool:
    return False
