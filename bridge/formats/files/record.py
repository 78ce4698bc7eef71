"""A chunk's life, from a caller's array to a line in the journal.

    declared   the tensor is known, and so are the numbers and boxes of its chunks      declare
    claimed    one caller writes the chunk, and nobody else may                       \
    encoded    the format says where the chunk goes and which bytes go there (`Sink`)  | write
    written    the bytes are in a data file, perhaps only in the system's cache, or   /
               gathered with small neighbours, to go there together
    synced     the disk has them: after every 256 MiB, at the end, and on failure     \\  sync
    noted      the journal names the chunk and the CRC-32C of its elements            /

A writer that resumes an attempt asks `stored` first: a noted chunk counts only if the disk still has its elements.
The writers of all formats keep one record; they know nothing of syncing and of the journal.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from bridge.formats.arrays import array_checksum, raw_bytes
from bridge.formats.base import Box, CheckpointError, Checksums, Elements, TensorInfo, dtype_name
from bridge.formats.crc32c import extend
from bridge.formats.files.atomic import fsync_directory
from bridge.formats.files.data_file import DataFile, allow_open_files
from bridge.formats.files.gathered import SMALL, Gathered
from bridge.formats.files.journal import Journal
from bridge.formats.files.manifest import ManifestTensor
from bridge.formats.stores.folder import StoredJournal
from bridge.formats.stores.upload import UploadFile
from bridge.formats.stores.upload_path import UploadPath

SYNC_BYTES = 256 << 20
"""Data is synced to disk, and then noted in the journal, whenever so much of it is new."""


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [offset, offset + length) of a data file, reserved for one chunk."""

    file: DataFile | UploadFile
    offset: int
    length: int


class Sink(Protocol):
    """How a format stores a chunk: where, and which bytes stand around its elements. Used by several threads.

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
        """How many bytes `around` gives, before and after; None where a chunk is not stored as its elements alone."""

    def around(
        self, info: TensorInfo, number: int, elements: memoryview, sums: Checksums
    ) -> tuple[bytes, bytes]:
        """As `encode`, but only what stands before and after the elements. sums: of these, the CRC-32C at least."""

    def decode(self, info: TensorInfo, number: int, data: bytes) -> np.ndarray | None:
        """The elements of the chunk in bytes read from its place; None if these do not hold a whole chunk."""

    def remembered(self, info: TensorInfo, number: int) -> int:
        """What the sink knows of a chunk from its elements, and has to know of one that is in a store already."""

    def recall(self, info: TensorInfo, number: int, remembered: int) -> None:
        """Take over what an earlier attempt's sink remembered."""


class ChunkRecord:
    """The tensors of a checkpoint that is being written, its data files, and how far each chunk has come. Thread-safe.

    path: where the checkpoint will be, for errors. failure: the error of a write that failed, None if none did.
    """

    def __init__(self, path: Path, journal: Journal | StoredJournal | None = None) -> None:
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self.failure: BaseException | None = None
        self._journal = journal
        self._numbers: dict[str, dict[Box, int]] = {}
        self._crcs: dict[str, dict[int, int]] = {}
        self._unchecked: set[tuple[str, int]] = set()
        self._claimed: set[tuple[str, int]] = set()
        self._written: list[tuple[str, int, int]] = []
        self._gathered: dict[int, Gathered] = {}
        self._unsynced = 0
        self._lock = threading.Lock()
        self._files: list[DataFile | UploadFile] = []
        self._entries_synced = False
        self._lost: OSError | None = None
        self._closed = False
        self._syncing = threading.Lock()

    def open(self, path: Path) -> DataFile | UploadFile:
        """One more data file, synced and closed by this record. Before any chunk is written."""
        if isinstance(path, UploadPath):
            self._files.append(path.open_data())
            return self._files[-1]
        allow_open_files(2 * (len(self._files) + 1))
        self._files.append(DataFile(path))
        return self._files[-1]

    def declare(self, info: TensorInfo) -> None:
        """Expect the chunks of this tensor."""
        with self._lock:
            self.infos[info.name] = info
            self._numbers[info.name] = {box: number for number, box in enumerate(info.chunks)}
            done = self._journal.done.get(info.name, {}) if self._journal else {}
            self._crcs[info.name] = {n: crc for n, crc in done.items() if 0 <= n < len(info.chunks)}
            self._unchecked.update((info.name, number) for number in self._crcs[info.name])

    def stored(self, name: str, sink: Sink) -> frozenset[Box]:
        """Chunks of a tensor that an earlier attempt has noted, and whose elements are on disk as it noted them."""
        info, crcs = self.infos[name], self._crcs[name]
        if not crcs:
            return frozenset()
        for number in list(crcs):
            # Once: chunks that this attempt has written are in the list as well, and need no second look.
            if (name, number) in self._unchecked:
                self._unchecked.discard((name, number))
                place = sink.place(info, number)
                if isinstance(place.file, UploadFile) and isinstance(self.path, UploadPath):
                    if place.file.holds(place.offset, place.length):
                        sink.recall(info, number, self.path.folder.recalled[name, number])
                    else:
                        del crcs[number]
                    continue
                found = sink.decode(info, number, place.file.read(place.offset, place.length))
                if found is None or array_checksum(found) != crcs[number]:
                    del crcs[number]
        return frozenset(box for box, number in self._numbers[name].items() if number in crcs)

    def write(self, name: str, box: Box, array: Elements, sink: Sink, *, crc: int | None = None) -> None:
        """Take a chunk from the caller's array to the disk's queue, and sync when many bytes are waiting.

        KeyError for an unknown tensor; CheckpointError for another box, shape or dtype, or a chunk written before;
        OSError when the disk fails. The array may be changed afterwards. crc: its CRC-32C, if known.
        """
        parts = self._parts(name, box, array)
        info, number = self.infos[name], self._claim(name, box)
        try:
            crc = array_checksum(*parts) if crc is None else crc
            place = sink.place(info, number)
            data = sink.encode(info, number, parts, crc)
            if isinstance(place.file, UploadFile):
                place.file.write_parts(place.offset, data)
                note = (name, number, crc, sink.remembered(info, number))
                place.file.note(place.offset, place.length, note)
            elif place.length < SMALL:
                self._gathering().add(place.file, place.offset, data)
            else:
                place.file.write_parts(place.offset, data)
            self._wrote(name, number, crc, place.length)
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def write_from(
        self, name: str, box: Box, fill: Callable[[memoryview], Checksums | None], sink: Sink
    ) -> bool:
        """The same for a small chunk whose elements ``fill`` makes; see `CheckpointWriter.write_from`."""
        info = self.infos[name]
        nbytes = box.numel * info.dtype.itemsize
        # Where the place is known only once the chunk is written, asking for it twice would leave one of them empty.
        if nbytes >= SMALL or not sink.placed:
            return False
        number = self._claim(name, box)
        crc = 0

        def piece(memory: memoryview) -> bool:
            nonlocal crc
            elements = memory[before : len(memory) - after]
            sums = fill(elements)
            if sums is None:
                return False
            if sums.crc32c is None:
                sums = Checksums(sums.crc32, extend(0, elements))
            crc = sums.crc32c or 0
            memory[:before], memory[len(memory) - after :] = sink.around(info, number, elements, sums)
            return True

        try:
            place, frame = sink.place(info, number), sink.frame(info, number)
            done = False
            if isinstance(place.file, DataFile) and place.length < SMALL and frame is not None:
                before, after = frame
                done = self._gathering().fill(place.file, place.offset, before + nbytes + after, piece)
            if done:
                self._wrote(name, number, crc, place.length)
            else:
                with self._lock:
                    self._claimed.discard((name, number))
        except BaseException as error:
            self.failure = self.failure or error
            raise
        return done

    def _wrote(self, name: str, number: int, crc: int, length: int) -> None:
        with self._lock:
            self._claimed.discard((name, number))
            self._crcs[name][number] = crc
            if self._journal is not None:
                self._written.append((name, number, crc))
            self._unsynced += length
            due = self._unsynced >= SYNC_BYTES
            if due:
                self._unsynced = 0
        if due:
            self.sync()

    def _gathering(self) -> Gathered:
        """Small chunks of this thread."""
        thread = threading.get_ident()
        if thread not in self._gathered:
            with self._lock:
                self._gathered[thread] = Gathered()
        return self._gathered[thread]

    def flush(self) -> None:
        """Bring what is written to the data files, or at least to the system's cache of them. OSError from the disk."""
        with self._lock:
            gathered = list(self._gathered.values())
        try:
            for one in gathered:
                one.flush()
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def _parts(self, name: str, box: Box, array: Elements) -> list[np.ndarray]:
        """The bytes of a chunk, in parts."""
        info = self.infos[name]
        parts = [array] if isinstance(array, np.ndarray) else list(array)
        size = sum([part.size for part in parts])
        fits = array.shape == box.sizes if isinstance(array, np.ndarray) else size == box.numel
        if not fits or [part for part in parts if part.dtype != info.dtype]:
            raise CheckpointError(
                f"{self._what(name)}: expected {info.dtype.name} of shape {box.sizes} for the chunk at {box.offsets}, "
                "got " + " and ".join(f"{part.dtype.name} of shape {part.shape}" for part in parts)
            )
        return [raw_bytes(part) for part in parts]

    def _claim(self, name: str, box: Box) -> int:
        """The number of the chunk, which nobody else may write from here on."""
        number = self._numbers[name].get(box)
        if number is None:
            raise CheckpointError(
                f"{self._what(name)}: expected every box to be one of its {len(self.infos[name].chunks)} chunks, got "
                f"{box}"
            )
        with self._lock:
            if number in self._crcs[name] or (name, number) in self._claimed:
                raise CheckpointError(
                    f"{self._what(name)}: expected every box to be written once, got {box} again"
                )
            self._claimed.add((name, number))
        return number

    def _what(self, name: str) -> str:
        return f"{self.path}: tensor {name!r}"

    def sync(self) -> None:
        """Bring to disk what is written, then note it in the journal.

        OSError when the disk fails, and at every call from then on.
        """
        with self._syncing:
            # The system tells a loss once for each open file: the next sync of the same file would succeed, and the
            # journal would name chunks that the disk does not have.
            if self._lost is not None:
                raise self._lost
            # Chunks that are written from here on wait for the next call: this one may come too early for them.
            with self._lock:
                written, self._written = self._written, []
            try:
                self.flush()
                for file in self._files:
                    file.sync()
                if not self._entries_synced:
                    self._sync_entries()
            except OSError as error:
                self._lost = error
                raise
            if self._journal is not None and written:
                self._journal.record(written)

    def _sync_entries(self) -> None:
        """Bring to disk that the data files exist: the entries of all directories from each file up."""
        top = self.path.parent
        files = [file for file in self._files if isinstance(file, DataFile)]
        for directory in {d for file in files for d in file.path.parents if d.is_relative_to(top)}:
            fsync_directory(directory)
        self._entries_synced = True

    def require_complete(self) -> None:
        """CheckpointError unless every chunk was written."""
        for name, info in self.infos.items():
            if len(self._crcs[name]) != len(info.chunks):
                missing = [
                    box for box, number in self._numbers[name].items() if number not in self._crcs[name]
                ]
                raise CheckpointError(
                    f"{self.path}: tensor {name!r}: {len(missing)} of {len(info.chunks)} chunks were not written, the "
                    f"first at {missing[0].offsets}: write every chunk before the commit"
                )

    def manifest(self) -> Mapping[str, ManifestTensor]:
        """What was written, for the manifest."""
        return {
            name: ManifestTensor(
                dtype_name(info.dtype),
                info.shape,
                {box: self._crcs[name][n] for n, box in enumerate(info.chunks) if n in self._crcs[name]},
            )
            for name, info in self.infos.items()
        }

    def close(self) -> None:
        """Close the data files. Where a failed attempt keeps them, everything written is synced and noted first."""
        if self._journal is not None and self._journal.kept and not self._closed:
            # The attempt is failing already; what cannot be noted is written again by the next one.
            with suppress(OSError):
                self.sync()
        self._closed = True
        self._gathered.clear()
        for file in self._files:
            file.close()


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

    def write_from(self, name: str, box: Box, fill: Callable[[memoryview], Checksums | None]) -> bool:
        """Store one of `chunks(name)`, a small one, as ``fill`` makes it; see `CheckpointWriter.write_from`."""
        self._require_open()
        return self._record.write_from(name, box, fill, self._sink)

    def _require_open(self) -> None:
        failure = self._record.failure
        if self.ended or failure is not None:
            why = "it was committed or aborted" if self.ended else f"a write failed: {failure}"
            raise CheckpointError(f"{self.path}: the checkpoint cannot be written any further: {why}")

    def _refuse_repeated(self, name: str, objects: Sequence[str] | Mapping[str, object]) -> None:
        if name in self._record.infos or name in objects:
            raise CheckpointError(f"{self.path}: two entries are named {name!r} (names join the path by '.')")
