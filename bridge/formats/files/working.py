"""How a checkpoint is being made: its working directory, its journal, and which chunks it has by now."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bridge.formats.arrays import raw_bytes
from bridge.formats.base import (
    Box,
    CheckpointError,
    Elements,
    TensorInfo,
    dtype_name,
)
from bridge.formats.files.atomic import AtomicDirectory, CommitOrAbort, is_temporary
from bridge.formats.files.journal import JOURNAL_FILE, Journal, Key, remove_abandoned, resume
from bridge.formats.files.manifest import ManifestTensor
from bridge.formats.replaceable import require_replaceable


@dataclass(frozen=True)
class Attempt:
    """One attempt at writing a checkpoint.

    replace: an existing checkpoint may be there, and gives way at the commit. key: with one, progress is noted, and
    what a killed attempt with the same key has written can be taken over. resume: do so if there is any, and keep the
    working directory when this attempt fails.
    """

    replace: bool = False
    key: Key = field(default_factory=dict)
    resume: bool = False

    def __post_init__(self) -> None:
        if self.resume and not self.key:
            raise ValueError("expected a key beside resume, got none")


class WorkingDirectory(CommitOrAbort):
    """The directory a checkpoint is written in; see `AtomicDirectory` and `Journal`.

    `resumed`: whether it was taken over. CheckpointError when there is one that cannot be.
    """

    def __init__(self, path: str | os.PathLike[str], attempt: Attempt, *, payload: str | None = None) -> None:
        target = Path(os.path.abspath(path))
        if is_temporary(target):
            raise CheckpointError(
                f"expected a name that does not end as those of unfinished checkpoints do, got {target}: choose another"
            )
        self._replace = attempt.replace
        self._require_replaceable(target)
        journal = resume(target, attempt.key) if attempt.resume else None
        if journal is not None and payload is not None and not (journal.directory / payload).exists():
            # Killed between the renaming of the one file and the end: what the journal tells of is not there any more.
            journal.close()
            shutil.rmtree(journal.directory)
            journal = None
        self.resumed = journal is not None
        try:
            self._directory = AtomicDirectory(
                target,
                replace=attempt.replace,
                resumed=journal.directory if journal else None,
                payload=payload,
            )
        except BaseException:
            if journal is not None:
                journal.close()
            raise
        self.path, self.temporary = self._directory.path, self._directory.temporary
        if journal is None and attempt.key:
            try:
                journal = Journal.create(self.temporary, attempt.key)
            except BaseException:
                # Without a journal it could not be resumed.
                self._directory.abort()
                raise
        self._directory.keep = attempt.resume
        if journal is not None:
            journal.kept = attempt.resume
        self.journal = journal

    @property
    def ended(self) -> bool:
        return self._directory.ended

    def commit(self) -> None:
        """Let the checkpoint appear, and remove what earlier attempts left.

        CheckpointError when something that is no checkpoint has come to what is to be replaced.
        """
        try:
            self._require_replaceable(self.path)
        except BaseException:
            self.abort()
            raise
        self._directory.commit()
        if self.journal is not None:
            # After the renaming: a directory without it could not be resumed.
            if self.path.is_dir():
                (self.path / JOURNAL_FILE).unlink(missing_ok=True)
            self.journal.close()
            self.journal = None
            remove_abandoned(self.path)

    def place_beside(self, name: str) -> None:
        """Let the file of this name go beside the checkpoint, which is one file."""
        self._directory.sidecar = name

    def _require_replaceable(self, path: Path) -> None:
        if self._replace and os.path.lexists(path):
            require_replaceable(path)

    def abort(self) -> None:
        """Remove everything, or keep it to be resumed. Does nothing after commit or abort."""
        if not self._directory.ended:
            self._directory.abort()
            if self.journal is not None:
                self.journal.close()
                self.journal = None


class ChunkRecord:
    """The tensors of a checkpoint being written, and which of their chunks are written and which are on disk.

    Thread-safe. A chunk goes through `begin` (is it one that is expected?), `end` (written) and `synced` (on disk).
    """

    def __init__(self, path: Path, journal: Journal | None = None) -> None:
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self._journal = journal
        self._numbers: dict[str, dict[Box, int]] = {}
        self._crcs: dict[str, dict[int, int]] = {}
        self._unchecked: set[tuple[str, int]] = set()
        self._writing: set[tuple[str, int]] = set()
        self._written: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()

    @property
    def kept(self) -> bool:
        """Whether what is written stays when the attempt fails."""
        return self._journal is not None and self._journal.kept

    def declare(self, info: TensorInfo) -> None:
        """Expect the chunks of this tensor."""
        with self._lock:
            self.infos[info.name] = info
            self._numbers[info.name] = {box: number for number, box in enumerate(info.chunks)}
            done = self._journal.done.get(info.name, {}) if self._journal else {}
            self._crcs[info.name] = {n: crc for n, crc in done.items() if 0 <= n < len(info.chunks)}
            self._unchecked.update((info.name, number) for number in self._crcs[info.name])

    def stored(self, name: str, found: Callable[[int, Box], int | None]) -> frozenset[Box]:
        """Chunks of a tensor that an earlier attempt has written, and that are on disk as it did.

        found: the CRC-32C of the elements that are in the place of a chunk now, by its number and box; None when that
        place does not hold a whole chunk.
        """
        crcs = self._crcs[name]
        for box, number in self._numbers[name].items():
            if (name, number) in self._unchecked:
                self._unchecked.discard((name, number))
                if found(number, box) != crcs[number]:
                    del crcs[number]
        return frozenset(box for box, number in self._numbers[name].items() if number in crcs)

    def begin(self, name: str, box: Box, array: Elements) -> tuple[int, list[np.ndarray]]:
        """The number of a chunk about to be written, and its bytes, in parts.

        CheckpointError unless it is one, of this dtype, for once.
        """
        info, number = self.infos[name], self._numbers[name].get(box)
        what = f"{self.path}: tensor {name!r}"
        parts = [array] if isinstance(array, np.ndarray) else list(array)
        fits = array.shape == box.sizes if isinstance(array, np.ndarray) else _size(parts) == box.numel
        if not fits or any(part.dtype != info.dtype for part in parts):
            raise CheckpointError(
                f"{what}: expected {info.dtype.name} of shape {box.sizes} for the chunk at {box.offsets}, got "
                + " and ".join(f"{part.dtype.name} of shape {part.shape}" for part in parts)
            )
        if number is None:
            raise CheckpointError(
                f"{what}: expected every box to be one of its {len(info.chunks)} chunks, got {box}"
            )
        with self._lock:
            if number in self._crcs[name] or (name, number) in self._writing:
                raise CheckpointError(f"{what}: expected every box to be written once, got {box} again")
            self._writing.add((name, number))
        return number, [raw_bytes(part) for part in parts]

    def end(self, name: str, number: int, crc: int) -> None:
        """The chunk is written, if perhaps not synced yet; `crc`: the CRC-32C of its elements."""
        with self._lock:
            self._writing.discard((name, number))
            self._crcs[name][number] = crc
            if self._journal is not None:
                self._written.append((name, number, crc))

    def take_written(self) -> list[tuple[str, int, int]]:
        """Chunks written since the last call: sync them, then give them to `synced`."""
        with self._lock:
            written, self._written = self._written, []
        return written

    def synced(self, written: list[tuple[str, int, int]]) -> None:
        """Note them in the journal."""
        if self._journal is not None and written:
            with self._lock:
                self._journal.record(written)

    def require_complete(self) -> None:
        """CheckpointError unless every chunk was written."""
        for name, info in self.infos.items():
            if len(self._crcs[name]) != len(info.chunks):
                missing = [
                    box for box, number in self._numbers[name].items() if number not in self._crcs[name]
                ]
                raise CheckpointError(
                    f"{self.path}: tensor {name!r}: expected all {len(info.chunks)} chunks to be written before "
                    f"commit, but {len(missing)} were not, the first at {missing[0].offsets}"
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


def _size(parts: Sequence[np.ndarray]) -> int:
    return sum(part.size for part in parts)


class RecordedChunks:
    """The chunks of a writer that keeps a record of them."""

    path: Path
    _record: ChunkRecord

    def chunks(self, name: str) -> tuple[Box, ...]:
        """The boxes that `write` expects, in row-major order; none for a tensor without elements.

        KeyError for an unknown name.
        """
        return self._record.infos[name].chunks

    def stored(self, name: str) -> frozenset[Box]:
        """Those of `chunks(name)` that a resumed attempt has written already."""
        return self._record.stored(name, partial(self._crc_on_disk, name))

    def _crc_on_disk(self, name: str, number: int, box: Box) -> int | None:
        """The CRC-32C of the elements that are in the place of a chunk now, None if it is not whole."""
        raise NotImplementedError
