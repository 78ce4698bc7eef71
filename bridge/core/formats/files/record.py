"""A chunk's life, from a caller's array to a line in the journal.

    declared   the tensor is known, and so are the numbers and boxes of its chunks      declare
    claimed    one caller writes the chunk, and nobody else may                       \
    encoded    the format says where the chunk goes and which bytes go there (`Sink`)  | write
    written    the bytes are in a data file, perhaps only in the system's cache, or   /
               gathered with small neighbours, to go there together
    synced     the disk has them: after every 256 MiB, at the end, and on failure     \\  sync
    noted      the journal names the chunk and the CRC-32C of its elements            /

A writer that resumes an attempt calls `stored` first: a noted chunk counts only if the disk still has its elements. The
writers of all formats use this record, and know nothing about syncing or the journal.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bridge.core.formats.files.atomic import fsync_directory
from bridge.core.formats.files.data_file import SMALL, DataFile, Gathered, allow_open_files
from bridge.core.formats.files.journal import Journal
from bridge.core.formats.files.manifest import ManifestTensor
from bridge.core.formats.files.sink import Place, Sink
from bridge.core.formats.stores.folder import StoredJournal
from bridge.core.formats.stores.upload import UploadFile, UploadPath
from bridge.core.formats.tensors.arrays import array_checksum, extend, raw_bytes
from bridge.core.formats.tensors.base import Box, CheckpointError, Checksums, Elements, Fill, TensorInfo

SYNC_BYTES = 256 << 20
"""Data is synced to disk, and then noted in the journal, whenever this many bytes are new."""

_TOGETHER = 1 << 20
"""Bytes of small chunks that one call fills: they are checked while they are in the processor's cache."""


class _Slot(NamedTuple):
    """One of the requested chunks, whose elements go to the file from byte `first` on."""

    position: int
    info: TensorInfo
    number: int
    place: Place
    first: int
    nbytes: int
    after: int

    @property
    def stop(self) -> int:
        return self.first + self.nbytes + self.after

    def goes_on(self, other: _Slot, start: int) -> bool:
        """Whether the other chunk follows at once, and everything from ``start`` on is small enough for one call."""
        following = other.place
        near = following.file is self.place.file and following.offset == self.stop
        return near and other.stop - start <= _TOGETHER


class ChunkRecord:
    """The tensors of a checkpoint that is being written, its data files, and how far each chunk has come. Thread-safe.

    path: where the checkpoint will be, for errors. failure: the error of a failed write, None if none failed.
    """

    def __init__(self, path: Path, journal: Journal | StoredJournal | None = None) -> None:
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self.failure: BaseException | None = None
        self._journal = journal
        self._numbers: dict[str, dict[Box, int]] = {}
        self._alike: dict[int, tuple[tuple[Box, ...], dict[Box, int]]] = {}
        self._crcs: dict[str, dict[int, int]] = {}
        self._unchecked: set[tuple[str, int]] = set()
        self._claimed: set[tuple[str, int]] = set()
        self._written: list[tuple[str, int, int]] = []
        self._gathered: dict[int, Gathered] = {}
        self._unsynced = 0
        # Protects the tables below; held briefly, and never while bytes are written.
        self._lock = threading.Lock()
        self._files: list[DataFile | UploadFile] = []
        self._entries_synced = False
        self._lost: OSError | None = None
        self._closed = False
        # One sync at a time, with a separate lock: threads continue writing while the disk works.
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
        name, chunks = info.name, info.chunks
        with self._lock:
            self.infos[name] = info
            # Tensors that are alike share their chunks and chunk numbers.
            known, numbers = self._alike.get(id(chunks), (None, {}))
            if known is not chunks:
                numbers = {box: number for number, box in enumerate(chunks)}
                self._alike[id(chunks)] = chunks, numbers
            self._numbers[name] = numbers
            done = self._journal.done.get(name) if self._journal else None
            self._crcs[name] = {n: crc for n, crc in done.items() if 0 <= n < len(chunks)} if done else {}
            if done:
                self._unchecked.update((name, number) for number in self._crcs[name])

    def position(self, name: str, box: Box | None, sink: Sink) -> tuple[str, int]:
        """Where a tensor, or the elements of a chunk, begin; ("", 0) if the place is not known."""
        info = self.infos[name]
        if not info.chunks or not sink.placed:
            return "", 0
        number = 0 if box is None else self._number(name, box)
        reserved, frame = sink.place(info, number), (0, 0) if box is None else sink.frame(info, number)
        return str(reserved.file.path), reserved.offset + (frame[0] if frame else 0)

    def stored(self, name: str, sink: Sink) -> frozenset[Box]:
        """Chunks of a tensor that an earlier attempt has noted, and whose elements are on disk as it noted them."""
        info, crcs = self.infos[name], self._crcs[name]
        if not crcs:
            return frozenset()
        for number in list(crcs):
            # Only once: chunks that this attempt has written are also in the list, and need no second check.
            if (name, number) in self._unchecked:
                self._unchecked.discard((name, number))
                reserved = sink.place(info, number)
                if isinstance(reserved.file, UploadFile) and isinstance(self.path, UploadPath):
                    if reserved.file.holds(reserved.offset, reserved.length):
                        sink.recall(info, number, self.path.store.recalled[name, number])
                    else:
                        del crcs[number]
                    continue
                elements = sink.decode(info, number, reserved.file.read(reserved.offset, reserved.length))
                if elements is None or array_checksum(elements) != crcs[number]:
                    del crcs[number]
        return frozenset(box for box, number in self._numbers[name].items() if number in crcs)

    def write(self, name: str, box: Box, array: Elements, sink: Sink, *, crc: int | None = None) -> None:
        """Take a chunk from the caller's array to the disk's queue, and sync when many bytes are waiting.

        KeyError for an unknown tensor; CheckpointError for another box, shape or dtype, or a chunk written before;
        OSError when the disk fails. The array may be changed afterwards. crc: its CRC-32C, if known.
        """
        parts = self._parts(name, box, array)
        info, number = self.infos[name], self._number(name, box)
        self._claim([(name, number)])
        try:
            crc = array_checksum(*parts) if crc is None else crc
            reserved = sink.place(info, number)
            data = sink.encode(info, number, parts, crc)
            if isinstance(reserved.file, UploadFile):
                reserved.file.write_parts(reserved.offset, data)
                note = (name, number, crc, sink.remembered(info, number))
                reserved.file.note(reserved.offset, reserved.length, note)
            elif reserved.length < SMALL:
                self._gathering().add(reserved.file, reserved.offset, data)
            else:
                reserved.file.write_parts(reserved.offset, data)
            self._wrote([(name, number, crc)], reserved.length)
        except BaseException as error:
            # The first failure is kept: the checkpoint can no longer be completed, and `_require_open` says why.
            self.failure = self.failure or error
            raise

    def write_from(self, chunks: Sequence[tuple[str, Box]], fill: Fill, sink: Sink) -> list[bool]:
        """The same for small chunks whose elements ``fill`` writes; see `CheckpointWriter.write_from`."""
        done = [False] * len(chunks)
        # If a place is known only once its chunk is written, asking for it twice would leave one place empty.
        if not sink.placed:
            return done
        batch: list[_Slot] = []
        for position, (name, box) in enumerate(chunks):
            info, number = self.infos[name], self._number(name, box)
            nbytes, frame = box.numel * info.dtype.itemsize, sink.frame(info, number)
            reserved = sink.place(info, number)
            if nbytes >= SMALL or frame is None or not isinstance(reserved.file, DataFile):
                continue
            before, after = frame
            slot = _Slot(position, info, number, reserved, reserved.offset + before, nbytes, after)
            if batch and not batch[-1].goes_on(slot, batch[0].place.offset):
                self._fill(batch, fill, sink, done)
                batch = []
            batch.append(slot)
        if batch:
            self._fill(batch, fill, sink, done)
        return done

    def _fill(self, batch: list[_Slot], fill: Fill, sink: Sink, done: list[bool]) -> None:
        """Neighbours, filled and handed over together."""
        written: list[tuple[_Slot, int]] = []
        start, file = batch[0].place.offset, batch[0].place.file
        assert isinstance(file, DataFile)

        def piece(memory: memoryview) -> bool:
            targets = [memory[slot.first - start : slot.first - start + slot.nbytes] for slot in batch]
            sums_of_all = fill([slot.position for slot in batch], targets)
            for slot, elements, sums in zip(batch, targets, sums_of_all, strict=True):
                if sums is None:
                    continue
                crc = extend(0, elements) if sums.crc32c is None else sums.crc32c
                before, after = sink.around(slot.info, slot.number, elements, Checksums(sums.crc32, crc))
                at = slot.first - start
                memory[at - len(before) : at] = before
                memory[at + slot.nbytes : at + slot.nbytes + len(after)] = after
                written.append((slot, crc))
            # An unfilled place is overwritten when its chunk arrives.
            return bool(written)

        claimed = [(slot.info.name, slot.number) for slot in batch]
        self._claim(claimed)
        try:
            self._gathering().fill(file, start, batch[-1].stop - start, piece)
            with self._lock:
                self._claimed.difference_update(claimed)
            self._wrote([(slot.info.name, slot.number, crc) for slot, crc in written], batch[-1].stop - start)
        except BaseException as error:
            self.failure = self.failure or error
            raise
        for slot, _ in written:
            done[slot.position] = True

    def _wrote(self, chunks: Sequence[tuple[str, int, int]], length: int) -> None:
        with self._lock:
            for name, number, crc in chunks:
                self._claimed.discard((name, number))
                self._crcs[name][number] = crc
            if self._journal is not None:
                self._written += chunks
            self._unsynced += length
            due = self._unsynced >= SYNC_BYTES
            if due:
                self._unsynced = 0
        # Outside the lock: other threads continue writing while this thread waits for the disk.
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
        """Flush the written data to the data files, or at least to the system's cache. OSError from the disk."""
        with self._lock:
            gathered = list(self._gathered.values())
        try:
            for buffer in gathered:
                buffer.flush()
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

    def _number(self, name: str, box: Box) -> int:
        number = self._numbers[name].get(box)
        if number is None:
            raise CheckpointError(
                f"{self._what(name)}: expected every box to be one of its {len(self.infos[name].chunks)} chunks, got "
                f"{box}"
            )
        return number

    def _claim(self, chunks: Sequence[tuple[str, int]]) -> None:
        """Claim these chunks: nobody else may write them from now on."""
        with self._lock:
            for name, number in chunks:
                if number in self._crcs[name] or (name, number) in self._claimed:
                    box = self.infos[name].chunks[number]
                    raise CheckpointError(
                        f"{self._what(name)}: expected every box to be written once, got {box} again"
                    )
            self._claimed.update(chunks)

    def _what(self, name: str) -> str:
        return f"{self.path}: tensor {name!r}"

    def sync(self) -> None:
        """Sync the written data to disk, then note it in the journal.

        OSError when the disk fails, and at every call from then on.
        """
        with self._syncing:
            # The system reports a loss once for each open file: the next sync of the file would succeed, and the
            # journal would name chunks that the disk does not have.
            if self._lost is not None:
                raise self._lost
            # Chunks that are written from now on wait for the next call: this sync may miss them.
            with self._lock:
                written, self._written = self._written, []
            try:
                self.flush()
                for file in self._files:
                    file.sync()
                # A power cut loses the bytes of a file that no directory names. Once is enough: no file comes later.
                if not self._entries_synced:
                    self._sync_entries()
            except OSError as error:
                self._lost = error
                raise
            # After the sync, never before: the journal names only chunks that a resumed attempt will find on disk.
            if self._journal is not None and written:
                self._journal.record(written)

    def _sync_entries(self) -> None:
        """Sync the existence of the data files to disk: the entries of all directories from each file upwards."""
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
        """The written chunks, for the manifest."""
        return {name: ManifestTensor.of(info, self._crcs[name]) for name, info in self.infos.items()}

    def close(self) -> None:
        """Close the data files. If a failed attempt keeps them, everything written is synced and noted first."""
        if self._journal is not None and self._journal.kept and not self._closed:
            # The attempt is failing already; the next attempt writes again what cannot be noted.
            with suppress(OSError):
                self.sync()
        self._closed = True
        self._gathered.clear()
        for file in self._files:
            file.close()
