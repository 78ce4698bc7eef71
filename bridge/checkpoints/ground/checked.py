"""A checkpoint compared with its manifest: everything read is compared with checksums, and a difference is an error.

Chunks of the manifest that a block contains whole are compared as they are read. For other chunks, the whole chunk is
read for the comparison when a part of it is first requested. `verify` lists the same problems without stopping. The
format's reader checks tensors whose format has checksums.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from bridge.core.formats import detect_format
from bridge.core.formats.files.manifest import (
    MANIFEST_FILE,
    Manifest,
    ManifestTensor,
    manifest_path,
    object_checksum,
    read_manifest,
    rest_checksum,
)
from bridge.core.formats.orbax.item import find_item
from bridge.core.formats.reading.source_files import FileView
from bridge.core.formats.safetensors.files import SAFETENSORS_FILES
from bridge.core.formats.stores.listing import StoredReader, StorePath
from bridge.core.formats.tensors.arrays import array_checksum, extend
from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    CheckpointReader,
    Checksums,
    Loan,
    TensorInfo,
    Wanted,
    name_of,
)
from bridge.core.formats.tensors.boxes import ChunkIndex, check_coverage, split_box
from bridge.core.formats.tensors.wrapping import ReadWhenAsked, WrappingReader, home_of
from bridge.core.formats.whole.composite import JoinedReader

_FILE_BLOCK = 8 << 20


@dataclass(frozen=True)
class Problem:
    """What is wrong, and where: the name of a file, a tensor or an object."""

    where: str
    text: str


@runtime_checkable
class SaysWhatIsChecked(Protocol):
    """A reader of a format with its own checksums."""

    def checksummed(self, name: str) -> bool:
        """Whether every stored chunk of a tensor has a checksum that reading verifies."""


@runtime_checkable
class _SaysWhereDataIs(Protocol):
    def data_ranges(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """For each file, the ranges of chunks' elements: the first byte, and the byte after the last."""


@runtime_checkable
class _HasCopies(Protocol):
    def damaged_copies(self) -> Iterator[tuple[str, CheckpointError]]:
        """Tensors with a damaged copy that is not read, since another file has the data, and what is wrong with it."""


@runtime_checkable
class _ShowsFiles(Protocol):
    def view(self, file: str) -> FileView | None:
        """A file of the checkpoint, for reading between its chunks; None if it is in a store."""


def file_problems(home: Path, manifest: Manifest) -> Iterator[Problem]:
    """Problems of the manifest's files: missing, of another size, or with another checksum."""
    for name, expected in manifest.files.items():
        path = _listed_file(home, manifest, name)
        if ".." in Path(name).parts or Path(name).is_absolute():
            yield Problem(
                name, "expected a file of the checkpoint in the manifest, got a path that leads elsewhere"
            )
            continue
        try:
            if not path.is_file():
                yield Problem(name, "the manifest lists this file, but it is missing")
            elif (size := path.stat().st_size) != expected.size:
                yield Problem(name, f"expected {expected.size} bytes, got {size}")
            elif expected.crc is not None and (crc := _file_crc(path)) != expected.crc:
                yield Problem(name, f"damaged: expected CRC-32C {expected.crc:08x}, got {crc:08x}")
        except OSError as error:
            yield Problem(name, f"cannot be read: {error}")


def _listed_file(home: Path, manifest: Manifest, name: str) -> Path:
    """A checkpoint in one file may have been renamed, together with its manifest."""
    if home.is_dir():
        return home / name
    return home if len(manifest.files) == 1 else home.parent / name


def _file_crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_FILE_BLOCK):
            crc = extend(crc, block)
    return crc


def copy_problems(reader: CheckpointReader) -> Iterator[Problem]:
    """Problems of the copies of chunks that several ranks have written; reading uses only one copy."""
    if isinstance(reader, _HasCopies):
        yield from (Problem(name, str(error)) for name, error in reader.damaged_copies())


def rest_problems(reader: CheckpointReader, home: Path, manifest: Manifest) -> Iterator[Problem]:
    """Problems of headers and the like in files whose data the chunks' checksums cover."""
    listed = {name: file.rest for name, file in manifest.files.items() if file.rest is not None}
    if not listed or not isinstance(reader, _SaysWhereDataIs):
        return
    try:
        ranges = reader.data_ranges()
        for name, expected in listed.items():
            path = _listed_file(home, manifest, name)
            held = ranges.get(path.name if home.is_file() else name, ())
            try:
                view = reader.view(name) if isinstance(reader, _ShowsFiles) and held else None
                if (crc := rest_checksum(path, held, view)) != expected:
                    yield Problem(
                        name, f"damaged outside of its data: expected CRC-32C {expected:08x}, got {crc:08x}"
                    )
            except (CheckpointError, OSError) as error:
                yield Problem(name, str(error))
    except (CheckpointError, OSError) as error:
        yield Problem(manifest.format, str(error))


def structure_problems(reader: CheckpointReader, manifest: Manifest) -> Iterator[Problem]:
    """A format that differs from the manifest's; tensors and objects that are missing or not in the manifest."""
    if reader.format != manifest.format:
        yield Problem(
            MANIFEST_FILE, f"expected format {manifest.format}, as in the manifest, got {reader.format}"
        )
    for noun, listed, names in (
        ("tensor", manifest.tensors.keys(), reader.tensors.keys()),
        ("object", manifest.objects.keys(), reader.objects.keys()),
    ):
        for name in listed:
            if name not in names:
                yield Problem(name, f"the manifest lists this {noun}, but it is missing")
        for name in names:
            if name not in listed:
                yield Problem(name, f"expected no {noun} of this name: the manifest does not list it")


def object_problems(name: str, value: object, manifest: Manifest) -> Iterator[Problem]:
    """A problem if an object's value does not match the manifest's checksum."""
    expected = manifest.objects.get(name)
    if expected is not None and (crc := object_checksum(value)) != expected:
        yield Problem(
            name, f"the value is damaged: expected CRC-32C {expected:08x}, got {crc:08x} of {value!r:.80}"
        )


def entry_problems(info: TensorInfo, entry: ManifestTensor) -> Iterable[Problem]:
    """Problems of a tensor's dtype and shape, and of its chunks in the manifest."""
    if entry.dtype != name_of(info.dtype) or entry.shape != info.shape:
        text = f"expected {entry.dtype} {list(entry.shape)}, as in the manifest, got {info.dtype} {list(info.shape)}"
        return [Problem(info.name, text)]
    # The manifest nearly always has the chunks of the file, which were checked when the file was opened.
    if tuple(entry.chunks) == info.chunks:
        return []
    try:
        check_coverage(info.shape, entry.chunks, f"chunks in the manifest of tensor {info.name!r}")
    except CheckpointError as error:
        return [Problem(info.name, str(error))]
    return []


def crc_problems(info: TensorInfo, chunk: Box, expected: int, crc: int) -> list[Problem]:
    """A problem unless the checksums of a chunk agree."""
    if crc == expected:
        return []
    return [
        Problem(
            info.name,
            f"the chunk at {chunk.offsets}, sizes {chunk.sizes}, is damaged: expected CRC-32C {expected:08x}, got "
            f"{crc:08x}",
        )
    ]


def checked(reader: CheckpointReader) -> CheckpointReader:
    """``reader``, compared with the manifest of its checkpoint; ``reader`` itself if there is none.

    Metadata files, names, dtypes and shapes are compared immediately, values when they are read.

    Raises CheckpointError, naming file, tensor or chunk, if the checkpoint does not match the manifest.
    """
    if isinstance(reader, StoredReader):
        # Whoever opened the reader closes it.
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
    # DCP's chunk places are stored between the chunks: a store would have to deliver all of its data at once.
    if reader.format == "safetensors" or not isinstance(home, StorePath):
        yield from rest_problems(reader, home, manifest)
    for name, entry in manifest.tensors.items():
        yield from entry_problems(reader.tensors[name], entry)
    if manifest.certificate_problem:
        yield Problem(manifest_path(home).name, manifest.certificate_problem)


class CheckedReader(WrappingReader):
    """``reader``, with values compared with ``manifest``, the content of the file ``source``; see above."""

    def __init__(self, reader: CheckpointReader, manifest: Manifest, source: str) -> None:
        super().__init__(reader)
        self._manifest, self._source = manifest, source
        self._own = reader.checksummed if isinstance(reader, SaysWhatIsChecked) else lambda name: False
        self._owned: dict[str, bool] = {}
        self._listed: dict[str, TensorInfo] = {}
        self._chunks = ChunkIndex()
        self._compared: set[tuple[str, int]] = set()
        # Guards the set of compared chunks. Two threads may compare one chunk, which only costs time.
        self._lock = threading.Lock()
        self.objects = ReadWhenAsked(reader.object_paths, self._checked_object)

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; CheckpointError also if it does not match the manifest."""
        array = self._reader.read(name, box)
        self._compare(name, Box.whole(self.tensors[name].shape) if box is None else box, array)
        return array

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        """One block lent from the file; CheckpointError also if it does not match the manifest."""
        loan = self._reader.lend(name, box, offset)
        if loan is not None:
            crc = self._compare(name, box, loan.array)
            loan = loan if crc is None else dataclasses.replace(loan, crc=crc)
        return loan

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        """Small tensors into memory, compared with the manifest; None also for a tensor that does not match."""
        sums_of_all = self._reader.read_into(wanted)
        return [self._held(*tensor, sums) for tensor, sums in zip(wanted, sums_of_all, strict=True)]

    def _held(self, name: str, target: memoryview, sums: Checksums | None) -> Checksums | None:
        if sums is None or self._is_own(name):
            return sums
        chunks = self._manifest.tensors[name].chunks
        if len(chunks) != 1:
            return None
        ((chunk, crc),) = chunks.items()
        crc32c = extend(0, target) if sums.crc32c is None else sums.crc32c
        return (
            Checksums(sums.crc32, crc32c)
            if crc32c == crc and chunk.sizes == self.tensors[name].shape
            else None
        )

    def require(self, problems: Iterable[Problem]) -> None:
        """Raise CheckpointError for the first of these."""
        for problem in problems:
            raise CheckpointError(
                f"{self.path}: {problem.where}: {problem.text}. The checkpoint does not match its manifest: use an "
                "undamaged copy (twinshard verify lists all differences), or convert without verifying "
                "(--no-verify): the new checkpoint's manifest will then describe the data as read. The manifest is "
                f"{self._source}"
            )

    def _compare(self, name: str, box: Box, array: np.ndarray) -> int | None:
        """Compare the manifest's chunks in a box; the CRC-32C of the box, if it is one of them and was computed."""
        if self._is_own(name):
            return None
        if name not in self._listed:
            # With the manifest's chunks, which may differ from the file's chunks.
            chunks = tuple(self._manifest.tensors[name].chunks)
            info = self.tensors[name]
            self._listed[name] = info if info.chunks == chunks else dataclasses.replace(info, chunks=chunks)
        info = self._listed[name]
        crc_of_box = None
        for index in self._chunks.touching(info, box):
            if (name, index) in self._compared:
                continue
            chunk = info.chunks[index]
            whole = chunk.intersect(box) == chunk
            crc = array_checksum(array[chunk.slices(box)]) if whole else self._checksum(info, chunk)
            self.require(crc_problems(info, chunk, self._manifest.tensors[name].chunks[chunk], crc))
            crc_of_box = crc if chunk == box else None
            with self._lock:
                self._compared.add((name, index))
        return crc_of_box

    def _is_own(self, name: str) -> bool:
        """Whether the format has checksums of the tensor, which the format's reader compares."""
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


def manifest_home(path: Path) -> Path:
    """The path with the manifest for ``path``: ``path`` itself, or the only step, item or safetensors file in it."""
    if not path.is_dir() or manifest_path(path).exists():
        return path
    try:
        format = detect_format(path)
        if format == "safetensors":
            files = SAFETENSORS_FILES.find(path)
            file = path / files.names[0] if len(files.names) == 1 else path
            return file if manifest_path(file).is_file() else path
        item = find_item(path) if format == "orbax" else path
    except (CheckpointError, FileNotFoundError):
        return path
    between = [directory for directory in (item, *item.parents) if directory.is_relative_to(path)]
    return next((directory for directory in between if manifest_path(directory).is_file()), path)
