"""What of a checkpoint is not as its manifest says: its files, the names in it, its objects, its tensors' chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from bridge.core.formats.files.manifest import (
    MANIFEST_FILE,
    Manifest,
    ManifestTensor,
    object_checksum,
    rest_checksum,
)
from bridge.core.formats.reading.source_files import FileView
from bridge.core.formats.tensors.base import Box, CheckpointError, CheckpointReader, TensorInfo, name_of
from bridge.core.formats.tensors.coverage import check_coverage
from bridge.core.formats.tensors.crc32c import extend

_FILE_BLOCK = 8 << 20


@dataclass(frozen=True)
class Problem:
    """What is wrong, and where: the name of a file, a tensor or an object."""

    where: str
    text: str


@runtime_checkable
class SaysWhatIsChecked(Protocol):
    """A reader of a format that has checksums of its own."""

    def checksummed(self, name: str) -> bool:
        """Whether every stored chunk of a tensor has a checksum that reading verifies."""


@runtime_checkable
class _SaysWhereDataIs(Protocol):
    def data_ranges(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """For each file, where the elements of chunks are: first byte, and the one after the last."""


@runtime_checkable
class _HasCopies(Protocol):
    def damaged_copies(self) -> Iterator[tuple[str, CheckpointError]]:
        """Tensors with a damaged copy that is not read, since another file has the same, and what is wrong with it."""


@runtime_checkable
class _ShowsFiles(Protocol):
    def view(self, file: str) -> FileView | None:
        """A file of the checkpoint, to look at between its chunks; None where it is in a store."""


def file_problems(home: Path, manifest: Manifest) -> Iterator[Problem]:
    """Of the files that the manifest lists: missing, of another size, or not of their checksum."""
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
    """A checkpoint that is one file may have been renamed, its manifest with it."""
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
    """Of copies of chunks that several ranks have written, of which reading takes one."""
    if isinstance(reader, _HasCopies):
        yield from (Problem(name, str(error)) for name, error in reader.damaged_copies())


def rest_problems(reader: CheckpointReader, home: Path, manifest: Manifest) -> Iterator[Problem]:
    """Of headers and the like in files whose data the chunks' checksums speak for."""
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
    """Another format than in the manifest; tensors and objects that are missing, or that it does not list."""
    if reader.format != manifest.format:
        yield Problem(
            MANIFEST_FILE, f"expected format {manifest.format}, as in the manifest, got {reader.format}"
        )
    for kind, listed, found in (
        ("tensor", manifest.tensors.keys(), reader.tensors.keys()),
        ("object", manifest.objects.keys(), reader.objects.keys()),
    ):
        for name in listed:
            if name not in found:
                yield Problem(name, f"the manifest lists this {kind}, but it is missing")
        for name in found:
            if name not in listed:
                yield Problem(name, f"expected no {kind} of this name: the manifest does not list it")


def object_problems(name: str, value: object, manifest: Manifest) -> Iterator[Problem]:
    """One, if an object has another value than the manifest's checksum says."""
    expected = manifest.objects.get(name)
    if expected is not None and (crc := object_checksum(value)) != expected:
        yield Problem(
            name, f"the value is damaged: expected CRC-32C {expected:08x}, got {crc:08x} of {value!r:.80}"
        )


def entry_problems(info: TensorInfo, entry: ManifestTensor) -> Iterable[Problem]:
    """Of a tensor's dtype and shape, and of the chunks that the manifest lists of it."""
    if entry.dtype != name_of(info.dtype) or entry.shape != info.shape:
        text = f"expected {entry.dtype} {list(entry.shape)}, as in the manifest, got {info.dtype} {list(info.shape)}"
        return [Problem(info.name, text)]
    # Nearly always the manifest has the chunks of the file, which were checked when that was opened.
    if tuple(entry.chunks) == info.chunks:
        return []
    try:
        check_coverage(info.shape, entry.chunks, f"chunks in the manifest of tensor {info.name!r}")
    except CheckpointError as error:
        return [Problem(info.name, str(error))]
    return []


def crc_problems(info: TensorInfo, chunk: Box, expected: int, found: int) -> list[Problem]:
    """One, unless the checksums of a chunk agree."""
    if found == expected:
        return []
    return [
        Problem(
            info.name,
            f"the chunk at {chunk.offsets}, sizes {chunk.sizes}, is damaged: expected CRC-32C {expected:08x}, got "
            f"{found:08x}",
        )
    ]
