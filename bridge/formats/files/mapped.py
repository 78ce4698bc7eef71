"""Files of a checkpoint mapped into memory for reading, and regions of arrays in them copied out block by block.

Files are mapped, not read, and let go of page by page, so that reading needs memory for its result only.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from bridge.formats.base import Box, CheckpointError, Loan, TensorInfo
from bridge.formats.stores.listing import StorePath

MAX_SMALL_FILE = 256 << 20
"""Bytes of a file that is read whole: metadata and the like, not data."""

BLOCK = 8 << 20
"""Bytes of a mapped file that are looked at in one go, so that little of the file is in memory."""

_MAX_OPEN_FILES = 64

_GAP = 16 << 10
"""Bytes between two pieces that are read with them."""

_MOST_PARTS = 1000
"""Memory that one read may fill: 1024 parts on Linux (`IOV_MAX`)."""

_BETWEEN = memoryview(bytearray(_GAP))
_SNAPSHOTS = "snapshots"
_BLOBS = "blobs"

_NORESERVE = 0x4000 if sys.platform == "linux" else 0

_STORED = re.compile(
    r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}$"
    r"|/\.dvc/cache/[0-9a-f]{2}/[0-9a-f]{30}$"
    r"|/annex/objects/[0-9A-Za-z]{2,3}/[0-9A-Za-z]{2,3}/(?P<key>[A-Z0-9_]+-s\d+-[^/]+)/(?P=key)$"
)
"""Where DVC and git-annex, and so DataLad, keep the files that a working tree links to. The Hub's cache has them in
`blobs`, beside the links in `snapshots/<revision>`."""


def is_kept_by_content(target: Path) -> bool:
    """Whether this is the place of a file in a store that names files after their content; see `_STORED`."""
    return _STORED.search(str(target)) is not None


def is_plain_name(name: object) -> bool:
    """Whether this names a file of a directory: anything else could lead out of it."""
    return (
        isinstance(name, str)
        and 0 < len(name) < 256
        and name not in (".", "..")
        and not re.search(r"[/\\\0]", name)
    )


def regular_file(directory: Path, name: str, what: str, *, links: bool = False) -> tuple[Path, int]:
    """A file of a checkpoint's directory and its size in bytes.

    CheckpointError, beginning with `what`, when it is missing, is no regular file, or is a link out of the directory.
    Allowed are all `links`, if so asked, and those into stores whose files are named after their content (`_STORED`):
    no other file of the system has such a name.
    """
    file = directory / name
    try:
        home, target = directory.resolve(strict=True), file.resolve(strict=True)
        status = target.stat()
    except (OSError, RuntimeError, ValueError) as error:
        absent = file.is_symlink() and isinstance(error, FileNotFoundError)
        why = (
            "a link to what is not here: fetch it (dvc pull, git annex get)"
            if absent
            else "which cannot be read"
        )
        raise CheckpointError(f"{what} is stored in {file}, {why}: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{what} is stored in {file}, which is not a regular file")
    blobs = home.parent.parent / _BLOBS
    if (
        not links
        and target.parent != home
        and not (home.parent.name == _SNAPSHOTS and target.parent == blobs)
        and not is_kept_by_content(target)
    ):
        raise CheckpointError(
            f"{what} is stored in {file}, a link to {target}: expected a file in the checkpoint's directory"
        )
    return file, status.st_size


def small_file(
    directory: Path, name: str, what: str, *, most: int = MAX_SMALL_FILE, links: bool = False
) -> bytes:
    """The content of a file that is read whole; see `regular_file`. CheckpointError for one above `most` bytes, too."""
    file, size = regular_file(directory, name, what, links=links)
    if size > most:
        raise CheckpointError(f"{file}: expected at most {most} bytes, got {size}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def files_below(directory: Path) -> list[Path]:
    """All files in a directory and in those below it, but not behind links to directories."""
    if isinstance(directory, StorePath):
        return list(directory.files())
    found = [Path(place, name) for place, _, names in os.walk(directory) for name in names]
    return [path for path in found if path.is_file()]


class StreamedMap(mmap.mmap):
    """Memory for a file in an object store, as if it was mapped: as long as the file, with some of its bytes.

    Only what is filled takes memory, and that goes when the last array in it goes: `madvise` frees nothing here.
    """

    @classmethod
    def of(cls, file: StorePath, *wanted: tuple[int, int]) -> Self:
        """The map of a file with these ranges, from first byte to the one after the last. Others read as zeros.

        CheckpointError when there is no room for it in the address space; OSError when the store fails.
        """
        size = file.stat().st_size
        try:
            if not size:
                raise ValueError("it is empty")
            streamed = cls(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"cannot read {file}: no map of its {size} bytes: {error}") from error
        view = memoryview(streamed)
        for start, stop in wanted:
            file.fill(start, view[start : min(stop, size)])
        view.release()
        return streamed

    def madvise(self, *_: int) -> None:
        """Nothing: the bytes would have to be fetched again."""


class Piece(NamedTuple):
    """Bytes of a file from `start` on, and the memory that they are to fill, one part after the other."""

    file: str
    start: int
    targets: tuple[memoryview, ...]


class _Descriptor:
    """A file that is open for reading, until nobody has this any more."""

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class MappedFiles:
    """Read-only maps of a directory's files, the most recently used ones kept open. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._opened: OrderedDict[str, _Descriptor] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def get(self, name: str, start: int, stop: int, *others: tuple[int, int]) -> mmap.mmap:
        """The map of a file, for its bytes [start, stop), and those of other ranges: in a store, others are not there.

        CheckpointError when it cannot be read, ValueError after `close`.
        """
        with self._lock:
            if self._closed:
                raise ValueError(f"the checkpoint {self.directory} was closed")
        if isinstance(self.directory, StorePath):
            return StreamedMap.of(self.directory / name, (start, stop), *others)
        with self._lock:
            if name not in self._maps:
                try:
                    with open(self.directory / name, "rb") as file:
                        self._maps[name] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                except (OSError, ValueError) as error:
                    raise CheckpointError(f"cannot read {self.directory / name}: {error}") from error
                # Dropped, not closed: another thread may still copy from it.
                if len(self._maps) > _MAX_OPEN_FILES:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(name)
            return self._maps[name]

    def read_into(self, pieces: Sequence[Piece | None]) -> list[bool]:
        """Read pieces of files into memory, without mapping them; whether each is there as a whole.

        Of a small piece a page fault for every few pages, and letting go of them, would cost more than the copy. And
        neighbours come by one read: each read lets go of Python's lock, and a thread waits longer to get it back than
        the read of a small piece takes. None of them in a store. OSError when a file cannot be read, ValueError after
        `close`.
        """
        found = [False] * len(pieces)
        if isinstance(self.directory, StorePath):
            return found
        run: list[tuple[int, int]] = []
        vector: list[memoryview] = []
        name, start, stop = "", 0, 0
        for index, piece in enumerate(pieces):
            if piece is None:
                continue
            gap = piece.start - stop
            if run and not (piece.file == name and 0 <= gap <= _GAP and len(vector) < _MOST_PARTS):
                self._read(name, start, vector, run, found)
                run, vector = [], []
            if not run:
                name, start = piece.file, piece.start
            elif gap:
                vector.append(_BETWEEN[:gap])
            vector += piece.targets
            stop = piece.start + sum(map(len, piece.targets))
            run.append((index, stop))
        if run:
            self._read(name, start, vector, run, found)
        return found

    def _read(
        self, name: str, start: int, vector: list[memoryview], run: list[tuple[int, int]], found: list[bool]
    ) -> None:
        path = self.directory / name
        with self._lock:
            if self._closed:
                raise ValueError(f"the checkpoint {self.directory} was closed")
            file = self._opened.get(name)
            if file is None:
                file = self._opened[name] = _Descriptor(path)
                # Dropped, not closed: another thread may still read from it.
                if len(self._opened) > _MAX_OPEN_FILES:
                    self._opened.popitem(last=False)
        try:
            end = start + os.preadv(file.number, vector, start)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        for index, stop in run:
            found[index] = stop <= end

    def close(self) -> None:
        """Release the files; arrays copied out stay valid."""
        with self._lock:
            self._closed = True
            self._maps.clear()
            self._opened.clear()


class ChunkIndex:
    """Which chunks of a tensor a box touches, by array arithmetic: there may be 100,000 of them."""

    def __init__(self) -> None:
        self._bounds: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def touching(self, info: TensorInfo, box: Box) -> list[int]:
        """Positions in `info.chunks` of those that share elements with the box."""
        if not box.numel or len(info.chunks) == 1:
            return list(range(len(info.chunks))) if box.numel else []
        if info.name not in self._bounds:
            starts = np.array([c.offsets for c in info.chunks], np.int64).T.copy()
            sizes = np.array([c.sizes for c in info.chunks], np.int64).T
            self._bounds[info.name] = (starts, starts + sizes)
        hits = np.ones(len(info.chunks), np.bool_)
        for start, stop, low, high in zip(*self._bounds[info.name], box.offsets, box.stops, strict=True):
            hits &= (start < high) & (stop > low)
        return [int(index) for index in np.flatnonzero(hits)]


def box_of(info: TensorInfo, box: Box | None) -> Box:
    """The box to be read, all of the tensor if None. ValueError when it is not inside."""
    if box is None:
        return Box.whole(info.shape)
    if not box.inside(info.shape):
        raise ValueError(f"tensor {info.name!r}: expected a box inside shape {info.shape}, got {box}")
    return box


def array_for(info: TensorInfo, box: Box, what: object) -> np.ndarray:
    """Memory for a box of a tensor. CheckpointError, beginning with `what`, when there is not enough."""
    try:
        return np.empty(box.sizes, info.dtype)
    except (MemoryError, ValueError) as error:
        raise CheckpointError(
            f"{what}: no memory for {box.numel} elements of tensor {info.name!r}, shape {info.shape}: {error}"
        ) from error


def drop_pages(file: mmap.mmap, start: int, stop: int) -> None:
    """Let go of the memory of a mapped range; the operating system still caches the file."""
    first = start - start % mmap.PAGESIZE
    if stop > first:
        file.madvise(mmap.MADV_DONTNEED, first, stop - first)


def lend_mapped(source: np.ndarray, file: mmap.mmap, start: int) -> Loan | None:
    """An array that lies in a mapped file from byte `start` on, if it lies there in one piece."""
    if not source.flags.c_contiguous:
        return None
    source.flags.writeable = False
    return Loan(source, partial(drop_pages, file, start, start + source.nbytes))


def copy_mapped(target: np.ndarray, source: np.ndarray, file: mmap.mmap, start: int) -> None:
    """Copy an array that lies in a mapped file from byte `start` on.

    Halves it along its longest stride until a piece spans at most a block, so that little of the file is resident.
    """
    span = source.itemsize + sum((n - 1) * s for n, s in zip(source.shape, source.strides, strict=True))
    if span <= BLOCK:
        target[...] = source
        drop_pages(file, start, start + span)
        return
    axis = max(range(source.ndim), key=lambda a: source.strides[a] if source.shape[a] > 1 else -1)
    half = source.shape[axis] // 2
    before = (slice(None),) * axis
    low, high = (*before, slice(None, half)), (*before, slice(half, None))
    copy_mapped(target[low], source[low], file, start)
    copy_mapped(target[high], source[high], file, start + half * source.strides[axis])
